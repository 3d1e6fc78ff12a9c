//! Event notifications for logs, metrics and health checks.

mod default_observer;
mod event;
#[cfg(feature = "metrics")]
mod metrics;
pub(crate) mod misses;
pub(crate) mod mistakes;
#[cfg(feature = "tracing")]
mod repeats;
#[cfg(feature = "tracing")]
mod tracing;

use std::fmt;
use std::sync::Arc;

pub(crate) use self::default_observer::{log_settings, or_log, shared_observer};
pub use self::event::{Event, UncountedReason};
#[cfg(feature = "metrics")]
pub use self::metrics::MetricsObserver;
#[cfg(feature = "tracing")]
pub use self::tracing::TracingObserver;

/// Receives events, for logs, metrics and health checks.
///
/// The crate provides a `TracingObserver` with the feature `tracing`, and a `MetricsObserver` with
/// the feature `metrics`.
///
/// Without an observer, the feature `tracing` logs problems as a `TracingObserver` does:
/// [`Degraded`](Event::Degraded), [`Recovered`](Event::Recovered),
/// [`Misconfigured`](Event::Misconfigured), [`Suspected`](Event::Suspected), [`Failed`](Event::Failed) once a minute for each kind
/// of error, the number of requests without a key once a minute, and the denials of a dry run. Without that feature, or without a subscriber, a debug build prints the first
/// `Degraded`, the first `Misconfigured` and the first `Suspected` to standard error. A `MetricsObserver` keeps this log, since it shows no text;
/// any other observer replaces it. `.observer(())` disables both.
///
/// Set the observer on each layer and [`Limiter`](crate::Limiter), since these report their decisions to their own
/// observers only. They also pass the observer to their store, such as a [`Fallback`](crate::Fallback) and both stores in
/// it. A store keeps the first observer that it gets, either from [its
/// builder](crate::store::RedisStoreBuilder::observer) or from a layer or `Limiter` over it. A pair of observers is an
/// observer.
///
/// [`notify`](Self::notify) is called on the request path or on a task of the store, so it must not block. A panic in an event
/// of a layer fails the request; a panic in an event of a store only loses that event.
///
/// ```
/// use tower_redis_ratelimit::observe::{Event, Observer};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn notify(&self, event: &Event<'_>) {
///         match event {
///             Event::Degraded { error, .. } => {
///                 eprintln!("shared store unavailable, enforcing rate limits locally: {error}");
///             }
///             Event::Recovered { after, .. } => {
///                 eprintln!("shared store recovered after {after:.1?}");
///             }
///             _ => {}
///         }
///     }
/// }
/// ```
pub trait Observer: Send + Sync + 'static {
    /// Receives an event.
    fn notify(&self, event: &Event<'_>);

    /// Returns `true` if problems are logged nevertheless, as without an observer.
    #[doc(hidden)]
    fn keeps_log(&self) -> bool {
        false
    }
}

/// Ignores all events: `.observer(())` also disables the log of problems.
impl Observer for () {
    fn notify(&self, _: &Event<'_>) {}
}

/// Notifies both observers.
impl<A: Observer, B: Observer> Observer for (A, B) {
    fn notify(&self, event: &Event<'_>) {
        self.0.notify(event);
        self.1.notify(event);
    }

    fn keeps_log(&self) -> bool {
        self.0.keeps_log() && self.1.keeps_log()
    }
}

impl<O: Observer + ?Sized> Observer for Arc<O> {
    fn notify(&self, event: &Event<'_>) {
        (**self).notify(event);
    }

    fn keeps_log(&self) -> bool {
        (**self).keeps_log()
    }
}

impl<O: Observer + ?Sized> Observer for Box<O> {
    fn notify(&self, event: &Event<'_>) {
        (**self).notify(event);
    }

    fn keeps_log(&self) -> bool {
        (**self).keeps_log()
    }
}

impl fmt::Debug for dyn Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
