use smallvec::SmallVec;

use super::strategy::Ask;
use super::{Mode, Policy, State};

/// A charge to refund a part of, as one policy counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charged {
    /// How many microseconds ago it was made.
    pub(crate) age: i64,
    pub(crate) at: ChargedAt,
    /// How much it was.
    pub(crate) cost: i64,
    /// `reset_after` reported at charge time, in microseconds.
    pub(crate) reset: i64,
    /// Whether it is a turn that was taken ahead, which is refunded only as far as no later turn stands on it.
    pub(crate) is_turn: bool,
}

/// Where a charge was made: its refund goes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChargedAt {
    /// In the store itself, or in the primary store of a fallback, at this time by its clock in
    /// microseconds; 0 if the time is unknown. From this time Redis computes the age again, and
    /// uses the greater of that and [`Charged::age`]: the refund may arrive late, and another
    /// server may have another clock. For a turn it uses the computed age.
    Redis(i64),
    /// In the fallback, at this time by the clock of this process in microseconds.
    Local(i64),
}

impl ChargedAt {
    /// The time by Redis's clock in microseconds; 0 for an unknown time.
    pub(crate) fn micros(self) -> i64 {
        match self {
            Self::Redis(at) => at,
            Self::Local(_) => 0,
        }
    }
}

/// One charge per policy of a check: only the reset differs.
pub(crate) type EachCharged = SmallVec<[Charged; 1]>;

/// The longest wait of a take ahead, and the greatest age of a charge, in microseconds: 142 years.
pub(crate) const LONGEST: i64 = 1 << 52;

impl Charged {
    /// A charge made just before, refunded as a whole.
    pub(crate) fn just_now(cost: i64) -> Self {
        Self {
            age: 0,
            at: ChargedAt::Redis(0),
            cost,
            reset: LONGEST,
            is_turn: false,
        }
    }

    /// The rest of `reset_after`, in microseconds: above 0 if the charge still counts.
    pub(crate) fn left(&self) -> i64 {
        self.reset - self.age
    }

    /// Refunds it on the state of its policy, and returns how much.
    pub(crate) fn refund(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        let ask = Ask {
            of: Some(&self),
            ..Ask::new(Mode::Refund, cost, now)
        };
        state.decide(policy.params(), &ask, i64::MAX).1
    }
}
