use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::block::{Block, Taken};
use super::hot::OFTEN;
use crate::limit::{Check, Decision};

/// A caller that comes often, under one list of policies.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) lease: Duration,
    /// The oldest first.
    blocks: SmallVec<[Block; 1]>,
    /// Number of the ask in flight.
    asked: Option<u64>,
    /// Dropped when that ask is answered, which wakes the checks that wait for it.
    waiting: Waiting,
    /// The next block is asked for when no more than this is left.
    low: u32,
    /// What was left in the store after the last ask.
    remaining: u32,
    /// Units wanted since the last ask.
    wanted: u64,
    /// Units wanted in half a lease time, as of the last ask.
    demand: u32,
    /// Time of the last ask.
    since: Instant,
    /// Nothing is asked for before.
    pause_until: Instant,
    /// Successive asks whose answers took longer than a quarter of the lease time.
    slow: u32,
}

/// Blocks that are not spent any more.
pub(super) type Ended = SmallVec<[Block; 1]>;

/// The checks that wait for an ask: each has the receiver.
type Waiting = Vec<oneshot::Sender<()>>;

/// A block to ask for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    pub(super) number: u64,
    pub(super) at: Instant,
    pub(super) lease: Duration,
    /// Units that the caller is expected to want before the block dies.
    wanted: u32,
    remaining: u32,
}

/// What follows from the answer to an ask.
#[derive(Debug, Default)]
pub(super) struct Answered {
    pub(super) ended: Ended,
    /// To be dropped without a lock.
    pub(super) woken: Waiting,
    /// The answer came too late to be spent: the next ask, which the same checks wait for.
    pub(super) again: Option<Ask>,
    /// Successive slow answers.
    pub(super) slow: u32,
}

/// Maximum number of blocks of a caller: some have too little left for each check.
const MOST: usize = 4;
/// Bound of an ask, in multiples of the units wanted since the last: a burst is not the rate.
const GROWTH: u64 = 8;
/// Minimum size of an ask: a caller that comes often wants as much in half a lease time.
pub(super) const LEAST: u32 = OFTEN / 2;
/// Maximum number of successive slow answers that checks wait for.
const PATIENCE: u32 = 2;
/// For how many lease times after its last ask a caller is remembered.
const REMEMBERED: u32 = 4;

static ASKS: AtomicU64 = AtomicU64::new(0);

