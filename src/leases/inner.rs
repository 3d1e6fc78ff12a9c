use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

use super::block::Block;
use super::caller::{Answered, Ask, Ended};
use super::hot::HotCallers;
use super::shard::{Asked, Next, SAMPLE, Shard};
use super::timer::Timer;
use crate::error::StoreError;
use crate::limit::{Check, Decision, Lease, Mode, Policies};
use crate::observe::mistakes::SHORT_LEASE;
use crate::observe::{Observer, event, or_log};
use crate::refunds::{PendingOp, RefundQueue, StoreQueue};
use crate::store::{Answer, Digest, Shards, Share, Store};
use crate::util::{contain, instant};

/// The state of a [`Leased`](super::Leased), which its clones share.
pub(super) struct Inner<S: Store> {
    pub(super) store: S,
    pub(super) share: Share,
    pub(super) max_callers: NonZeroUsize,
    hot: HotCallers,
    shards: Shards<Shard>,
    pub(super) timer: Timer,
    /// Created for the first ask, when the observer is known.
    queue: OnceLock<StoreQueue<S>>,
    observer: OnceLock<Arc<dyn Observer>>,
    /// Number of asks.
    asks: AtomicU64,
    /// Each ask in flight has a receiver.
    in_flight: watch::Sender<()>,
    /// Whether nothing is leased any more, and whether no block is kept either.
    is_shut_down: AtomicBool,
    is_drained: AtomicBool,
    /// Whether it was reported that a lease time is too short.
    reported_short: AtomicBool,
}

/// A caller that may have a block.
pub(super) struct Found<'a> {
    lease: Lease,
    shard: &'a Shard,
    caller: Digest,
    /// Whether it comes often, as far as that was counted.
    is_hot: bool,
}

/// Who decides a check.
pub(super) enum Decided {
    Block(Decision),
    Store(Check),
    /// The block that is asked for, when this is received.
    Later(Check, oneshot::Receiver<()>),
}

const SHARDS: usize = 64;
/// How long a shutdown waits for answers: longer than the usual deadlines of stores.
const PATIENCE: Duration = Duration::from_secs(1);
/// After this many successive slow answers a lease time is reported as too short.
const SLOW: u32 = 16;

