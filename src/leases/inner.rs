use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};

use super::block::Block;
use super::caller::{Ask, Caller, Ended};
use super::hot::HotCallers;
use crate::background::{OpQueue, PendingOp};
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::observe::mistakes::SHORT_LEASE;
use crate::observe::{Observer, event, or_log};
use crate::store::{Answer, Digest, Shards, Share, Store, op_queue};
use crate::util::{contain, instant, lock};

/// The state of a [`Leased`](super::Leased), which its clones share.
pub(super) struct Inner<S: Store> {
    pub(super) store: S,
    pub(super) share: Share,
    pub(super) max_callers: NonZeroUsize,
    hot: HotCallers,
    shards: Shards<Shard>,
    /// Created for the first ask, when the observer is known.
    queue: OnceLock<OpQueue>,
    observer: OnceLock<Arc<dyn Observer>>,
    /// Each ask in flight has a receiver.
    in_flight: watch::Sender<()>,
    /// Whether nothing is leased any more, and whether no block is kept either.
    is_shut_down: AtomicBool,
    is_drained: AtomicBool,
    has_sweeper: AtomicBool,
    /// Whether it was reported that a lease time is too short.
    reported_short: AtomicBool,
}

/// Some of the callers that come often, by the caller and its policies.
struct Shard {
    callers: Mutex<BTreeMap<Digest, Caller>>,
    /// How many there are: other callers need no lock where there is none.
    len: AtomicUsize,
    max: usize,
}

/// Who decides a check.
pub(super) enum Decided {
    Block(Decision),
    Store(Check),
    /// The block that arrives when this is received.
    Later(Check, oneshot::Receiver<()>),
}

/// The task that refunds what is not spent, and forgets callers. If it ends with its runtime, all blocks are refunded:
/// nobody else may be left to do so.
struct Sweeper<S: Store>(Weak<Inner<S>>);

const SHARDS: usize = 64;
/// Of so many callers a new one replaces the one that wants the least.
const SAMPLE: usize = 8;
/// How long a shutdown waits for answers: longer than the usual deadlines of stores.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest time between two sweeps.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// After this many successive slow answers a lease time is reported as too short.
const SLOW: u32 = 16;

