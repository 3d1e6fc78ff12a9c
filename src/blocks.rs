//! The blocked callers of a store: in memory, so that a request without a block costs nothing in Redis, and in an outage
//! the known blocks hold.
//!
//! A shared store sends the changes of this process, and reads the changes of other instances twice a second: see
//! `store/redis/blocks.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::limit::Key;
use crate::util::{Digest, Digester, instant, lock};

/// The blocked callers. Clones share them.
#[derive(Clone)]
pub(crate) struct Blocks(Arc<SharedBlocks>);

struct SharedBlocks {
    /// Number of entries in `ends`: without any, a request takes no lock.
    count: AtomicUsize,
    ends: RwLock<BlockEnds>,
    digester: Digester,
    /// The changes that the other instances must learn. `None` if no other instance shares the store.
    unsent: Option<Mutex<Vec<BlockChange>>>,
    changed: Notify,
}

/// The end of each block.
#[derive(Default)]
struct BlockEnds {
    each: BTreeMap<Digest, Instant>,
    by_end: BTreeSet<(Instant, Digest)>,
}

/// A caller under a policy: the policy's name, a colon and the key. A name has no colon.
pub(crate) type BlockedCaller = SmallVec<[u8; 104]>;

/// A change by this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockChange {
    pub(crate) caller: BlockedCaller,
    pub(crate) kind: BlockChangeKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockChangeKind {
    /// Block until this time, or until the end of an existing block if that is later.
    Extend(Instant),
    /// Block until this time, unless the caller is blocked.
    Begin(Instant),
    End,
}

/// Maximum number of blocks. Beyond it, the block with the earliest end is dropped.
pub(crate) const MAX: usize = 65_536;
/// Maximum time of a block: a year.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// Returns the caller with this key under the policy of this name.
pub(crate) fn caller(policy: &str, key: &Key) -> BlockedCaller {
    let mut caller = BlockedCaller::from_slice(policy.as_bytes());
    caller.push(b':');
    caller.extend_from_slice(key.as_bytes());
    caller
}

impl Blocks {
    /// Creates the blocks of a store that no other instance shares.
    pub(crate) fn local() -> Self {
        Self::new(None)
    }

    /// Creates the blocks of a store that other instances share. Something must [send](Self::take_unsent) the changes.
    pub(crate) fn shared() -> Self {
        Self::new(Some(Mutex::default()))
    }

    fn new(unsent: Option<Mutex<Vec<BlockChange>>>) -> Self {
        Self(Arc::new(SharedBlocks {
            count: AtomicUsize::new(0),
            ends: RwLock::default(),
            digester: Digester::new(),
            unsent,
            changed: Notify::new(),
        }))
    }

    /// Returns the rest of the caller's block. `None` if the caller is not blocked.
    #[inline]
    pub(crate) fn rest(&self, policy: &str, key: &Key) -> Option<Duration> {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.rest_of(&caller(policy, key))
    }

    fn rest_of(&self, caller: &BlockedCaller) -> Option<Duration> {
        let digest = self.0.digester.digest_of(caller);
        let ends = self.0.ends.read().unwrap_or_else(PoisonError::into_inner);
        let end = *ends.each.get(&digest)?;
        drop(ends);
        let rest = end.saturating_duration_since(instant());
        (!rest.is_zero()).then_some(rest)
    }

    /// Makes a change, and records it for the other instances.
    pub(crate) fn change(&self, change: BlockChange) {
        let is_begin = matches!(change.kind, BlockChangeKind::Begin(_));
        // The instances that count the last strikes at the same time would each begin the block.
        if is_begin && self.rest_of(&change.caller).is_some() {
            return;
        }
        self.apply(&change);
        if let Some(unsent) = &self.0.unsent {
            let mut unsent = lock(unsent);
            if unsent.len() < MAX {
                unsent.push(change);
            }
            drop(unsent);
            self.0.changed.notify_one();
        }
    }

    fn apply(&self, change: &BlockChange) {
        self.write(|ends, digester| {
            let digest = digester.digest_of(&change.caller);
            match change.kind {
                BlockChangeKind::Extend(end) | BlockChangeKind::Begin(end) => {
                    let former = ends.each.get(&digest).copied();
                    ends.set(digest, former.map_or(end, |former| former.max(end)));
                }
                BlockChangeKind::End => ends.remove(digest),
            }
        });
    }

    /// Adds the store's blocks, and replaces their ends.
    pub(crate) fn learn(&self, blocks: &[(BlockedCaller, Instant)]) {
        self.write(|ends, digester| {
            for (caller, end) in blocks {
                ends.set(digester.digest_of(caller), *end);
            }
        });
    }

