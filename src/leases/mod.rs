//! Leased quota: blocks of a busy caller's quota are charged in advance, in the background, and its checks are answered
//! from memory.
//!
//! | file | contents |
//! |---|---|
//! | `busy` | detects busy callers |
//! | `caller` | one caller's blocks, and the size of the next one |
//! | `block` | a charged block and its expiry |
//! | `leasable` | the checks that blocks decide |
//! | `inner` | all busy callers; requests blocks and refunds unspent quota, off the request path |
//! | `future` | the decision on a check, which may wait for a block |
//!
//! Blocks are kept in this process only; the store has already counted them as charges. Stores count with
//! the [`quota`](crate::Policy::quota) of a leased policy, which is tighter than the configured one, `Policy::stated`.
//!
//! - **Lost reply.** A block whose reply is lost may have been charged. It is neither spent nor refunded, but reported
//!   as lost, and counts in the store until it expires.
//! - **Failing store.** Blocks are spent until they expire. Requests for blocks fail, are repeated after at least a quarter of
//!   the lease time, and the store decides the other checks.
//! - **End of a runtime.** When the sweeper's runtime shuts down, blocks and queued refunds are kept. The next check of a
//!   busy caller that no block covers starts the sweeper and the queue on its own runtime.

mod block;
mod busy;
mod caller;
mod future;
mod inner;
mod leasable;
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::leasable::is_leasable;

use self::future::LeasedFuture;
use self::inner::SharedLeases;
use crate::blocks::{Blocks, TakenChanges};
use crate::limit::{Check, Decision, JointCheck, Key};
use crate::observe::{Observer, shared_observer};
use crate::store::{
    Answer, Backend, BlocksSent, Health, Hooks, Instances, JointFuture, Store, StoreError,
    Unreconciled, Waiters, Withdraw, flush,
};

/// A store wrapper that answers busy callers from memory and never grants more than the quota.
///
/// It affects checks under [leased](crate::Policy::leased) policies only, and passes all others to the wrapped, shared
/// store.
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::{Fallback, Leased, LocalStore, Policy, Quota, RedisStore, Strategy};
///
/// let store = Fallback::new(RedisStore::connect_lazy("redis://127.0.0.1/")?, LocalStore::default());
/// let store = Leased::new(store);
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50_000))?.leased(Duration::from_millis(100))?;
/// # let _ = (store, policy);
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
///
/// A caller is busy if its last 8 checks came within the lease time. Its expected demand for half a lease time is then
/// charged as one block, off the request path, and its [takes](Check::take) are answered from the block immediately.
/// When a quarter is left, the next block is charged; earlier if the shared store is slow, at up to three quarters.
/// The shared store decides a check that no block covers.
///
/// - **Strict.** A block is spent within 7/8 of the lease time after its request, and before its window ends. The page
///   [`leases`](crate::guide::leases) shows why this never exceeds the quota.
/// - **Fair.** A block is at most half of an instance's equal part of the remaining quota; see [`share`](LeasedBuilder::share).
///   With little left, the shared store decides each check.
/// - **Refunded.** The rest of a block is refunded within 50 ms after the block expires, when the last clone of the store is dropped,
///   and by [`shutdown`](Self::shutdown).
/// - **Outages.** While the primary store of an inner [`Fallback`] cannot decide, blocks are spent, and no others are
///   charged. Wrap the fallback in this store, not the reverse.
/// - **Resets.** A [reset](Check::reset) drops the blocks of this instance under these policies. Other instances, and
///   other lists of policies, may spend their blocks for up to a lease time.
/// - **Exceptions.** The shared store decides checks with an id, checks that wait or are settled afterwards, and checks
///   under a list with a policy that is not leased.
///
/// - **Waiting.** If a block is late, a check may wait for it, at most for the deadline of a [`Fallback`], the
///   [`timeout`](crate::store::RedisStoreBuilder::timeout) of a [`RedisStore`](crate::RedisStore) or 1 s of another store.
///   Then the shared store decides it.
///
/// Clones share the blocks.
///
/// # Runtimes
///
/// The task that charges and refunds blocks runs on the tokio runtime that first needed it. After that runtime has shut
/// down, the next check that no block covers starts the task on its own runtime. While that runtime is alive and runs nothing,
/// as a current-thread runtime does outside of `block_on`, no blocks are charged or refunded, and the shared store decides
/// the checks of all runtimes.
///
/// [`Fallback`]: crate::Fallback
pub struct Leased<S: Store> {
    inner: Arc<SharedLeases<S>>,
}

/// Builds a [`Leased`] store, from [`Leased::builder`].
///
/// ```
/// use tower_redis_ratelimit::{Fallback, Leased, LocalStore, RedisStore};
///
/// let store = Fallback::new(RedisStore::connect_lazy("redis://127.0.0.1/")?, LocalStore::default());
/// let store = Leased::builder(store).share(4).build();
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug)]
#[must_use = "call `build` to create the store"]
pub struct LeasedBuilder<S> {
    store: S,
    share: Instances,
    max_callers: NonZeroUsize,
    observer: Option<Arc<dyn Observer>>,
}

