use smallvec::SmallVec;

use super::strategy::Ask;
use super::{Mode, Policy, State};

/// What is known of a charge of which a part is refunded, as one policy knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charged {
    /// How many microseconds ago it was made.
    pub(crate) age: i64,
    /// When it was made, by Redis's clock, if it was made there. Redis takes the greater age of both: what gives it
    /// back may be long on its way, and another server may have another clock. If it was made elsewhere 0, or below
    /// that the number of its [log](Self::log_number).
    pub(crate) at: i64,
    /// How much it was.
    pub(crate) cost: i64,
    /// In how many microseconds from then nothing was to be charged any more, as told then.
    pub(crate) reset: i64,
}

/// The same charge as each policy of a check knows it: they differ in the reset alone.
pub(crate) type EachCharged = SmallVec<[Charged; 1]>;

/// The longest time within which a take ahead has to be due, and the greatest age of a charge, in microseconds: 142
/// years.
pub(crate) const LONGEST: i64 = 1 << 52;

impl Charged {
    /// A charge of just now, of which all is refunded.
    pub(crate) fn just_now(cost: i64) -> Self {
        Self { age: 0, at: 0, cost, reset: LONGEST }
    }

    /// The number of its log in the fallback, if it is not in Redis.
    pub(crate) fn log_number(&self) -> Option<i64> {
        (self.at < 0).then_some(-self.at)
    }

    /// In how many microseconds from now nothing was to be charged any more, as told then: above 0 if it counts still.
    pub(crate) fn left(&self) -> i64 {
        self.reset - self.age
    }

    /// The same so many microseconds later.
    pub(crate) fn later(self, elapsed: i64) -> Self {
        Self { age: self.age.saturating_add(elapsed.max(0)).min(LONGEST), ..self }
    }

    /// What is certain of both: the older, and the smaller.
    pub(crate) fn or(self, other: Self) -> Self {
        let (age, cost) = (self.age.max(other.age), self.cost.min(other.cost));
        let at = [self.at, other.at].into_iter().filter(|at| *at > 0).min().unwrap_or(0);
        Self { age, at, cost, reset: self.left().min(other.left()) + age }
    }

    /// Refunds of it on the state of its policy. How much that was.
    pub(crate) fn refund(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        let ask = Ask { mode: Mode::Refund, cost, within: 0, of: self, now };
        state.decide(policy.params(), &ask, i64::MAX).1
    }
}
