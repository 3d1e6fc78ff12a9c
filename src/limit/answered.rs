use super::{Check, Policies, Verdicts};

/// The answer to a check with an id, which is given again for the longest period of its policies.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    policies: Policies,
    verdicts: Verdicts,
}

impl Answered {
    pub(crate) fn new(check: &Check, verdicts: &Verdicts) -> Self {
        Self {
            policies: check.policies().clone(),
            verdicts: verdicts.clone(),
        }
    }

    /// The same answer to a check with the same id, if it counts the same. The answer is kept `until` then.
    pub(crate) fn again(&self, check: &Check, until: i64, now: i64) -> Option<Verdicts> {
        if until <= now || !self.policies.count_alike(check.policies()) {
            return None;
        }
        let mut again = self.verdicts.clone();
        again.age = (now - (until - self.policies.longest_period())).max(1);
        // Quotas may have changed since, and none leaves more than its capacity.
        for (verdict, policy) in again.each.iter_mut().zip(check.policies()) {
            verdict.remaining = verdict.remaining.min(policy.params().capacity);
        }
        Some(again)
    }
}
