use smallvec::SmallVec;

use super::strategy::Ask;
use super::{Mode, Policy, State};

/// A charge of which a part is refunded, as one policy knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charged {
    /// How many microseconds ago it was made.
    pub(crate) age: i64,
    /// When it was made, by Redis's clock, if it was made there. Redis takes the greater age of both: the refund may
    /// take long to arrive, and another server may have another clock. 0 if it was made elsewhere, or below that the
    /// number of the [outage log](Self::log_number) that has it.
    pub(crate) at: i64,
    /// How much it was.
    pub(crate) cost: i64,
    /// `reset_after` reported at charge time, in microseconds.
    pub(crate) reset: i64,
    /// Whether it is a turn that was taken ahead, which is refunded only as far as no later turn stands on it.
    pub(crate) is_turn: bool,
}

/// The same charge as each policy of a check knows it: only the reset differs.
pub(crate) type EachCharged = SmallVec<[Charged; 1]>;

/// The longest wait of a take ahead, and the greatest age of a charge, in microseconds: 142 years.
pub(crate) const LONGEST: i64 = 1 << 52;

impl Charged {
    /// A charge made just before, refunded as a whole.
    pub(crate) fn just_now(cost: i64) -> Self {
        Self {
            age: 0,
            at: 0,
            cost,
            reset: LONGEST,
            is_turn: false,
        }
    }

    /// The number of the outage log that has it, if it is not in Redis.
    pub(crate) fn log_number(&self) -> Option<i64> {
        (self.at < 0).then_some(-self.at)
    }

    /// What is left of `reset_after`, in microseconds: above 0 if the charge still counts.
    pub(crate) fn left(&self) -> i64 {
        self.reset - self.age
    }

    /// The same charge so many microseconds later.
    pub(crate) fn later(self, elapsed: i64) -> Self {
        Self {
            age: self.age.saturating_add(elapsed.max(0)).min(LONGEST),
            ..self
        }
    }

    /// Conservative merge: the greater age, the smaller cost.
    pub(crate) fn or(self, other: Self) -> Self {
        let (age, cost) = (self.age.max(other.age), self.cost.min(other.cost));
        let at = [self.at, other.at]
            .into_iter()
            .filter(|at| *at > 0)
            .min()
            .unwrap_or(0);
        Self {
            age,
            at,
            cost,
            reset: self.left().min(other.left()) + age,
            is_turn: self.is_turn || other.is_turn,
        }
    }

    /// Refunds it on the state of its policy, and returns how much.
    pub(crate) fn refund(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        let ask = Ask {
            mode: Mode::Refund,
            cost,
            within: 0,
            of: self,
            slot: None,
            now,
        };
        state.decide(policy.params(), &ask, i64::MAX).1
    }
}
