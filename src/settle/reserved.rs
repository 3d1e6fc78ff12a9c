use std::cmp::Ordering;

use tokio::time::Instant;

use crate::background::{OpQueue, PendingOp};
use crate::limit::{Check, Decision, Key};

/// What a decision has granted to a caller, until it is settled.
#[derive(Debug)]
pub(crate) struct Reserved {
    pub(crate) decision: Decision,
    key: Key,
    cost: u32,
    /// When it was asked for, or before.
    since: Instant,
}

impl Reserved {
    /// What was granted to a take of this cost.
    pub(crate) fn new(decision: Decision, key: Key, cost: u32, since: Instant) -> Self {
        Self {
            decision,
            key,
            cost,
            since,
        }
    }

    /// How much.
    pub(crate) fn cost(&self) -> u32 {
        self.cost
    }

    /// The refund of all of it now. `None` if nothing of it counts any more.
    pub(crate) fn refund(&self, now: Instant) -> Option<Check> {
        self.decision
            .refund(
                self.key,
                self.cost,
                now.saturating_duration_since(self.since),
            )
            .next()
    }

    /// What takes so much more for the caller. `None` if no policy counts costs.
    pub(crate) fn ask_more(&self, units: u32) -> Option<Check> {
        let policies = self.decision.policies().whole();
        Some(Check::take(self.key, policies.without_in_flight()?, units).reserving(true))
    }

    /// Has the caller charged `cost` instead.
    pub(crate) fn settle(self, cost: u32, ops: &OpQueue) {
        let reserved = self.cost();
        match cost.cmp(&reserved) {
            Ordering::Less => {
                let rest = Self {
                    cost: reserved - cost,
                    ..self
                };
                let policies = rest.decision.policies().clone();
                ops.put(PendingOp::refund(rest.key, &policies, move |now| {
                    rest.refund(now)
                }));
            }
            Ordering::Equal => {}
            Ordering::Greater => {
                // A request in flight counts as one, whatever it costs.
                if let Some(policies) = self.decision.policies().whole().without_in_flight() {
                    ops.put(PendingOp::charge(self.key, policies, cost - reserved));
                }
            }
        }
    }
}
