use std::time::Duration;

use tokio::time::Instant;

use crate::background::PendingOp;
use crate::limit::{Check, Decision, Frees, Key, Policies, Strategy};

/// What was charged ahead for one caller, and is spent in memory until it is too old.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) key: Key,
    /// The store's decision on the whole block.
    pub(super) decision: Decision,
    pub(super) left: u32,
    /// How much of it was charged and not refunded by itself.
    charged: u32,
    /// Before the store charged it.
    asked_at: Instant,
    pub(super) dies_at: Instant,
}

impl Block {
    /// Creates a block from the decision on a request that was sent at `asked_at`.
    pub(super) fn new(key: Key, decision: Decision, asked_at: Instant) -> Self {
        // Windows end by the clock of the store, which charged it after it was asked for.
        let windows = decision
            .verdicts()
            .filter(|(policy, _)| matches!(policy.strategy(), Some(Strategy::FixedWindow(_))))
            .map(|(_, verdict)| Duration::from_micros(verdict.reset.max(0) as u64));
        let lease = decision.policies().lease().map(|lease| lease.time);
        let lives = windows.chain(lease).min().unwrap_or_default();
        // Its last eighth is for a clock that runs slower than that of the store.
        let (granted, dies_at) = (decision.granted(), asked_at + lives / 8 * 7);
        Self {
            key,
            left: granted,
            charged: granted,
            decision,
            asked_at,
            dies_at,
        }
    }

    /// Takes the cost of a check, which is at most what is left.
    ///
    /// The clock is read after that: if the process has stood still before, nothing that is too old is granted.
    ///
    /// # Errors
    ///
    /// Returns the same check if the block is dead, so that nothing of it is spent.
    pub(super) fn take(
        &mut self,
        check: Check,
        now: &impl Fn() -> Instant,
    ) -> Result<Decision, Check> {
        let left = self.left;
        self.left = left.saturating_sub(check.cost());
        let now = now();
        if self.is_dead(now) {
            self.left = left;
            return Err(check);
        }
        Ok(self.decision.part(check, self.left, now - self.asked_at))
    }

    pub(super) fn is_dead(&self, now: Instant) -> bool {
        now >= self.dies_at
    }

    /// Notes that so much of what was spent is refunded, maybe of this block.
    pub(super) fn refunded(&mut self, cost: u32) {
        self.charged = self.charged.saturating_sub(cost).max(self.left);
    }

    /// What refunds the rest of it. What has been spent flows back first, but of that no more than by now: a part of it that is
    /// refunded later takes into account what flows back until then.
    pub(super) fn into_refund(self, now: Instant) -> PendingOp {
        let (key, policies) = (self.key, self.decision.policies().clone());
        let flown = flown_in(&policies, now.saturating_duration_since(self.asked_at));
        let decision = self
            .decision
            .of_charge(self.left.saturating_add(flown).min(self.charged));
        PendingOp::refund(key, &policies, move |now| {
            let age = now.saturating_duration_since(self.asked_at);
            decision
                .refund(self.key, self.left, age)
                .next()
                .map(Check::for_block)
        })
    }
}

/// How much of a charge flows back at least in this time, whatever else is charged: nothing counts longer than a log or a
/// window says. No batch is certain to.
fn flown_in(policies: &Policies, time: Duration) -> u32 {
    let flown = policies.iter().map(|policy| match policy.frees() {
        Frees::Gradually => policy.quota().units_in(time).saturating_sub(1),
        Frees::InBatches => 0,
        Frees::OneByOne | Frees::Fading | Frees::WithWindow | Frees::OnRelease => u32::MAX,
    });
    flown.min().unwrap_or(0)
}
