use std::mem;
use std::time::Duration;

use tokio::time::Instant;

use super::{LineRef, Place};
use crate::background::PendingOp;
use crate::in_flight::Slot;
use crate::limit::{Check, Decision, Key, Policies};
use crate::util::instant;

/// A permit that is due: its cost has been charged, and it may be used once.
///
/// Dropped unused, it passes to the first waiter if that has the same cost; otherwise it is refunded.
#[must_use]
pub(crate) struct Permit {
    charge: Charge,
    line: LineRef,
    /// The slot under policies of requests in flight, released with the permit.
    slot: Option<Slot>,
    is_used: bool,
}

/// The charge of a permit.
#[derive(Clone)]
pub(super) struct Charge {
    /// The store's decision on it.
    decision: Decision,
    key: Key,
    /// The policies of the line. The decision may be on a share of them.
    policies: Policies,
    pub(super) cost: u32,
    asked_at: Instant,
    /// Time from the reply until it is due, and that time.
    wait: Duration,
    pub(super) due: Instant,
}

/// A used permit.
pub(crate) struct Spent {
    /// Its decision, adjusted to the time of use.
    pub(crate) decision: Decision,
    /// The time of the charge, or of a turn the time at which it was due; and the microseconds since the reply.
    pub(crate) taken: (Instant, i64),
    /// Its slot in flight.
    pub(crate) slot: Option<Slot>,
}

/// Time after its due time for which an expired permit may be used without another charge.
const PATIENCE: Duration = Duration::from_secs(1);

impl Charge {
    pub(super) fn new(
        place: &Place,
        decision: Decision,
        cost: u32,
        asked_at: Instant,
        due: Instant,
    ) -> Self {
        Self {
            decision: decision.of_charge(cost),
            key: place.line.id.key,
            policies: place.policies.clone(),
            cost,
            asked_at,
            wait: due.saturating_duration_since(instant()),
            due,
        }
    }

    /// Returns whether a later charge may be added to this one: both were made in the same place, and this one still
    /// counts. A refund of the sum treats all of it as old as this one, so it never refunds too much.
    pub(super) fn joins(&self, later: &Self) -> bool {
        let place = |charge: &Self| mem::discriminant(&charge.decision.charged_at());
        place(self) == place(later) && self.expired().is_none()
    }

    /// Returns the charge with another cost: that of a part, or of the sum with a later charge.
    pub(super) fn of(&self, cost: u32) -> Self {
        Self {
            decision: self.decision.clone().of_charge(cost),
            cost,
            ..self.clone()
        }
    }

    /// The decision, adjusted to a check that is allowed now.
    fn decision(&self) -> Decision {
        self.decision.clone().due(self.cost).later(self.age())
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
        let (age, decision) = (self.age(), self.decision.clone().due(self.cost));
        let verdicts = decision.verdicts();
        let expired = self
            .policies
            .iter()
            .zip(verdicts)
            .filter(|(policy, (_, verdict))| !policy.is_in_flight() && verdict.reset <= age);
        Policies::new(expired.map(|(policy, _)| policy.clone())).ok()
    }

    /// Returns a refund of the part that still counts when the refund is sent.
    pub(super) fn refund(self) -> PendingOp {
        let policies = self.policies.clone();
        PendingOp::refund(self.key, &policies, move |now| self.refund_at(now))
    }

    fn refund_at(&self, now: Instant) -> Option<Check> {
        let age = now.saturating_duration_since(self.asked_at);
        self.decision.refund(self.key, self.cost, age).next()
    }
}

impl Permit {
    pub(super) fn new(line: LineRef, charge: Charge, slot: Option<Slot>) -> Self {
        Self {
            charge,
            line,
            slot,
            is_used: false,
        }
    }

    /// The decision, adjusted to the present time.
    pub(crate) fn decision(&self) -> Decision {
        self.charge.decision()
    }

    /// Uses the permit. The request is in flight while it holds the slot. An expired charge is charged again; otherwise
    /// permits could be saved up.
    pub(crate) fn spend(mut self) -> Spent {
        self.is_used = true;
        if let Some(expired) = self.charge.expired() {
            let Charge { key, cost, .. } = self.charge;
            let charge = PendingOp::charge(key, &expired, cost);
            self.line.queues.refunds.put(charge);
        }
        Spent {
            decision: self.charge.decision(),
            taken: (self.charge.asked_at + self.charge.wait, self.charge.age()),
            slot: self.slot.take(),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_used {
            return;
        }
        let Self { charge, line, .. } = &*self;
        let next = || line.with(|line| line.pop(charge.cost)).flatten();
        match charge.expired().is_none().then(next).flatten() {
            Some(next) => {
                let (line, charge) = (line.clone(), charge.clone());
                next.answer(Ok(Self::new(line, charge, self.slot.take())));
            }
            None => line.queues.refunds.put(charge.clone().refund()),
        }
    }
}
