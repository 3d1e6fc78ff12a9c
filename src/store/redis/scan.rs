//! Looks through the counts under a prefix: for people, and not for requests.

use std::sync::Arc;

use super::script::read_key;
use super::topology::Node;
use super::worker::Inner;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Key, Policy};

/// Finds what is counted under the prefix of a [`RedisStore`](crate::RedisStore), step by step.
///
/// Made by [`RedisStore::scan`](crate::RedisStore::scan).
#[derive(Debug)]
#[must_use = "it asks Redis with `next`"]
pub struct Scan {
    inner: Arc<Inner>,
    /// Those that are left, the present one last. None before the first step.
    nodes: Option<Vec<Node>>,
    cursor: u64,
    /// What the keys begin with.
    prefixes: Vec<String>,
}

/// One count in Redis: whose it is, and under which policy.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counted {
    /// The caller.
    pub key: Key,
    /// The name of the policy.
    pub policy: String,
    /// The name of its strategy, such as `gcra`, or `in-flight`.
    pub strategy: &'static str,
    /// The span as it stands in the key: the period of a window, such as `1m`, the quota of a bucket, such as `100/s+200`
    /// with a burst of 200. Empty for requests in flight.
    pub span: String,
    of: Policy,
}

impl Counted {
    /// Whether it is a count of this policy: of its name, strategy and span.
    pub fn is_of(&self, policy: &Policy) -> bool {
        self.policy == policy.name()
            && self.strategy == policy.kind().name()
            && self.span == policy.span()
    }

    /// The policy, if it is a bucket, which has its whole quota in the key. Redis has no other limit.
    pub fn bucket(&self) -> Option<Policy> {
        self.of.frees().has_burst().then(|| self.of.clone())
    }
}

impl Scan {
    pub(super) fn new(inner: &Arc<Inner>) -> Self {
        let prefixes = inner.topology.prefixes(&inner.prefix);
        Self {
            inner: Arc::clone(inner),
            nodes: None,
            cursor: 0,
            prefixes,
        }
    }

    /// Takes one step: returns the counts among the next 1,000 keys or so of the database, perhaps none. `None` at the
    /// end.
    ///
    /// As with the command `SCAN`, a count that is there all the time is found at least once, and one that comes or goes
    /// meanwhile may be missed. So may those of a cluster's slot that is moved meanwhile.
    ///
    /// # Errors
    ///
    /// As a check of the store. The next call repeats the step, on the same server: if another has taken over, begin anew.
    pub async fn next(&mut self) -> Result<Option<Vec<Counted>>, StoreError> {
        if self.nodes.is_none() {
            self.inner.shared_node().await?;
            let masters = self.inner.topology.masters();
            self.nodes = Some(masters.ok_or_else(|| StoreError::new(ErrorKind::NotReady))?);
        }
        let Some(&node) = self.nodes.iter().flatten().last() else {
            return Ok(None);
        };
        let pattern = format!("{}:{{*", self.inner.prefix);
        let (cursor, keys) = self.inner.scan(node, self.cursor, &pattern).await?;
        self.cursor = cursor;
        if let Some(nodes) = self.nodes.as_mut().filter(|_| cursor == 0) {
            nodes.pop();
        }
        Ok(Some(keys.iter().filter_map(|key| self.read(key)).collect()))
    }

    fn read(&self, key: &[u8]) -> Option<Counted> {
        let key = str::from_utf8(key).ok()?;
        let (key, of) = self
            .prefixes
            .iter()
            .find_map(|prefix| read_key(key.strip_prefix(prefix.as_str())?))?;
        let (policy, strategy, span) =
            (of.name().to_owned(), of.kind().name(), of.span().to_owned());
        Some(Counted {
            key,
            policy,
            strategy,
            span,
            of,
        })
    }
}
