//! The blocked callers of a store: in memory, so that a request without a block costs nothing in Redis, and in an outage
//! the known blocks hold.
//!
//! A shared store sends the changes of this process, and reads the changes of other instances twice a second: see
//! `store/redis/blocks.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
    unsent: Option<Mutex<UnsentChanges>>,
    /// Whether a layer or limiter of this process enforces them.
    are_enforced: AtomicBool,
    changed: Notify,
}

/// The end of each block.
#[derive(Default)]
struct BlockEnds {
    each: BTreeMap<Digest, Instant>,
    by_end: BTreeSet<(Instant, Digest)>,
}

/// By caller, so that a flood of changes of one caller is one.
#[derive(Default)]
struct UnsentChanges(HashMap<BlockedCaller, UnsentChange>);

/// The changes of one caller that were not sent yet: first the end of a block, then a block.
#[derive(Clone, Copy, Default)]
struct UnsentChange {
    ends: Option<EndOfBlock>,
    block: Option<BlockChangeKind>,
}

#[derive(Clone, Copy)]
struct EndOfBlock {
    was_known: bool,
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
    /// End the block. If this process knew it, others may too, even if Redis has lost it.
    End { was_known: bool },
}

/// Changes that are being sent. The rest is unsent again when it is dropped.
#[derive(Debug)]
pub(crate) struct TakenChanges {
    blocks: Blocks,
    changes: VecDeque<BlockChange>,
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

    fn new(unsent: Option<Mutex<UnsentChanges>>) -> Self {
        Self(Arc::new(SharedBlocks {
            count: AtomicUsize::new(0),
            ends: RwLock::default(),
            digester: Digester::new(),
            unsent,
            are_enforced: AtomicBool::new(false),
            changed: Notify::new(),
        }))
    }

