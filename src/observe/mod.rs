//! Who is told what happens: for logs, metrics and health checks.

pub mod event;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "tracing")]
mod throttle;
#[cfg(feature = "tracing")]
mod tracing;

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "metrics")]
pub use self::metrics::MetricsObserver;
#[cfg(feature = "tracing")]
pub use self::tracing::TracingObserver;
#[cfg(feature = "tracing")]
pub(crate) use self::tracing::misconfigured as log_misconfigured;

/// Is told what happens, for logs, metrics and health checks.
///
/// With the feature `tracing` there is a `TracingObserver`, with the feature `metrics` a `MetricsObserver`.
///
/// One call is enough: [`RateLimitLayer::observer`](crate::RateLimitLayer::observer) tells it of the layer's decisions,
/// of the layer's [`Fallback`](crate::Fallback), and of both stores in that. A store that has an observer of its own
/// keeps it: that of [its builder](crate::store::RedisStoreBuilder::observer), or of the first layer over it. So where
/// several layers share a store, the first one's observer hears of the store. A pair of observers is one.
///
/// Every method does nothing unless it is written. They are called on the request path or a task of the store's: they
/// must not block. One that panics fails the requests that a layer tells it of; of what a [`Fallback`](crate::Fallback)
/// tells it, it misses that event.
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

    /// A store could not decide a check: told by a [`Fallback`](crate::Fallback), which then answers it locally, and by
    /// a layer when nothing could answer it. Also told of what a request was to be charged or refunded
    /// [in the end](crate::RateLimitLayer::settle), and was not.
    fn failed(&self, event: &event::Failed<'_>) {
        let _ = event;
    }

    /// A layer finds that the server is set up so that it can count no request: over HTTP each gets a 500. Or that it
    /// cannot count by a policy, which it leaves out, or that a request was counted twice. Told once a minute at most
    /// by each layer. A layer without an observer tells the log, with the feature `tracing`.
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

    /// What the fallback granted in place of the primary store was charged to that, after an outage or a moment in
    /// which it could not be asked.
    fn reconciled(&self, event: &event::Reconciled) {
        let _ = event;
    }

    /// A [`RedisStore`](crate::RedisStore) sends a script call.
    fn sends(&self, event: &event::Sends) {
        let _ = event;
    }
}

/// Nobody is told.
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

        fn sends(&$self, event: &event::Sends) {
            $($observer.sends(event);)+
        }
    };
}

/// Both are told.
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
