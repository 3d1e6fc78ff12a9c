use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::block::Block;
use super::busy::BusyDetector;
use super::caller::{BlockRequest, BusyCaller};
use super::future::LeasedFuture;
use super::leasable::{is_leasable, of_block};
use crate::background::{OpQueue, PendingOp, TaskOwner};
use crate::error::StoreError;
use crate::limit::{Check, Key, Mode, Policies};
use crate::observe::misses::Misses;
use crate::observe::mistakes::NOT_LEASED;
use crate::observe::{Event, Observer, or_log};
use crate::store::{Answer, Instances, Store, op_queue};
use crate::util::{Digest, OnceFlag, Shards, contain, instant, lock};

/// The state that the clones of a [`Leased`](super::Leased) share.
pub(super) struct SharedLeases<S: Store> {
    pub(super) store: S,
    pub(super) share: Instances,
    pub(super) max_callers: NonZeroUsize,
    /// The time that the store allows for a check. No check waits longer for blocks.
    pub(super) deadline: Duration,
    detector: BusyDetector,
    pub(super) shards: Shards<BusyShard>,
    /// Created at its first use, when the observer is set.
    queue: OnceLock<OpQueue>,
    pub(super) observer: OnceLock<Arc<dyn Observer>>,
    /// A shutdown waits until no request for a block and no refund holds a receiver.
    awaited: watch::Sender<()>,
    is_shut_down: AtomicBool,
    /// The task that refunds expired blocks and drops idle callers.
    sweeper: TaskOwner,
    short_lease_reported: OnceFlag,
    /// The checks without a lease.
    pub(super) unleased: Misses,
}

/// Some of the busy callers, by the digest of caller and policies.
type BusyShard = Mutex<BTreeMap<Digest, BusyCaller>>;

const MAX_SHARDS: usize = 64;
const MIN_CALLERS_PER_SHARD: usize = 8;
/// The assumed deadline of a store that has no other, and the time that a shutdown waits for replies. Longer than the usual
/// deadlines of stores.
const MAX_REPLY_TIME: Duration = Duration::from_secs(1);
/// Interval between two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// The problem that no check is under leased policies.
fn unleased() -> String {
    format!(
        "none of the first {} checks of a `Leased` store is under leased policies, so it answers none from memory: add `.leased(..)` \
         to the policies, or remove the `Leased`{NOT_LEASED}",
        Misses::REPORT_AT
    )
}

impl<S: Store> SharedLeases<S> {
    pub(super) fn new(store: S, share: Instances, max_callers: NonZeroUsize) -> Arc<Self> {
        let deadline = store.backend().deadline().unwrap_or(MAX_REPLY_TIME);
        Arc::new(Self {
            store,
            share,
            max_callers,
            deadline,
            detector: BusyDetector::new(),
            shards: Shards::new(
                MAX_SHARDS.min(max_callers.get() / MIN_CALLERS_PER_SHARD),
                |_| Mutex::default(),
            ),
            queue: OnceLock::new(),
            observer: OnceLock::new(),
            awaited: watch::Sender::default(),
            is_shut_down: AtomicBool::new(false),
            sweeper: TaskOwner::new(),
            short_lease_reported: OnceFlag::new(),
            unleased: Misses::default(),
        })
    }

    /// Decides a check, from a block if its caller is busy. `waited_until` is the latest end of its wait for blocks; `None`
    /// if it has not waited.
    /// `spend` is a separate function so that the path of other checks can be inlined.
    #[inline]
    pub(super) fn check(
        self: &Arc<Self>,
        check: Check,
        waited_until: Option<Instant>,
    ) -> Answer<LeasedFuture<S>> {
        let Some(lease) = check.policies().lease_time() else {
            self.unleased.missed(unleased);
            return self.send(check);
        };
        self.unleased.found();
        let (shard, caller) = self.shards.of(check.key());
        let digest = caller.of_count(check.policies().id());
        if is_leasable(&check) {
            return self.spend(check, shard, digest, lease, waited_until);
        }
        match check.mode() {
            Mode::Refund => {
                if let Some(caller) = lock(shard).get_mut(&digest) {
                    // The decision does not name its block: any of them may have granted it.
                    for block in &mut caller.blocks {
                        block.deduct_refund(check.cost());
                    }
                }
            }
            Mode::Reset => {
                // The store drops the charge, so there is nothing to refund.
                let dropped = lock(shard).remove(&digest);
                for block in dropped.into_iter().flat_map(|caller| caller.blocks) {
                    self.notify(Event::LeasedBlockEnded {
                        charged: block.charge.cost().into(),
                        refunded: 0,
                        expired: block.left.into(),
                        lost: 0,
                    });
                }
            }
            _ => {}
        }
        self.send(check)
    }