    /// Call it for each layer and limiter that enforces them.
    pub(crate) fn enforce(&self) {
        self.0.are_enforced.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if something enforces them. Other processes that share the store may.
    pub(crate) fn may_be_enforced(&self) -> bool {
        self.0.unsent.is_some() || self.0.are_enforced.load(Ordering::Relaxed)
    }

    /// Returns `true` if no caller is blocked.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    /// Returns the rest of the caller's block. `None` if the caller is not blocked.
    pub(crate) fn rest(&self, policy: &str, key: &Key) -> Option<Duration> {
        self.rest_of(&caller(policy, key))
    }

    fn rest_of(&self, caller: &BlockedCaller) -> Option<Duration> {
        let digest = self.0.digester.digest_of(caller);
        let ends = self.0.ends.read().unwrap_or_else(PoisonError::into_inner);
        let end = *ends.each.get(&digest)?;
        drop(ends);
        let rest = end.saturating_duration_since(instant());
        if rest.is_zero() { None } else { Some(rest) }
    }

    /// Makes a change, and records it for the other instances.
    pub(crate) fn change(&self, change: BlockChange) {
        if let Some(change) = self.apply(change)
            && let Some(unsent) = &self.0.unsent
        {
            lock(unsent).add(change);
            self.0.changed.notify_one();
        }
    }

    /// Makes a change, and takes the unsent changes of its caller, which must be sent.
    pub(crate) fn change_and_take(&self, change: BlockChange) -> TakenChanges {
        let mut changes = VecDeque::new();
        let caller = change.caller.clone();
        let applied = self.apply(change);
        if let Some(unsent) = &self.0.unsent {
            let mut unsent = lock(unsent);
            if let Some(change) = applied {
                unsent.add(change);
            }
            if let Some(change) = unsent.0.remove(&caller) {
                change.add_to(caller, &mut changes);
            }
        }
        self.taken(changes)
    }

    /// Makes a change in this process. Returns it, unless it changes nothing.
    fn apply(&self, mut change: BlockChange) -> Option<BlockChange> {
        let is_blocked = self.rest_of(&change.caller).is_some();
        match &mut change.kind {
            // The instances that count the last strikes at the same time would each begin the block.
            BlockChangeKind::Begin(_) if is_blocked => return None,
            BlockChangeKind::End { was_known } => *was_known |= is_blocked,
            BlockChangeKind::Begin(_) | BlockChangeKind::Extend(_) => {}
        }
        self.write(|ends, digester| {
            let caller = digester.digest_of(&change.caller);
            match change.kind {
                BlockChangeKind::Extend(end) | BlockChangeKind::Begin(end) => {
                    ends.extend(caller, end);
                }
                BlockChangeKind::End { .. } => ends.remove(caller),
            }
        });
        Some(change)
    }

    /// Applies the store's changes, in order: for each caller the end of the block, or `None` if it was ended. Unsent
    /// changes of a caller prevail.
    pub(crate) fn learn(&self, changes: &[(BlockedCaller, Option<Instant>)]) {
        let Some(unsent) = &self.0.unsent else {
            return;
        };
        let unsent = lock(unsent);
        self.write(|ends, digester| {
            for (caller, end) in changes {
                let digest = digester.digest_of(caller);
                match (unsent.0.get(caller), end) {
                    (None, Some(end)) => ends.set(digest, *end),
                    (None, None) => ends.remove(digest),
                    (Some(unsent), Some(end)) if unsent.ends.is_none() => ends.extend(digest, *end),
                    (Some(_), _) => {}
                }
            }
        });
    }

    fn write(&self, write: impl FnOnce(&mut BlockEnds, &Digester)) {
        let mut ends = self.0.ends.write().unwrap_or_else(PoisonError::into_inner);
        ends.drop_expired(instant());
        write(&mut ends, &self.0.digester);
        ends.drop_excess();
        self.0.count.store(ends.each.len(), Ordering::Release);
    }

    /// Takes the unsent changes of at most `callers` callers, which must be sent.
    pub(crate) fn take_unsent(&self, callers: usize) -> TakenChanges {
        let mut changes = VecDeque::new();
        if let Some(unsent) = &self.0.unsent {
            let mut unsent = lock(unsent);
            for (caller, change) in unsent.0.extract_if(|_, _| true).take(callers) {
                change.add_to(caller, &mut changes);
            }
            if unsent.0.is_empty() {
                // It may have held a flood.
                unsent.0.shrink_to_fit();
            }
        }
        self.taken(changes)
    }

    fn taken(&self, changes: VecDeque<BlockChange>) -> TakenChanges {
        TakenChanges {
            blocks: self.clone(),
            changes,
        }
    }

    /// Returns `true` if some changes are unsent.
    pub(crate) fn are_unsent(&self) -> bool {
        match &self.0.unsent {
            Some(unsent) => !lock(unsent).0.is_empty(),
            None => false,
        }
    }

    /// Puts unsent changes back, before newer ones.
    fn put_back(&self, changes: VecDeque<BlockChange>) {
        let Some(unsent) = &self.0.unsent else {
            return;
        };
        let mut older = UnsentChanges::default();
        for change in changes {
            older.add(change);
        }
        let mut unsent = lock(unsent);
        for (caller, mut change) in older.0 {
            if let Some(newer) = unsent.0.remove(&caller) {
                change.merge(newer);
            }
            unsent.0.insert(caller, change);
        }
    }

    /// Resolves after a change.
    pub(crate) async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

impl TakenChanges {
    /// Returns the next change to send. The changes of one caller are in order.
    pub(crate) fn next(&self) -> Option<&BlockChange> {
        self.changes.front()
    }

    /// Call it when the next change is sent.
    pub(crate) fn sent(&mut self) {
        self.changes.pop_front();
    }
}

impl Drop for TakenChanges {
    fn drop(&mut self) {
        if !self.changes.is_empty() {
            self.blocks.put_back(mem::take(&mut self.changes));
        }
    }
}

impl BlockEnds {
    /// Sets the end, unless that of an existing block is later.
    fn extend(&mut self, caller: Digest, end: Instant) {
        match self.each.get(&caller) {
            Some(former) if *former >= end => {}
            _ => self.set(caller, end),
        }
    }

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
        while let Some(&(end, caller)) = self.by_end.first()
            && end <= now
        {
            self.remove(caller);
        }
    }

    fn drop_excess(&mut self) {
        while self.each.len() > MAX
            && let Some(&(_, caller)) = self.by_end.first()
        {
            self.remove(caller);
        }
    }
}

impl UnsentChanges {
    fn add(&mut self, BlockChange { caller, kind }: BlockChange) {
        let change = match kind {
            BlockChangeKind::End { was_known } => UnsentChange {
                ends: Some(EndOfBlock { was_known }),
                block: None,
            },
            block => UnsentChange {
                ends: None,
                block: Some(block),
            },
        };
        // Only blocks have an order in which they are dropped.
        if change.block.is_none() && self.0.len() >= MAX && !self.0.contains_key(&caller) {
            return;
        }
        self.0.entry(caller).or_default().merge(change);
        // An outage may last, and a flood of callers with it. Sorting once for `MAX` changes keeps the time of each short.
        if self.0.len() > 2 * MAX {
            self.drop_earliest();
        }
    }

    /// Drops the blocks with the earliest ends.
    fn drop_earliest(&mut self) {
        let mut ends: Vec<Instant> = vec![];
        for change in self.0.values() {
            ends.extend(change.end());
        }
        let excess = ends.len().saturating_sub(MAX);
        if excess == 0 {
            return;
        }
        let earliest = *ends.select_nth_unstable(excess).1;
        self.0
            .retain(|_, change| change.end().is_none_or(|end| end >= earliest));
    }
}

impl UnsentChange {
    /// Adds the changes of `caller`, in order.
    fn add_to(self, caller: BlockedCaller, changes: &mut VecDeque<BlockChange>) {
        let Self { ends, block } = self;
        if let Some(EndOfBlock { was_known }) = ends {
            changes.push_back(BlockChange {
                caller: caller.clone(),
                kind: BlockChangeKind::End { was_known },
            });
        }
        if let Some(kind) = block {
            changes.push_back(BlockChange { caller, kind });
        }
    }

