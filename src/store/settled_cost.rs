use crate::limit::{Calendar, Decision, MadeBy, Policy, Verdict, Verdicts};
use crate::util::unix_time;

/// The cost of a request, and the reserved cost that it replaces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SettledCost {
    pub(crate) reserved: u32,
    pub(crate) cost: u32,
}

impl SettledCost {
    /// Returns the decision after the settlement, without a call to the store, so it is an estimate.
    pub(crate) fn update(self, decision: Decision) -> Decision {
        // Positive: refunded. Negative: charged.
        let back = i64::from(self.reserved) - i64::from(self.cost);
        let mut verdicts = decision.verdicts().clone();
        verdicts.granted = self.cost.into();
        for (policy, verdict) in decision.policies().iter().zip(&mut verdicts.each) {
            refund(verdict, policy, back, &decision);
        }
        decision.with_verdicts(verdicts)
    }

    /// Returns the decision on a check of this cost after the refund of its charge and the release of its slot. An
    /// [unsure](MadeBy::Unsure) charge is never refunded.
    pub(crate) fn undo(decision: Decision, cost: u32) -> Decision {
        if decision.made_by() == MadeBy::Unsure {
            return decision;
        }
        let nothing = Self {
            reserved: cost,
            cost: 0,
        };
        let decision = nothing.update(decision);
        let mut verdicts = decision.verdicts().clone();
        for (policy, verdict) in decision.policies().iter().zip(&mut verdicts.each) {
            if policy.is_in_flight() {
                let capacity = i64::from(policy.quota().capacity());
                verdict.remaining = (verdict.remaining + 1).min(capacity);
            }
        }
        decision.with_verdicts(verdicts)
    }
}

/// Returns the rest of a calendar's window at the time of these verdicts, in microseconds. Uses the clock of this process if
/// the store has reported no time.
pub(crate) fn rest_of_window(calendar: Calendar, verdicts: &Verdicts) -> i64 {
    let own = || unix_time().as_micros() as i64;
    calendar.rest(verdicts.calendar_micros().unwrap_or_else(own))
}

/// Updates a verdict of a decision after `back` was refunded (charged if negative).
fn refund(verdict: &mut Verdict, policy: &Policy, back: i64, decision: &Decision) {
    if policy.is_in_flight() {
        // The request is still in flight, and counts as one regardless of its cost.
        return;
    }
    let capacity = i64::from(policy.quota().capacity());
    verdict.remaining = (verdict.remaining + back).clamp(0, capacity);
    if verdict.remaining == capacity {
        verdict.reset = 0;
    } else if policy.frees().is_gradual() {
        let time = policy.quota().time_for(back.unsigned_abs());
        let time = i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let earlier = time.saturating_mul(back.signum());
        verdict.reset = verdict.reset.saturating_sub(earlier).max(0);
    } else if back < 0 && verdict.reset == 0 {
        // Nothing was charged before: the new charge counts for a period, or for the rest of a calendar's window.
        let params = policy.params();
        verdict.reset = match params.calendar {
            Some(calendar) => rest_of_window(calendar, decision.verdicts()),
            None => params.period,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::{Check, Key, Quota, Source, Strategy};

    const SOURCE: Source = Source::Other("test");

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
            let settled = SettledCost {
                reserved: 4,
                cost: 4_u32.wrapping_add_signed(cost),
            };
            let settled = settled.update(decision);
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
        let decision = Check::take(Key::GLOBAL, &uploads, 4).decided(SOURCE, 4, |_| verdict);
        let settled = SettledCost {
            reserved: 4,
            cost: 0,
        };
        let settled = settled.update(decision);
        assert_eq!(
            (settled.remaining(), settled.reset_after()),
            (2, second(30)),
            "still in flight"
        );
        let undone = SettledCost::undo(settled, 0);
        assert_eq!(undone.remaining(), 3, "no longer in flight");
    }

    /// By the clock of calendars.
    #[test]
    fn a_first_charge_lasts_until_the_window_ends() {
        const HOUR: i64 = 3_600_000_000;
        let days = "fixed-window(day)".parse().unwrap();
        let policies = Policy::new("plan", days, "6/d").unwrap().into();
        let peek = Check::peek(Key::GLOBAL, &policies, 0);
        let decision = peek.decided(SOURCE, 0, |_| Verdict::allowed());
        let charged = SettledCost {
            reserved: 0,
            cost: 1,
        };
        let mut verdicts = decision.verdicts().clone();
        verdicts.at = 20_000 * 24 * HOUR + 21 * HOUR;
        verdicts.ahead = 2 * HOUR;
        let settled = charged.update(decision.clone().with_verdicts(verdicts));
        assert_eq!(settled.reset_after(), Duration::from_secs(3_600));
        let by_own_clock = charged.update(decision).reset_after();
        assert!(!by_own_clock.is_zero() && by_own_clock <= Duration::from_secs(86_400));
    }
}
