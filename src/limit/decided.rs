//! Decisions of stores outside of this crate.

use std::time::Duration;

use super::duration::micros;
use super::{Check, Decision, Mode, Policy, Source, Verdict, Verdicts};

impl Check {
    /// Creates the decision on this check, for your own [`Store`](crate::store::Store).
    ///
    /// `verdict` is called for each policy, in order. The check is allowed if all policies allow
    /// it. `granted` is the amount that was charged, refunded or reset. It matters only for modes
    /// that may grant a part of the cost: an allowed take is granted its whole cost, and a peek or
    /// a denied check nothing.
    ///
    /// Contradictions are corrected. The granted amount is at most the cost. The remaining amount
    /// is at most the capacity minus the charge, and less than the cost if the check is denied. A
    /// denial waits at least a microsecond, and the reset is not earlier than the end of the wait.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redis_ratelimit::check::{Check, Source, Verdict};
    /// use tower_redis_ratelimit::{Key, Policy, Quota, Strategy};
    ///
    /// let policies = Policy::new("api", Strategy::Gcra, Quota::per_minute(10))?.into();
    /// let check = Check::take(Key::new("user-42"), &policies, 4);
    ///
    /// let verdict = Verdict::denied(Duration::from_secs(30)).with_remaining(3);
    /// let decision = check.decided(Source::Other("postgres"), 0, |_policy| verdict);
    /// assert_eq!(decision.retry_after(), Some(Duration::from_secs(30)));
    /// assert_eq!((decision.granted(), decision.remaining()), (0, 3));
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub fn decided(
        &self,
        source: Source,
        granted: u32,
        verdict: impl FnMut(&Policy) -> Verdict,
    ) -> Decision {
        let given: Vec<Verdict> = self.policies().iter().map(verdict).collect();
        let granted = match self.mode() {
            _ if !given.iter().all(Verdict::is_allowed) => 0,
            Mode::Take | Mode::TakeAhead => self.cost(),
            Mode::UpTo | Mode::Charge | Mode::Refund => granted.min(self.cost()),
            Mode::Peek => 0,
            Mode::Reset => granted,
            Mode::Renew | Mode::Release => 1,
        };
        let granted = i64::from(granted);
        let verdicts = given
            .iter()
            .zip(self.policies())
            .map(|(given, policy)| given.corrected(self, policy, granted));
        self.clone()
            .answer(Verdicts::new(granted, verdicts.collect()), source)
    }
}

impl Verdict {
    /// The policy allows the check.
    pub const fn allowed() -> Self {
        Self {
            remaining: i64::MAX,
            wait: 0,
            reset: 0,
        }
    }

    /// The policy denies the check until `retry_after` has passed, rounded up to microseconds,
    /// provided that nothing else is charged.
    pub fn denied(retry_after: Duration) -> Self {
        let wait = micros(retry_after).max(1);
        Self {
            remaining: 0,
            wait,
            reset: wait,
        }
    }

    /// The cost exceeds the policy's capacity, so waiting does not help.
    pub const fn exceeds_capacity() -> Self {
        Self {
            remaining: i64::MAX,
            wait: Self::NEVER,
            reset: 0,
        }
    }

    /// Sets the largest cost that would be allowed now. Defaults to 0 for a denial, and otherwise
    /// to the maximum.
    pub fn with_remaining(self, remaining: u32) -> Self {
        Self {
            remaining: i64::from(remaining),
            ..self
        }
    }

    /// Sets the time until every charge has expired, if none is added; rounded up to microseconds.
    /// Defaults to the wait of a denial, and otherwise to zero.
    pub fn with_reset_after(self, reset_after: Duration) -> Self {
        Self {
            reset: micros(reset_after),
            ..self
        }
    }

