//! Stores of the callers' counts.
//!
//! [`RedisStore`] keeps one count for all instances, [`LocalStore`] one per process. [`Fallback`]
//! combines two stores: the second decides while the first cannot. [`AnyStore`] is any of these,
//! chosen by its settings.

mod answer;
mod any;
mod backend;
mod bounded_map;
mod config;
mod fallback;
mod freed;
mod instances;
mod local;
mod mock;
mod redis;
mod shards;

use std::future::Future;
use std::sync::Arc;

pub use self::redis::{
    RedisFuture, RedisStore, RedisStoreBuilder, Scan, Server, Servers, StoredCount,
};
pub use crate::error::{ErrorKind, StoreError};
pub use answer::Answer;
pub use any::{AnyStore, AnyStoreFuture};
pub use backend::Backend;
pub use config::{ShareConfig, StoreConfig, StoreKind};
pub use fallback::{Fallback, FallbackFuture, Share};
pub use instances::Instances;
pub use local::LocalStore;
pub use mock::MockStore;

pub(crate) use backend::{Hooks, Withdraw};
pub use freed::Waiters;

pub(crate) use freed::Wake;
pub(crate) use shards::{Digest, Shards};

pub use crate::limit::Counts;

use crate::background::{Asked, OpQueue};
use crate::limit::{Check, Decision};
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
/// Only [`check`](Self::check) is required. In a custom store, [`Counts`] implements the strategies,
/// [`Check::decided`] creates other decisions, and
/// [`Source::Other`](crate::check::Source::Other) names the store. A [`StoreError`] states whether a
/// check was [sent](StoreError::not_sent).
///
/// For tests, use a [`MockStore`]. Outside of tower, use a [`Limiter`](crate::Limiter), a store with
/// fixed policies.
///
/// A store that wraps another one and decides some checks differently:
///
/// ```
/// use tower_redis_ratelimit::Key;
/// use tower_redis_ratelimit::check::{Check, Source, Verdict};
/// use tower_redis_ratelimit::store::{Answer, Backend, Store};
///
/// /// Never denies these callers.
/// #[derive(Clone)]
/// struct Exempt<S>(S, &'static [Key]);
///
/// impl<S: Store> Store for Exempt<S> {
///     type Future = S::Future;
///
///     fn check(&self, check: Check) -> Answer<S::Future> {
///         if self.1.contains(check.key()) {
///             let granted = check.cost();
///             return Answer::ready(Ok(check.decided(Source::Other("exempt"), granted, |_| Verdict::allowed())));
///         }
///         self.0.check(check)
///     }
///
///     fn backend(&self) -> Backend<'_, S::Future> {
///         self.0.backend()
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
pub trait Store: Clone + Send + Sync + 'static {
    /// The future of a reply that is not ready immediately.
    type Future: Future<Output = Result<Decision, StoreError>> + Send + 'static;

    /// Decides one check.
    fn check(&self, check: Check) -> Answer<Self::Future>;

    /// Returns the hooks for a [`Fallback`] and the layers. Defaults to none. A store that wraps
    /// another one returns the hooks of the inner store.
    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::default()
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
