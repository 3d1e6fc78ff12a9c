//! Notifications of what happens, for logs, metrics and health checks.

pub mod event;
#[cfg(feature = "metrics")]
mod metrics;
pub(crate) mod mistakes;
#[cfg(feature = "tracing")]
mod repeats;
#[cfg(feature = "tracing")]
mod tracing;
mod unobserved;

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "metrics")]
pub use self::metrics::MetricsObserver;
#[cfg(feature = "tracing")]
pub use self::tracing::TracingObserver;
pub(crate) use self::unobserved::or_log;

/// Is notified of what happens, for logs, metrics and health checks.
///
/// With the feature `tracing` there is a `TracingObserver`, with the feature `metrics` a `MetricsObserver`.
///
/// Where no observer is set, the feature `tracing` logs what needs attention as a `TracingObserver` does:
/// [`degraded`](Self::degraded), [`recovered`](Self::recovered), [`misconfigured`](Self::misconfigured), and
/// [`failed`](Self::failed) once a minute for each kind of error. Without the feature, a debug build writes the first
/// `degraded` and `misconfigured` to standard error. `.observer(())` turns both off.
///
/// One call is enough: an observer set by [`RateLimitLayer::observer`](crate::RateLimitLayer::observer) is notified of
/// the layer's decisions, of its [`Fallback`](crate::Fallback), and of both stores in that. A store that has an
/// observer keeps it: that of [its builder](crate::store::RedisStoreBuilder::observer), or of the first layer over it.
/// So if several layers share a store, only the first one's observer is notified of the store. A pair of observers is
/// an observer.
///
/// Every method does nothing by default. They are called on the request path or on a task of the store, so they must
/// not block. A panic fails the request that a layer reports; a panic on an event of a [`Fallback`](crate::Fallback)
/// only loses that event.
///
/// ```
/// use tower_redis_ratelimit::observe::{Observer, event};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn degraded(&self, event: &event::Degraded<'_>) {
///         eprintln!("rate limits are local now: {}", event.error);
///     }
///
///     fn recovered(&self, event: &event::Recovered) {
///         eprintln!("rate limits are shared again, after {:.1?}", event.after);
///     }
/// }
/// ```
pub trait Observer: Send + Sync + 'static {
    /// A layer got a decision.
    fn decided(&self, event: &event::Decided<'_>) {
        let _ = event;
    }

    /// A store could not decide a check: reported by a [`Fallback`](crate::Fallback), which then answers it locally,
    /// and by a layer when nothing could answer it. Also reported when a request could not be
    /// [settled](crate::RateLimitLayer::settle).
    fn failed(&self, event: &event::Failed<'_>) {
        let _ = event;
    }

    /// The server is misconfigured, so that a layer can count no request: over HTTP each gets a 500. Or it cannot count
    /// by a policy, which it leaves out, or has counted a request twice, or a policy is leased without effect, or the Redis
    /// user lacks a right. Reported at most once a minute by each layer and store.
    fn misconfigured(&self, event: &event::Misconfigured<'_>) {
        let _ = event;
    }

    /// The primary store of a [`Fallback`](crate::Fallback) has failed too often: from here on the fallback decides.
    fn degraded(&self, event: &event::Degraded<'_>) {
        let _ = event;
    }

    /// The primary store decides again.
    fn recovered(&self, event: &event::Recovered) {
        let _ = event;
    }

    /// What the fallback granted was charged to the primary store, after an outage or a single failure.
    fn reconciled(&self, event: &event::Reconciled) {
        let _ = event;
    }

    /// What a [`Leased`](crate::Leased) store had charged ahead for a caller is spent, or the rest is refunded.
    fn leased(&self, event: &event::Leased) {
        let _ = event;
    }

    /// A [`RedisStore`](crate::RedisStore) sends a script call.
    fn sends(&self, event: &event::Sends) {
        let _ = event;
    }
}

/// Ignores all events: `.observer(())` also turns off the log of what needs attention.
impl Observer for () {}

macro_rules! tells {
    ($self:ident: $($observer:expr),+) => {
        fn decided(&$self, event: &event::Decided<'_>) {
            $($observer.decided(event);)+
        }

        fn failed(&$self, event: &event::Failed<'_>) {
            $($observer.failed(event);)+
        }

        fn misconfigured(&$self, event: &event::Misconfigured<'_>) {
            $($observer.misconfigured(event);)+
        }

        fn degraded(&$self, event: &event::Degraded<'_>) {
            $($observer.degraded(event);)+
        }

        fn recovered(&$self, event: &event::Recovered) {
            $($observer.recovered(event);)+
        }

        fn reconciled(&$self, event: &event::Reconciled) {
            $($observer.reconciled(event);)+
        }

        fn leased(&$self, event: &event::Leased) {
            $($observer.leased(event);)+
        }

        fn sends(&$self, event: &event::Sends) {
            $($observer.sends(event);)+
        }
    };
}

/// Notifies both.
impl<A: Observer, B: Observer> Observer for (A, B) {
    tells!(self: self.0, self.1);
}

impl<O: Observer + ?Sized> Observer for Arc<O> {
    tells!(self: (**self));
}

impl fmt::Debug for dyn Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
