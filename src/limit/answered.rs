use super::{Check, Extra, Frees, Mode, Policies, Verdicts};

/// The decision on a check with an id, returned again to repeated checks.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    /// The time of the charge.
    pub(super) charged_at: i64,
    pub(super) verdicts: Verdicts,
}

impl Answered {
    /// Returns `true` if the id of a check is remembered: of each grant, and of a charge of any cost.
    pub(crate) fn is_kept(check: &Check, verdicts: &Verdicts) -> bool {
        verdicts.granted > 0 || check.mode() == Mode::Charge
    }

    /// A repetition passes, also of a charge that a full debt has cut to nothing.
    pub(crate) fn new(check: &Check, verdicts: &Verdicts, now: i64) -> Self {
        let mut verdicts = verdicts.clone();
        if let Some(Extra::Recorded(_, granted)) = check.extra() {
            verdicts.granted = (*granted).into();
        }
        for verdict in &mut verdicts.each {
            verdict.wait = 0;
        }
        Self {
            charged_at: now,
            verdicts,
        }
    }

    /// Returns the time until which the id is remembered: the end of each fixed window that has counted the charge, and
    /// a period under each other policy.
    pub(crate) fn until(&self, policies: &Policies) -> i64 {
        let windows = policies.iter().zip(&self.verdicts.each);
        let windows = windows.filter(|(policy, _)| policy.frees() == Frees::WithWindow);
        let end = windows.map(|(_, verdict)| verdict.reset).max();
        let lasts = longest_period(policies).max(end.unwrap_or(0));
        self.charged_at.saturating_add(lasts)
    }

    /// Returns the decision for another check with the same id and number of policies. The decision
    /// expires at `until`.
    pub(crate) fn again(&self, check: &Check, until: i64, now: i64) -> Option<Verdicts> {
        if until <= now || self.verdicts.each.len() != check.policies().as_slice().len() {
            return None;
        }
        let mut again = self.verdicts.clone();
        again.age = (now - self.charged_at).max(1);
        // A quota may have been lowered since, and no more than its capacity can remain.
        for (verdict, policy) in again.each.iter_mut().zip(check.policies()) {
            verdict.remaining = verdict.remaining.min(policy.params().capacity);
        }
        Some(again)
    }
}

/// Returns the longest period of the policies without a fixed window, in microseconds; at least 1.
pub(crate) fn longest_period(policies: &Policies) -> i64 {
    let others = policies
        .iter()
        .filter(|policy| policy.frees() != Frees::WithWindow);
    let periods = others.map(|policy| policy.params().period);
    periods.max().unwrap_or(1)
}
