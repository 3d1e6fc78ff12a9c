use std::num::NonZeroU32;

use super::breaker::Breaker;
use crate::limit::{Check, Decision, Outcome, Snapshot, State, Verdict};
use crate::store::Instances;

/// How many instances share a policy while each decides by itself.
///
/// Each grants its share of the limit and of the burst, rounded down, but at least 1. For example, each of 4 instances
/// grants 2 of a limit of 10, and each of 20 instances grants 1, so that all together grant 20. The rate of a strategy
/// that refills gradually is divided exactly.
///
/// ```
/// use std::num::NonZeroU32;
/// use tower_redis_ratelimit::store::Share;
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// const INSTANCES: NonZeroU32 = NonZeroU32::new(4).unwrap();
/// let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
/// let store = Fallback::new(redis, LocalStore::default()).share(Share::Fixed(INSTANCES));
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Share {
    /// This many.
    Fixed(NonZeroU32),
    /// As many as are alive, by this instance's knowledge.
    Alive(Instances),
}

impl Share {
    pub(crate) fn instances(&self) -> NonZeroU32 {
        match self {
            Self::Fixed(instances) => *instances,
            Self::Alive(instances) => instances.alive(),
        }
    }
}

/// What a decision by this instance's part of the policies comes to for the caller.
///
/// It differs where a cost is more than the part, but not more than the whole: that is denied, for as long as the whole
/// would deny it if the same share of it were used up. For example, a cost of 50 never fits a part of 25. If 20 of
/// these are used, the wait is that of a whole of 100 of which 80 are.
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
        // None if a fallback has decided on other policies than it was asked.
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
            // The whole has room, but this instance may not grant it. Redis may decide after the next probe.
            0 => Breaker::LONGEST_DELAY.as_micros() as i64,
            wait => wait,
        }
    })
}