impl<S: Store> LeasedBuilder<S> {
    /// Sets the number of instances that share a quota. Defaults to 1. It bounds the block of each instance; with too
    /// small a number, the end of a quota is only shared less fairly.
    pub fn share(mut self, share: impl Into<Instances>) -> Self {
        self.share = share.into();
        self
    }

    /// Sets the maximum number of callers with blocks. Defaults to 65,536. When no place is free, the
    /// shared store decides a new caller's checks until another caller has not been busy for two lease times.
    pub fn max_callers(mut self, max: NonZeroUsize) -> Self {
        self.max_callers = max;
        self
    }

    /// Sets the observer of blocks. An inner store without an observer gets it too. Defaults to the
    /// [observer](crate::RateLimitLayer::observer) of the first layer over the store, or else to [a
    /// log of problems](Observer).
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observer = Some(shared_observer(observer));
        self
    }

    /// Creates the store, without blocks.
    #[must_use]
    pub fn build(self) -> Leased<S> {
        let inner = SharedLeases::new(self.store, self.share, self.max_callers);
        let store = Leased { inner };
        if let Some(observer) = self.observer {
            store.backend().observe(&observer);
        }
        store
    }
}

impl<S: Store> Leased<S> {
    /// The default bound of callers with blocks.
    pub const DEFAULT_CALLERS: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();

    /// Creates a store that leases from `store`, which all instances share, with the default settings. For others, use the
    /// [`builder`](Self::builder).
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// Returns a builder of a store that leases from `store`, which all instances share.
    pub fn builder(store: S) -> LeasedBuilder<S> {
        LeasedBuilder {
            store,
            share: Instances::from(NonZeroU32::MIN),
            max_callers: Self::DEFAULT_CALLERS,
            observer: None,
        }
    }

    /// Refunds the rest of all blocks, and stops charging them. Call it at the end of a process, before its runtime shuts
    /// down. Waits at most 1 s for the store's replies to all refunds and to charges in flight. Checks are still
    /// decided, by the shared store.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime.
    pub async fn shutdown(&self) {
        self.inner.shut_down().await;
    }
}

impl<S: Store> Store for Leased<S> {
    type Future = LeasedFuture<S>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.inner.check(check, None)
    }

    /// No block decides it.
    fn check_all(&self, joint: JointCheck) -> JointFuture {
        self.inner.store.check_all(joint)
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::withdrawable(self)
    }

    async fn flush(&self) -> bool {
        // A store of the application may owe more than its hooks know.
        flush(self, None).await && self.inner.store.flush().await
    }
}

impl<S: Store> Hooks for Leased<S> {
    fn warm(&self, key: &Key, decision: &Decision) {
        self.inner.store.backend().warm(key, decision);
    }

    fn partitions(&self) -> usize {
        self.inner.store.backend().partitions()
    }

    fn partition(&self, key: &Key) -> usize {
        self.inner.store.backend().partition(key)
    }

    fn waiters(&self) -> Option<Waiters> {
        self.inner.store.backend().waiters()
    }

    // Blocked callers, which have nothing to do with leased blocks.
    fn blocks(&self) -> Option<Blocks> {
        self.inner.store.backend().blocks()
    }

    fn sync_blocks(&self) {
        self.inner.store.backend().sync_blocks();
    }

    fn send_blocks(&self, changes: TakenChanges) -> BlocksSent {
        self.inner.store.backend().send_blocks(changes)
    }

    fn server(&self, key: &Key) -> Option<String> {
        self.inner.store.backend().server(key)
    }

    fn is_connecting(&self, key: &Key) -> bool {
        self.inner.store.backend().is_connecting(key)
    }

    fn remembered(&self, check: &Check) -> Option<Decision> {
        self.inner.store.backend().remembered(check)
    }

    fn deadline(&self) -> Option<Duration> {
        self.inner.store.backend().deadline()
    }

    fn has_fallback(&self) -> bool {
        self.inner.store.backend().has_fallback()
    }

    fn leases(&self) -> bool {
        true
    }

    fn unreconciled(&self) -> Unreconciled {
        self.inner.store.backend().unreconciled()
    }

    fn health(&self) -> Health {
        self.inner.store.health()
    }

    fn failed(&self, error: &StoreError) {
        self.inner.store.backend().failed(error);
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.inner.observer.get_or_init(|| Arc::clone(observer));
        self.inner.unleased.observe(observer);
        self.inner.store.backend().observe(observer);
    }
}

impl<S: Store> Withdraw<LeasedFuture<S>> for Leased<S> {
    fn withdraw(&self, future: Pin<&mut LeasedFuture<S>>) -> bool {
        let this = future.project();
        // Nothing was sent while it waits for a block.
        this.waiting.is_some()
            || this
                .sent
                .as_pin_mut()
                .is_some_and(|sent| self.inner.store.backend().withdraw(sent))
    }
}

impl<S: Store> Clone for Leased<S> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
        }
    }
}

impl<S: Store + fmt::Debug> fmt::Debug for Leased<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leased")
            .field("store", &self.inner.store)
            .finish_non_exhaustive()
    }
}
