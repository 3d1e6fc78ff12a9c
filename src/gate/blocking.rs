//! Blocks of callers: the denial of a blocked one, and the strikes that begin a block.

use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;

use crate::background::{OpQueue, PendingOp, Task, TaskOwner};
use crate::blocks::{BlockChange, BlockChangeKind, BlockedCaller, Blocks, caller};
use crate::limit::{
    BlockAfter, Check, Decision, Key, Outcome, Policies, Policy, Source, Strategy, Verdict,
};
use crate::store::Store;
use crate::util::{instant, lock};

/// The blocks that a layer or limiter enforces. Clones share the strikes.
pub(crate) struct Blocking<R> {
    blocks: Blocks,
    /// `None` if denials begin no block.
    strikes: Option<Arc<Strikes>>,
    key_of: Option<Arc<KeyOf<R>>>,
}

/// Returns the blocked key of a request, if it differs from the counted key.
pub(super) type KeyOf<R> = dyn Fn(&R) -> Option<Key> + Send + Sync;

/// The strikes of this process that were not sent yet.
struct Strikes {
    rule: BlockAfter,
    pending: Mutex<HashMap<BlockedCaller, Strike>>,
    sender: TaskOwner,
    blocks: Blocks,
}

/// Denials of one caller.
struct Strike {
    policy: Box<str>,
    key: Key,
    count: u32,
}

/// Time in which the strikes of a caller are added up.
const INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of callers whose strikes are added up. Strikes of further callers are sent one by one.
const MAX_PENDING: usize = 10_000;

impl<R> Blocking<R> {
    /// Creates the enforcement of the blocks in `store`, which `rule` begins.
    pub(crate) fn new(store: &impl Store, rule: Option<BlockAfter>) -> Self {
        let blocks = store.backend().blocks().unwrap_or_else(Blocks::local);
        blocks.enforce();
        store.backend().sync_blocks();
        let strikes = rule.map(|rule| {
            Arc::new(Strikes {
                rule,
                pending: Mutex::default(),
                sender: TaskOwner::new(),
                blocks: blocks.clone(),
            })
        });
        Self {
            blocks,
            strikes,
            key_of: None,
        }
    }

