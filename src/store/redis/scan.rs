//! Iterates over the counts under a prefix: for tools, not for the request path.
//!
//! The method [`RedisStore::scan`] is in this file, because it creates the iterator.

use std::sync::Arc;

use futures_util::stream::{self, Stream, StreamExt, TryStreamExt};

use super::script::{read_bucket, read_key};
use super::topology::Node;
use super::worker::{RedisStore, SharedStore};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Key, Policy};

/// Iterates over the counts under the prefix of a [`RedisStore`](crate::RedisStore), in steps.
///
/// Created by [`RedisStore::scan`](crate::RedisStore::scan).
#[derive(Debug)]
#[must_use = "it queries Redis only when `next` is called"]
pub struct Scan {
    inner: Arc<SharedStore>,
    /// The remaining nodes, the current one last. `None` before the first step.
    nodes: Option<Vec<Node>>,
    cursor: u64,
    /// The prefixes of the keys.
    prefixes: Vec<String>,
}

/// One count in Redis: its caller and its policy.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredCount {
    /// The caller.
    pub key: Key,
    /// The name of the policy.
    pub policy: String,
    /// The name of its strategy, such as `gcra`, or `in-flight`.
    pub strategy: &'static str,
    /// The span in the key: the period of a window, such as `1m`, or `i` for a bucket that refills by the
    /// interval. Empty for other buckets and for requests in flight.
    pub span: String,
    of: Policy,
    /// The quota in the value of a bucket.
    bucket: Option<Policy>,
}

impl StoredCount {
    /// Returns `true` if it is a count of this policy: the same name, strategy and span.
    pub fn is_of(&self, policy: &Policy) -> bool {
        self.policy == policy.name()
            && self.strategy == policy.kind().name()
            && self.span == policy.span()
    }

    /// The policy, if it is a bucket, with the quota that wrote the value last: its text may differ from that in
    /// the settings, such as `1/s burst 60` for `60/m`. For others, Redis does not store the limit.
    pub fn bucket(&self) -> Option<Policy> {
        self.bucket.clone()
    }
}

impl RedisStore {
    /// Iterates over the counts under this store's prefix, on every master of a cluster: for tools,
    /// since it reads the whole database. `ratelimit-inspect` is one. The Redis user needs
    /// `+scan` for it.
    ///
    /// ```no_run
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut scan = RedisStore::connect("redis://127.0.0.1/?prefix=shop").await?.scan();
    /// while let Some(counts) = scan.next().await? {
    ///     for count in counts {
    ///         println!("{} is counted under {} ({})", count.key.reveal(), count.policy, count.strategy);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn scan(&self) -> Scan {
        let inner = &self.inner;
        Scan {
            inner: Arc::clone(inner),
            nodes: None,
            cursor: 0,
            prefixes: inner.topology.prefixes(&inner.settings.prefix),
        }
    }
}

impl Scan {
    /// Performs one step: returns the counts among the next 1,000 keys or so of the database,
    /// possibly none. `None` at the end.
    ///
    /// As with the command `SCAN`, a count that exists during the whole scan is returned at least
    /// once, and one that is added or removed during the scan may be missed. So may the counts of a
    /// cluster's slot that migrates during the scan.
    ///
    /// # Errors
    ///
    /// As a check of the store. The next call repeats the step on the same server. If a failover
    /// has occurred, start a new scan.
    pub async fn next(&mut self) -> Result<Option<Vec<StoredCount>>, StoreError> {
        if self.nodes.is_none() {
            // Queries the slots of a cluster if no check has done so.
            self.inner.shared_node().await?;
            let Some(masters) = self.inner.topology.masters() else {
                return Err(StoreError::new(ErrorKind::NotReady));
            };
            self.nodes = Some(masters);
        }
        let Some(&node) = self.nodes.iter().flatten().last() else {
            return Ok(None);
        };
        let pattern = format!("{}:{{*", self.inner.settings.prefix);
        let (cursor, keys) = self.inner.scan(node, self.cursor, &pattern).await?;
        let mut counts = vec![];
        let mut buckets = vec![];
        let mut keys_of_buckets = vec![];
        for key in keys {
            let Some(count) = self.read(&key) else {
                continue;
            };
            if count.of.frees().has_burst() {
                buckets.push(count);
                keys_of_buckets.push(key);
            } else {
                counts.push(count);
            }
        }
        let values = self.inner.values(node, &keys_of_buckets).await?;
        for (mut count, value) in buckets.into_iter().zip(values) {
            // It has expired since, or is another program's.
            let Some(bucket) = value.and_then(|value| read_bucket(&count.of, &value)) else {
                continue;
            };
            count.bucket = Some(bucket);
            counts.push(count);
        }
        // At the end of the step, which a failure repeats.
        self.cursor = cursor;
        // Redis ends its scan with this cursor, which also begins the scan of the next node.
        if cursor == 0
            && let Some(nodes) = &mut self.nodes
        {
            nodes.pop();
        }
        Ok(Some(counts))
    }

    /// Returns a stream of the counts. It ends after the first error.
    ///
    /// ```no_run
    /// use std::pin::pin;
    /// use futures_util::StreamExt;
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut counts = pin!(RedisStore::connect_lazy("redis://127.0.0.1/")?.scan().into_stream());
    /// while let Some(count) = counts.next().await {
    ///     println!("{}", count?.key.reveal());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_stream(
        self,
    ) -> impl Stream<Item = Result<StoredCount, StoreError>> + Send + 'static {
        let steps = stream::try_unfold(self, |mut scan| async move {
            let Some(counts) = scan.next().await? else {
                return Ok::<_, StoreError>(None);
            };
            Ok(Some((counts, scan)))
        });
        let steps = steps.map_ok(|counts| stream::iter(counts).map(Ok));
        steps.try_flatten()
    }

    fn read(&self, key: &[u8]) -> Option<StoredCount> {
        let key = str::from_utf8(key).ok()?;
        let (key, of) = self
            .prefixes
            .iter()
            .find_map(|prefix| read_key(key.strip_prefix(prefix.as_str())?))?;
        Some(StoredCount {
            key,
            policy: of.name().to_owned(),
            strategy: of.kind().name(),
            span: of.span().to_owned(),
            of,
            bucket: None,
        })
    }
}
