use std::time::Duration;

use tokio::time::Instant;

use crate::error::StoreError;
use crate::in_flight::Slot;
use crate::limit::{Decision, Key};
use crate::settle::Reserved;
use crate::util::instant;

/// A request's check, and the resources that the request owns once it is sent.
pub(crate) struct Question {
    key: Key,
    cost: u32,
    /// Time at which the check was sent. `None` if it is not needed.
    since: Option<Instant>,
    /// If the request waited: when its permit was charged, and the microseconds between the store's
    /// reply and the use of the permit.
    permit: Option<(Instant, i64)>,
    /// The slot under the policies that limit requests in flight.
    slot: Option<Slot>,
}

impl Question {
    /// Creates the question for a check of this caller at this cost.
    pub(crate) fn new(key: Key, cost: u32, since: Option<Instant>) -> Self {
        Self {
            key,
            cost,
            since,
            permit: None,
            slot: None,
        }
    }

    /// Stores the in-flight slot. Call it before the check is sent.
    #[inline]
    pub(super) fn hold(&mut self, slot: Option<Slot>) {
        self.slot = slot;
    }

    /// Stores the permit that the request has waited for, and its slot.
    pub(super) fn spend(&mut self, permit: Option<(Instant, i64)>, slot: Option<Slot>) {
        (self.permit, self.slot) = (permit, slot);
    }

    /// Passes the store's reply to the in-flight slot.
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

    /// The time since the check was sent; zero if it was not recorded.
    pub(super) fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| instant() - since)
    }

    /// The reservation that the decision granted. `None` if the send time was not recorded, or if
    /// the decision repeats an earlier one: the first request under an id settles its charge.
    pub(super) fn reserved(&self, decision: &Decision) -> Option<Reserved> {
        if decision.is_repeated() {
            return None;
        }
        let (charged_at, age) = self.permit.or(self.since.map(|since| (since, 0)))?;
        Some(Reserved::new(
            decision.clone().later(-age),
            self.key,
            self.cost,
            charged_at,
        ))
    }

    /// Moves out the in-flight slot.
    pub(super) fn take_slot(&mut self) -> Option<Slot> {
        self.slot.take()
    }
}
