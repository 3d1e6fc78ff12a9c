use std::time::Duration;

use tokio::time::Instant;

use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Decision, Key};
use crate::refunds::Reserved;
use crate::util::instant;

/// The check of a request, and what the request holds from then on.
pub(crate) struct Question {
    key: Key,
    cost: u32,
    /// When it was sent. None if the time is not needed.
    since: Option<Instant>,
    /// When the permit was charged, and the microseconds from the store's answer to its use.
    permit: Option<(Instant, i64)>,
    /// Of the policies that count requests in flight.
    slot: Option<Slot>,
}

impl Question {
    /// The check of this caller, at this cost.
    pub(crate) fn new(key: Key, cost: u32, since: Option<Instant>) -> Self {
        Self {
            key,
            cost,
            since,
            permit: None,
            slot: None,
        }
    }

    /// Holds this while the request is in flight. Call it before the check is sent.
    #[inline]
    pub(super) fn hold(&mut self, slot: Option<Slot>) {
        self.slot = slot;
    }

    /// The request has waited for this permit.
    pub(super) fn spend(&mut self, permit: Option<(Instant, i64)>, slot: Option<Slot>) {
        (self.permit, self.slot) = (permit, slot);
    }

    /// The store has answered.
    #[inline]
    pub(super) fn answered(&mut self, answer: &Result<Decision, StoreError>) {
        if let Some(slot) = &mut self.slot {
            slot.answered(answer.as_ref());
        }
    }

    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    pub(super) fn cost(&self) -> u32 {
        self.cost
    }

    /// How long the answer took.
    pub(super) fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| instant() - since)
    }

    /// What the decision has granted.
    pub(super) fn reserved(&self, decision: &Decision) -> Option<Reserved> {
        let (charged_at, age) = self.permit.or(self.since.map(|since| (since, 0)))?;
        Some(Reserved::new(
            decision.clone().later(-age),
            self.key,
            self.cost,
            charged_at,
        ))
    }

    /// What the request holds in flight.
    pub(super) fn take_slot(&mut self) -> Option<Slot> {
        self.slot.take()
    }
}
