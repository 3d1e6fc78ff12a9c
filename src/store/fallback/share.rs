use std::num::NonZeroU32;

use super::breaker::Breaker;
use crate::limit::{Check, Decision, Followed, Outcome, State, Verdict};
use crate::store::Instances;

/// How many instances share a policy while each decides by itself.
///
/// Each grants the whole part of a limit and of a burst, at least 1: with more instances than the limit, all together
/// may grant one each. The rate of a strategy that refills little by little is divided exactly.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Share {
    /// So many.
    Fixed(NonZeroU32),
    /// As many as were alive when Redis was last seen.
    Alive(Instances),
}

impl Share {
    /// So many instances; 0 counts as 1.
    pub const fn fixed(instances: u32) -> Self {
        match NonZeroU32::new(instances) {
            Some(instances) => Self::Fixed(instances),
            None => Self::Fixed(NonZeroU32::MIN),
        }
    }

    pub(super) fn instances(&self) -> NonZeroU32 {
        match self {
            Self::Fixed(instances) => *instances,
            Self::Alive(instances) => instances.alive(),
        }
    }
}

/// The decision on a check by this instance's part of its policies. What the part never lets pass, but the whole would in
/// time, is denied for as long as the whole would deny it, used up as the part is.
pub(super) fn of_whole(check: &Check, decision: Decision, now: impl FnOnce() -> i64) -> Decision {
    if decision.outcome() != Outcome::NeverFits {
        return decision;
    }
    let now = now();
    let parts: Vec<i64> = decision.verdicts().map(|(part, _)| part.params().capacity).collect();
    decision.wait_instead(|i, verdict| {
        let policy = &check.policies()[i];
        let (whole, part) = (policy.params().capacity, parts[i]);
        if i64::from(check.cost()) > whole {
            return Verdict::NEVER;
        }
        let used = i128::from(part - verdict.remaining) * i128::from(whole) / i128::from(part);
        let followed = Followed { used: used as i64, until: now + verdict.reset };
        let mut state = match verdict.reset {
            0 => State::fresh(policy.strategy()),
            _ => State::resume(policy.strategy(), policy.params(), now, followed),
        };
        let peek = Check::peek(*check.key(), &policy.clone().into(), check.cost());
        match peek.decide(std::slice::from_mut(&mut state), now).first().wait {
            // There is room in the whole, which is not this instance's to grant: until the next probe, perhaps.
            0 => Breaker::LONGEST_DELAY.as_micros() as i64,
            wait => wait,
        }
    })
}
