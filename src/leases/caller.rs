use std::pin::Pin;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::block::Block;
use super::busy::BUSY_CHECKS;
use crate::limit::{Check, Decision};
use crate::observe::mistakes::SHORT_LEASE;

/// A busy caller under one list of policies.
#[derive(Debug)]
pub(super) struct BusyCaller {
    lease: Duration,
    /// Its blocks, oldest first. Several are kept because each may have too little left for the next check.
    pub(super) blocks: SmallVec<[Block; 1]>,
    /// Time of the last request for a block.
    requested_at: Instant,
    /// Closed when that request has ended. `None` if there is no request.
    in_progress: Option<watch::Receiver<()>>,
    /// The next block is requested when no more than this is left.
    low_watermark: u32,
    remaining_quota: RemainingQuota,
    /// Units requested by checks since the last request for a block.
    demand: u32,
    /// Number of consecutive replies that took longer than a quarter of the lease time.
    slow_replies: u32,
}

/// The remaining quota of a caller, as far as its last request has shown it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RemainingQuota {
    /// No request was replied to.
    Unknown,
    /// The request failed, or its block came too late to be spent. The next request is for one unit, and no check waits for
    /// it.
    NoBlock,
    /// By the reply.
    Units(u32),
}

/// The wait of a check for the requested block.
pub(super) struct BlockWait {
    /// The latest end of the wait, also of a wait for the next block.
    pub(super) until: Instant,
    /// Resolves to `true` when the block has arrived or its request has failed, and to `false` if the wait ends before.
    pub(super) arrival: Pin<Box<dyn Future<Output = bool> + Send + Sync>>,
}

/// A request for a block. Dropping it wakes the checks that wait for the block.
#[derive(Debug)]
pub(super) struct BlockRequest {
    pub(super) sent_at: Instant,
    pub(super) size: u32,
    _in_progress: watch::Sender<()>,
}

/// Cap on the expected demand, as a multiple of the units since the last request: a burst does not set the rate.
const MAX_GROWTH: u32 = 8;
/// Minimum demand for a block: a busy caller's checks reach this in half a lease time.
const MIN_DEMAND: u32 = BUSY_CHECKS / 2;
/// Number of consecutive slow replies after which the lease time is too short.
const MAX_SLOW_REPLIES: u32 = 16;
/// Number of lease times for which a caller is kept after its last request for a block.
const MAX_IDLE_LEASES: u32 = 2;

impl BusyCaller {
    pub(super) fn new(lease: Duration, now: Instant) -> Self {
        Self {
            lease,
            blocks: SmallVec::new(),
            requested_at: now,
            in_progress: None,
            low_watermark: 0,
            remaining_quota: RemainingQuota::Unknown,
            demand: 0,
            slow_replies: 0,
        }
    }

    /// Counts the demand of a check. Called once per check, also if the check waits.
    pub(super) fn add_demand(&mut self, cost: u32) {
        self.demand = self.demand.saturating_add(cost);
    }

    /// Takes the cost of a check from the oldest block that covers it.
    ///
    /// # Errors
    ///
    /// Returns the check if no block covers it.
    pub(super) fn spend(
        &mut self,
        mut check: Check,
        clock: &impl Fn() -> Instant,
        ended: &mut Vec<Block>,
    ) -> Result<Decision, Check> {
        let cost = check.cost();
        while let Some(index) = self.blocks.iter().position(|block| block.left >= cost) {
            let block = &mut self.blocks[index];
            match block.take(check, clock) {
                Ok(decision) => {
                    if block.left == 0 {
                        ended.push(self.blocks.remove(index));
                    }
                    return Ok(decision);
                }
                Err(unspent) => {
                    ended.push(self.blocks.remove(index));
                    check = unspent;
                }
            }
        }
        Err(check)
    }

    /// Returns the next request for a block, if one is due after a check: for the expected demand in half a lease time,
    /// and at least for the demand since the last request. If the maximum is 0, the request is for one unit.
    pub(super) fn next_request(
        &mut self,
        clock: &impl Fn() -> Instant,
        instances: u32,
    ) -> Option<BlockRequest> {
        if self.in_progress.is_some() || self.left() > u64::from(self.low_watermark) {
            return None;
        }
        let now = clock();
        let max_size = self.max_block_size(instances);
        let elapsed = now.saturating_duration_since(self.requested_at);
        // With little quota left, or a failing store, each check would send a request.
        let has_little = self.remaining_quota != RemainingQuota::Unknown && max_size < MIN_DEMAND;
        if has_little && elapsed < self.lease / 4 {
            return None;
        }
        let at_this_rate = f64::from(self.demand) * (self.lease / 2).div_duration_f64(elapsed);
        let most = self.demand.saturating_mul(MAX_GROWTH);
        let expected = most.min(at_this_rate as u32);
        if expected < MIN_DEMAND {
            return None;
        }
        let size = match max_size {
            // The reply reports the remaining quota.
            0 => 1,
            max => expected.max(self.demand).min(max),
        };
        let (sender, receiver) = watch::channel(());
        self.in_progress = Some(receiver);
        self.requested_at = now;
        self.demand = 0;
        Some(BlockRequest {
            sent_at: now,
            size,
            _in_progress: sender,
        })
    }

