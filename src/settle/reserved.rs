use std::cmp::Ordering;

use tokio::time::Instant;

use crate::background::{OpQueue, PendingOp};
use crate::limit::{Check, Decision, Key};

/// A granted cost of one caller that is not settled yet.
#[derive(Debug)]
pub(crate) struct Reserved {
    pub(crate) decision: Decision,
    key: Key,
    cost: u32,
    /// Time at which the check was sent, or an earlier time. A refund computes the charge's age
    /// from it; a greater age refunds less.
    since: Instant,
}

impl Reserved {
    /// Creates a reservation of `cost`, granted by `decision`.
    pub(crate) fn new(decision: Decision, key: Key, cost: u32, since: Instant) -> Self {
        Self {
            decision,
            key,
            cost,
            since,
        }
    }

    /// Returns the reserved cost.
    pub(crate) fn cost(&self) -> u32 {
        self.cost
    }

    /// Returns the check that refunds everything at `now`. `None` if all of it has expired.
    pub(crate) fn refund(&self, now: Instant) -> Option<Check> {
        self.decision
            .refund(
                self.key,
                self.cost,
                now.saturating_duration_since(self.since),
            )
            .next()
    }

    /// Returns a check that takes `units` in addition. `None` if no policy counts costs.
    pub(crate) fn take_more(&self, units: u32) -> Option<Check> {
        let policies = self.decision.policies().whole();
        Some(Check::take(self.key, policies.without_in_flight()?, units).reserving(true))
    }

    /// Charges the caller `cost` instead: refunds the rest, or charges the missing part.
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
                // Policies of requests in flight count a request as one, regardless of its cost.
                if let Some(policies) = self.decision.policies().whole().without_in_flight() {
                    ops.put(PendingOp::charge(self.key, policies, cost - reserved));
                }
            }
        }
    }
}
