use std::time::Duration;

use tokio::time::Instant;

use crate::background::PendingOp;
use crate::limit::{Check, Decision, Frees, Key, Policies, Strategy};
use crate::util::instant;

/// What was charged ahead for one caller, and is spent in memory until it is too old.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) key: Key,
    /// That of the whole block.
    decision: Decision,
    left: u32,
    /// How much of it was charged and not refunded by itself.
    charged: u32,
    /// Before the store charged it.
    asked_at: Instant,
    dies_at: Instant,
    /// Half-way from its arrival to its death.
    idle_at: Instant,
}

/// What came of taking a part of a block.
pub(super) enum Taken {
    /// It has too little left.
    TooLittle(Check),
    /// It was too old by then: nothing of it may be spent any more.
    TooOld(Check),
    Part(Decision),
}

impl Block {
    /// What this decision granted to an ask of this time, under policies that are leased for `lease`.
    pub(super) fn new(key: Key, decision: Decision, asked_at: Instant, lease: Duration) -> Self {
        // Windows end by the clock of the store, which charged it after it was asked for.
        let window = decision
            .verdicts()
            .filter(|(policy, _)| matches!(policy.strategy(), Some(Strategy::FixedWindow(_))));
        let ends = window
            .map(|(_, verdict)| Duration::from_micros(verdict.reset.max(0) as u64))
            .min();
        let lives = ends.map_or(lease, |ends| ends.min(lease));
        // Its last eighth is for a clock that runs slower than that of the store.
        let dies_at = asked_at + lives / 8 * 7;
        let granted = decision.granted();
        let now = instant();
        let idle_at = now + dies_at.saturating_duration_since(now) / 2;
        Self {
            key,
            left: granted,
            charged: granted,
            decision,
            asked_at,
            dies_at,
            idle_at,
        }
    }

    /// Takes the cost of a check out of it.
    ///
    /// The clock is read after that: if the process has stood still before, nothing that is too old is granted.
    pub(super) fn take(&mut self, check: Check, now: &impl Fn() -> Instant) -> Taken {
        let Some(left) = self.left.checked_sub(check.cost()) else {
            return Taken::TooLittle(check);
        };
        let untouched = std::mem::replace(&mut self.left, left);
        let now = now();
        if self.is_dead(now) {
            self.left = untouched;
            return Taken::TooOld(check);
        }
        Taken::Part(self.decision.part(check, left, now - self.asked_at))
    }

    pub(super) fn left(&self) -> u32 {
        self.left
    }

    pub(super) fn policies(&self) -> &Policies {
        self.decision.policies()
    }

    /// What the store had left when it charged the block.
    pub(super) fn remaining(&self) -> u32 {
        self.decision.remaining()
    }

    pub(super) fn granted(&self) -> u32 {
        self.decision.granted()
    }

    pub(super) fn is_dead(&self, now: Instant) -> bool {
        now >= self.dies_at
    }

    /// Returns `true` if nothing was spent of it in the first half of the time since it arrived.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        self.left == self.granted() && now >= self.idle_at
    }

    #[cfg(test)]
    pub(super) fn dies_at(&self) -> Instant {
        self.dies_at
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
/// window says.
fn flown_in(policies: &Policies, time: Duration) -> u32 {
    let flown = policies.iter().map(|policy| match policy.frees() {
        Frees::Gradually => policy.quota().units_in(time).saturating_sub(1),
        Frees::InBatches => policy
            .quota()
            .units_in_periods(time)
            .saturating_sub(policy.quota().limit()),
        Frees::OneByOne | Frees::Fading | Frees::WithWindow | Frees::OnRelease => u32::MAX,
    });
    flown.min().unwrap_or(0)
}