    /// Removes contradictions with the granted amount.
    fn corrected(self, check: &Check, policy: &Policy, granted: i64) -> Self {
        let capacity = i64::from(policy.quota().capacity());
        let (cost, granted) = match check.mode().takes() && policy.is_in_flight() {
            true => (1, granted.min(1)),
            false => (i64::from(check.cost()), granted),
        };
        let max = match check.mode() {
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge if self.is_allowed() => {
                capacity - granted
            }
            Mode::Take | Mode::TakeAhead | Mode::Peek if !self.is_allowed() => {
                capacity.min(cost - 1)
            }
            Mode::UpTo | Mode::Charge => 0,
            _ => capacity,
        };
        Self {
            remaining: self.remaining.min(max).max(0),
            reset: self.reset.max(self.wait),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Key, LONGEST, Outcome, Policies, Quota, Strategy};

    const SOURCE: Source = Source::Other("test");

    fn policies() -> Policies {
        let policy = |name, quota| Policy::new(name, Strategy::Gcra, quota).unwrap();
        Policies::new([
            policy("ten", Quota::per_second(10)),
            policy("five", Quota::per_second(5)),
        ])
        .unwrap()
    }

    #[test]
    fn every_policy_must_allow_a_check() {
        let policies = policies();
        let check = Check::take(Key::GLOBAL, &policies, 2);
        let mut seen = vec![];
        let decision = check.decided(SOURCE, 2, |policy| {
            seen.push(policy.name().to_owned());
            Verdict::allowed()
        });
        assert_eq!(seen, ["ten", "five"]);
        assert_eq!(
            (
                decision.granted(),
                decision.policy().name(),
                decision.remaining()
            ),
            (2, "five", 3)
        );
        assert_eq!(decision.source().as_str(), "test");

        let decision = check.decided(SOURCE, 2, |policy| match policy.name() {
            "ten" => Verdict::denied(Duration::from_secs(1)),
            _ => Verdict::allowed(),
        });
        assert_eq!((decision.granted(), decision.policy().name()), (0, "ten"));

        let equal = check.decided(SOURCE, 2, |_| Verdict::allowed().with_remaining(1));
        assert_eq!(equal.policy().name(), "ten", "the first");
        assert_ne!(equal, decision);
    }

    #[test]
    fn expired_charges_are_not_refunded() {
        let (key, policies, second) = (Key::GLOBAL, policies(), Duration::from_secs(1));
        let verdict = Verdict::allowed().with_reset_after(second);
        let whole = Check::take(key, &policies, 2).decided(SOURCE, 2, |_| verdict);
        let part = whole.part(Check::take(key, &policies, 1), 1, second / 2);
        let just_before = Duration::from_micros(999_999);
        for (decision, cost, age, refunds) in [
            (&whole, 2, just_before, 1),
            (&whole, 2, second, 0),
            (&whole, 0, just_before, 0),
            (&part, 1, just_before - second / 2, 1),
            (&part, 1, second / 2, 0),
        ] {
            assert_eq!(
                decision.refund(key, cost, age).count(),
                refunds,
                "{cost} after {age:?}"
            );
        }
    }

    /// Settling a cost of 4 at `cost` more, with `used` of 6 per minute used.
    #[test]
    fn settling_changes_the_reset() {
        let second = Duration::from_secs;
        for (strategy, used, cost, reset) in [
            (Strategy::Gcra, 4, 1, 50),
            (Strategy::Gcra, 4, -1, 30),
            (Strategy::Gcra, 4, -4, 0),
            (Strategy::Gcra, 0, 1, 10),
            (Strategy::SlidingLog, 4, 1, 40),
            (Strategy::SlidingLog, 4, -1, 40),
            (Strategy::SlidingLog, 4, -4, 0),
            (Strategy::SlidingLog, 0, 1, 60),
        ] {
            let policies = Policy::new("test", strategy, Quota::per_minute(6))
                .unwrap()
                .into();
            let verdict = Verdict::allowed()
                .with_remaining(6 - used)
                .with_reset_after(second(u64::from(used) * 10));
            let decision = Check::charge(Key::GLOBAL, &policies, 0).decided(SOURCE, 0, |_| verdict);
            let settled = decision.settled(4, 4_u32.wrapping_add_signed(cost));
            assert_eq!(
                settled.reset_after(),
                second(reset),
                "{strategy}: {cost} with {used} used"
            );
        }
        let uploads = Policy::in_flight("uploads", 6).unwrap().into();
        let verdict = Verdict::allowed()
            .with_remaining(2)
            .with_reset_after(second(30));
        let settled = Check::take(Key::GLOBAL, &uploads, 4)
            .decided(SOURCE, 4, |_| verdict)
            .settled(4, 0);
        assert_eq!(
            (settled.remaining(), settled.reset_after()),
            (2, second(30)),
            "still in flight"
        );
    }

    #[test]
    fn impossible_values_are_never_returned() {
        let policies = policies();
        let decided = |check: Check, granted, verdict| check.decided(SOURCE, granted, |_| verdict);
        let numbers = |check: Check, granted, verdict| {
            let decision = decided(check, granted, verdict);
            (decision.granted(), decision.remaining())
        };
        let (key, many) = (Key::GLOBAL, Verdict::allowed().with_remaining(u32::MAX));
        assert_eq!(numbers(Check::take(key, &policies, 2), 99, many), (2, 3));
        assert_eq!(
            numbers(Check::take(key, &policies, 9), 9, many),
            (9, 0),
            "more than its capacity"
        );
        assert_eq!(numbers(Check::up_to(key, &policies, 2), 99, many), (2, 3));
        assert_eq!(numbers(Check::up_to(key, &policies, 2), 1, many), (1, 4));
        assert_eq!(numbers(Check::peek(key, &policies, 2), 99, many), (0, 5));
        assert_eq!(numbers(Check::refund(key, &policies, 2), 99, many), (2, 5));
        assert_eq!(numbers(Check::reset(key, &policies), 99, many), (99, 5));
        let uploads = Policy::in_flight("uploads", 5).unwrap().into();
        assert_eq!(
            numbers(Check::take(key, &uploads, 2), 99, many),
            (2, 4),
            "of one request"
        );
        assert_eq!(
            numbers(Check::charge(key, &uploads, 2), 99, many),
            (2, 3),
            "of two requests"
        );

        let denied = Verdict::denied(Duration::ZERO)
            .with_remaining(u32::MAX)
            .with_reset_after(Duration::ZERO);
        for (check, remaining) in [
            (Check::take(key, &policies, 2), 1),
            (Check::take(key, &policies, 0), 0),
            (Check::take(key, &policies, 99), 5),
            (Check::peek(key, &policies, 2), 1),
            (Check::up_to(key, &policies, 2), 0),
            (Check::charge(key, &policies, 2), 0),
        ] {
            let decision = decided(check, 99, denied);
            let microsecond = Duration::from_micros(1);
            assert_eq!(
                decision.outcome(),
                Outcome::Denied {
                    retry_after: microsecond
                }
            );
            assert_eq!(
                (decision.granted(), decision.remaining()),
                (0, remaining),
                "{decision:?}"
            );
            assert_eq!(decision.reset_after(), microsecond);
        }
        let never = decided(
            Check::take(key, &policies, 11),
            11,
            Verdict::exceeds_capacity(),
        );
        assert_eq!(
            (never.outcome(), never.granted(), never.remaining()),
            (Outcome::ExceedsCapacity, 0, 5)
        );
        let long = decided(
            Check::take(key, &policies, 2),
            0,
            Verdict::denied(Duration::MAX),
        );
        assert_eq!(
            long.retry_after(),
            Some(Duration::from_micros(LONGEST as u64))
        );
        let nanosecond = decided(
            Check::take(key, &policies, 2),
            0,
            Verdict::denied(Duration::from_nanos(1_001)),
        );
        assert_eq!(nanosecond.retry_after(), Some(Duration::from_micros(2)));
    }
}
