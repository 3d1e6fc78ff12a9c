use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::block::Block;
use super::caller::{Answered, Ask, Caller, Ended};
use crate::limit::{Check, Decision, Key};
use crate::store::Digest;
use crate::util::{instant, lock};

/// Some of the callers that come often, by the caller and its policies.
pub(super) struct Shard {
    callers: Mutex<BTreeMap<Digest, Caller>>,
    /// How many there are: other callers need no lock where there is none.
    len: AtomicUsize,
    max: usize,
}

/// What follows a check besides its decision.
pub(super) enum Next {
    Nothing,
    Ask(Ask),
    /// The check waits for the ask in flight.
    Wait(oneshot::Receiver<()>),
    /// The caller is not known.
    Count,
}

/// A block that was asked for: by whom, and when.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) key: Key,
    pub(super) caller: Digest,
    pub(super) lease: Duration,
    pub(super) number: u64,
    pub(super) at: Instant,
}

/// Of so many callers a newcomer replaces the one with the least demand.
pub(super) const SAMPLE: usize = 8;

impl Shard {
    /// Creates a shard for at most this many callers.
    pub(super) fn new(max: usize) -> Self {
        Self { callers: Mutex::default(), len: AtomicUsize::new(0), max }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.load(Relaxed)
    }

    /// Decides a check by the blocks of its caller, if they have so much. The `first` time it adds to the demand, and may
    /// wait for a block.
    pub(super) fn spend(
        &self,
        caller: Digest,
        check: Check,
        lease: Duration,
        asks: &AtomicU64,
        first: bool,
        ended: &mut Ended,
    ) -> (Result<Decision, Check>, Next) {
        let mut callers = lock(&self.callers);
        let Some(known) = callers.get_mut(&caller) else { return (Err(check), Next::Count) };
        if first {
            known.want(check.cost());
        }
        let answer = known.spend(check, &instant, ended);
        let next = match known.ask(lease, &instant, asks) {
            Some(ask) => Next::Ask(ask),
            None if first && answer.is_err() => known.wait(lease, &instant).map_or(Next::Nothing, Next::Wait),
            None => Next::Nothing,
        };
        (answer, next)
    }

    /// Adds a caller that comes often. If there are too many, one of little demand gives way.
    pub(super) fn begin(
        &self,
        caller: Digest,
        cost: u32,
        lease: Duration,
        asks: &AtomicU64,
        ended: &mut Ended,
    ) -> Option<Ask> {
        let mut callers = lock(&self.callers);
        if callers.len() >= self.max && !callers.contains_key(&caller) {
            // Digests are random, so that neighbors are a sample.
            let sample = callers.range(caller..).chain(callers.range(..caller)).take(SAMPLE);
            let least = sample.filter_map(|(other, known)| Some((known.demand()?, *other))).min()?.1;
            if let Some(mut known) = callers.remove(&least) {
                ended.extend(known.drain());
            }
        }
        let known = callers.entry(caller).or_insert_with(|| Caller::new(instant(), cost));
        let ask = known.ask(lease, &instant, asks);
        self.len.store(callers.len(), Relaxed);
        ask
    }

    /// Handles the answer to an ask. `None` if the caller was reset since: then there is nothing to spend and nothing to
    /// refund.
    pub(super) fn answered(
        &self,
        asked: &Asked,
        block: Option<Block>,
        remaining: Option<u32>,
        instances: u32,
        asks: &AtomicU64,
        is_drained: impl Fn() -> bool,
    ) -> Option<Answered> {
        let (mut callers, now) = (lock(&self.callers), instant());
        let caller = callers.get_mut(&asked.caller)?;
        let mut answered = caller.answered(asked, block, remaining, instances, now, asks)?;
        if is_drained() {
            answered.ended.extend(caller.drain());
        }
        Some(answered)
    }

    /// Looks whether the block of an ask is spent, and forgets a caller whose last block has ended some time ago. Returns
    /// a block that has ended, and when to look again.
    pub(super) fn look(&self, asked: &Asked, now: Instant) -> (Option<Block>, Option<Instant>) {
        let mut callers = lock(&self.callers);
        let Some(caller) = callers.get_mut(&asked.caller) else { return (None, None) };
        let (block, next) = caller.look(asked.number, asked.lease, now);
        if caller.forget_at(asked.lease).is_some_and(|at| at <= now) {
            callers.remove(&asked.caller);
            self.len.store(callers.len(), Relaxed);
        }
        (block, next)
    }

    /// Reduces the charge of a caller's blocks by a refund of what was spent.
    pub(super) fn refunded(&self, caller: Digest, cost: u32) {
        if let Some(caller) = lock(&self.callers).get_mut(&caller) {
            caller.refunded(cost);
        }
    }

    /// Removes a caller.
    pub(super) fn forget(&self, caller: Digest) -> Option<Caller> {
        let mut callers = lock(&self.callers);
        let forgotten = callers.remove(&caller);
        self.len.store(callers.len(), Relaxed);
        forgotten
    }

    /// Takes the blocks of all callers, which are known still.
    pub(super) fn drain(&self) -> Vec<Block> {
        lock(&self.callers).values_mut().flat_map(Caller::drain).collect()
    }

    #[cfg(test)]
    pub(super) fn left(&self) -> u64 {
        lock(&self.callers).values().map(Caller::left_in_blocks).sum()
    }
}

impl Asked {
    pub(super) fn block(&self, decision: Decision) -> Block {
        Block::new(self.key, self.number, decision, self.at, self.lease)
    }
}
