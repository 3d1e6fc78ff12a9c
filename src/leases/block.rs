use std::time::Duration;

use tokio::time::Instant;

use crate::background::PendingOp;
use crate::limit::{Charge, Check, Decision, Frees, Key, Policies, Source, micros};
use crate::util::instant;

/// Quota of one caller that was charged in advance and is spent in memory until it expires.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) charge: Charge,
    /// The part that is not spent.
    pub(super) left: u32,
    /// The charge minus all refunds to the caller since, which may be of grants from this block. At
    /// least `left`.
    kept: u32,
    pub(super) expires_at: Instant,
}

impl Block {
    /// Creates a block from the decision on a request that was sent at `asked_at`.
    pub(super) fn new(key: Key, decision: Decision, asked_at: Instant) -> Self {
        // Clock-aligned windows end by the store's clock. Counting from `asked_at`, before the charge, cannot overshoot
        // the end.
        let mut lifetime = decision.policies().lease_time().unwrap_or_default();
        for (policy, verdict) in decision.policies().iter().zip(&decision.verdicts().each) {
            if policy.frees() == Frees::WithWindow {
                let window = Duration::from_micros(verdict.reset.max(0) as u64);
                lifetime = lifetime.min(window);
            }
        }
        // The last eighth allows for a clock slower than the store's.
        let expires_at = asked_at + lifetime / 8 * 7;
        let granted = decision.granted();
        Self {
            charge: Charge::new(key, decision, granted, asked_at, instant()),
            left: granted,
            kept: granted,
            expires_at,
        }
    }

    /// Takes the cost of a check, which must be at most `left`.
    ///
    /// Reads the clock after subtracting the cost: if the process was stopped before, an expired block grants nothing.
    ///
    /// # Errors
    ///
    /// Returns the check if the block has expired. Nothing of the block is spent then.
    pub(super) fn take(
        &mut self,
        check: Check,
        clock: &impl Fn() -> Instant,
    ) -> Result<Decision, Check> {
        let left = self.left;
        self.left = left.saturating_sub(check.cost());
        let now = clock();
        if self.is_expired(now) {
            self.left = left;
            return Err(check);
        }
        let age = self.charge.age(now);
        Ok(part(self.charge.decision(), check, self.left, age))
    }

    pub(super) fn is_expired(&self, now: Instant) -> bool {
        now >= self.expires_at
    }

    /// Subtracts a refund of a decision, which may have been granted from this block.
    pub(super) fn deduct_refund(&mut self, cost: u32) {
        self.kept = self.kept.saturating_sub(cost).max(self.left);
    }

    /// Returns the refund of the unspent rest. In a refilling quota, the spent part drains first, up to the amount that
    /// can have drained by `now`: a spent part that is refunded later already deducts what drains until then. For example, of
    /// 10 charged units 4 are left and 3 have drained: it refunds 4 of a charge of 7.
    pub(super) fn into_refund(self, now: Instant) -> PendingOp {
        let policies = self.charge.decision().policies();
        let drained = min_drained_in(policies, self.charge.age(now));
        let kept = self.left.saturating_add(drained).min(self.kept);
        PendingOp::refund(self.charge.of_cost(kept), self.left)
    }
}

/// Returns the decision on a check whose cost is taken from the grant of the block's decision, `age` after it, so that `left`
/// of the grant is left. The remaining amount that the store reported is added to that. A [refund](Decision::refund) treats the part as
/// if it had been charged alone at the time of the block's decision.
fn part(of_block: &Decision, check: Check, left: u32, age: Duration) -> Decision {
    let mut verdicts = of_block.verdicts().clone();
    verdicts.granted = check.cost().into();
    verdicts.age += micros(age);
    for (verdict, policy) in verdicts.each.iter_mut().zip(of_block.policies()) {
        let capacity = i64::from(policy.quota().capacity());
        verdict.remaining = (verdict.remaining + i64::from(left)).min(capacity);
    }
    let part = check.answer(verdicts, Source::Leased);
    if part.decider() == of_block.decider() {
        return part;
    }
    // The policy that decided on the block decides on its parts.
    let of_decider = part.each().nth(of_block.decider());
    match of_decider {
        Some(of_decider) => of_decider,
        None => part,
    }
}

/// The least amount of a charge that drains within `time`, regardless of other charges. In a log or a window a refund
/// is limited by what still counts of the charge, so no limit is needed here. A refill at intervals may not have
/// happened yet.
fn min_drained_in(policies: &Policies, time: Duration) -> u32 {
    let mut least = u32::MAX;
    for policy in policies {
        let drained = match policy.frees() {
            Frees::Gradually => policy.quota().units_in(time).saturating_sub(1),
            Frees::InBatches => 0,
            Frees::OneByOne
            | Frees::Fading
            | Frees::WithWindow
            | Frees::WithCell
            | Frees::OnRelease => u32::MAX,
        };
        least = least.min(drained);
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Policy, Quota, Strategy, Verdict};

    #[test]
    fn expired_parts_are_not_refunded() {
        let (key, second) = (Key::GLOBAL, Duration::from_secs(1));
        let policies = Policy::new("five", Strategy::Gcra, Quota::per_second(5)).unwrap();
        let policies = policies.into();
        let verdict = Verdict::allowed().with_reset_after(second);
        let whole = Check::take(key, &policies, 2).decided(Source::Redis, 2, |_| verdict);
        let part = part(&whole, Check::take(key, &policies, 1), 1, second / 2);
        let just_before = Duration::from_micros(499_999);
        for (age, refunds) in [(just_before, 1), (second / 2, 0)] {
            assert_eq!(
                part.refund(key, 1, age).iter().count(),
                refunds,
                "after {age:?}"
            );
        }
    }
}
