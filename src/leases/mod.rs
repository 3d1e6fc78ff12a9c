//! Leased quota: what a caller that comes often will want is charged ahead, a block at a time, and spent in memory.
//!
//! | file | has |
//! |---|---|
//! | `hot` | which callers come often |
//! | `caller` | the blocks of one caller, and how large the next one is |
//! | `block` | what was charged ahead, and until when it is spent |
//! | `inner` | all callers; asks for blocks and refunds what is left of them, off the request path |
//! | `future` | the answer to a check, which may wait for a block |

mod block;
mod caller;
mod future;
mod hot;
mod inner;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::pin::Pin;
use std::sync::Arc;

pub use self::future::LeasedFuture;

use self::inner::{Inner, PATIENCE};
use crate::limit::{Check, Decision, Key};
use crate::observe::Observer;
use crate::store::{Answer, Share, Store, Waiters};

/// A store that answers callers that come often from memory, and never grants more than the quota.
///
/// It is around the store that is shared, and does so under [leased](crate::Policy::leased) policies only: all other
/// checks are those of that store.
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
/// A caller comes often if its last 8 checks came within the lease time. What it will want in half of that time is then
/// charged as a block, off the request path, and its [takes](Check::take) are answered from the block at once. The next
/// block is charged when a quarter is left. A check that finds too little in the blocks is decided by the shared store.
///
/// - **Strict.** A block is spent within 7/8 of the lease time from when it was asked for, and within its window. The
///   page [`leases`](crate::guide::leases) says why no more than the quota is granted then.
/// - **Fair.** A block is at most a part of what remains: half of what each instance of the [`share`](Self::share) would
///   get. With little left, each check is decided by the shared store.
/// - **Refunded.** The rest of a block is refunded when the block is too old, when the last clone of the store is dropped,
///   and by [`shutdown`](Self::shutdown).
/// - **Outages.** While the primary store of a [`Fallback`] inside cannot decide, blocks are spent, and no other is
///   charged. Put this store around the fallback, not into it.
/// - A [reset](Check::reset) drops the blocks of this instance. Other instances, and other lists of policies, may spend
///   theirs for a lease time.
/// - Checks with an id, those that wait or are settled afterwards, and those of a list of policies of which one is not
///   leased are decided by the shared store.
///
/// Clones share the blocks.
///
/// [`Fallback`]: crate::Fallback
pub struct Leased<S: Store> {
    inner: Arc<Inner<S>>,
}

impl<S: Store> Leased<S> {
    /// The default bound of callers with blocks.
    pub const DEFAULT_CALLERS: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();

    /// Around the store that all instances share.
    pub fn new(store: S) -> Self {
        Self::with(store, Share::Fixed(NonZeroU32::MIN), Self::DEFAULT_CALLERS)
    }

    fn with(store: S, share: Share, max_callers: NonZeroUsize) -> Self {
        Self {
            inner: Arc::new(Inner::new(store, share, max_callers)),
        }
    }

    /// Sets how many instances share a quota. Defaults to 1. It bounds how much one of them has charged ahead, and too
    /// small a number only means that the end of a quota is shared less fairly.
    #[must_use]
    pub fn share(self, share: Share) -> Self {
        let Inner {
            store, max_callers, ..
        } = &*self.inner;
        Self::with(store.clone(), share, *max_callers)
    }

    /// Sets how many callers may have blocks, at most. Defaults to 65,536. If there are more, a new one replaces the one
    /// that wants the least of a few, so that the callers that want the most keep their blocks.
    #[must_use]
    pub fn max_callers(self, max: NonZeroUsize) -> Self {
        let Inner { store, share, .. } = &*self.inner;
        Self::with(store.clone(), share.clone(), max)
    }

    /// Refunds what is left of all blocks, and charges none from here on: for the end of a process, before its runtime
    /// ends. It waits for at most a second until the store has replied to all refunds, and to the charges in flight. The
    /// store still decides checks.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub async fn shutdown(&self) {
        self.inner.shut_down().await;
    }
}

impl<S: Store> Store for Leased<S> {
    type Future = LeasedFuture<S>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.inner.check(check, PATIENCE)
    }

    fn withdraw(&self, future: Pin<&mut Self::Future>) -> bool {
        let this = future.project();
        this.waiting.is_some()
            || this
                .sent
                .as_pin_mut()
                .is_some_and(|sent| self.inner.store.withdraw(sent))
    }

    fn warm(&self, key: &Key, decision: &Decision) {
        self.inner.store.warm(key, decision);
    }

    fn partitions(&self) -> usize {
        self.inner.store.partitions()
    }

    fn partition(&self, key: &Key) -> usize {
        self.inner.store.partition(key)
    }

    fn waiters(&self) -> Option<Waiters> {
        self.inner.store.waiters()
    }

    fn server(&self, key: &Key) -> Option<String> {
        self.inner.store.server(key)
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.inner.observe(observer);
        self.inner.store.observe(observer);
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
