//! Stores of the callers' counts.
//!
//! [`RedisStore`] keeps one count for all instances, [`LocalStore`] one per process. [`Fallback`]
//! combines two stores: the second decides while the first cannot. [`AnyStore`] is any of these,
//! chosen by its settings.

mod answer;
mod any;
mod bounded_map;
mod config;
mod digest;
mod fallback;
mod freed;
mod instances;
mod local;
mod mock;
mod redis;
mod shards;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

pub use self::redis::{Counted, RedisFuture, RedisStore, RedisStoreBuilder, Scan, Servers};
pub use crate::error::{ErrorKind, StoreError};
pub use answer::Answer;
pub use any::{AnyStore, AnyStoreFuture};
pub use config::{ShareConfig, StoreConfig, StoreKind};
pub use fallback::{Fallback, FallbackFuture, Share};
pub use instances::Instances;
pub use local::LocalStore;
pub use mock::MockStore;

pub(crate) use digest::Digest;
pub use freed::Waiters;

pub(crate) use freed::{Listener, Wake};
pub(crate) use shards::Shards;

pub use crate::limit::Counts;

use crate::background::{Asked, OpQueue};
use crate::limit::{Check, Decision, Key};
use crate::observe::Observer;

/// Decides checks, and remembers what was charged.
///
/// The contract of an implementation:
/// - A check is atomic: no other check of the same caller is decided between its reads and its
///   writes.
/// - It is all or nothing over its policies, and a denied one charges nothing.
/// - A clone shares the counts.
/// - Every check resolves in bounded time, to a [`Decision`] on its own policies or a
///   [`StoreError`]; an error is not a verdict.
/// - A future that is dropped before the check was sent charges nothing.
///
/// Only [`check`](Self::check) is required. The other methods are hooks for a [`Fallback`] and the
/// layers. A store that wraps another one implements [`WrapStore`], which forwards all hooks. In a
/// custom store, [`Counts`] implements the strategies, [`Check::decided`] creates other decisions,
/// and [`Source::Other`](crate::check::Source::Other) names the store. A [`StoreError`] states
/// whether a check was [sent](StoreError::unsent).
///
/// For an example see `tests/store/outside.rs`; for tests, use a [`MockStore`]. Outside of tower,
/// use a [`Limiter`](crate::Limiter), a store with fixed policies.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not implement `Store`",
    label = "not a `Store`",
    note = "stores are `RedisStore`, `LocalStore`, and `Fallback::new(redis, local)`; `AnyStore` is any of these",
    note = "a `Result`: add `?`, as in `RedisStore::connect_lazy(url)?` or `RedisStore::connect(url).await?`"
)]
pub trait Store: Clone + Send + Sync + 'static {
    /// The future of a reply that is not ready immediately.
    type Future: Future<Output = Result<Decision, StoreError>> + Send + 'static;

    /// Decides one check.
    fn check(&self, check: Check) -> Answer<Self::Future>;

    /// Withdraws a check whose reply is no longer needed, as a [`Fallback`] does at its deadline.
    /// Returns `true` if it is certain that the check was not sent, and never will be. The fallback
    /// then charges its own grant to this store later, as after an [unsent](StoreError::unsent)
    /// error.
    ///
    /// The future is not polled after this call, but dropped. Defaults to `false`: uncertain.
    fn withdraw(&self, future: Pin<&mut Self::Future>) -> bool {
        let _ = (self, future);
        false
    }

    /// Records a decision of another store on this caller, to continue from there if that store
    /// fails. A [`Fallback`] passes the decisions of its first store to the second. Defaults to
    /// doing nothing.
    fn warm(&self, key: &Key, decision: &Decision) {
        let _ = (key, decision);
    }

    /// Returns the number of partitions that may fail separately, as in a Redis Cluster. A
    /// [`Fallback`] has a breaker for each. Defaults to 1; must not change.
    fn partitions(&self) -> usize {
        1
    }

    /// Returns the [partition](Self::partitions) of a caller, counted from 0; always the same for
    /// one caller.
    fn partition(&self, key: &Key) -> usize {
        let _ = key;
        0
    }

    /// The requests of this process that wait for what this store counts, the same for all its clones. A store that calls
    /// [`Waiters::freed`] after each refund, release and reset wakes those that wait for it, in all layers over the store.
    /// Defaults to `None`: waiters check again without a wake-up.
    fn waiters(&self) -> Option<Waiters> {
        None
    }

    /// Returns the address of the server that decides a caller's checks, without user and password.
    /// A [`Fallback`] names it in the error when the deadline has passed. Defaults to `None`.
    fn server(&self, key: &Key) -> Option<String> {
        let _ = key;
        None
    }

    /// Sets the observer of this store to that of a layer or a [`Limiter`](crate::Limiter). A store
    /// that has an observer keeps it; a store that wraps others passes it on. Defaults to doing
    /// nothing.
    fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = observer;
    }
}