    /// Sets the function that returns the blocked key. Defaults to the counted key.
    pub(super) fn by(self, key_of: Arc<KeyOf<R>>) -> Self {
        Self {
            key_of: Some(key_of),
            ..self
        }
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Returns the rest of the block of a request's caller.
    #[inline]
    pub(crate) fn rest(&self, request: &R, key: &Key, policies: &Policies) -> Option<Duration> {
        // Most of the time no caller is blocked, and extracting another key takes longer than this.
        if self.blocks.is_empty() {
            return None;
        }
        let key = self.key(request, key)?;
        self.blocks.rest(policies[0].name(), &key)
    }

    /// Extends the block of a denied caller, whose rest is `rest`, unless that began a moment ago or ends later than a
    /// new one.
    pub(crate) fn extend(&self, request: &R, key: &Key, policies: &Policies, rest: Duration) {
        if let Some(strikes) = &self.strikes
            && rest + strikes.rule.extension() <= strikes.rule.time()
            && let Some(key) = self.key(request, key)
        {
            self.blocks.change(BlockChange {
                caller: caller(policies[0].name(), &key),
                kind: BlockChangeKind::Extend(instant() + strikes.rule.time()),
            });
        }
    }

    /// Counts a denial of the store, which may begin a block.
    pub(crate) fn denied(&self, request: &R, key: &Key, denied: &Decision, ops: &OpQueue) {
        // A cost above the burst is denied for its size, and a block must not extend itself.
        let is_strike = matches!(denied.outcome(), Outcome::Denied { .. }) && !is_block(denied);
        if let Some(strikes) = &self.strikes
            && is_strike
            && let Some(key) = self.key(request, key)
        {
            strikes.add(denied.policies()[0].name(), key, ops);
        }
    }

    /// Ends the block of a caller, and returns the check that ends the strikes.
    pub(crate) fn unblock(&self, policy: &str, key: Key) -> Option<Check> {
        let strikes = self.strikes.as_ref()?;
        // Otherwise the strikes of the last moment would begin the block again.
        lock(&strikes.pending).remove(&caller(policy, &key));
        let counted = strikes.policies(policy)?;
        Some(Check::reset(strikes_of(key), &counted))
    }

    fn key(&self, request: &R, key: &Key) -> Option<Key> {
        match &self.key_of {
            Some(key_of) => key_of(request),
            None => Some(*key),
        }
    }
}

/// Denies a check because of a block that lasts for `rest`; `None` for [blocked policies](Policies::blocked).
pub(crate) fn denial(check: &Check, rest: Option<Duration>, forbids: bool) -> Decision {
    let source = if forbids {
        Source::Forbidden
    } else {
        Source::Blocked
    };
    let verdict = match rest {
        Some(rest) => Verdict::denied(rest),
        None => Verdict::exceeds_capacity().with_remaining(0),
    };
    check.decided(source, 0, |_| verdict)
}

fn is_block(decision: &Decision) -> bool {
    matches!(decision.source(), Source::Blocked | Source::Forbidden)
}

/// The key under which the strikes of a caller are counted.
fn strikes_of(key: Key) -> Key {
    Key::tuple(&[key, Key::STRIKES])
}

impl Strikes {
    fn add(self: &Arc<Self>, policy: &str, key: Key, ops: &OpQueue) {
        let caller = caller(policy, &key);
        let mut pending = lock(&self.pending);
        match pending.get_mut(&caller) {
            Some(strike) => strike.count = strike.count.saturating_add(1),
            None => {
                let strike = Strike {
                    policy: policy.into(),
                    key,
                    count: 1,
                };
                if pending.len() >= MAX_PENDING {
                    drop(pending);
                    return self.send(strike, ops);
                }
                pending.insert(caller, strike);
            }
        }
        // Before the spawn: a runtime that shuts down drops the task in it.
        drop(pending);
        self.sender.spawn(None, |task| {
            Arc::clone(self).send_pending(task, ops.clone())
        });
    }

    async fn send_pending(self: Arc<Self>, task: Task, ops: OpQueue) {
        sleep(INTERVAL).await;
        // Before the strikes are taken: a later one starts the next task.
        drop(task);
        let pending = mem::take(&mut *lock(&self.pending));
        for strike in pending.into_values() {
            self.send(strike, &ops);
        }
    }

    /// Charges strikes, and begins the block when the count is full.
    fn send(self: &Arc<Self>, strike: Strike, ops: &OpQueue) {
        let Strike { policy, key, count } = strike;
        let Some(policies) = self.policies(&policy) else {
            return;
        };
        let this = Arc::clone(self);
        let charge = PendingOp::charge(strikes_of(key), &policies, count).then(move |charged| {
            if let Ok(counted) = charged
                // The sliding log is full: its limit is the number of strikes.
                && counted.remaining() == 0
            {
                this.blocks.change(BlockChange {
                    caller: caller(&policy, &key),
                    kind: BlockChangeKind::Begin(instant() + this.rule.time()),
                });
            }
        });
        ops.put(charge);
    }

    /// The policy that counts the strikes under the policy of this name.
    fn policies(&self, policy: &str) -> Option<Policies> {
        let counted = Policy::new(policy, Strategy::SlidingLog, self.rule.strikes());
        // The rule and the name were checked.
        Some(counted.ok()?.into())
    }
}

impl<R> Clone for Blocking<R> {
    fn clone(&self) -> Self {
        Self {
            blocks: self.blocks.clone(),
            strikes: self.strikes.clone(),
            key_of: self.key_of.clone(),
        }
    }
}
