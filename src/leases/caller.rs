use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

use super::block::Block;
use super::hot::OFTEN;
use crate::limit::{Check, Decision};
use crate::store::Share;

/// A caller that comes often, under one list of policies.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) lease: Duration,
    /// The oldest first.
    pub(super) blocks: SmallVec<[Block; 1]>,
    /// Time of the last request for a block.
    since: Instant,
    /// Whether that request is in flight.
    is_asked: bool,
    /// Wakes the checks that wait for its answer.
    waiting: Option<Waiting>,
    /// The next block is asked for when no more than this is left.
    low: u32,
    /// What was left in the store after the last ask.
    remaining: u32,
    /// Units wanted since the last ask.
    wanted: u64,
    /// Units wanted in half a lease time, as of the last ask.
    demand: u32,
    /// Nothing is asked for before.
    pause_until: Instant,
    /// Successive asks whose answers took longer than a quarter of the lease time.
    pub(super) slow: u32,
}

/// Notified when the block arrives that a check waits for, or none does.
pub(super) type Arrival = Pin<Box<OwnedNotified>>;

/// Blocks that are not spent any more.
pub(super) type Ended = SmallVec<[Block; 1]>;

/// Wakes all checks that wait when it is dropped, which must not be under a lock.
#[derive(Debug, Default)]
pub(super) struct Waiting(Arc<Notify>);

/// A block to ask for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    pub(super) at: Instant,
    pub(super) size: u32,
}

/// Maximum number of blocks of a caller: some have too little left for each check.
const MOST: usize = 4;
/// Bound of an ask, in multiples of the units wanted since the last: a burst is not the rate.
const GROWTH: u64 = 8;
/// Minimum size of an ask: a caller that comes often wants as much in half a lease time.
pub(super) const LEAST: u32 = OFTEN / 2;
/// Maximum number of successive slow answers after which checks wait for the next one.
const PATIENCE: u32 = 2;
/// For how many lease times after its last ask a caller is remembered.
const REMEMBERED: u32 = 4;

impl Caller {
    pub(super) fn new(lease: Duration, now: Instant) -> Self {
        Self {
            lease,
            blocks: SmallVec::new(),
            since: now,
            is_asked: false,
            waiting: None,
            low: 0,
            remaining: 0,
            wanted: 0,
            demand: 0,
            pause_until: now,
            slow: 0,
        }
    }

    /// Counts the units that a check wants, once.
    pub(super) fn want(&mut self, cost: u32) {
        self.wanted = self.wanted.saturating_add(cost.into());
    }

    /// Takes the cost of a check out of a block, the oldest first.
    ///
    /// # Errors
    ///
    /// With the same check, if no block has so much.
    pub(super) fn spend(
        &mut self,
        mut check: Check,
        now: &impl Fn() -> Instant,
        ended: &mut Ended,
    ) -> Result<Decision, Check> {
        let cost = check.cost();
        let has_enough = |block: &Block| block.left >= cost;
        while let Some(place) = self.blocks.iter().position(has_enough) {
            let taken = self.blocks[place].take(check, now);
            if taken.is_err() || self.blocks[place].left == 0 {
                ended.push(self.blocks.remove(place));
            }
            match taken {
                Ok(decision) => return Ok(decision),
                Err(same) => check = same,
            }
        }
        Err(check)
    }

    /// Returns the next request for a block, if one is due after a check. Its size lets all
    /// instances share the end of a quota fairly. The first request is for one unit, since its
    /// reply shows what remains.
    pub(super) fn ask(&mut self, now: &impl Fn() -> Instant, share: &Share) -> Option<Ask> {
        if self.is_asked || self.left() > u64::from(self.low) {
            return None;
        }
        let at = now();
        if at < self.pause_until {
            return None;
        }
        let elapsed = at.saturating_duration_since(self.since).as_micros().max(1);
        let soon = u128::from(self.wanted) * (self.lease / 2).as_micros() / elapsed;
        let demand = soon
            .min(u128::from(self.wanted.saturating_mul(GROWTH)))
            .min(u32::MAX.into()) as u32;
        if demand < LEAST {
            return None;
        }
        // The units of the checks that wait are among those wanted since.
        let waiting = if self.is_stalled() {
            self.wanted.min(u32::MAX.into()) as u32
        } else {
            0
        };
        (self.is_asked, self.since, self.wanted, self.demand) = (true, at, 0, demand);
        let size = demand
            .saturating_add(waiting)
            .min(fair(self.remaining, share.instances().get()))
            .max(1);
        Some(Ask { at, size })
    }

