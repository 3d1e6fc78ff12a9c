use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::block::Block;
use super::caller::{Ask, Ended, LEAST, fair};
use super::hot::HotCallers;
use super::shard::{Asked, Next, Shard};
use crate::error::StoreError;
use crate::limit::{Check, Decision, Lease, Mode, Policies};
use crate::observe::{Observer, event, or_log};
use crate::refunds::{PendingOp, RefundQueue, StoreQueue};
use crate::store::{Digest, Shards, Share, Store};
use crate::util::{contain, instant};

/// The state of a [`Leased`](super::Leased), which its clones share.
pub(super) struct Inner<S: Store> {
    pub(super) store: S,
    share: Share,
    hot: HotCallers,
    shards: Shards<Shard>,
    /// Made for the first ask, when the observer is known.
    queue: OnceLock<StoreQueue<S>>,
    observer: OnceLock<Arc<dyn Observer>>,
    /// How many blocks were asked for.
    asks: AtomicU64,
    /// Each ask that is under way has a receiver.
    under_way: watch::Sender<()>,
    /// Whether nothing is leased any more, and whether no block is kept either.
    is_shut_down: AtomicBool,
    is_drained: AtomicBool,
}

/// A caller that may have a block.
pub(super) struct Found<'a> {
    lease: Lease,
    shard: &'a Shard,
    caller: Digest,
    /// Whether it comes often, as far as that was counted.
    is_hot: bool,
}

/// Has what is left of a block refunded when nothing is spent of it, and at the latest when it is dropped: when the block is
/// too old, and with its runtime.
struct Watch<S: Store> {
    inner: Weak<Inner<S>>,
    asked: Asked,
    looks: [Instant; 2],
}

const SHARDS: usize = 64;
/// For how long whoever shuts down waits for answers: longer than the deadlines of stores, as a rule.
const PATIENCE: Duration = Duration::from_secs(1);