/// A store that wraps another one and decides some checks differently. It is a [`Store`] with all
/// hooks of the inner one.
///
/// ```
/// use tower_redis_ratelimit::check::{Check, Source, Verdict};
/// use tower_redis_ratelimit::store::{Answer, Store, WrapStore};
/// use tower_redis_ratelimit::Key;
///
/// /// Never denies these callers.
/// #[derive(Clone)]
/// struct Exempt<S>(S, &'static [Key]);
///
/// impl<S: Store> WrapStore for Exempt<S> {
///     type Inner = S;
///
///     fn inner(&self) -> &S {
///         &self.0
///     }
///
///     fn decide(&self, check: Check) -> Answer<S::Future> {
///         if self.1.contains(check.key()) {
///             let granted = check.cost();
///             return Answer::ready(Ok(check.decided(Source::Other("exempt"), granted, |_| Verdict::allowed())));
///         }
///         self.0.check(check)
///     }
/// }
/// # fn is_store(_: impl Store) {}
/// # is_store(Exempt(tower_redis_ratelimit::store::MockStore::new(), &[Key::GLOBAL]));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not implement `Store`",
    label = "not a `Store`",
    note = "stores are `RedisStore`, `LocalStore`, and `Fallback::new(redis, local)`; `AnyStore` is any of these",
    note = "a `Result`: add `?`, as in `RedisStore::connect_lazy(url)?` or `RedisStore::connect(url).await?`"
)]
pub trait WrapStore: Clone + Send + Sync + 'static {
    /// The wrapped store.
    type Inner: Store;

    /// Returns the wrapped store.
    fn inner(&self) -> &Self::Inner;

    /// Decides one check, under [the contract of a store](Store).
    fn decide(&self, check: Check) -> Answer<<Self::Inner as Store>::Future>;
}

impl<W: WrapStore> Store for W {
    type Future = <W::Inner as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.decide(check)
    }

    fn withdraw(&self, future: Pin<&mut Self::Future>) -> bool {
        self.inner().withdraw(future)
    }

    fn warm(&self, key: &Key, decision: &Decision) {
        self.inner().warm(key, decision);
    }

    fn partitions(&self) -> usize {
        self.inner().partitions()
    }

    fn partition(&self, key: &Key) -> usize {
        self.inner().partition(key)
    }

    fn waiters(&self) -> Option<Waiters> {
        self.inner().waiters()
    }

    fn server(&self, key: &Key) -> Option<String> {
        self.inner().server(key)
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.inner().observe(observer);
    }
}

/// Creates the queue of a store's background operations. `observer` is notified of each operation that failed.
pub(crate) fn op_queue(store: impl Store, observer: Option<Arc<dyn Observer>>) -> OpQueue {
    let ask = move |check| match store.check(check) {
        Answer::Ready { answer } => Asked::Replied(answer),
        Answer::Pending { future } => Asked::Pending(Box::pin(future)),
    };
    OpQueue::new(ask, observer)
}