    /// Adds a newer change.
    fn merge(&mut self, newer: Self) {
        if let Some(mut end) = newer.ends {
            if let Some(former) = self.ends {
                end.was_known |= former.was_known;
            }
            self.ends = Some(end);
            self.block = newer.block;
            return;
        }
        self.block = match (self.end(), newer.end()) {
            (Some(former), Some(end)) => Some(BlockChangeKind::Extend(former.max(end))),
            (None, Some(_)) => newer.block,
            (_, None) => self.block,
        };
    }

    /// Returns the end of the block.
    fn end(&self) -> Option<Instant> {
        match self.block? {
            BlockChangeKind::Extend(end) | BlockChangeKind::Begin(end) => Some(end),
            BlockChangeKind::End { .. } => None,
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

    fn take_all(blocks: &Blocks) -> Vec<BlockChange> {
        mem::take(&mut blocks.take_unsent(usize::MAX).changes).into()
    }

    #[tokio::test(start_paused = true)]
    async fn changes_that_are_not_sent_stay_unsent() {
        let blocks = Blocks::shared();
        block(&blocks, "ann", 5);
        let caller = caller("api", &Key::new("bob"));
        let kind = BlockChangeKind::Extend(instant() + Duration::from_secs(7));
        let mut of_bob = blocks.change_and_take(BlockChange { caller, kind });
        assert_eq!(of_bob.changes.len(), 1);
        assert_eq!(take_all(&blocks).len(), 1, "of ann");
        drop(of_bob);
        of_bob = blocks.take_unsent(MAX);
        assert_eq!(of_bob.changes.len(), 1, "a future was dropped");
        of_bob.sent();
        drop(of_bob);
        assert!(!blocks.are_unsent());
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
        assert_eq!(take_all(&blocks).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn unsent_changes_prevail() {
        let blocks = Blocks::shared();
        let named = |name| caller("api", &Key::new(name));
        let after = |seconds| Some(instant() + Duration::from_secs(seconds));
        block(&blocks, "ann", 600);
        blocks.learn(&[
            (named("ann"), after(5)),
            (named("bob"), after(5)),
            (named("ann"), None),
        ]);
        assert_eq!(
            (rest(&blocks, "ann"), rest(&blocks, "bob")),
            (Some(600), Some(5))
        );
        let sent = take_all(&blocks);
        blocks.learn(&[(named("ann"), None), (named("bob"), after(3))]);
        assert_eq!(
            (rest(&blocks, "ann"), rest(&blocks, "bob")),
            (None, Some(3))
        );
        blocks.put_back(sent.clone().into());
        assert_eq!(take_all(&blocks), sent);

        let end = || BlockChange {
            caller: named("bob"),
            kind: BlockChangeKind::End { was_known: true },
        };
        blocks.change(end());
        blocks.learn(&[(named("bob"), after(9))]);
        assert_eq!(rest(&blocks, "bob"), None);
        block(&blocks, "bob", 7);
        blocks.learn(&[(named("bob"), after(9))]);
        assert_eq!(rest(&blocks, "bob"), Some(7), "the end is sent first");
        let older = take_all(&blocks);
        assert_eq!(older[0], end());
        block(&blocks, "bob", 70);
        blocks.put_back(older.into());
        let sent = take_all(&blocks);
        let longer = BlockChangeKind::Extend(instant() + Duration::from_secs(70));
        assert_eq!((sent.len(), &sent[0], sent[1].kind), (2, &end(), longer));
    }

    /// In an outage, an operator's block is not lost in a flood of others.
    #[tokio::test(start_paused = true)]
    async fn a_flood_of_changes_is_bounded() {
        let blocks = Blocks::shared();
        block(&blocks, "ann", 1_000);
        for number in 0..2 * MAX + 9 {
            block(&blocks, &number.to_string(), 500 + number as u64 % 100);
            block(&blocks, "bob", 600 + number as u64 % 100);
        }
        let unsent = take_all(&blocks);
        assert!(unsent.len() <= 2 * MAX);
        for name in ["ann", "bob"] {
            let of_name = unsent
                .iter()
                .filter(|change| change.caller == caller("api", &Key::new(name)));
            assert_eq!(of_name.count(), 1, "{name}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn blocks_of_other_policies_are_separate() {
        let blocks = Blocks::local();
        block(&blocks, "ann", 600);
        assert_eq!(blocks.rest("login", &Key::new("ann")), None);
    }
}