    pub(super) fn send(&self, check: Check) -> Answer<LeasedFuture<S>> {
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
        shard: &BusyShard,
        digest: Digest,
        lease: Duration,
        waited_until: Option<Instant>,
    ) -> Answer<LeasedFuture<S>> {
        let is_first_try = waited_until.is_none();
        let is_busy = is_first_try && self.detector.count_check(digest, lease);
        if self.is_shut_down.load(Relaxed) {
            return self.send(check);
        }
        let key = *check.key();
        let instances = self.share.alive().get();
        let mut ended = vec![];
        let mut callers = lock(shard);
        if is_busy && callers.len() < self.max_callers_per_shard() {
            callers
                .entry(digest)
                .or_insert_with(|| BusyCaller::new(lease, instant()));
        }
        let Some(caller) = callers.get_mut(&digest) else {
            drop(callers);
            return self.send(check);
        };
        if is_first_try {
            caller.add_demand(check.cost());
        }
        let spent = caller.spend(check, &instant, &mut ended);
        let request = caller.next_request(&instant, instances);
        // Outside of a runtime there is no timer.
        let wait = if spent.is_err() && Handle::try_current().is_ok() {
            caller.wait_for_block(instant(), instances, self.deadline, waited_until)
        } else {
            None
        };
        // Before the queue, the observer and the store are called.
        drop(callers);
        if spent.is_err() {
            self.ensure_tasks();
        }
        if let Some(request) = request {
            let policies = match &spent {
                Ok(decision) => decision.policies(),
                Err(check) => check.policies(),
            };
            self.request_block(key, digest, policies, request);
        }
        self.end_blocks(ended);
        match (spent, wait) {
            (Ok(decision), _) => Answer::ready(Ok(decision)),
            (Err(check), None) => self.send(check),
            (Err(check), Some(wait)) => Answer::pending(LeasedFuture {
                waiting: Some((Arc::clone(self), check, wait)),
                sent: None,
            }),
        }
    }

    fn max_callers_per_shard(&self) -> usize {
        self.max_callers.get() / self.shards.iter().len()
    }

    fn queue(&self) -> &OpQueue {
        self.queue
            .get_or_init(|| op_queue(self.store.clone(), self.observer.get().cloned()))
    }

    fn request_block(
        self: &Arc<Self>,
        key: Key,
        digest: Digest,
        policies: &Policies,
        request: BlockRequest,
    ) {
        let check = of_block(Check::up_to(key, policies, request.size));
        let inner = Arc::downgrade(self);
        let queue = self.queue().downgrade();
        let awaited = self.awaited.subscribe();
        self.queue()
            .put(PendingOp::of_check(check).then(move |answer| {
                let _awaited = awaited;
                let block = answer.map(|decision| Block::new(key, decision, request.sent_at));
                if let Some(inner) = inner.upgrade() {
                    inner.on_block_reply(digest, &request, block);
                } else if let (Ok(block), Some(queue)) = (block, queue.upgrade()) {
                    // The store was dropped: refund the whole block.
                    queue.put(block.into_refund(instant()));
                }
            }));
    }

    /// Handles the reply to a request, which may be late or an error, and adds the granted block.
    fn on_block_reply(
        &self,
        digest: Digest,
        request: &BlockRequest,
        block: Result<Block, StoreError>,
    ) {
        // A charge of unknown outcome is not refunded: if it was never made, a refund would free charges of other
        // instances.
        if let Err(error) = &block
            && !error.is_not_sent()
        {
            self.notify(Event::LeasedBlockEnded {
                charged: 0,
                refunded: 0,
                expired: 0,
                lost: request.size.into(),
            });
        }
        let mut ended = vec![];
        let mut problem = None;
        let mut callers = lock(self.shards.at(digest));
        if let Some(caller) = callers.get_mut(&digest) {
            problem = caller.on_reply(request, block.ok(), instant());
            if self.is_shut_down.load(SeqCst) {
                // The sweep of `shut_down` may be over.
                ended.extend(caller.blocks.drain(..));
            }
        }
        drop(callers);
        self.end_blocks(ended);
        if let Some(problem) = problem
            && self.short_lease_reported.claim()
        {
            self.notify(Event::Misconfigured { problem: &problem });
        }
    }

    /// Reports removed blocks to the observer, and refunds their unspent rest.
    fn end_blocks(&self, ended: Vec<Block>) {
        for block in ended {
            let now = instant();
            let left = u64::from(block.left);
            let expired = if block.is_expired(now) { left } else { 0 };
            self.notify(Event::LeasedBlockEnded {
                charged: block.charge.cost().into(),
                refunded: left - expired,
                expired,
                lost: 0,
            });
            if left > 0 {
                let awaited = self.awaited.subscribe();
                self.queue()
                    .put(block.into_refund(now).then(move |_| drop(awaited)));
            }
        }
    }

    fn notify(&self, event: Event<'_>) {
        contain(|| or_log(self.observer.get()).notify(&event));
    }

    /// Starts the background tasks of this store unless they are running: their runtime may have shut down.
    fn ensure_tasks(self: &Arc<Self>) {
        self.queue().wake();
        let inner = Arc::downgrade(self);
        self.sweeper.spawn(None, |task| async move {
            while let Some(inner) = inner.upgrade() {
                inner.sweep(false);
                drop(inner);
                sleep(SWEEP_INTERVAL).await;
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
            self.end_blocks(ended);
        }
    }

    /// Refunds the rest of all blocks, and stops requesting blocks. Blocks that arrive later are refunded too.
    pub(super) async fn shut_down(self: &Arc<Self>) {
        self.is_shut_down.store(true, SeqCst);
        // A runtime that has shut down may have left queued operations.
        self.ensure_tasks();
        self.sweep(true);
        let _ = timeout(MAX_REPLY_TIME, self.awaited.closed()).await;
    }
}

impl<S: Store> Drop for SharedLeases<S> {
    fn drop(&mut self) {
        self.sweep(true);
    }
}
