use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::strategy::Ask;
use super::{Check, Decision, Key, Mode, Policy, State};

/// A cost that a store has charged to a caller: how much, when, under which policies, and where.
#[derive(Debug, Clone)]
pub(crate) struct Charge {
    key: Key,
    /// The decision that granted this charge, and nothing else.
    decision: Decision,
    /// The time from which the age counts. If the store has reported its time, it computes the age, and this one is a
    /// lower bound: from the reply on. Otherwise it is an upper bound: from the time on at which the check was sent. For a
    /// [due](Self::due) turn, the time at which it was expected to be due.
    since: Instant,
}

impl Charge {
    /// Creates the charge of `cost` by this decision, which has arrived at `now`, on a check that was sent at `sent_at`.
    pub(crate) fn new(
        key: Key,
        decision: Decision,
        cost: u32,
        sent_at: impl Into<Instant>,
        now: impl Into<Instant>,
    ) -> Self {
        let store_has_clock = decision.charged_at().micros() > 0;
        Self {
            key,
            decision: decision.of_charge(cost),
            since: if store_has_clock {
                now.into()
            } else {
                sent_at.into()
            },
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

    /// Returns the charge as if only `cost` had been charged.
    pub(crate) fn of_cost(self, cost: u32) -> Self {
        Self {
            decision: self.decision.of_charge(cost),
            ..self
        }
    }

    pub(crate) fn age(&self, now: impl Into<Instant>) -> Duration {
        now.into().saturating_duration_since(self.since)
    }

    /// Returns the check that refunds a part of the charge, as far as the charge still counts at
    /// `now`. `None` if nothing of it counts. The refund goes to the store that made the charge:
    /// see [`Decision::refund`].
    pub(crate) fn refund(&self, part: u32, now: impl Into<Instant>) -> Option<Check> {
        self.decision.refund(self.key, part, self.age(now))
    }

    /// Returns the charge of a turn as if it had been made when the turn is due.
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
    /// Age of the charge in microseconds.
    pub(crate) age: i64,
    pub(crate) at: ChargedAt,
    /// The charged cost.
    pub(crate) cost: i64,
    /// `reset_after` reported at charge time, in microseconds.
    pub(crate) reset: i64,
    /// Whether the charge is a turn that was taken ahead. It is refunded only if it is the last one.
    pub(crate) is_turn: bool,
}

/// Where a charge was made: its refund goes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChargedAt {
    /// In the store itself, or in the primary store of a fallback, at this time by its clock in
    /// microseconds; 0 if the time is unknown. Redis, `Counts` and a `LocalStore` compute the age again
    /// from this time, and use the greater of both ages: the refund may arrive late, and after a failover
    /// another server may have another clock. For a turn they use only the computed age.
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

/// Maximum wait of a take ahead, and maximum age of a charge, in microseconds: 142 years.
pub(crate) const LONGEST: i64 = 1 << 52;

impl PolicyCharge {
    /// Creates a charge that has this cost and is refunded as a whole.
    pub(crate) fn just_now(cost: i64) -> Self {
        Self {
            age: 0,
            at: ChargedAt::Redis(0),
            cost,
            reset: LONGEST,
            is_turn: false,
        }
    }

    /// Returns the charge with its age at the time `now` of the store that made it, as Redis computes it: the refund may have
    /// been delayed.
    pub(super) fn arriving(self, now: i64) -> Self {
        let at = self.at.micros();
        if at == 0 {
            return self;
        }
        let computed = now - at;
        // The sender's age is from the reply on, so it is greater only after a change of the clock. A turn counts from its
        // due time, which is `at`.
        let age = if self.is_turn {
            computed.max(0)
        } else {
            computed.max(self.age)
        };
        Self { age, ..self }
    }

    /// The rest of `reset_after`, in microseconds: above 0 if the charge still counts.
    pub(crate) fn left(&self) -> i64 {
        self.reset - self.age
    }

    /// Refunds `cost` of this charge in the state of its policy. Returns the refunded cost.
    pub(crate) fn refund(self, policy: &Policy, state: &mut State, cost: i64, now: i64) -> i64 {
        let ask = Ask {
            of: Some(&self),
            ..Ask::new(Mode::Refund, cost, now)
        };
        state.decide(policy.params(), &ask, i64::MAX).1
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Policies, Quota, Source, Strategy};
    use super::*;

    fn policies(strategy: Strategy) -> Policies {
        Policy::new("test", strategy, Quota::per_minute(60))
            .unwrap()
            .into()
    }

    #[allow(clippy::disallowed_methods, reason = "any time will do")]
    fn any_time() -> Instant {
        Instant::now()
    }

    /// A charge of 10 by this check, with these charges before.
    fn charge(policies: &Policies, check: Check, before: u32, since: Instant) -> Charge {
        let mut states = [State::fresh(policies[0].kind())];
        let _ = Check::take(Key::GLOBAL, policies, before).decide(&mut states, 0);
        let decision = check
            .clone()
            .answer(check.decide(&mut states, 0), Source::Redis);
        Charge::new(Key::GLOBAL, decision, 10, since, since)
    }

    #[test]
    fn a_part_is_refunded_while_it_counts() {
        let (policies, since) = (policies(Strategy::Gcra), any_time());
        let take = Check::take(Key::GLOBAL, &policies, 10);
        let charge = charge(&policies, take, 0, since);
        let refund = |seconds| charge.refund(4, since + Duration::from_secs(seconds));
        let check = refund(3).unwrap();
        assert_eq!((check.mode(), check.cost()), (Mode::Refund, 4));
        let charged = check.charged_under(0, 0).unwrap();
        assert_eq!(
            (charged.cost, charged.age, charged.left()),
            (10, 3_000_000, 7_000_000)
        );
        assert!(refund(10).is_none());
    }

    /// Its part would otherwise drain while the request waits.
    #[test]
    fn a_turn_is_charged_when_it_is_due() {
        let (policies, since) = (policies(Strategy::Gcra), any_time());
        let ahead = Check::take_ahead(Key::GLOBAL, &policies, 10, Duration::from_secs(60));
        let turn = charge(&policies, ahead, 60, since);
        let due = since + Duration::from_secs(10);
        let charged = turn
            .due()
            .refund(10, due)
            .unwrap()
            .charged_under(0, 0)
            .unwrap();
        assert_eq!((charged.age, charged.is_turn), (0, true));
    }
}
