//! Who is told what happens: for logs, metrics and health checks.

#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "tracing")]
mod tracing;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "metrics")]
pub use self::metrics::MetricsObserver;
#[cfg(feature = "tracing")]
pub use self::tracing::TracingObserver;

use super::Error;
use crate::limit::Decision;

/// Is told what happens, for logs, metrics and health checks.
///
/// Give it to whatever it is to hear of: a [`RateLimitLayer`](crate::RateLimitLayer::observer), a
/// [`Fallback`](crate::Fallback::observer), a [`RedisStore`](crate::RedisStoreBuilder::observer). A pair of observers
/// is one. With the feature `tracing` there is a `TracingObserver`, with the feature `metrics` a `MetricsObserver`.
///
/// Every method does nothing unless it is written. They are called on the request path or a task of the store's:
/// they must not block.
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::{Error, Observer};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn degraded(&self, error: &Error) {
///         eprintln!("rate limits are local now: {error}");
///     }
///
///     fn recovered(&self, after: Duration) {
///         eprintln!("rate limits are shared again, after {after:.1?}");
///     }
/// }
/// ```
pub trait Observer: Send + Sync + 'static {
    /// A layer got a decision, `took` after it asked.
    fn decided(&self, decision: &Decision, took: Duration) {
        let _ = (decision, took);
    }

    /// A store could not decide a check: told by a [`Fallback`](crate::Fallback), which then answers it locally, and by
    /// a layer when nothing could answer it.
    fn failed(&self, error: &Error) {
        let _ = error;
    }

    /// The primary store of a [`Fallback`](crate::Fallback) has failed too often: from now on the fallback decides.
    /// `error` is the last failure.
    fn degraded(&self, error: &Error) {
        let _ = error;
    }

    /// The primary store decides again. It did not for as long as `after`.
    fn recovered(&self, after: Duration) {
        let _ = after;
    }

    /// What the fallback granted in place of the primary store was charged to that, after an outage or a moment in which
    /// it could not be asked: `charged` units still counted, and `dropped` could not be charged, because there were too
    /// many callers to note or because the primary store failed again. What was given back or reset is in neither.
    fn settled(&self, charged: u64, dropped: u64) {
        let _ = (charged, dropped);
    }

    /// A [`RedisStore`](crate::RedisStore) sends a script call with so many `checks`, while `waiting` more wait in its
    /// queue.
    fn sends(&self, checks: usize, waiting: usize) {
        let _ = (checks, waiting);
    }
}

/// Nobody is told.
impl Observer for () {}

macro_rules! tells {
    ($self:ident: $($observer:expr),+) => {
        fn decided(&$self, decision: &Decision, took: Duration) {
            $($observer.decided(decision, took);)+
        }

        fn failed(&$self, error: &Error) {
            $($observer.failed(error);)+
        }

        fn degraded(&$self, error: &Error) {
            $($observer.degraded(error);)+
        }

        fn recovered(&$self, after: Duration) {
            $($observer.recovered(after);)+
        }

        fn settled(&$self, charged: u64, dropped: u64) {
            $($observer.settled(charged, dropped);)+
        }

        fn sends(&$self, checks: usize, waiting: usize) {
            $($observer.sends(checks, waiting);)+
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

#[derive(Clone)]
pub(crate) struct Observers(pub(crate) Arc<dyn Observer>);

impl Default for Observers {
    fn default() -> Self {
        Self(Arc::new(()))
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
