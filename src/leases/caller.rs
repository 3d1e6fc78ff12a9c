use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::block::{Block, Taken};
use super::hot::OFTEN;
use crate::limit::{Check, Decision};

/// A caller that comes often, under one list of policies.
#[derive(Debug)]
pub(super) struct Caller {
    /// The oldest first.
    blocks: SmallVec<[Block; 2]>,
    /// The number of the ask that is under way.
    asked: Option<u64>,
    /// With as little left, the next block is asked for.
    low: u32,
    /// What was left in the store after the last ask.
    remaining: u32,
    /// What was wanted since then.
    wanted: u64,
    since: Instant,
    /// Until then nothing is asked for.
    pause_until: Instant,
}

/// Blocks that are not spent any more.
pub(super) type Ended = SmallVec<[Block; 1]>;

/// A block that is to be asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    pub(super) number: u64,
    pub(super) at: Instant,
    /// What the caller is expected to want in half of a lease time.
    wanted: u32,
    remaining: u32,
}

/// More blocks are not kept: some that are left have too little for each check.
const MOST: usize = 4;
/// An ask is for no more than so many times what was wanted since the last: what comes in a moment is not the rule.
const GROWTH: u64 = 8;
/// Less than that is not asked for: what comes often wants as much in half of a lease time.
pub(super) const LEAST: u32 = OFTEN / 2;

impl Caller {
    /// With a first check of this cost.
    pub(super) fn new(now: Instant, cost: u32) -> Self {
        let (blocks, wanted) = (SmallVec::new(), cost.into());
        Self { blocks, asked: None, low: 0, remaining: 0, wanted, since: now, pause_until: now }
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
        self.wanted = self.wanted.saturating_add(check.cost().into());
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

    /// The block to ask for after a check, if it is time for one. It is under way then, with the next of the numbers.
    pub(super) fn ask(&mut self, lease: Duration, now: &impl Fn() -> Instant, numbers: &AtomicU64) -> Option<Ask> {
        if self.asked.is_some() || self.left() > u64::from(self.low) {
            return None;
        }
        let at = now();
        if at < self.pause_until {
            return None;
        }
        let elapsed = at.saturating_duration_since(self.since).as_micros().max(1);
        let soon = u128::from(self.wanted) * (lease / 2).as_micros() / elapsed;
        let wanted = soon.min(u128::from(self.wanted.saturating_mul(GROWTH))).min(u32::MAX.into()) as u32;
        if wanted < LEAST {
            return None;
        }
        let number = numbers.fetch_add(1, Relaxed);
        (self.asked, self.since, self.wanted) = (Some(number), at, 0);
        Some(Ask { number, at, wanted, remaining: self.remaining })
    }

    fn left(&self) -> u64 {
        self.blocks.iter().map(|block| u64::from(block.left())).sum()
    }

    /// The ask of this number has been answered. `false` if the caller was reset since.
    pub(super) fn answered(&mut self, number: u64, remaining: u32, pause_until: Instant) -> bool {
        let is_ours = self.asked == Some(number);
        if is_ours {
            (self.asked, self.remaining, self.pause_until) = (None, remaining, pause_until);
        }
        is_ours
    }

    pub(super) fn add(&mut self, block: Block, ended: &mut Ended) {
        if self.blocks.len() >= MOST {
            ended.push(self.blocks.remove(0));
        }
        self.low = block.granted() / 4;
        self.blocks.push(block);
    }

    /// Notes that so much of what was spent is refunded.
    pub(super) fn refunded(&mut self, cost: u32) {
        self.blocks.iter_mut().for_each(|block| block.refunded(cost));
    }

    /// How much is left of the block of this number, if there is one.
    pub(super) fn left_of(&self, number: u64) -> Option<u32> {
        self.blocks.iter().find(|block| block.number == number).map(Block::left)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Block> {
        let place = self.blocks.iter().position(|block| block.number == number)?;
        Some(self.blocks.remove(place))
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Block> {
        self.blocks.drain(..)
    }

    /// Whether it has no block, none is asked for, and it does not wait until it may ask.
    pub(super) fn is_over(&self, now: &impl Fn() -> Instant) -> bool {
        self.blocks.is_empty() && self.asked.is_none() && now() >= self.pause_until
    }
}

impl Ask {
    /// How much to ask for with so many instances, so that they share the end of a quota fairly. The first ask is for one
    /// unit: what is left is not known before.
    pub(super) fn size(self, instances: u32) -> u32 {
        self.wanted.min(fair(self.remaining, instances)).max(1)
    }
}

/// What one of so many instances may have charged ahead at a time.
pub(super) fn fair(remaining: u32, instances: u32) -> u32 {
    remaining / instances.saturating_mul(2)
}
