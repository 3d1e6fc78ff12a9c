use super::{Check, Extra, Mode, Policies, Verdicts};

/// The decision on a check with an id, returned again to repeated checks for the longest period of
/// its policies.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    /// The longest period of the policies, in microseconds.
    pub(super) period: i64,
    pub(super) verdicts: Verdicts,
}

impl Answered {
    /// Returns `true` if the id of a check is remembered: of each grant, and of a charge of any cost.
    pub(crate) fn is_kept(check: &Check, verdicts: &Verdicts) -> bool {
        verdicts.granted > 0 || check.mode() == Mode::Charge
    }

    /// A repetition passes, also of a charge that a full debt has cut to nothing.
    pub(crate) fn new(check: &Check, verdicts: &Verdicts) -> Self {
        let mut verdicts = verdicts.clone();
        if let Some(Extra::Recorded(_, granted)) = check.extra() {
            verdicts.granted = (*granted).into();
        }
        for verdict in &mut verdicts.each {
            verdict.wait = 0;
        }
        Self {
            period: longest_period(check.policies()),
            verdicts,
        }
    }

    /// Returns how long the id is remembered, in microseconds.
    pub(crate) fn period(&self) -> i64 {
        self.period
    }

    /// Returns the decision for another check with the same id and number of policies. The decision
    /// expires at `until`.
    pub(crate) fn again(&self, check: &Check, until: i64, now: i64) -> Option<Verdicts> {
        if until <= now || self.verdicts.each.len() != check.policies().as_slice().len() {
            return None;
        }
        let mut again = self.verdicts.clone();
        again.age = (now - (until - self.period)).max(1);
        // A quota may have been lowered since, and no more than its capacity can remain.
        for (verdict, policy) in again.each.iter_mut().zip(check.policies()) {
            verdict.remaining = verdict.remaining.min(policy.params().capacity);
        }
        Some(again)
    }
}

/// Returns the longest period, in microseconds.
fn longest_period(policies: &Policies) -> i64 {
    let periods = policies.iter().map(|policy| policy.params().period);
    periods.max().unwrap_or(0)
}