    /// Lets a check that the blocks do not cover wait for the requested block, if the reply is slow: later than a
    /// quarter of the lease time, or after a slow one. Otherwise a store that stalls would get every check. No check
    /// waits for more than the next block may cover.
    ///
    /// A check that has not waited yet may wait for `deadline`, and then until `waited_until`. No check waits once the
    /// block has expired and the request has missed the deadline: the runtime that sends the request may stall.
    pub(super) fn wait_for_block(
        &self,
        now: Instant,
        instances: u32,
        deadline: Duration,
        waited_until: Option<Instant>,
    ) -> Option<BlockWait> {
        let in_progress = self.in_progress.as_ref()?;
        let is_slow = self.slow_replies > 0 || now >= self.requested_at + self.lease / 4;
        let may_cover = self.demand < self.max_block_size(instances);
        let request_ends = self.requested_at.checked_add(self.lease.max(deadline))?;
        let longest = waited_until.unwrap_or(now.checked_add(deadline)?);
        let until = longest.min(request_ends);
        if !is_slow || !may_cover || now >= until {
            return None;
        }
        let mut ended = in_progress.clone();
        let arrival = async move { timeout_at(until, ended.changed()).await.is_ok() };
        Some(BlockWait {
            until,
            arrival: Box::pin(arrival),
        })
    }

    pub(super) fn left(&self) -> u64 {
        self.blocks.iter().map(|block| u64::from(block.left)).sum()
    }

    /// Handles the reply to a request, with the granted block. Returns the problem if the lease time
    /// has been too short for the store for a while.
    pub(super) fn on_reply(
        &mut self,
        request: &BlockRequest,
        block: Option<Block>,
        now: Instant,
    ) -> Option<String> {
        if self.in_progress.is_none() || self.requested_at != request.sent_at {
            // The caller was reset since, so the store may have dropped the charge of the block: neither spend nor
            // refund it.
            return None;
        }
        self.in_progress = None;
        let trip = now.saturating_duration_since(request.sent_at);
        self.slow_replies = if trip > self.lease / 4 {
            self.slow_replies + 1
        } else {
            0
        };
        let is_too_short = self.slow_replies >= MAX_SLOW_REPLIES;
        self.remaining_quota = match &block {
            // If the lease time is too short, a block that comes too late is worth no wait.
            Some(block) if is_too_short && block.is_expired(now) => RemainingQuota::NoBlock,
            Some(block) => RemainingQuota::Units(block.charge.decision().remaining()),
            None => RemainingQuota::NoBlock,
        };
        if let Some(block) = block
            && block.left > 0
        {
            // Expected demand until the next block would arrive: a block covers half a lease time.
            let spent_until = f64::from(block.left) * 2.0 * trip.div_duration_f64(self.lease);
            let quarter = block.left / 4;
            self.low_watermark = (spent_until as u32).clamp(quarter, quarter * 3);
            self.blocks.push(block);
        }
        if !is_too_short {
            return None;
        }
        let last = self.blocks.last()?;
        Some(format!(
            "the lease of policy {:?} for {:?} is too short, since the last {MAX_SLOW_REPLIES} blocks took more than a quarter of \
             that time to arrive, the latest {trip:.1?}: lease it for at least {:.1?}, or remove the lease{SHORT_LEASE}",
            last.charge.decision().policies().as_slice()[0].name(),
            self.lease,
            trip * 4
        ))
    }

    /// Removes the blocks that have expired, or all of them. Returns `false` if the last request was some time ago, so
    /// that the caller is dropped.
    pub(super) fn sweep(&mut self, now: Instant, all: bool, ended: &mut Vec<Block>) -> bool {
        let mut index = 0;
        while let Some(block) = self.blocks.get(index) {
            if all || block.is_expired(now) {
                ended.push(self.blocks.remove(index));
            } else {
                index += 1;
            }
        }
        self.in_progress.is_some() || now < self.requested_at + self.lease * MAX_IDLE_LEASES
    }

    /// Maximum size of a block: half of an equal share of the remaining quota. 0 before a reply has shown it.
    fn max_block_size(&self, instances: u32) -> u32 {
        match self.remaining_quota {
            RemainingQuota::Unknown | RemainingQuota::NoBlock => 0,
            RemainingQuota::Units(units) => units / instances.saturating_mul(2),
        }
    }
}