impl<S: Store> Inner<S> {
    pub(super) fn new(store: S, share: Share, max_callers: NonZeroUsize) -> Self {
        Self {
            store,
            share,
            max_callers,
            hot: HotCallers::new(),
            shards: Shards::new(SHARDS.min(max_callers.get() / SAMPLE), |count| Shard::new(max_callers.get() / count)),
            timer: Timer::new(),
            queue: OnceLock::new(),
            observer: OnceLock::new(),
            asks: AtomicU64::new(0),
            in_flight: watch::Sender::default(),
            is_shut_down: AtomicBool::new(false),
            is_drained: AtomicBool::new(false),
            reported_short: AtomicBool::new(false),
        }
    }

    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        self.observer.get_or_init(|| Arc::clone(observer));
    }

    /// Finds the caller of a check that a block may decide. Most callers neither have one nor come often: this is all that
    /// they cost.
    #[inline]
    pub(super) fn find(&self, check: &Check) -> Option<Found<'_>> {
        let lease = check.policies().lease()?;
        let is_leasable = check.is_leasable();
        if is_leasable {
            check.policies().lease_takes_effect();
        }
        let (shard, caller) = self.shards.of(check.key());
        let caller = caller.of_count(lease.id);
        let is_alone = shard.len() == 0;
        let is_hot = is_alone && is_leasable && self.hot.count(caller, lease.time);
        (is_hot || !is_alone).then_some(Found { lease, shard, caller, is_hot })
    }

    /// Decides by a block, also by one that is asked for already.
    pub(super) fn decide(self: &Arc<Self>, check: Check, found: Found<'_>) -> Decided {
        let Found { shard, caller, .. } = found;
        match check.mode() {
            _ if check.is_leasable() => {}
            Mode::Refund => {
                shard.refunded(caller, check.cost());
                return Decided::Store(check);
            }
            Mode::Reset => {
                // The store forgets the charge, so that there is nothing to refund.
                for block in shard.forget(caller).iter_mut().flat_map(|caller| caller.drain()) {
                    self.notify(&block, 0, block.left());
                }
                return Decided::Store(check);
            }
            _ => return Decided::Store(check),
        }
        if self.is_shut_down.load(Relaxed) {
            return Decided::Store(check);
        }
        self.spend(check, found, true)
    }

    /// Decides a check that has waited for a block, if need be by the store.
    pub(super) fn decide_now(self: &Arc<Self>, check: Check) -> Answer<S::Future> {
        let Some(found) = self.find(&check) else { return self.store.check(check) };
        match self.spend(check, found, false) {
            Decided::Block(decision) => Answer::ready(Ok(decision)),
            Decided::Store(check) | Decided::Later(check, _) => self.store.check(check),
        }
    }

    fn spend(self: &Arc<Self>, check: Check, found: Found<'_>, first: bool) -> Decided {
        let Found { lease, shard, caller, is_hot } = found;
        let (key, cost) = (*check.key(), check.cost());
        let mut ended = Ended::new();
        let (answer, next) = shard.spend(caller, check, lease.time, &self.asks, first, &mut ended);
        let (mut ask, mut wait) = (None, None);
        match next {
            Next::Nothing => {}
            Next::Ask(next) => ask = Some(next),
            Next::Wait(answered) => wait = Some(answered),
            Next::Count if is_hot || self.hot.count(caller, lease.time) => {
                ask = shard.begin(caller, cost, lease.time, &self.asks, &mut ended);
            }
            Next::Count => {}
        }
        if let Some(ask) = ask {
            let policies = answer.as_ref().map_or_else(Check::policies, Decision::policies);
            self.ask(Asked { key, caller, lease: lease.time, number: ask.number, at: ask.at }, policies, ask);
        } else if answer.is_err() {
            // An ask, or the timer, may be left of a runtime that has ended.
            self.queue().wake();
            self.timer.attend(self);
        }
        self.end(ended);
        match (answer, wait) {
            (Ok(decision), _) => Decided::Block(decision),
            (Err(check), Some(answered)) => Decided::Later(check, answered),
            (Err(check), None) => Decided::Store(check),
        }
    }

    fn queue(&self) -> &StoreQueue<S> {
        self.queue.get_or_init(|| StoreQueue::new(self.store.clone(), self.observer.get().cloned()))
    }

    fn instances(&self) -> u32 {
        self.share.instances().get()
    }

    fn ask(self: &Arc<Self>, asked: Asked, policies: &Policies, ask: Ask) {
        let in_flight = self.in_flight.subscribe();
        if self.is_shut_down.load(SeqCst) {
            return self.forget(&asked);
        }
        let size = ask.size(self.instances());
        let check = Check::up_to(asked.key, policies, size).for_block();
        let (inner, queue) = (Arc::downgrade(self), self.queue().downgrade());
        self.queue().put(PendingOp::of_check(check).then(move |answer| {
            match (inner.upgrade(), answer, queue()) {
                (Some(inner), answer, _) => inner.answered(asked, answer, size),
                (None, Ok(decision), Some(queue)) => queue.put(asked.block(decision).into_refund(instant())),
                (None, ..) => {}
            }
            drop(in_flight);
        }));
    }

    /// Handles the answer to an ask of this size, however late it is.
    fn answered(self: &Arc<Self>, asked: Asked, answer: Result<Decision, StoreError>, size: u32) {
        let mut lost = 0;
        let (mut policies, mut remaining, mut block) = (None, None, None);
        match answer {
            Ok(decision) if self.store.is_authoritative(&decision) => {
                remaining = Some(decision.remaining());
                policies = Some(decision.policies().clone());
                block = Some(asked.block(decision)).filter(|block| block.left() > 0);
            }
            // Another store has decided instead.
            Ok(decision) => self.queue().put(asked.block(decision).into_refund(instant())),
            Err(error) if error.is_unsent() => {}
            // It may have been charged, or not: a refund could be of what others were charged.
            Err(_) => lost = size,
        }
        let first = block.as_ref().map(|block| {
            let now = instant();
            now + block.dies_at().saturating_duration_since(now) / 2
        });
        let is_drained = || self.is_drained.load(SeqCst);
        let shard = self.shards.at(asked.caller);
        let answered = shard.answered(&asked, block, remaining, self.instances(), &self.asks, is_drained);
        if lost > 0 {
            let mut event = event::Leased::new(0, 0, 0);
            event.lost = lost.into();
            contain(|| or_log(self.observer.get()).leased(&event));
        }
        let Some(Answered { ended, woken, again, slow }) = answered else { return };
        drop(woken);
        self.end(ended);
        if let Some(policies) = policies {
            if slow == SLOW {
                self.report_short(&policies, asked);
            }
            if let Some(ask) = again {
                self.ask(Asked { number: ask.number, at: ask.at, ..asked }, &policies, ask);
            }
        }
        self.timer.add(first.unwrap_or_else(instant), asked);
        if !self.timer.attend(self) {
            // Nobody would refund what is left later.
            self.refund_all();
        }
    }

    fn forget(&self, asked: &Asked) {
        let mut forgotten = self.shards.at(asked.caller).forget(asked.caller);
        self.end(forgotten.iter_mut().flat_map(|caller| caller.drain()).collect());
    }

    /// Looks at the block of an ask. Returns when to look again.
    pub(super) fn look(&self, asked: &Asked) -> Option<Instant> {
        let (block, next) = self.shards.at(asked.caller).look(asked, instant());
        self.end(block.into_iter().collect());
        next
    }

    fn end(&self, ended: Ended) {
        for op in ended.into_iter().filter_map(|block| self.ended(block)) {
            self.queue().put(op);
        }
    }

    /// Notifies the observer that a block has ended. Returns what refunds the rest of it.
    fn ended(&self, block: Block) -> Option<PendingOp> {
        let (now, left) = (instant(), block.left());
        let (refunded, expired) = if block.is_dead(now) { (0, left) } else { (left, 0) };
        self.notify(&block, refunded, expired);
        (left > 0).then(|| block.into_refund(now))
    }

    fn notify(&self, block: &Block, refunded: u32, expired: u32) {
        let event = event::Leased::new(block.granted().into(), refunded.into(), expired.into());
        contain(|| or_log(self.observer.get()).leased(&event));
    }

    /// Reports, once, that blocks take longer than a quarter of their lease time to be charged.
    fn report_short(&self, policies: &Policies, asked: Asked) {
        if self.reported_short.swap(true, Relaxed) {
            return;
        }
        let (lease, trip) = (asked.lease, instant() - asked.at);
        let name = policies.iter().min_by_key(|policy| policy.lease()).map_or("", |policy| policy.name());
        let problem = format!(
            "the policy {name:?} is leased for {lease:?}, and Redis took {trip:.1?} to charge a block, {SLOW} times in a \
             row more than a quarter of that: lease it for at least {:.1?}, or remove the lease{SHORT_LEASE}",
            trip * 4
        );
        contain(|| or_log(self.observer.get()).misconfigured(&event::Misconfigured::new(&problem)));
    }

    /// Refunds what is left of all blocks, also of those that are being asked for, and asks for no other.
    pub(super) async fn shut_down(&self) {
        self.is_shut_down.store(true, SeqCst);
        // An answer may be left of a runtime that has ended.
        self.queue().wake();
        let _ = timeout(PATIENCE, self.in_flight.closed()).await;
        self.is_drained.store(true, SeqCst);
        let refunds: Vec<_> = self.drain().into_iter().filter_map(|block| self.ended(block)).collect();
        let sent: Vec<_> = refunds.into_iter().map(|op| self.queue().ask(op)).collect();
        for refund in sent {
            refund.await;
        }
    }

    /// Refunds what is left of all blocks.
    pub(super) fn refund_all(&self) {
        self.end(self.drain().into());
    }

    fn drain(&self) -> Vec<Block> {
        self.shards.iter().flat_map(Shard::drain).collect()
    }

    /// How many callers it knows.
    #[cfg(test)]
    pub(super) fn callers(&self) -> usize {
        self.shards.iter().map(Shard::len).sum()
    }

    /// The units that are left in all blocks.
    #[cfg(test)]
    pub(super) fn left(&self) -> u64 {
        self.shards.iter().map(Shard::left).sum()
    }
}

impl<S: Store> Drop for Inner<S> {
    fn drop(&mut self) {
        self.refund_all();
        self.timer.end();
    }
}
