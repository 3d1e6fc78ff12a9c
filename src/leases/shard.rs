use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use super::block::Block;
use super::caller::{Ask, Caller, Ended};
use crate::limit::{Check, Decision, Key};
use crate::store::Digest;
use crate::util::{instant, lock};

/// Some of the callers that come often, by the caller and its policies.
#[derive(Default)]
pub(super) struct Shard {
    callers: Mutex<BTreeMap<Digest, Caller>>,
    /// How many there are, so that other callers need no lock where there is none.
    len: AtomicUsize,
}

/// What is to be done after a check, besides.
pub(super) enum Next {
    Nothing,
    Ask(Ask),
    /// The caller is not known.
    Count,
}

/// A block that was asked for: of whom, and when.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) key: Key,
    pub(super) caller: Digest,
    pub(super) lease: Duration,
    pub(super) number: u64,
    pub(super) at: Instant,
}

/// So many callers in a shard: beyond that, none is leased to.
const CALLERS: usize = 1_024;

impl Shard {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.load(Relaxed)
    }

    /// Decides a check by the blocks of its caller, if they have so much.
    pub(super) fn spend(
        &self,
        caller: Digest,
        check: Check,
        lease: Duration,
        asks: &AtomicU64,
        ended: &mut Ended,
    ) -> (Result<Decision, Check>, Next) {
        let mut callers = lock(&self.callers);
        let Some(known) = callers.get_mut(&caller) else { return (Err(check), Next::Count) };
        let answer = known.spend(check, &instant, ended);
        let next = known.ask(lease, &instant, asks).map_or(Next::Nothing, Next::Ask);
        if matches!(next, Next::Nothing) && known.is_over(&instant) {
            callers.remove(&caller);
            self.len.store(callers.len(), Relaxed);
        }
        (answer, next)
    }

    /// Knows a caller from here on, that comes often.
    pub(super) fn begin(&self, caller: Digest, cost: u32, lease: Duration, asks: &AtomicU64) -> Option<Ask> {
        let mut callers = lock(&self.callers);
        if callers.len() >= CALLERS {
            return None;
        }
        let known = callers.entry(caller).or_insert_with(|| Caller::new(instant(), cost));
        let ask = known.ask(lease, &instant, asks);
        self.len.store(callers.len(), Relaxed);
        ask
    }

    /// Adds a block, if it is the one that the caller has asked for. Returns those that are not kept: without it, it was
    /// late.
    pub(super) fn answered(
        &self,
        asked: &Asked,
        block: Option<Block>,
        remaining: u32,
        pause_until: Instant,
        is_drained: impl Fn() -> bool,
    ) -> Ended {
        let mut ended = Ended::new();
        // Of a caller that was reset since there is nothing to refund, and nothing to spend.
        if let Some(caller) = lock(&self.callers).get_mut(&asked.caller)
            && caller.answered(asked.number, remaining, pause_until)
            && let Some(block) = block
        {
            if block.is_dead(instant()) || is_drained() {
                ended.push(block);
            } else {
                caller.add(block, &mut ended);
            }
        }
        ended
    }

    /// How much is left of a block.
    pub(super) fn left(&self, asked: &Asked) -> Option<u32> {
        lock(&self.callers).get(&asked.caller)?.left_of(asked.number)
    }

    /// Takes a block out, if it is there yet, and forgets a caller that has no other.
    pub(super) fn give_up(&self, asked: &Asked) -> Option<Block> {
        let mut callers = lock(&self.callers);
        let caller = callers.get_mut(&asked.caller)?;
        let block = caller.remove(asked.number);
        if caller.is_over(&instant) {
            callers.remove(&asked.caller);
            self.len.store(callers.len(), Relaxed);
        }
        block
    }

    /// Notes that so much of what a caller has spent is refunded.
    pub(super) fn refunded(&self, caller: Digest, cost: u32) {
        if let Some(caller) = lock(&self.callers).get_mut(&caller) {
            caller.refunded(cost);
        }
    }

    /// The blocks of a caller that is not known from here on.
    pub(super) fn forget(&self, caller: Digest) -> Vec<Block> {
        let mut callers = lock(&self.callers);
        let forgotten = callers.remove(&caller);
        self.len.store(callers.len(), Relaxed);
        forgotten.map_or_else(Vec::new, |mut caller| caller.drain().collect())
    }

    /// The blocks of all callers, which are known still.
    pub(super) fn drain(&self) -> Vec<Block> {
        lock(&self.callers).values_mut().flat_map(Caller::drain).collect()
    }
}

impl Asked {
    pub(super) fn block(&self, decision: Decision) -> Block {
        Block::new(self.key, self.number, decision, self.at, self.lease)
    }
}