    /// Replaces all blocks with the store's blocks, and applies the unsent changes.
    pub(crate) fn replace(&self, blocks: &[(BlockedCaller, Instant)]) {
        let unsent = match &self.0.unsent {
            Some(unsent) => lock(unsent).clone(),
            None => vec![],
        };
        self.write(|ends, digester| {
            *ends = BlockEnds::default();
            for (caller, end) in blocks {
                ends.set(digester.digest_of(caller), *end);
            }
        });
        for change in &unsent {
            self.apply(change);
        }
    }

    fn write(&self, write: impl FnOnce(&mut BlockEnds, &Digester)) {
        let mut ends = self.0.ends.write().unwrap_or_else(PoisonError::into_inner);
        ends.drop_expired(instant());
        write(&mut ends, &self.0.digester);
        ends.drop_excess();
        self.0.count.store(ends.each.len(), Ordering::Release);
    }

    /// Takes the changes that were not sent yet.
    pub(crate) fn take_unsent(&self) -> Vec<BlockChange> {
        match &self.0.unsent {
            Some(unsent) => std::mem::take(&mut *lock(unsent)),
            None => vec![],
        }
    }

    /// Puts unsent changes back, before newer ones.
    pub(crate) fn put_back(&self, mut changes: Vec<BlockChange>) {
        if let Some(unsent) = &self.0.unsent {
            let mut unsent = lock(unsent);
            changes.append(&mut unsent);
            changes.truncate(MAX);
            *unsent = changes;
        }
    }

    /// Resolves after a change.
    pub(crate) async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

impl BlockEnds {
    fn set(&mut self, caller: Digest, end: Instant) {
        if let Some(former) = self.each.insert(caller, end) {
            self.by_end.remove(&(former, caller));
        }
        self.by_end.insert((end, caller));
    }

    fn remove(&mut self, caller: Digest) {
        if let Some(former) = self.each.remove(&caller) {
            self.by_end.remove(&(former, caller));
        }
    }

    fn drop_expired(&mut self, now: Instant) {
        while let Some((end, caller)) = self.by_end.first().copied()
            && end <= now
        {
            self.remove(caller);
        }
    }

    fn drop_excess(&mut self) {
        while self.each.len() > MAX
            && let Some((_, caller)) = self.by_end.first().copied()
        {
            self.remove(caller);
        }
    }
}

/// Shows how many there are.
impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Blocks")
            .field(&self.0.count.load(Ordering::Relaxed))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(blocks: &Blocks, name: &str, seconds: u64) {
        blocks.change(BlockChange {
            caller: caller("api", &Key::new(name)),
            kind: BlockChangeKind::Extend(instant() + Duration::from_secs(seconds)),
        });
    }

    fn rest(blocks: &Blocks, name: &str) -> Option<u64> {
        Some(blocks.rest("api", &Key::new(name))?.as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_frees_no_longer_block() {
        let blocks = Blocks::local();
        block(&blocks, "ann", 1_000);
        block(&blocks, "bob", 10);
        for number in 0..MAX + 5_000 {
            block(&blocks, &number.to_string(), 999);
        }
        assert_eq!(rest(&blocks, "ann"), Some(1_000));
        assert_eq!(rest(&blocks, "bob"), None, "the shortest rest goes first");
        assert_eq!(blocks.0.count.load(Ordering::Relaxed), MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn the_later_end_is_kept() {
        let blocks = Blocks::local();
        block(&blocks, "ann", 600);
        block(&blocks, "ann", 60);
        assert_eq!(rest(&blocks, "ann"), Some(600));
        block(&blocks, "ann", 900);
        assert_eq!(rest(&blocks, "ann"), Some(900));
        tokio::time::advance(Duration::from_secs(900)).await;
        assert_eq!(rest(&blocks, "ann"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_begin_does_not_extend() {
        let blocks = Blocks::shared();
        let begin = |seconds| {
            blocks.change(BlockChange {
                caller: caller("api", &Key::new("ann")),
                kind: BlockChangeKind::Begin(instant() + Duration::from_secs(seconds)),
            });
        };
        begin(600);
        begin(900);
        assert_eq!(rest(&blocks, "ann"), Some(600));
        assert_eq!(blocks.take_unsent().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn unsent_changes_outlive_a_replacement() {
        let blocks = Blocks::shared();
        block(&blocks, "ann", 600);
        let bob = (
            caller("api", &Key::new("bob")),
            instant() + Duration::from_secs(5),
        );
        blocks.replace(&[bob]);
        assert_eq!(
            (rest(&blocks, "ann"), rest(&blocks, "bob")),
            (Some(600), Some(5))
        );
        let sent = blocks.take_unsent();
        blocks.replace(&[]);
        assert_eq!((rest(&blocks, "ann"), rest(&blocks, "bob")), (None, None));
        blocks.put_back(sent.clone());
        assert_eq!(blocks.take_unsent(), sent);
    }

    #[tokio::test(start_paused = true)]
    async fn blocks_of_other_policies_are_separate() {
        let blocks = Blocks::local();
        block(&blocks, "ann", 600);
        assert_eq!(blocks.rest("login", &Key::new("ann")), None);
    }
}
