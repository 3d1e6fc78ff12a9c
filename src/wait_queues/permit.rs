use std::time::Duration;

use tokio::time::Instant;

use super::QueueRef;
use crate::background::PendingOp;
use crate::held_slots::Slot;
use crate::limit::{Charge, Decision, Policies};
use crate::util::instant;

/// A charged cost that may be used once, when it is due.
///
/// Dropped unused, it passes to the first waiter of its queue if that has the same cost; otherwise, and if its runtime
/// ends before it is due, it is refunded.
#[must_use]
pub(crate) struct Permit {
    queue_ref: QueueRef,
    charge: Charge,
    due: Instant,
    /// The slot under policies of requests in flight, released with the permit.
    slot: Option<Slot>,
    /// `false` if it was used, or if its refund was sent, even if the store has rejected that.
    is_refundable: bool,
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
const EXPIRY_GRACE: Duration = Duration::from_secs(1);

impl Permit {
    /// A permit for the cost of this charge.
    pub(super) fn new(
        queue_ref: QueueRef,
        charge: Charge,
        due: Instant,
        slot: Option<Slot>,
    ) -> Self {
        Self {
            queue_ref,
            charge,
            due,
            slot,
            is_refundable: true,
        }
    }

    pub(super) fn cost(&self) -> u32 {
        self.charge.cost()
    }

    pub(super) fn due(&self) -> Instant {
        self.due
    }

    pub(super) fn is_refundable(&self) -> bool {
        self.is_refundable
    }

    /// The decision, adjusted to a check that is allowed now.
    pub(crate) fn decision(&self) -> Decision {
        let decision = self.charge.decision().clone();
        let due = decision.due();
        let later = due.verdicts().later(self.age());
        due.with_verdicts(later)
    }

    /// Microseconds since it was due.
    fn age(&self) -> i64 {
        let age = instant().saturating_duration_since(self.due);
        i64::try_from(age.as_micros()).unwrap_or(i64::MAX)
    }

    /// The policies under which the charge has expired, unless it was due less than [`EXPIRY_GRACE`] ago.
    fn expired(&self) -> Option<Policies> {
        if instant() < self.due + EXPIRY_GRACE {
            return None;
        }
        let age = self.age();
        let decision = self.charge.decision().clone().due();
        let mut expired = vec![];
        for (policy, verdict) in self
            .queue_ref
            .policies
            .iter()
            .zip(&decision.verdicts().each)
        {
            if !policy.is_in_flight() && verdict.reset <= age {
                expired.push(policy.clone());
            }
        }
        // `None` without any: a list is never empty.
        Policies::new(expired).ok()
    }

    /// Uses the permit. The request is in flight while it holds the slot. An expired charge is made again:
    /// otherwise permits of several windows could be used in one.
    pub(crate) fn spend(mut self) -> Spent {
        self.is_refundable = false;
        if let Some(expired) = self.expired() {
            let charge = PendingOp::charge(self.queue_ref.id.key, &expired, self.charge.cost());
            self.queue_ref.queues.ops.put(charge);
        }
        Spent {
            decision: self.decision(),
            charge: self.charge.clone().due(),
            slot: self.slot.take(),
        }
    }

    /// Returns a refund of the part that still counts when it is sent. Then its drop does nothing.
    pub(super) fn refund(&mut self) -> PendingOp {
        self.is_refundable = false;
        let mut charge = self.charge.clone();
        if self.due <= instant() {
            charge = charge.due();
        }
        PendingOp::refund(charge, self.charge.cost())
    }

    /// Passes the permit to the first waiter if that needs one of this cost now. Returns whether it does.
    fn pass_on(&mut self) -> bool {
        if self.due > instant() || self.expired().is_some() {
            return false;
        }
        let queue_ref = self.queue_ref.clone();
        let passed = queue_ref.with(|queue| {
            let is_needed = queue.first_costs(self.cost());
            if is_needed {
                let charge = self.charge.clone();
                let slot = self.slot.take();
                // The task serves the waiter: an answer here, under the lock, would wake the user's task.
                queue.add_turn(Self::new(queue_ref.clone(), charge, self.due, slot));
                queue.wake.notify.notify_one();
            }
            is_needed
        });
        passed == Some(true)
    }

    /// Returns the permit for a waiter. If the waiter drops it, it is refunded, even if a refund was rejected before: a turn
    /// that is due is refunded like any charge.
    pub(super) fn for_waiter(mut self) -> Self {
        self.is_refundable = true;
        self
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.is_refundable {
            return;
        }
        if !self.pass_on() {
            let refund = self.refund();
            self.queue_ref.queues.ops.put(refund);
        }
    }
}
