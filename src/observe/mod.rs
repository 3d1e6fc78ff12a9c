//! Event notifications for logs, metrics and health checks.

mod default_observer;
pub mod event;
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
/// [`degraded`](Self::degraded), [`recovered`](Self::recovered),
/// [`misconfigured`](Self::misconfigured), [`suspected`](Self::suspected), [`failed`](Self::failed) once a minute for each kind
/// of error, the number of requests without a key once a minute, and the denials of a dry run. Without that feature, or without a subscriber, a debug build prints the first
/// `degraded`, the first `misconfigured` and the first `suspected` to standard error. A `MetricsObserver` keeps this log, since it shows no text;
/// any other observer replaces it. `.observer(())` disables both.
///
/// Set the observer on each layer and [`Limiter`](crate::Limiter), since these report their decisions to their own
/// observers only. They also pass the observer to their store, such as a [`Fallback`](crate::Fallback) and both stores in
/// it. A store keeps the first observer that it gets, either from [its
/// builder](crate::store::RedisStoreBuilder::observer) or from a layer or `Limiter` over it. A pair of observers is an
/// observer.
///
/// Every method does nothing by default. Methods are called on the request path or on a task of the
/// store, so they must not block. A panic in an event of a layer fails the request; a panic in an
/// event of a store only loses that event.
///
/// ```
/// use tower_redis_ratelimit::observe::{Observer, event};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn degraded(&self, event: &event::Degraded<'_>) {
///         eprintln!("shared store unavailable, enforcing rate limits locally: {}", event.error);
///     }
///
///     fn recovered(&self, event: &event::Recovered) {
///         eprintln!("shared store recovered after {:.1?}", event.after);
///     }
/// }
/// ```
pub trait Observer: Send + Sync + 'static {
    /// A layer or a [`Limiter`](crate::Limiter) received a decision.
    fn decided(&self, event: &event::Decided<'_>) {
        let _ = event;
    }

    /// A store could not decide a check. A [`Fallback`](crate::Fallback) reports this before it
    /// decides the check itself, and a layer if no store decided. Also reported if a request could
    /// not be [settled](crate::RateLimitLayer::settle).
    fn failed(&self, event: &event::Failed<'_>) {
        let _ = event;
    }

    /// A layer or a [`Limiter`](crate::Limiter) did not count a request: it passed uncounted, or was rejected because it has
    /// no key.
    fn uncounted(&self, event: &event::Uncounted<'_>) {
        let _ = event;
    }

    /// The first extractor of an [`or`](crate::extract::KeyExtractor::or) found no key in a request, and the second one did.
    fn second_key(&self, event: &event::SecondKey<'_>) {
        let _ = event;
    }

    /// Rate limiting is misconfigured. Either a layer can count no request, and every HTTP request
    /// gets a 500. Or a layer skips a policy that it cannot enforce, a request was charged twice, a
    /// policy is leased without effect, or the Redis user lacks a right. Each layer and store
    /// reports this at most once a minute.
    fn misconfigured(&self, event: &event::Misconfigured<'_>) {
        let _ = event;
    }

    /// Rate limiting may be misconfigured: the application may intend it, or clients may cause it, so
    /// it is no reason for an alert. Each layer and store reports a problem once.
    fn suspected(&self, event: &event::Suspected<'_>) {
        let _ = event;
    }

    /// The primary store of a [`Fallback`](crate::Fallback) has failed too often, so the fallback
    /// decides.
    fn degraded(&self, event: &event::Degraded<'_>) {
        let _ = event;
    }

    /// The fallback still decides: once a minute of an outage, from the second minute on.
    fn still_degraded(&self, event: &event::StillDegraded<'_>) {
        let _ = event;
    }

    /// The runtime noticed the deadline of a check late. The primary store is not the cause.
    fn runtime_late(&self, event: &event::RuntimeLate) {
        let _ = event;
    }

    /// The primary store decides again.
    fn recovered(&self, event: &event::Recovered) {
        let _ = event;
    }

    /// The fallback's grants were charged to the primary store, after an outage or a single
    /// failure.
    fn reconciled(&self, event: &event::Reconciled) {
        let _ = event;
    }

    /// A block of a [`Leased`](crate::Leased) store has ended: it is spent, expired, refunded or
    /// reset. Also reported if Redis did not reply to a request for a block.
    fn leased(&self, event: &event::EndedBlock) {
        let _ = event;
    }

    /// A [`RedisStore`](crate::RedisStore) sends a script call.
    fn sent(&self, event: &event::Sent) {
        let _ = event;
    }

    /// Returns `true` if problems are logged nevertheless, as without an observer.
    #[doc(hidden)]
    fn keeps_log(&self) -> bool {
        false
    }
}

/// Ignores all events: `.observer(())` also disables the log of problems.
impl Observer for () {}

// A method that is not forwarded would do nothing, and still compile. So the list is in one place.
macro_rules! forward {
    ($self:ident: $($observer:expr),+) => {
        fn decided(&$self, event: &event::Decided<'_>) {
            $($observer.decided(event);)+
        }

        fn failed(&$self, event: &event::Failed<'_>) {
            $($observer.failed(event);)+
        }

        fn uncounted(&$self, event: &event::Uncounted<'_>) {
            $($observer.uncounted(event);)+
        }

        fn second_key(&$self, event: &event::SecondKey<'_>) {
            $($observer.second_key(event);)+
        }

        fn misconfigured(&$self, event: &event::Misconfigured<'_>) {
            $($observer.misconfigured(event);)+
        }

        fn suspected(&$self, event: &event::Suspected<'_>) {
            $($observer.suspected(event);)+
        }

        fn degraded(&$self, event: &event::Degraded<'_>) {
            $($observer.degraded(event);)+
        }

        fn still_degraded(&$self, event: &event::StillDegraded<'_>) {
            $($observer.still_degraded(event);)+
        }

        fn runtime_late(&$self, event: &event::RuntimeLate) {
            $($observer.runtime_late(event);)+
        }

        fn recovered(&$self, event: &event::Recovered) {
            $($observer.recovered(event);)+
        }

        fn reconciled(&$self, event: &event::Reconciled) {
            $($observer.reconciled(event);)+
        }

        fn leased(&$self, event: &event::EndedBlock) {
            $($observer.leased(event);)+
        }

        fn sent(&$self, event: &event::Sent) {
            $($observer.sent(event);)+
        }
    };
}

/// Notifies both observers.
impl<A: Observer, B: Observer> Observer for (A, B) {
    forward!(self: self.0, self.1);

    fn keeps_log(&self) -> bool {
        self.0.keeps_log() && self.1.keeps_log()
    }
}

impl<O: Observer + ?Sized> Observer for Arc<O> {
    forward!(self: (**self));

    fn keeps_log(&self) -> bool {
        (**self).keeps_log()
    }
}

impl<O: Observer + ?Sized> Observer for Box<O> {
    forward!(self: (**self));

    fn keeps_log(&self) -> bool {
        (**self).keeps_log()
    }
}

impl fmt::Debug for dyn Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