impl<S: Store> Inner<S> {
    pub(super) fn new(store: S, share: Share, max_callers: NonZeroUsize) -> Self {
        let max = max_callers.get();
        let shard = |count| Shard {
            callers: Mutex::default(),
            len: AtomicUsize::new(0),
            max: max / count,
        };
        Self {
            store,
            share,
            max_callers,
            hot: HotCallers::new(),
            shards: Shards::new(SHARDS.min(max / SAMPLE), shard),
            queue: OnceLock::new(),
            observer: OnceLock::new(),
            in_flight: watch::Sender::default(),
            is_shut_down: AtomicBool::new(false),
            is_drained: AtomicBool::new(false),
            has_sweeper: AtomicBool::new(false),
            reported_short: AtomicBool::new(false),
        }
    }

    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        self.observer.get_or_init(|| Arc::clone(observer));
    }

    /// Decides a check by a block, if its caller comes often. Most callers do not: what `spend` does is kept out of line.
    #[inline]
    pub(super) fn decide(self: &Arc<Self>, check: Check) -> Decided {
        let Some(lease) = check.policies().lease() else {
            return Decided::Store(check);
        };
        let is_leasable = check.is_leasable();
        if is_leasable {
            check.policies().lease_takes_effect();
        }
        let (shard, caller) = self.shards.of(check.key());
        let caller = caller.of_count(lease.id);
        let is_alone = shard.len.load(Relaxed) == 0;
        let is_hot = is_alone && is_leasable && self.hot.count(caller, lease.time);
        match check.mode() {
            _ if is_alone && !is_hot => Decided::Store(check),
            _ if is_leasable && !self.is_shut_down.load(Relaxed) => {
                self.spend(check, (shard, caller), lease.time, is_hot, true)
            }
            Mode::Refund => {
                if let Some(caller) = lock(&shard.callers).get_mut(&caller) {
                    caller.refunded(check.cost());
                }
                Decided::Store(check)
            }
            Mode::Reset => {
                // The store forgets the charge, so that there is nothing to refund.
                for block in shard.forget(caller).iter_mut().flat_map(Caller::drain) {
                    self.notify(&block, 0, block.left());
                }
                Decided::Store(check)
            }
            _ => Decided::Store(check),
        }
    }

    /// Decides a check that has waited for a block, if need be by the store.
    pub(super) fn decide_now(self: &Arc<Self>, check: Check) -> Answer<S::Future> {
        let Some(lease) = check.policies().lease() else {
            return self.store.check(check);
        };
        let (shard, caller) = self.shards.of(check.key());
        match self.spend(
            check,
            (shard, caller.of_count(lease.id)),
            lease.time,
            false,
            false,
        ) {
            Decided::Block(decision) => Answer::ready(Ok(decision)),
            Decided::Store(check) | Decided::Later(check, _) => self.store.check(check),
        }
    }

    /// Spends a block for a check. The `first` time it adds to the demand, and may wait.
    fn spend(
        self: &Arc<Self>,
        check: Check,
        (shard, caller): (&Shard, Digest),
        lease: Duration,
        is_hot: bool,
        first: bool,
    ) -> Decided {
        let (key, cost, mut ended) = (*check.key(), check.cost(), Ended::new());
        let (answer, ask, wait) = {
            let mut callers = lock(&shard.callers);
            if first && !callers.contains_key(&caller) && (is_hot || self.hot.count(caller, lease))
            {
                shard.begin(&mut callers, caller, lease, &mut ended);
            }
            match callers.get_mut(&caller) {
                None => (Err(check), None, None),
                Some(known) => {
                    if first {
                        known.want(cost);
                    }
                    let answer = known.spend(check, &instant, &mut ended);
                    let ask = known.ask(&instant);
                    let waits = first && ask.is_none() && answer.is_err();
                    (answer, ask, waits.then(|| known.wait(instant())).flatten())
                }
            }
        };
        if let Some(ask) = ask {
            let policies = answer
                .as_ref()
                .map_or_else(Check::policies, Decision::policies);
            self.ask(key, caller, policies, ask);
        } else if answer.is_err() {
            // Asks and the sweeper may be left of a runtime that has ended.
            self.queue().wake();
            self.attend();
        }
        self.end(ended);
        match (answer, wait) {
            (Ok(decision), _) => Decided::Block(decision),
            (Err(check), Some(arrived)) => Decided::Later(check, arrived),
            (Err(check), None) => Decided::Store(check),
        }
    }

    fn queue(&self) -> &OpQueue {
        self.queue
            .get_or_init(|| op_queue(self.store.clone(), self.observer.get().cloned()))
    }

    fn ask(self: &Arc<Self>, key: Key, caller: Digest, policies: &Policies, ask: Ask) {
        let in_flight = self.in_flight.subscribe();
        if self.is_shut_down.load(SeqCst) {
            let mut forgotten = self.shards.at(caller).forget(caller);
            return self.end(forgotten.iter_mut().flat_map(Caller::drain).collect());
        }
        let size = ask.size(self.share.instances().get());
        let check = Check::up_to(key, policies, size).for_block();
        let (inner, queue) = (Arc::downgrade(self), self.queue().downgrade());
        self.queue()
            .put(PendingOp::of_check(check).then(move |answer| {
                let block = |decision| Block::new(key, decision, ask.at, ask.lease);
                match (inner.upgrade(), answer, queue()) {
                    (Some(inner), Ok(decision), _) if inner.store.is_authoritative(&decision) => {
                        inner.answered(caller, ask, Some(block(decision)));
                    }
                    (inner, answer, queue) => {
                        if let (Ok(decision), Some(queue)) = (&answer, queue) {
                            // Nobody is left to spend it, or another store has granted it instead.
                            queue.put(block(decision.clone()).into_refund(instant()));
                        }
                        if let Some(inner) = inner {
                            // A refund of what may have been charged could be of what others were charged.
                            let lost = if answer.is_err_and(|error| !error.is_unsent()) {
                                size
                            } else {
                                0
                            };
                            inner.answered(caller, ask, None);
                            inner.notify_lost(lost);
                        }
                    }
                }
                drop(in_flight);
            }));
    }

    /// Handles the block that an ask was answered with, however late, if it was.
    fn answered(self: &Arc<Self>, caller: Digest, ask: Ask, block: Option<Block>) {
        let asked = block
            .as_ref()
            .map(|block| (block.key, block.policies().clone()));
        let remaining = block.as_ref().map(Block::remaining);
        let (instances, shard) = (self.share.instances().get(), self.shards.at(caller));
        let answered = {
            let (mut callers, now) = (lock(&shard.callers), instant());
            let Some(known) = callers.get_mut(&caller) else {
                return;
            };
            let block = block.filter(|block| block.left() > 0);
            let Some(mut answered) = known.answered(&ask, block, remaining, instances, now) else {
                return;
            };
            if self.is_drained.load(SeqCst) {
                answered.ended.extend(known.drain());
            }
            answered
        };
        drop(answered.woken);
        self.end(answered.ended);
        if let Some((key, policies)) = asked {
            if answered.slow == SLOW && !self.reported_short.swap(true, Relaxed) {
                self.report_short(&policies, ask);
            }
            if let Some(ask) = answered.again {
                self.ask(key, caller, &policies, ask);
            }
        }
        self.attend();
    }

    fn end(&self, ended: Ended) {
        for op in ended.into_iter().filter_map(|block| self.ended(block)) {
            self.queue().put(op);
        }
    }

    /// Notifies the observer that a block has ended. Returns what refunds the rest of it.
    fn ended(&self, block: Block) -> Option<PendingOp> {
        let (now, left) = (instant(), block.left());
        let (refunded, expired) = if block.is_dead(now) {
            (0, left)
        } else {
            (left, 0)
        };
        self.notify(&block, refunded, expired);
        (left > 0).then(|| block.into_refund(now))
    }

    fn notify(&self, block: &Block, refunded: u32, expired: u32) {
        let event = event::Leased::new(block.granted().into(), refunded.into(), expired.into());
        contain(|| or_log(self.observer.get()).leased(&event));
    }

    fn notify_lost(&self, lost: u32) {
        let mut event = event::Leased::new(0, 0, 0);
        event.lost = lost.into();
        contain(|| (lost > 0).then(|| or_log(self.observer.get()).leased(&event)));
    }

    /// Reports that blocks take longer than a quarter of their lease time to be charged.
    fn report_short(&self, policies: &Policies, Ask { at, lease, .. }: Ask) {
        let (name, trip) = (policies.as_slice()[0].name(), instant() - at);
        let problem = format!(
            "the policy {name:?} is leased for {lease:?}, and a block took {trip:.1?} to arrive, {SLOW} times in a row more \
             than a quarter of that: lease it for at least {:.1?}, or remove the lease{SHORT_LEASE}",
            trip * 4
        );
        contain(|| or_log(self.observer.get()).misconfigured(&event::Misconfigured::new(&problem)));
    }

    /// Starts a sweeper if there is none. Without a runtime nobody would refund what is left later.
    fn attend(self: &Arc<Self>) {
        if self.has_sweeper.load(SeqCst) || self.has_sweeper.swap(true, SeqCst) {
            return;
        }
        let sweeper = Sweeper(Arc::downgrade(self));
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(sweeper.run()));
        }
    }

    /// Refunds what is not spent, and forgets callers. Returns when to do so again, if there are any.
    fn sweep(&self) -> Option<Duration> {
        let mut pause: Option<Duration> = None;
        for shard in self.shards.iter() {
            let mut ended = Ended::new();
            {
                let (mut callers, now) = (lock(&shard.callers), instant());
                callers.retain(|_, caller| caller.sweep(now, &mut ended));
                shard.len.store(callers.len(), Relaxed);
                let pauses = callers.values().map(|caller| caller.lease / 8);
                pause = pauses.chain(pause).min();
            }
            self.end(ended);
        }
        pause.map(|pause| pause.min(LONGEST_PAUSE))
    }

    /// Refunds what is left of all blocks, also of those that are being asked for, and asks for no other.
    pub(super) async fn shut_down(&self) {
        self.is_shut_down.store(true, SeqCst);
        // An answer may be left of a runtime that has ended.
        self.queue().wake();
        let _ = timeout(PATIENCE, self.in_flight.closed()).await;
        self.is_drained.store(true, SeqCst);
        let refunds: Vec<_> = self
            .drain()
            .into_iter()
            .filter_map(|block| self.ended(block))
            .collect();
        let sent: Vec<_> = refunds.into_iter().map(|op| self.queue().ask(op)).collect();
        for refund in sent {
            refund.await;
        }
    }

    fn drain(&self) -> Ended {
        let drain = |shard: &Shard| {
            lock(&shard.callers)
                .values_mut()
                .flat_map(Caller::drain)
                .collect::<Ended>()
        };
        self.shards.iter().flat_map(drain).collect()
    }

    /// How many callers it knows.
    #[cfg(test)]
    pub(super) fn callers(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| shard.len.load(Relaxed))
            .sum()
    }

    /// The units that are left in all blocks.
    #[cfg(test)]
    pub(super) fn left(&self) -> u64 {
        self.shards
            .iter()
            .map(|shard| lock(&shard.callers).values().map(Caller::left).sum::<u64>())
            .sum()
    }
}

