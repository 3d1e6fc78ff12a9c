use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::strategy::Ask;
use super::{Check, Decision, Key, Mode, Policy, State};

/// A cost that a store has charged to a caller: how much, when, under which policies, and where.
#[derive(Debug, Clone)]
pub(crate) struct Charge {
    key: Key,
    /// The decision that granted it, and nothing else.
    decision: Decision,
    /// When the check was sent, which is before the store charged it. Of a turn, when it is due as
    /// far as was known then.
    since: Instant,
}

impl Charge {
    /// Creates the charge of `cost` by this decision on a check that was sent at `since`.
    pub(crate) fn new(key: Key, decision: Decision, cost: u32, since: impl Into<Instant>) -> Self {
        Self {
            key,
            decision: decision.of_charge(cost),
            since: since.into(),
        }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn decision(&self) -> &Decision {
        &self.decision
    }

    pub(crate) fn cost(&self) -> u32 {
        self.decision.granted()
    }

    /// The same charge as if only `cost` had been charged.
    pub(crate) fn of_cost(self, cost: u32) -> Self {
        Self {
            decision: self.decision.of_charge(cost),
            ..self
        }
    }

    pub(crate) fn age(&self, now: impl Into<Instant>) -> Duration {
        now.into().saturating_duration_since(self.since)
    }

    /// Returns the check that refunds a part of it, as far as it still counts at `now`. `None` if
    /// nothing of it counts. The refund goes where the charge was made: see [`Decision::refund`].
    pub(crate) fn refund(&self, part: u32, now: impl Into<Instant>) -> Option<Check> {
        self.decision.refund(self.key, part, self.age(now)).next()
    }

    /// The same charge at the time at which a turn is due, when it counts as made.
    pub(crate) fn due(self) -> Self {
        Self {
            since: self.since + self.decision.due_in().unwrap_or_default(),
            decision: self.decision.due(),
            ..self
        }
    }
}

/// A charge as one policy counts it, for a refund of a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicyCharge {
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
    /// uses the greater of that and [`PolicyCharge::age`]: the refund may arrive late, and another
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
pub(crate) type EachCharge = SmallVec<[PolicyCharge; 1]>;

/// The longest wait of a take ahead, and the greatest age of a charge, in microseconds: 142 years.
pub(crate) const LONGEST: i64 = 1 << 52;

impl PolicyCharge {
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
            of: self,
            ..Ask::new(Mode::Refund, cost, now)
        };
        state.decide(policy.params(), &ask, i64::MAX).1
    }
}
