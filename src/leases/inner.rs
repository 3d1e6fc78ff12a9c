use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Once, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::block::Block;
use super::caller::{Ask, Caller, Ended};
use super::future::LeasedFuture;
use super::hot::HotCallers;
use crate::background::{OpQueue, PendingOp};
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::observe::mistakes::SHORT_LEASE;
use crate::observe::{Observer, event, or_log};
use crate::store::{Answer, Digest, Shards, Share, Store, op_queue};
use crate::util::{contain, instant, lock};

/// The state that the clones of a [`Leased`](super::Leased) share.
pub(super) struct Inner<S: Store> {
    pub(super) store: S,
    pub(super) share: Share,
    pub(super) max_callers: NonZeroUsize,
    hot: HotCallers,
    shards: Shards<Shard>,
    /// Created at its first use, when the observer is set.
    queue: OnceLock<OpQueue>,
    observer: OnceLock<Arc<dyn Observer>>,
    /// Each request for a block and each refund holds a receiver while it is in flight.
    in_flight: watch::Sender<()>,
    is_shut_down: AtomicBool,
    has_sweeper: AtomicBool,
    /// Limits reports of a short lease time to one.
    short: Once,
}

/// A part of the busy callers under one lock, by the digest of caller and policies.
struct Shard {
    callers: Mutex<BTreeMap<Digest, Caller>>,
    /// Number of callers in the shard. While it is 0, other checks skip the lock.
    len: AtomicUsize,
    max: usize,
}

/// The task that refunds expired blocks and drops idle callers. If its runtime shuts down, all blocks are refunded,
/// since no other runtime may be left to do it later.
struct Sweeper<S: Store>(Weak<Inner<S>>);

