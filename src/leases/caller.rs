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

/// A busy caller under one list of policies.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) lease: Duration,
    /// Its blocks, oldest first.
    pub(super) blocks: SmallVec<[Block; 1]>,
    /// Time of the last request for a block.
    since: Instant,
    /// Whether that request has no reply yet.
    is_asked: bool,
    /// Wakes the checks that wait for the reply.
    waiting: Option<Waiting>,
    /// Low watermark: the next block is requested when no more than this is left.
    low: u32,
    /// The remaining quota that the store last reported.
    remaining: u32,
    /// Units requested by checks since the last request for a block.
    wanted: u64,
    /// Expected demand in half a lease time, computed at the last request for a block.
    demand: u32,
    /// Earliest time of the next request for a block.
    pause_until: Instant,
    /// Number of consecutive replies that took longer than a quarter of the lease time.
    pub(super) slow: u32,
}

/// Resolves when the requested block arrives, or its request fails.
pub(super) type Arrival = Pin<Box<OwnedNotified>>;

/// Blocks that have been removed from their caller: spent, expired or dropped.
pub(super) type Ended = SmallVec<[Block; 1]>;

/// Wakes all waiting checks when it is dropped. Do not drop it under a lock.
#[derive(Debug, Default)]
pub(super) struct Waiting(Arc<Notify>);

/// A request for a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    pub(super) at: Instant,
    pub(super) size: u32,
}

/// Maximum number of blocks of a caller. Several are kept because each may have too little left for the next check.
const MOST: usize = 4;
/// Cap on the expected demand, as a multiple of the units since the last request: a burst does not set the rate.
const GROWTH: u64 = 8;
/// Minimum demand for a block: a busy caller's checks reach this in half a lease time.
pub(super) const LEAST: u32 = OFTEN / 2;
/// Number of consecutive slow replies up to which checks wait for the next block. Beyond it, the store decides them.
const PATIENCE: u32 = 2;
/// Number of lease times after its last request for a block for which a caller is kept.
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

    /// Counts the demand of a check. Called once per check, also if the check waits.
    pub(super) fn want(&mut self, cost: u32) {
        self.wanted = self.wanted.saturating_add(cost.into());
    }

    /// Takes the cost of a check from the oldest block that covers it.
    ///
    /// # Errors
    ///
    /// Returns the check if no block covers it.
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
        // The demand of waiting checks is part of `wanted`.
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

    /// Lets a check that the blocks do not cover wait for the requested block, if the reply is slow: later than a
    /// quarter of the lease time, or after a slow one. Otherwise a store that stalls would get every check.
    pub(super) fn wait(&mut self, now: Instant) -> Option<Arrival> {
        let is_slow = self.is_stalled() || now >= self.since + self.lease / 4;
        (self.is_asked && is_slow).then(|| {
            let Waiting(waiting) = self.waiting.get_or_insert_default();
            Box::pin(Arc::clone(waiting).notified_owned())
        })
    }

    /// Returns `true` after a few slow replies, so that checks wait for the next one.
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
            // The caller was reset since, so the store may have dropped the charge of the block: neither spend nor
            // refund it.
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

    /// Adds a block that arrived `trip` after its request.
    pub(super) fn add(&mut self, block: Block, trip: Duration, ended: &mut Ended) {
        if self.blocks.len() >= MOST {
            ended.push(self.blocks.remove(0));
        }
        // Expected demand until the next block would arrive.
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

    /// Expected demand in half a lease time. `None` while a block is requested, so that its caller is not evicted.
    pub(super) fn demand(&self) -> Option<u32> {
        (!self.is_asked).then_some(self.demand)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.notify_waiters();
    }
}

/// Maximum size of a block: half of an equal share of the remaining quota.
fn fair(remaining: u32, instances: u32) -> u32 {
    remaining / instances.saturating_mul(2)
}
