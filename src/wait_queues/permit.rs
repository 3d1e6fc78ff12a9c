use std::time::Duration;

use tokio::time::Instant;

use super::LineRef;
use crate::background::PendingOp;
use crate::in_flight::Slot;
use crate::limit::{Charge, Decision, Policies};
use crate::util::instant;

/// A charged cost that may be used once, when it is due.
///
/// Dropped unused, it passes to the first waiter of its line if that has the same cost; otherwise, and if its runtime ends
/// before it is due, it is refunded.
#[must_use]
pub(crate) struct Permit {
    line: LineRef,
    charge: Charge,
    due: Instant,
    /// The slot under policies of requests in flight, released with the permit.
    slot: Option<Slot>,
    /// Whether it was used, or its refund was sent.
    is_used: bool,
}

/// A used permit.
pub(crate) struct Spent {
    /// Its decision, adjusted to the time of use.
    pub(crate) decision: Decision,
    pub(crate) charge: Charge,
    /// Its slot in flight.
    pub(crate) slot: Option<Slot>,
}

/// Time after its due time for which an expired permit may be used without another charge.
const PATIENCE: Duration = Duration::from_secs(1);

impl Permit {
    /// A permit for the cost of this charge.
    pub(super) fn new(line: LineRef, charge: Charge, due: Instant, slot: Option<Slot>) -> Self {
        Self {
            line,
            charge,
            due,
            slot,
            is_used: false,
        }
    }

    pub(super) fn cost(&self) -> u32 {
        self.charge.cost()
    }

    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Whether its refund was rejected.
    pub(super) fn refund_was_rejected(&self) -> bool {
        self.is_used
    }

    /// The decision, adjusted to a check that is allowed now.
    pub(crate) fn decision(&self) -> Decision {
        let decision = self.charge.decision().clone();
        decision.due().later(self.age())
    }

    /// Microseconds since it was due.
    fn age(&self) -> i64 {
        let age = instant().saturating_duration_since(self.due);
        i64::try_from(age.as_micros()).unwrap_or(i64::MAX)
    }

    /// The policies under which the charge has expired, unless it was due less than [`PATIENCE`] ago.
    fn expired(&self) -> Option<Policies> {
        if instant() < self.due + PATIENCE {
            return None;
        }
        let decision = self.charge.decision().clone().due();
        let (age, verdicts) = (self.age(), decision.verdicts());
        let expired = self.line.policies.iter().zip(verdicts);
        let expired =
            expired.filter(|(policy, (_, verdict))| !policy.is_in_flight() && verdict.reset <= age);
        Policies::new(expired.map(|(policy, _)| policy.clone())).ok()
    }

    /// Uses the permit. The request is in flight while it holds the slot. An expired charge is charged again; otherwise
    /// permits could be saved up.
    pub(crate) fn spend(mut self) -> Spent {
        self.is_used = true;
        if let Some(expired) = self.expired() {
            let charge = PendingOp::charge(self.line.id.key, &expired, self.charge.cost());
            self.line.queues.ops.put(charge);
        }
        let charge = self.charge.clone().due();
        Spent {
            decision: charge.decision().clone().later(self.age()),
            charge,
            slot: self.slot.take(),
        }
    }

    /// Returns a refund of the part that still counts when it is sent. Then its drop does nothing.
    pub(super) fn refund(&mut self) -> PendingOp {
        self.is_used = true;
        PendingOp::refund(self.charge.clone(), self.charge.cost())
    }

    /// Makes the permit usable, also after its refund was rejected.
    pub(super) fn reopen(mut self) -> Self {
        self.is_used = false;
        self
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_used {
            return;
        }
        let line = self.line.clone();
        let passes = self.due <= instant()
            && self.expired().is_none()
            && line.with(|here| {
                let is_needed = here.has_use_for(self.cost());
                if is_needed {
                    let charge = self.charge.clone();
                    here.add_turn(Self::new(line.clone(), charge, self.due, self.slot.take()));
                    here.wake.notify.notify_one();
                }
                is_needed
            }) == Some(true);
        if !passes {
            let refund = self.refund();
            self.line.queues.ops.put(refund);
        }
    }
}
