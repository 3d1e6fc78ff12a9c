use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::block::Block;
use super::caller::{Ask, Caller};
use super::future::LeasedFuture;
use super::hot::HotCallers;
use crate::background::{OpQueue, PendingOp, TaskOwner};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Mode, Policies};
use crate::observe::{Observer, event, or_log};
use crate::store::{Answer, Digest, Shards, Share, Store, op_queue};
use crate::util::{contain, instant, lock};

/// The state that the clones of a [`Leased`](super::Leased) share.
pub(super) struct Inner<S: Store> {
    pub(super) store: S,
    pub(super) share: Share,
    pub(super) max_callers: NonZeroUsize,
    hot: HotCallers,
    pub(super) shards: Shards<Shard>,
    /// Created at its first use, when the observer is set.
    queue: OnceLock<OpQueue>,
    pub(super) observer: OnceLock<Arc<dyn Observer>>,
    /// Each request for a block and each refund holds a receiver while it is in flight.
    in_flight: watch::Sender<()>,
    is_shut_down: AtomicBool,
    /// The task that refunds expired blocks and drops idle callers.
    sweeper: TaskOwner,
    /// Limits reports of a short lease time to one.
    short: Once,
}

/// Some of the busy callers, by the digest of caller and policies.
type Shard = Mutex<BTreeMap<Digest, Caller>>;

/// Maximum number of shards, and minimum number of callers in each.
const SHARDS: usize = 64;
const SHARD: usize = 8;
/// Maximum number of blocks that a check waits for, one after the other.
pub(super) const PATIENCE: u8 = 2;
/// Maximum time that a shutdown waits for replies. Longer than the usual deadlines of stores.
const SHUTDOWN: Duration = Duration::from_secs(1);
/// Interval between two sweeps.
const PAUSE: Duration = Duration::from_millis(50);

impl<S: Store> Inner<S> {
    pub(super) fn new(store: S, share: Share, max_callers: NonZeroUsize) -> Arc<Self> {
        Arc::new(Self {
            store,
            share,
            max_callers,
            hot: HotCallers::new(),
            shards: Shards::new(SHARDS.min(max_callers.get() / SHARD), |_| Mutex::default()),
            queue: OnceLock::new(),
            observer: OnceLock::new(),
            in_flight: watch::Sender::default(),
            is_shut_down: AtomicBool::new(false),
            sweeper: TaskOwner::new(),
            short: Once::new(),
        })
    }

