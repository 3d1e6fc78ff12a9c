use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Error;

/// Is told what happens to a [`Fallback`](crate::Fallback), for logs and health checks.
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
    /// The primary store has failed too often: from now on the fallback decides. `error` is the last failure.
    fn degraded(&self, error: &Error) {
        let _ = error;
    }

    /// The primary store decides again. It did not for as long as `after`.
    fn recovered(&self, after: Duration) {
        let _ = after;
    }

    /// What the fallback granted in the outage was charged to the primary store: `charged` units still counted, and `dropped`
    /// could not be charged, because there were too many callers to note or because the primary store failed again.
    fn settled(&self, charged: u64, dropped: u64) {
        let _ = (charged, dropped);
    }

    /// The primary store failed one check, which the fallback has answered.
    fn failed(&self, error: &Error) {
        let _ = error;
    }
}

/// Nobody is told.
impl Observer for () {}

#[derive(Clone)]
pub(crate) struct Observers(pub(crate) Arc<dyn Observer>);

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