impl<S: Store> Drop for Inner<S> {
    fn drop(&mut self) {
        self.end(self.drain());
    }
}

impl Shard {
    /// Adds a caller that comes often. If there are too many, one of little demand gives way.
    fn begin(
        &self,
        callers: &mut BTreeMap<Digest, Caller>,
        caller: Digest,
        lease: Duration,
        ended: &mut Ended,
    ) {
        if callers.len() >= self.max {
            // Digests are random, so that neighbors are a sample.
            let sample = callers
                .range(caller..)
                .chain(callers.range(..caller))
                .take(SAMPLE);
            let least = sample
                .filter_map(|(other, known)| Some((known.demand()?, *other)))
                .min();
            let Some(mut known) = least.and_then(|(_, least)| callers.remove(&least)) else {
                return;
            };
            ended.extend(known.drain());
        }
        callers.insert(caller, Caller::new(lease, instant()));
        self.len.store(callers.len(), Relaxed);
    }

    fn forget(&self, caller: Digest) -> Option<Caller> {
        let mut callers = lock(&self.callers);
        let forgotten = callers.remove(&caller);
        self.len.store(callers.len(), Relaxed);
        forgotten
    }
}

impl<S: Store> Sweeper<S> {
    async fn run(self) {
        while let Some(pause) = self.0.upgrade().and_then(|inner| inner.sweep()) {
            sleep(pause).await;
        }
    }
}

impl<S: Store> Drop for Sweeper<S> {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.has_sweeper.store(false, SeqCst);
            inner.end(inner.drain());
        }
    }
}
