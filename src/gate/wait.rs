//! Requests that wait for their turn instead of being rejected: see [`Wait`].

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::wait_queues::Bounds;

/// How long a request that would be denied may wait for its turn, and how many may wait. A [`Duration`] alone is a
/// `Wait` with the default bounds.
///
/// ```
/// use std::num::NonZeroUsize;
/// use std::time::Duration;
/// use tower_redis_ratelimit::extract::PeerIp;
/// use tower_redis_ratelimit::wait::Wait;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// const FEW: NonZeroUsize = NonZeroUsize::new(20).unwrap();
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy)
///     .wait(Wait::up_to(Duration::from_secs(2)).per_caller(FEW));
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Wait {
    pub(super) max: Duration,
    pub(super) bounds: Bounds,
}

impl Wait {
    const PER_CALLER: usize = 100;
    const IN_ALL: usize = 10_000;

    /// Creates a `Wait` of at most `max` per request, with the default bounds.
    pub const fn up_to(max: Duration) -> Self {
        Self {
            max,
            bounds: Bounds {
                per_caller: Self::PER_CALLER,
                total: Self::IN_ALL,
            },
        }
    }

    /// Sets how many requests of one caller may wait in this process, under all policies; one more
    /// is denied immediately. Defaults to 100.
    #[must_use]
    pub const fn per_caller(mut self, requests: NonZeroUsize) -> Self {
        self.bounds.per_caller = requests.get();
        self
    }

    /// Sets how many requests of all callers may wait in this process; one more is denied
    /// immediately. Defaults to 10,000: a hundred callers with the maximum of
    /// [`per_caller`](Self::per_caller) leave no place for others.
    #[must_use]
    pub const fn total(mut self, requests: NonZeroUsize) -> Self {
        self.bounds.total = requests.get();
        self
    }
}

impl From<Duration> for Wait {
    fn from(max: Duration) -> Self {
        Self::up_to(max)
    }
}
