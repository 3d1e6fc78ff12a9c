use std::num::NonZeroU32;

use super::breaker::Breaker;
use crate::limit::{Check, Decision, Outcome, Snapshot, State, Verdict};
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

/// Translates a decision on this instance's share into one for the caller.
///
/// The two differ if the cost exceeds the share but fits the whole policy. Then the wait is that of the whole policy
/// with the same proportion used. For example, a cost of 50 never fits a share of 25; if 20 of the 25 are used, the
/// wait is that of a policy of 100 with 80 used.
pub(super) fn of_whole(check: &Check, decision: Decision, now: impl FnOnce() -> i64) -> Decision {
    if decision.outcome() != Outcome::ExceedsCapacity {
        return decision;
    }
    let now = now();
    let parts: Vec<i64> = decision
        .verdicts()
        .map(|(part, _)| part.params().capacity)
        .collect();
    decision.wait_instead(|i, verdict| {
        // `None` if a custom fallback has decided on other policies than requested.
        let Some(policy) = check.policies().as_slice().get(i) else {
            return Verdict::NEVER;
        };
        let (whole, part) = (policy.params().capacity, parts[i]);
        let used = i128::from(part - verdict.remaining) * i128::from(whole) / i128::from(part);
        let followed = Snapshot {
            used: used as i64,
            until: now + verdict.reset,
        };
        let mut state = State::resume(policy.kind(), policy.params(), now, followed);
        let peek = Check::peek(*check.key(), &policy.clone().into(), check.cost());
        match peek
            .decide(std::slice::from_mut(&mut state), now)
            .first()
            .wait
        {
            // The whole policy has enough left, but this instance may not grant it. Redis may decide after the next
            // probe.
            0 => Breaker::LONGEST_DELAY.as_micros() as i64,
            wait => wait,
        }
    })
}
