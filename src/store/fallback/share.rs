use std::num::NonZeroU32;

use super::breaker::Breaker;
use crate::limit::{Check, Decision, Verdict};
use crate::store::Instances;

/// The number of instances that share a policy while each decides locally.
///
/// Each instance grants its share of the limit and of the burst, rounded down, but at least 1. For example, each of 4
/// instances grants 2 of a limit of 10, and each of 20 instances grants 1, so that together they grant 20. The rate of
/// a strategy that refills gradually is divided exactly.
///
/// ```
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store = Fallback::new(redis, LocalStore::default()).share(4);
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Share {
    /// A constant number.
    Fixed(NonZeroU32),
    /// The number of live instances that this instance knows.
    Alive(Instances),
}

/// A constant number. `0` counts as 1.
impl From<u32> for Share {
    fn from(instances: u32) -> Self {
        Self::Fixed(NonZeroU32::new(instances).unwrap_or(NonZeroU32::MIN))
    }
}

impl From<NonZeroU32> for Share {
    fn from(instances: NonZeroU32) -> Self {
        Self::Fixed(instances)
    }
}

impl From<Instances> for Share {
    fn from(instances: Instances) -> Self {
        Self::Alive(instances)
    }
}

impl Share {
    pub(crate) fn instances(&self) -> NonZeroU32 {
        match self {
            Self::Fixed(instances) => *instances,
            Self::Alive(instances) => instances.alive(),
        }
    }
}

/// Turns a decision on this instance's share into one for the caller: a cost that exceeds the share but fits the whole
/// policy is denied until the primary store may decide it, after the next probe.
pub(super) fn of_whole(check: &Check, decision: Decision) -> Decision {
    decision.wait_instead(|i| match check.policies().as_slice().get(i) {
        Some(whole) if check.cost() <= whole.quota().capacity() => {
            Breaker::LONGEST_DELAY.as_micros() as i64
        }
        // A custom fallback may have decided on other policies than requested.
        _ => Verdict::NEVER,
    })
}
