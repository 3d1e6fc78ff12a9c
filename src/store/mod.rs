//! Who remembers: stores of the callers' counts.
//!
//! [`RedisStore`] keeps one count for all instances, [`LocalStore`] one for this process, and [`Fallback`] is a store
//! made of two: the second answers while the first cannot. [`AnyStore`] is any of these, by its settings.

mod answer;
mod any;
mod bounded_map;
mod clock;
mod config;
mod digest;
mod error;
mod fallback;
mod freed;
mod instances;
mod local;
mod mock;
mod observer;
mod redis;
mod shards;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use self::redis::{RedisFuture, RedisStore, RedisStoreBuilder, Servers};
pub use answer::Answer;
pub use any::{AnyStore, AnyStoreFuture};
pub use config::{ShareConfig, StoreConfig, StoreKind};
pub use error::{ErrorKind, StoreError};
pub use fallback::{Fallback, FallbackFuture, Share};
pub use instances::Instances;
pub use local::LocalStore;
pub use mock::MockStore;
#[cfg(feature = "metrics")]
pub use observer::MetricsObserver;
#[cfg(feature = "tracing")]
pub use observer::TracingObserver;
#[cfg(feature = "tracing")]
pub(crate) use observer::log_misconfigured;
pub use observer::{Observer, event};

pub(crate) use clock::{instant, unix_time};
pub(crate) use freed::{Listener, Wake};

use crate::limit::{Check, Decision, Key};

/// Decides checks, and remembers what was charged.
///
/// The contract of an implementation:
/// - A check is atomic: no other check of the same caller is decided between its reading and its charging.
/// - It is all or nothing over its policies, and a denied one charges nothing.
/// - A clone shares the counts.
/// - Every check is answered in bounded time, with a [`Decision`] on its own policies or a [`StoreError`]; an error is no
///   verdict.
/// - A future that is dropped before the check was sent charges nothing.
///
/// [`Check::decided`] makes the decisions of a store of one's own, [`Source::Other`](crate::Source::Other) names it, and
/// a [`StoreError`] tells whether a check was [sent](StoreError::unsent). This one asks another store, but for some callers:
///
/// ```
/// use std::sync::Arc;
/// use tower_redis_ratelimit::{Answer, Check, Decision, Key, Observer, Source, Store, Verdict};
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
///     fn warm(&self, key: &Key, decision: &Decision) {
///         self.0.warm(key, decision);
///     }
///
///     fn partitions(&self) -> usize {
///         self.0.partitions()
///     }
///
///     fn partition(&self, key: &Key) -> usize {
///         self.0.partition(key)
///     }
///
///     fn is_authoritative(&self, decision: &Decision) -> bool {
///         self.0.is_authoritative(decision)
///     }
///
///     fn identity(&self) -> Option<usize> {
///         self.0.identity()
///     }
///
///     fn observe(&self, observer: &Arc<dyn Observer>) {
///         self.0.observe(observer);
///     }
/// }
/// # fn is_store(_: impl Store) {}
/// # is_store(Exempt(tower_redis_ratelimit::MockStore::new(), &[Key::GLOBAL]));
/// ```
///
/// One that counts by itself is `tests/store/outside.rs`, and a [`MockStore`] is for tests. Outside of tower, a
/// [`Limiter`](crate::Limiter) asks a store with the same policies each time.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no store of counts",
    label = "not a `Store`",
    note = "stores are `RedisStore`, `LocalStore`, and `Fallback::new(redis, local)`; `AnyStore` is any of these"
)]
pub trait Store: Clone + Send + Sync + 'static {
    /// Resolves to an answer that is not there at once.
    type Future: Future<Output = Result<Decision, StoreError>> + Send + 'static;

    /// Decides one check.
    fn check(&self, check: Check) -> Answer<Self::Future>;

    /// Takes a check back whose answer nobody waits for any longer: a [`Fallback`](crate::Fallback) does so at its deadline.
    /// Returns whether it is certain that the check was not sent, and will not be. The fallback then charges later what it
    /// granted instead, as after an error that is [unsent](StoreError::unsent).
    ///
    /// The future is then dropped, and not polled again. Defaults to `false`: not known. A store that asks another one should
    /// pass this on.
    fn withdraw(&self, future: Pin<&mut Self::Future>) -> bool {
        let _ = (self, future);
        false
    }

    /// Learns what another store decided on this caller, so as to go on from there if that store fails: a
    /// [`Fallback`](crate::Fallback) tells its second store what the first one decides. Defaults to doing nothing.
    fn warm(&self, key: &Key, decision: &Decision) {
        let _ = (key, decision);
    }

    /// How many partitions it has that may fail each by itself, such as a Redis Cluster. A [`Fallback`](crate::Fallback)
    /// has a breaker for each. Defaults to 1; must not change. A store that asks another one should pass this on, and
    /// [`partition`](Self::partition).
    fn partitions(&self) -> usize {
        1
    }

    /// Which of its [partitions](Self::partitions) decides a caller's checks, from 0 on; for one caller always the same.
    fn partition(&self, key: &Key) -> usize {
        let _ = key;
        0
    }

    /// Whether a decision was made where the count is kept. One that a [`Fallback`] made in place of its primary store was not:
    /// that knows nothing of it. Defaults to `true`.
    fn is_authoritative(&self, decision: &Decision) -> bool {
        let _ = decision;
        true
    }

    /// What tells this store and its clones from all others in this process, as the address of what they share does. All
    /// layers over one store then know together what is [in flight](crate::Strategy::InFlight). Defaults to `None`: only one
    /// layer, or [`Limiter`](crate::Limiter), may count the same policy of requests in flight in the store.
    fn identity(&self) -> Option<usize> {
        None
    }

    /// Is given the observer of a layer or a [`Limiter`](crate::Limiter) that asks it, to tell it what happens in the store.
    /// One that has an observer already keeps that; one that asks another store hands it on. Defaults to doing nothing.
    fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = observer;
    }
}

/// Panics, as std's futures do when they are polled after they have answered. To hang or to answer again would hide the
/// caller's mistake.
#[track_caller]
#[allow(clippy::panic, reason = "only code that breaks the contract of `Future` gets here")]
pub(crate) fn polled_after_completion(future: &str) -> ! {
    panic!("`{future}` polled after completion")
}

/// Runs code of a user, such as an observer's, that must not end what goes on around it: `None` if it panics, which the panic
/// hook has shown by then.
pub(crate) fn contain<T>(user: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(user)).ok()
}

/// Locks, whether or not the lock is poisoned: nothing panics under our locks, and if it did, what they hold would still
/// be consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