impl Caller {
    pub(super) fn new(lease: Duration, now: Instant) -> Self {
        Self {
            lease,
            blocks: SmallVec::new(),
            asked: None,
            waiting: Vec::new(),
            low: 0,
            remaining: 0,
            wanted: 0,
            demand: 0,
            since: now,
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
        let mut i = 0;
        while let Some(block) = self.blocks.get_mut(i) {
            match block.take(check, now) {
                Taken::Part(decision) => {
                    if block.left() == 0 {
                        ended.push(self.blocks.remove(i));
                    }
                    return Ok(decision);
                }
                Taken::TooLittle(same) => (check, i) = (same, i + 1),
                Taken::TooOld(same) => {
                    check = same;
                    ended.push(self.blocks.remove(i));
                }
            }
        }
        Err(check)
    }

    /// Returns the block to ask for after a check, if it is time for one. That ask is then in flight.
    pub(super) fn ask(&mut self, now: &impl Fn() -> Instant) -> Option<Ask> {
        if self.asked.is_some() || self.left() > u64::from(self.low) {
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
        let waiting = if self.waiting.is_empty() {
            0
        } else {
            self.wanted.min(u32::MAX.into()) as u32
        };
        let number = ASKS.fetch_add(1, Relaxed);
        (self.asked, self.since, self.wanted, self.demand) = (Some(number), at, 0, demand);
        let wanted = demand.saturating_add(waiting);
        Some(Ask {
            number,
            at,
            lease: self.lease,
            wanted,
            remaining: self.remaining,
        })
    }

    /// Has a check that found too little wait for the answer to the ask in flight, if that takes longer than a quarter of
    /// the lease time: a store that stalls is not sent all checks.
    pub(super) fn wait(&mut self, now: Instant) -> Option<oneshot::Receiver<()>> {
        if self.asked.is_none() || now < self.since + self.lease / 4 {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        if self.waiting.len() == self.waiting.capacity() {
            // Checks whose futures were dropped wait no longer.
            self.waiting.retain(|sender| !sender.is_closed());
            self.waiting.reserve(self.waiting.len().max(OFTEN as usize));
        }
        self.waiting.push(sender);
        Some(receiver)
    }

    pub(super) fn left(&self) -> u64 {
        self.blocks
            .iter()
            .map(|block| u64::from(block.left()))
            .sum()
    }

    /// Handles the answer to an ask: its block, and what the store had left, if that is known. `None` if the caller was
    /// reset since.
    pub(super) fn answered(
        &mut self,
        ask: &Ask,
        block: Option<Block>,
        remaining: Option<u32>,
        instances: u32,
        now: Instant,
    ) -> Option<Answered> {
        self.asked.take_if(|number| *number == ask.number)?;
        let trip = now.saturating_duration_since(self.since);
        self.slow = if trip > self.lease / 4 {
            self.slow.saturating_add(1)
        } else {
            0
        };
        self.remaining = remaining.unwrap_or(self.remaining);
        if remaining.is_none_or(|remaining| fair(remaining, instances) < LEAST) {
            self.pause_until = now + self.lease / 4;
        }
        let mut answered = Answered {
            slow: self.slow,
            ..Answered::default()
        };
        match block {
            Some(block) if block.is_dead(now) => {
                answered.ended.push(block);
                if self.slow > PATIENCE {
                    self.pause_until = now + self.lease;
                } else if !self.waiting.is_empty() {
                    answered.again = self.ask(&|| now);
                }
            }
            Some(block) => self.add(block, trip, &mut answered.ended),
            None => {}
        }
        if answered.again.is_none() {
            answered.woken = std::mem::take(&mut self.waiting);
        }
        Some(answered)
    }

    /// Adds a block that took so long to arrive.
    pub(super) fn add(&mut self, block: Block, trip: Duration, ended: &mut Ended) {
        if self.blocks.len() >= MOST {
            ended.push(self.blocks.remove(0));
        }
        // As much is wanted until the next one arrives.
        let meanwhile =
            u128::from(self.demand) * 2 * trip.as_micros() / self.lease.as_micros().max(1);
        let quarter = block.granted() / 4;
        self.low = quarter.max(meanwhile.min(u128::from(quarter * 3)) as u32);
        self.blocks.push(block);
    }

    /// Reduces the blocks' charge by a refund of what was spent.
    pub(super) fn refunded(&mut self, cost: u32) {
        self.blocks
            .iter_mut()
            .for_each(|block| block.refunded(cost));
    }

    /// Removes blocks that are dead or idle. Returns `false` if the caller has none and has asked for none for some time,
    /// so that it is forgotten.
    pub(super) fn sweep(&mut self, now: Instant, ended: &mut Ended) -> bool {
        while let Some(place) = self
            .blocks
            .iter()
            .position(|block| block.is_dead(now) || block.is_idle(now))
        {
            ended.push(self.blocks.remove(place));
        }
        !self.blocks.is_empty()
            || self.asked.is_some()
            || now < self.since + self.lease * REMEMBERED
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Block> {
        self.blocks.drain(..)
    }

    /// The units it wants in half a lease time. `None` while a block is asked for.
    pub(super) fn demand(&self) -> Option<u32> {
        self.asked.is_none().then_some(self.demand)
    }
}

impl Ask {
    /// The units to ask for, so that this many instances share the end of a quota fairly. The first ask is for one unit:
    /// what is left is not known before.
    pub(super) fn size(self, instances: u32) -> u32 {
        self.wanted.min(fair(self.remaining, instances)).max(1)
    }
}

/// Maximum size of a block of one of this many instances.
fn fair(remaining: u32, instances: u32) -> u32 {
    remaining / instances.saturating_mul(2)
}