const SHARDS: usize = 64;
/// Number of callers among which a new one replaces the one of the least demand.
const SAMPLE: usize = 8;
/// Maximum number of blocks that a check waits for, one after the other.
pub(super) const PATIENCE: u8 = 3;
/// Maximum time that a shutdown waits for replies. Longer than the usual deadlines of stores.
const SHUTDOWN: Duration = Duration::from_secs(1);
/// Maximum interval between two sweeps.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Number of consecutive slow replies after which the lease time is reported as too short.
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
            has_sweeper: AtomicBool::new(false),
            short: Once::new(),
        }
    }

    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        self.observer.get_or_init(|| Arc::clone(observer));
    }

    /// Decides a check, from a block if its caller is busy. `spend` is a separate function so that the path of other
    /// callers can be inlined.
    #[inline]
    pub(super) fn check(self: &Arc<Self>, check: Check, patience: u8) -> Answer<LeasedFuture<S>> {
        let Some(lease) = check.policies().lease() else {
            return self.send(check);
        };
        let is_leasable = check.is_leasable();
        if is_leasable {
            check.offer();
        }
        let (shard, caller) = self.shards.of(check.key());
        let caller = caller.of_count(lease.id);
        let is_hot = is_leasable && patience == PATIENCE && self.hot.count(caller, lease.time);
        if !is_hot && shard.len.load(Relaxed) == 0 {
            return self.send(check);
        }
        match check.mode() {
            _ if is_leasable && !self.is_shut_down.load(Relaxed) => {
                let hot = is_hot.then_some(lease.time);
                return self.spend(check, (shard, caller), hot, patience);
            }
            Mode::Refund => {
                if let Some(caller) = lock(&shard.callers).get_mut(&caller) {
                    let blocks = caller.blocks.iter_mut();
                    blocks.for_each(|block| block.refunded(check.cost()));
                }
            }
            Mode::Reset => {
                // The store drops the charge, so there is nothing to refund.
                for block in shard
                    .forget(caller)
                    .into_iter()
                    .flat_map(|caller| caller.blocks)
                {
                    let charged = block.decision.granted().into();
                    self.notify(event::Leased::new(charged, 0, block.left.into()));
                }
            }
            _ => {}
        }
        self.send(check)
    }

    fn send(&self, check: Check) -> Answer<LeasedFuture<S>> {
        match self.store.check(check) {
            Answer::Ready { answer } => Answer::ready(answer),
            Answer::Pending { future } => Answer::pending(LeasedFuture {
                waiting: None,
                sent: Some(future),
            }),
        }
    }

    /// Spends a block for a check, lets the check wait for a block, or sends it to the store. Adds the caller if it is
    /// busy; `hot` is its lease time.
    fn spend(
        self: &Arc<Self>,
        check: Check,
        (shard, caller): (&Shard, Digest),
        hot: Option<Duration>,
        patience: u8,
    ) -> Answer<LeasedFuture<S>> {
        let (key, mut ended) = (*check.key(), Ended::new());
        let (spent, ask, arrival) = {
            let mut callers = lock(&shard.callers);
            if let Some(lease) = hot.filter(|_| !callers.contains_key(&caller)) {
                shard.begin(&mut callers, caller, lease, &mut ended);
            }
            match callers.get_mut(&caller) {
                None => (Err(check), None, None),
                Some(known) => {
                    if patience == PATIENCE {
                        known.want(check.cost());
                    }
                    let spent = known.spend(check, &instant, &mut ended);
                    let ask = known.ask(&instant, &self.share);
                    let waits = patience > 0 && spent.is_err();
                    (spent, ask, waits.then(|| known.wait(instant())).flatten())
                }
            }
        };
        if let Some(ask) = ask {
            let policies = spent
                .as_ref()
                .map_or_else(Check::policies, Decision::policies);
            self.ask(key, caller, policies, ask);
        } else if spent.is_err() {
            // A runtime that has shut down may have left queued operations, and no sweeper.
            self.queue().wake();
            self.attend();
        }
        self.end(ended);
        match (spent, arrival) {
            (Ok(decision), _) => Answer::ready(Ok(decision)),
            (Err(check), None) => self.send(check),
            (Err(check), Some(arrival)) => Answer::pending(LeasedFuture {
                waiting: Some((Arc::clone(self), check, patience - 1, arrival)),
                sent: None,
            }),
        }
    }

    fn queue(&self) -> &OpQueue {
        self.queue
            .get_or_init(|| op_queue(self.store.clone(), self.observer.get().cloned()))
    }

    fn ask(self: &Arc<Self>, key: Key, caller: Digest, policies: &Policies, ask: Ask) {
        let check = Check::up_to(key, policies, ask.size).for_block();
        let (inner, queue) = (Arc::downgrade(self), self.queue().downgrade());
        let in_flight = self.in_flight.subscribe();
        self.queue()
            .put(PendingOp::of_check(check).then(move |answer| {
                let _in_flight = in_flight;
                // A charge of unknown outcome is not refunded: if it was never made, a refund would free charges of
                // other instances.
                let is_lost = answer.as_ref().is_err_and(|error| !error.is_not_sent());
                let block = answer
                    .ok()
                    .map(|decision| Block::new(key, decision, ask.at));
                match (inner.upgrade(), block) {
                    (Some(inner), block) => {
                        if is_lost {
                            inner.notify(event::Leased {
                                lost: ask.size.into(),
                                ..event::Leased::new(0, 0, 0)
                            });
                        }
                        inner.answered(caller, ask, block);
                    }
                    // The store was dropped: refund the whole block.
                    (None, Some(block)) => {
                        if let Some(queue) = queue() {
                            queue.put(block.into_refund(instant()));
                        }
                    }
                    (None, None) => {}
                }
            }));
    }

    /// Handles the reply to a request, which may be late or an error, and adds the granted block.
    fn answered(self: &Arc<Self>, caller: Digest, ask: Ask, block: Option<Block>) {
        let policies = block
            .as_ref()
            .map(|block| block.decision.policies().clone());
        let (instances, mut ended) = (self.share.instances().get(), Ended::new());
        let (woken, slow) = {
            let mut callers = lock(&self.shards.at(caller).callers);
            let Some(known) = callers.get_mut(&caller) else {
                return;
            };
            let woken = known.answered(ask, block, instances, instant(), &mut ended);
            if self.is_shut_down.load(SeqCst) {
                ended.extend(known.blocks.drain(..));
            }
            (woken, known.slow)
        };
        drop(woken);
        self.end(ended);
        if let Some(policies) = policies.filter(|_| slow >= SLOW) {
            self.short
                .call_once(|| self.report_short(&policies, ask.at));
        }
        self.attend();
    }

    /// Reports removed blocks to the observer, and refunds their unspent rest.
    fn end(&self, ended: Ended) {
        for block in ended {
            let (now, left) = (instant(), u64::from(block.left));
            let expired = if block.is_dead(now) { left } else { 0 };
            let charged = block.decision.granted().into();
            self.notify(event::Leased::new(charged, left - expired, expired));
            if left > 0 {
                let in_flight = self.in_flight.subscribe();
                self.queue()
                    .put(block.into_refund(now).then(move |_| drop(in_flight)));
            }
        }
    }

    fn notify(&self, event: event::Leased) {
        contain(|| or_log(self.observer.get()).leased(&event));
    }

    /// Reports that blocks arrive more than a quarter of their lease time after their requests, such as the one
    /// requested at `asked_at`.
    fn report_short(&self, policies: &Policies, asked_at: Instant) {
        let (name, trip) = (policies.as_slice()[0].name(), instant() - asked_at);
        let lease = policies.lease().map(|lease| lease.time).unwrap_or_default();
        let problem = format!(
            "the policy {name:?} is leased for {lease:?}, and a block took {trip:.1?} to arrive, {SLOW} times in a row more \
             than a quarter of that: lease it for at least {:.1?}, or remove the lease{SHORT_LEASE}",
            trip * 4
        );
        contain(|| or_log(self.observer.get()).misconfigured(&event::Misconfigured::new(&problem)));
    }

    /// Starts the sweeper unless it is running. Outside of a runtime all blocks are refunded immediately, because
    /// nothing would refund them later.
    fn attend(self: &Arc<Self>) {
        if self.has_sweeper.load(SeqCst) || self.has_sweeper.swap(true, SeqCst) {
            return;
        }
        let sweeper = Sweeper(Arc::downgrade(self));
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(sweeper.run()));
        }
    }

    /// Refunds expired blocks and drops idle callers. Returns the pause until the next sweep, or `None` if no caller is
    /// left.
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

    /// Refunds the rest of all blocks, and stops requesting blocks. Blocks that arrive later are refunded too.
    pub(super) async fn shut_down(&self) {
        self.is_shut_down.store(true, SeqCst);
        // A runtime that has shut down may have left queued operations.
        self.queue().wake();
        self.end(self.drain());
        let _ = timeout(SHUTDOWN, self.in_flight.closed()).await;
    }

    fn drain(&self) -> Ended {
        let drain = |shard: &Shard| {
            lock(&shard.callers)
                .values_mut()
                .flat_map(|caller| caller.blocks.drain(..))
                .collect::<Ended>()
        };
        self.shards.iter().flat_map(drain).collect()
    }

    /// Number of busy callers.
    #[cfg(test)]
    pub(super) fn callers(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| shard.len.load(Relaxed))
            .sum()
    }

    /// Units left in all blocks.
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
    /// Adds a busy caller. If the shard is full, replaces a caller of little demand, or adds nothing if none can be
    /// replaced.
    fn begin(
        &self,
        callers: &mut BTreeMap<Digest, Caller>,
        caller: Digest,
        lease: Duration,
        ended: &mut Ended,
    ) {
        if callers.len() >= self.max {
            // Digests are random, so the next ones are a random sample.
            let sample = callers
                .range(caller..)
                .chain(callers.range(..caller))
                .take(SAMPLE);
            let least = sample
                .filter_map(|(other, known)| Some((known.demand()?, *other)))
                .min();
            let Some(known) = least.and_then(|(_, least)| callers.remove(&least)) else {
                return;
            };
            ended.extend(known.blocks);
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