    /// Decides a check, from a block if its caller is busy. `spend` is a separate function so that the path of other
    /// checks can be inlined.
    #[inline]
    pub(super) fn check(self: &Arc<Self>, check: Check, patience: u8) -> Answer<LeasedFuture<S>> {
        let Some(lease) = check.policies().lease() else {
            return self.send(check);
        };
        let (shard, caller) = self.shards.of(check.key());
        let caller = caller.of_count(lease.id);
        if check.is_leasable() {
            check.offer();
            return self.spend(check, (shard, caller), lease.time, patience);
        }
        match check.mode() {
            Mode::Refund => {
                if let Some(known) = lock(shard).get_mut(&caller) {
                    known
                        .blocks
                        .iter_mut()
                        .for_each(|block| block.refunded(check.cost()));
                }
            }
            Mode::Reset => {
                // The store drops the charge, so there is nothing to refund.
                let dropped = lock(shard).remove(&caller);
                for block in dropped.into_iter().flat_map(|caller| caller.blocks) {
                    let charged = block.charge.cost().into();
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
    /// busy and there is room.
    fn spend(
        self: &Arc<Self>,
        check: Check,
        (shard, caller): (&Shard, Digest),
        lease: Duration,
        patience: u8,
    ) -> Answer<LeasedFuture<S>> {
        let is_new = patience == PATIENCE;
        let is_hot = is_new && self.hot.count(caller, lease);
        if self.is_shut_down.load(Relaxed) {
            return self.send(check);
        }
        let (key, instances) = (*check.key(), self.share.instances().get());
        let mut ended = vec![];
        let (spent, ask, arrived) = {
            let mut callers = lock(shard);
            if is_hot && callers.len() < self.max_callers.get() / self.shards.iter().len() {
                let new = || Caller::new(lease, instant());
                callers.entry(caller).or_insert_with(new);
            }
            let Some(known) = callers.get_mut(&caller) else {
                drop(callers);
                return self.send(check);
            };
            if is_new {
                known.want(check.cost());
            }
            let spent = known.spend(check, &instant, &mut ended);
            let ask = known.ask(&instant, instances);
            let waits = patience > 0 && spent.is_err();
            let arrived = waits.then(|| known.wait(instant(), instances)).flatten();
            (spent, ask, arrived)
        };
        if spent.is_err() {
            self.attend();
        }
        if let Some(ask) = ask {
            let policies = spent.as_ref();
            self.ask(
                key,
                caller,
                policies.map_or_else(Check::policies, Decision::policies),
                ask,
            );
        }
        self.end(ended);
        match (spent, arrived) {
            (Ok(decision), _) => Answer::ready(Ok(decision)),
            (Err(check), None) => self.send(check),
            (Err(check), Some(arrived)) => Answer::pending(LeasedFuture {
                waiting: Some((Arc::clone(self), check, patience - 1, arrived)),
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
                let block = answer.map(|decision| Block::new(key, decision, ask.at));
                if let Some(inner) = inner.upgrade() {
                    inner.answered(caller, &ask, block);
                } else if let (Ok(block), Some(queue)) = (block, queue()) {
                    // The store was dropped: refund the whole block.
                    queue.put(block.into_refund(instant()));
                }
            }));
    }

    /// Handles the reply to a request, which may be late or an error, and adds the granted block.
    fn answered(&self, caller: Digest, ask: &Ask, block: Result<Block, StoreError>) {
        // A charge of unknown outcome is not refunded: if it was never made, a refund would free charges of other
        // instances.
        if block.as_ref().is_err_and(|error| !error.is_not_sent()) {
            self.notify(event::Leased {
                lost: ask.size.into(),
                ..event::Leased::new(0, 0, 0)
            });
        }
        let mut ended = vec![];
        let problem = lock(self.shards.at(caller))
            .get_mut(&caller)
            .and_then(|known| {
                let problem = known.answered(ask, block.ok(), instant());
                if self.is_shut_down.load(SeqCst) {
                    ended.extend(known.blocks.drain(..));
                }
                problem
            });
        self.end(ended);
        if let Some(problem) = problem {
            let event = event::Misconfigured::new(&problem);
            self.short
                .call_once(|| _ = contain(|| or_log(self.observer.get()).misconfigured(&event)));
        }
    }

    /// Reports removed blocks to the observer, and refunds their unspent rest.
    fn end(&self, ended: Vec<Block>) {
        for block in ended {
            let (now, left) = (instant(), u64::from(block.left));
            let expired = if block.is_dead(now) { left } else { 0 };
            let charged = block.charge.cost().into();
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

    /// Starts the background tasks of this store unless they are running: their runtime may have shut down.
    fn attend(self: &Arc<Self>) {
        self.queue().wake();
        let inner = Arc::downgrade(self);
        self.sweeper.spawn(None, |task| async move {
            while let Some(inner) = inner.upgrade() {
                inner.sweep(false);
                drop(inner);
                sleep(PAUSE).await;
            }
            drop(task);
        });
    }

    /// Refunds expired blocks, or `all`, and drops idle callers.
    fn sweep(&self, all: bool) {
        let now = instant();
        for shard in self.shards.iter() {
            let mut ended = vec![];
            lock(shard).retain(|_, caller| caller.sweep(now, all, &mut ended));
            self.end(ended);
        }
    }

    /// Refunds the rest of all blocks, and stops requesting blocks. Blocks that arrive later are refunded too.
    pub(super) async fn shut_down(self: &Arc<Self>) {
        self.is_shut_down.store(true, SeqCst);
        // A runtime that has shut down may have left queued operations.
        self.attend();
        self.sweep(true);
        let _ = timeout(SHUTDOWN, self.in_flight.closed()).await;
    }
}

impl<S: Store> Drop for Inner<S> {
    fn drop(&mut self) {
        self.sweep(true);
    }
}