impl<S: Store> Inner<S> {
    pub(super) fn new(store: S, share: Share) -> Self {
        Self {
            store,
            share,
            hot: HotCallers::new(),
            shards: Shards::new(SHARDS, |_| Shard::default()),
            queue: OnceLock::new(),
            observer: OnceLock::new(),
            asks: AtomicU64::new(0),
            under_way: watch::Sender::default(),
            is_shut_down: AtomicBool::new(false),
            is_drained: AtomicBool::new(false),
        }
    }

    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        self.observer.get_or_init(|| Arc::clone(observer));
    }

    /// Finds the caller of a check that a block may decide. Most callers neither have one nor come often, and this is all
    /// that they cost.
    #[inline]
    pub(super) fn find(&self, check: &Check) -> Option<Found<'_>> {
        let lease = check.policies().lease()?;
        let (shard, caller) = self.shards.of(check.key());
        let caller = caller.of_count(lease.id);
        let is_alone = shard.len() == 0;
        let is_hot = is_alone && is_spent(check) && self.hot.count(caller, lease.time);
        (is_hot || !is_alone).then_some(Found { lease, shard, caller, is_hot })
    }

    /// Decides by a block.
    ///
    /// # Errors
    ///
    /// With the same check, for the shared store.
    pub(super) fn decide(self: &Arc<Self>, check: Check, found: Found<'_>) -> Result<Decision, Check> {
        let Found { lease, shard, caller, is_hot } = found;
        match check.mode() {
            _ if is_spent(&check) => {}
            Mode::Refund => {
                shard.refunded(caller, check.cost());
                return Err(check);
            }
            Mode::Reset => {
                // What they were charged is forgotten, so that there is nothing to refund.
                for block in shard.forget(caller) {
                    self.notify(&block, 0, block.left());
                }
                return Err(check);
            }
            _ => return Err(check),
        }
        if self.is_shut_down.load(Relaxed) {
            return Err(check);
        }
        let (key, cost) = (*check.key(), check.cost());
        let mut ended = Ended::new();
        let (answer, next) = shard.spend(caller, check, lease.time, &self.asks, &mut ended);
        let ask = match next {
            Next::Nothing => None,
            Next::Ask(ask) => Some(ask),
            Next::Count if !is_hot && !self.hot.count(caller, lease.time) => return answer,
            Next::Count => shard.begin(caller, cost, lease.time, &self.asks),
        };
        if let Some(ask) = ask {
            let policies = answer.as_ref().map_or_else(Check::policies, Decision::policies);
            self.ask(Asked { key, caller, lease: lease.time, number: ask.number, at: ask.at }, policies, ask);
        } else if answer.is_err() {
            // The answer to an ask may be left of a runtime that has ended.
            self.queue().wake();
        }
        self.end(ended);
        answer
    }

    fn queue(&self) -> &StoreQueue<S> {
        self.queue.get_or_init(|| StoreQueue::new(self.store.clone(), self.observer.get().cloned()))
    }

    fn instances(&self) -> u32 {
        self.share.instances().get()
    }

    fn ask(self: &Arc<Self>, asked: Asked, policies: &Policies, ask: Ask) {
        let under_way = self.under_way.subscribe();
        if self.is_shut_down.load(SeqCst) {
            return;
        }
        let check = Check::up_to(asked.key, policies, ask.size(self.instances()));
        let (inner, queue) = (Arc::downgrade(self), self.queue().downgrade());
        self.queue().put(PendingOp::of_check(check).then(move |answer| {
            match (inner.upgrade(), answer, queue()) {
                (Some(inner), answer, _) => inner.answered(asked, answer),
                (None, Ok(decision), Some(queue)) if is_known(&decision) => {
                    queue.put(asked.block(decision).into_refund(instant()));
                }
                (None, _, _) => {}
            }
            drop(under_way);
        }));
    }

    /// An ask has been answered, maybe late.
    fn answered(self: &Arc<Self>, asked: Asked, answer: Result<Decision, StoreError>) {
        let (mut remaining, mut block) = (0, None);
        match answer {
            Ok(decision) if self.store.is_authoritative(&decision) => {
                remaining = decision.remaining();
                block = Some(asked.block(decision)).filter(|block| block.left() > 0);
            }
            // A fallback has decided instead.
            Ok(decision) if is_known(&decision) => self.queue().put(asked.block(decision).into_refund(instant())),
            Ok(_) | Err(_) => {}
        }
        let little = fair(remaining, self.instances()) < LEAST;
        let now = instant();
        let pause_until = if little { now + asked.lease / 4 } else { now };
        // A caller is known at least until the end of its pause.
        let looks = block.as_ref().map_or([pause_until; 2], |block| block.looks().map(|at| at.max(pause_until)));
        let watch = Watch { inner: Arc::downgrade(self), asked, looks };
        let is_drained = || self.is_drained.load(SeqCst);
        self.end(self.shards.of(&asked.key).0.answered(&asked, block, remaining, pause_until, is_drained));
        // Without a runtime nobody would refund what is left of it, and the drop of the watch does at once.
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(watch.run()));
        }
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

    /// Refunds what is left of all blocks, also of those that are asked for just then, and asks for no other.
    pub(super) async fn shut_down(&self) {
        self.is_shut_down.store(true, SeqCst);
        // An answer may be left of a runtime that has ended.
        self.queue().wake();
        let _ = timeout(PATIENCE, self.under_way.closed()).await;
        self.is_drained.store(true, SeqCst);
        let refunds: Vec<_> = self.drain().into_iter().filter_map(|block| self.ended(block)).collect();
        let asked: Vec<_> = refunds.into_iter().map(|op| self.queue().ask(op)).collect();
        for refund in asked {
            refund.await;
        }
    }

    /// How many callers it knows.
    #[cfg(test)]
    pub(super) fn callers(&self) -> usize {
        self.shards.iter().map(Shard::len).sum()
    }

    fn drain(&self) -> Vec<Block> {
        self.shards.iter().flat_map(Shard::drain).collect()
    }
}

/// Whether a block may be spent for this check.
fn is_spent(check: &Check) -> bool {
    check.mode() == Mode::Take && check.cost() > 0 && check.id().is_none() && !check.reserves()
}

/// Whether it is certain where this was charged: by Redis, or by a fallback that has noted it. What a fallback grants after its
/// deadline may be charged in the primary store, or not: a refund there could be of what others were charged.
fn is_known(decision: &Decision) -> bool {
    decision.at() != 0
}

impl<S: Store> Drop for Inner<S> {
    fn drop(&mut self) {
        self.end(self.drain().into());
    }
}

impl<S: Store> Watch<S> {
    async fn run(self) {
        let mut left = self.left();
        for at in self.looks {
            sleep(at.saturating_duration_since(instant())).await;
            if left.is_some() && self.left() == left {
                return;
            }
            left = self.left();
        }
    }

    fn left(&self) -> Option<u32> {
        self.inner.upgrade()?.shards.of(&self.asked.key).0.left(&self.asked)
    }
}

impl<S: Store> Drop for Watch<S> {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            let block = inner.shards.of(&self.asked.key).0.give_up(&self.asked);
            inner.end(block.into_iter().collect());
        }
    }
}