    /// Has a check that found too little wait for the answer to the ask in flight, if that takes longer than a quarter of
    /// the lease time, or the last one did: a store that stalls is not sent all checks.
    pub(super) fn wait(&mut self, now: Instant) -> Option<Arrival> {
        let is_slow = self.is_stalled() || now >= self.since + self.lease / 4;
        (self.is_asked && is_slow).then(|| {
            let Waiting(waiting) = self.waiting.get_or_insert_default();
            Box::pin(Arc::clone(waiting).notified_owned())
        })
    }

    /// Whether the last answers were slow, and the next one is waited for.
    fn is_stalled(&self) -> bool {
        (1..=PATIENCE).contains(&self.slow)
    }

    pub(super) fn left(&self) -> u64 {
        self.blocks.iter().map(|block| u64::from(block.left)).sum()
    }

    /// Handles the reply to a request, with the granted block. Returns the checks that waited for
    /// the block.
    pub(super) fn answered(
        &mut self,
        ask: Ask,
        block: Option<Block>,
        instances: u32,
        now: Instant,
        ended: &mut Ended,
    ) -> Option<Waiting> {
        if !self.is_asked || self.since != ask.at {
            // The caller was reset since, and the store may have forgotten the block.
            return None;
        }
        self.is_asked = false;
        let trip = now.saturating_duration_since(ask.at);
        let is_slow = trip > self.lease / 4;
        self.slow = if is_slow {
            self.slow.saturating_add(1)
        } else {
            0
        };
        if let Some(block) = &block {
            self.remaining = block.decision.remaining();
        }
        if block.is_none() || fair(self.remaining, instances) < LEAST {
            self.pause_until = now + self.lease / 4;
        }
        match block.filter(|block| block.left > 0) {
            Some(block) if block.is_dead(now) => {
                ended.push(block);
                if self.slow > PATIENCE {
                    self.pause_until = now + self.lease;
                }
            }
            Some(block) => self.add(block, trip, ended),
            None => {}
        }
        self.waiting.take()
    }

    /// Adds a block that took so long to arrive.
    pub(super) fn add(&mut self, block: Block, trip: Duration, ended: &mut Ended) {
        if self.blocks.len() >= MOST {
            ended.push(self.blocks.remove(0));
        }
        // As much is wanted until the next one arrives.
        let meanwhile =
            u128::from(self.demand) * 2 * trip.as_micros() / self.lease.as_micros().max(1);
        let quarter = block.decision.granted() / 4;
        self.low = quarter.max(meanwhile.min(u128::from(quarter * 3)) as u32);
        self.blocks.push(block);
    }

    /// Removes dead blocks. Returns `false` if the last request was some time ago, so that the
    /// caller is dropped.
    pub(super) fn sweep(&mut self, now: Instant, ended: &mut Ended) -> bool {
        while let Some(place) = self.blocks.iter().position(|block| block.is_dead(now)) {
            ended.push(self.blocks.remove(place));
        }
        self.is_asked || now < self.since + self.lease * REMEMBERED
    }

    /// The units it wants in half a lease time. `None` while a block is asked for.
    pub(super) fn demand(&self) -> Option<u32> {
        (!self.is_asked).then_some(self.demand)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.notify_waiters();
    }
}

/// Maximum size of a block of one of this many instances.
fn fair(remaining: u32, instances: u32) -> u32 {
    remaining / instances.saturating_mul(2)
}
