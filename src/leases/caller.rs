use std::pin::Pin;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::Instant;

use super::block::Block;
use super::hot::OFTEN;
use crate::limit::{Check, Decision};
use crate::observe::mistakes::SHORT_LEASE;

/// A busy caller under one list of policies.
#[derive(Debug)]
pub(super) struct Caller {
    lease: Duration,
    /// Its blocks, oldest first. Several are kept because each may have too little left for the next check.
    pub(super) blocks: SmallVec<[Block; 1]>,
    /// Time of the last request for a block.
    since: Instant,
    /// Closed after the reply to that request was handled. `None` if there is no request.
    arrival: Option<watch::Receiver<()>>,
    /// Low watermark: the next block is requested when no more than this is left.
    low: u32,
    /// The remaining quota in the last reply; 0 after a failed request. `None` before the first reply.
    remaining: Option<u32>,
    /// Units requested by checks since the last request for a block.
    wanted: u32,
    /// Number of consecutive replies that took longer than a quarter of the lease time.
    slow: u32,
}

/// Resolves when the requested block arrives, or its request fails.
pub(super) type Arrived = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// A request for a block. Dropping it wakes the checks that wait for the block.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) at: Instant,
    pub(super) size: u32,
    _arrival: watch::Sender<()>,
}

/// Cap on the expected demand, as a multiple of the units since the last request: a burst does not set the rate.
const GROWTH: u32 = 8;
/// Minimum demand for a block: a busy caller's checks reach this in half a lease time.
const LEAST: u32 = OFTEN / 2;
/// Number of consecutive slow replies after which the lease time is too short.
const SLOW: u32 = 16;
/// Number of lease times after its last request for a block for which a caller is kept.
const REMEMBERED: u32 = 2;

impl Caller {
    pub(super) fn new(lease: Duration, now: Instant) -> Self {
        Self {
            lease,
            blocks: SmallVec::new(),
            since: now,
            arrival: None,
            low: 0,
            remaining: None,
            wanted: 0,
            slow: 0,
        }
    }

    /// Counts the demand of a check. Called once per check, also if the check waits.
    pub(super) fn want(&mut self, cost: u32) {
        self.wanted = self.wanted.saturating_add(cost);
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
        ended: &mut Vec<Block>,
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

    /// Returns the next request for a block, if one is due after a check: for the expected demand in half a lease time,
    /// and at least for all that was wanted since the last request. The first request is for one unit, since its reply
    /// shows what remains.
    pub(super) fn ask(&mut self, now: &impl Fn() -> Instant, instances: u32) -> Option<Ask> {
        if self.arrival.is_some() || self.left() > u64::from(self.low) {
            return None;
        }
        let (at, fair) = (now(), self.fair(instances));
        let elapsed = at.saturating_duration_since(self.since);
        // With little quota left, or a failing store, each check would send a request.
        if self.remaining.is_some() && fair < LEAST && elapsed < self.lease / 4 {
            return None;
        }
        let soon = f64::from(self.wanted) * (self.lease / 2).div_duration_f64(elapsed);
        let demand = self.wanted.saturating_mul(GROWTH).min(soon as u32);
        if demand < LEAST {
            return None;
        }
        let size = demand.max(self.wanted).min(fair).max(1);
        let (sender, arrival) = watch::channel(());
        (self.arrival, self.since, self.wanted) = (Some(arrival), at, 0);
        Some(Ask {
            at,
            size,
            _arrival: sender,
        })
    }

    /// Lets a check that the blocks do not cover wait for the requested block, if the reply is slow: later than a
    /// quarter of the lease time, or after a slow one. Otherwise a store that stalls would get every check. No check
    /// waits for more than the next block may cover.
    pub(super) fn wait(&self, now: Instant, instances: u32) -> Option<Arrived> {
        let is_slow = self.slow > 0 || now >= self.since + self.lease / 4;
        let may_cover = self.wanted < self.fair(instances);
        let mut arrival = self.arrival.clone().filter(|_| is_slow && may_cover)?;
        Some(Box::pin(async move { drop(arrival.changed().await) }))
    }

    pub(super) fn left(&self) -> u64 {
        self.blocks.iter().map(|block| u64::from(block.left)).sum()
    }

    /// Handles the reply to a request, with the granted block. Returns the problem if the lease time
    /// has been too short for the store for a while.
    pub(super) fn answered(
        &mut self,
        ask: &Ask,
        block: Option<Block>,
        now: Instant,
    ) -> Option<String> {
        if self.arrival.is_none() || self.since != ask.at {
            // The caller was reset since, so the store may have dropped the charge of the block: neither spend nor
            // refund it.
            return None;
        }
        self.arrival = None;
        let trip = now.saturating_duration_since(ask.at);
        self.slow = if trip > self.lease / 4 {
            self.slow + 1
        } else {
            0
        };
        // If the lease time is too short, a block that comes too late is worth no wait.
        let usable = block
            .as_ref()
            .filter(|block| self.slow < SLOW || !block.is_dead(now));
        self.remaining = Some(usable.map_or(0, |block| block.charge.decision().remaining()));
        if let Some(block) = block.filter(|block| block.left > 0) {
            // Expected demand until the next block would arrive: a block covers half a lease time.
            let meanwhile = f64::from(block.left) * 2.0 * trip.div_duration_f64(self.lease);
            let quarter = block.left / 4;
            self.low = (meanwhile as u32).clamp(quarter, quarter * 3);
            self.blocks.push(block);
        }
        let last = self.blocks.last().filter(|_| self.slow >= SLOW)?;
        Some(format!(
            "the lease of policy {:?} for {:?} is too short, since the last {SLOW} blocks took more than a quarter of \
             that time to arrive, the latest {trip:.1?}: lease it for at least {:.1?}, or remove the lease{SHORT_LEASE}",
            last.charge.decision().policies().as_slice()[0].name(),
            self.lease,
            trip * 4
        ))
    }

    /// Removes the blocks that have expired, or all of them. Returns `false` if the last request was some time ago, so
    /// that the caller is dropped.
    pub(super) fn sweep(&mut self, now: Instant, all: bool, ended: &mut Vec<Block>) -> bool {
        let is_over = |block: &Block| all || block.is_dead(now);
        while let Some(place) = self.blocks.iter().position(is_over) {
            ended.push(self.blocks.remove(place));
        }
        self.arrival.is_some() || now < self.since + self.lease * REMEMBERED
    }

    /// Maximum size of a block: half of an equal share of the remaining quota.
    fn fair(&self, instances: u32) -> u32 {
        self.remaining.unwrap_or(0) / instances.saturating_mul(2)
    }
}
