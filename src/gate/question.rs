use std::time::Duration;

use tokio::time::Instant;

use crate::error::StoreError;
use crate::in_flight::Lease;
use crate::limit::{Decision, Key};
use crate::settle::Reserved;
use crate::util::instant;

/// What the store is asked about a request, and what the request holds from then on.
#[derive(Debug)]
pub(crate) struct Question {
    key: Key,
    cost: u32,
    /// When it was asked. None if nobody wants to know.
    since: Option<Instant>,
    /// When the permit was charged that it waited for, which may have been for another waiter; and how many microseconds had
    /// passed since the store's answer when it was used.
    permit: Option<(Instant, i64)>,
    /// Of the policies that count requests in flight.
    lease: Option<Lease>,
}

impl Question {
    /// What this caller asks, at this cost.
    pub(crate) fn new(key: Key, cost: u32, since: Option<Instant>) -> Self {
        Self { key, cost, since, permit: None, lease: None }
    }

    /// Holds this while the request is in flight. To be called before the store is asked.
    #[inline]
    pub(super) fn hold(&mut self, lease: Option<Lease>) {
        self.lease = lease;
    }

    /// The request has waited for this permit.
    pub(super) fn spend(&mut self, permit: Option<(Instant, i64)>, lease: Option<Lease>) {
        (self.permit, self.lease) = (permit, lease);
    }

    /// The store has answered.
    pub(super) fn answered(&mut self, answer: &Result<Decision, StoreError>) {
        if let Some(lease) = &mut self.lease {
            lease.answered(answer.as_ref());
        }
    }

    pub(super) fn key(&self) -> Key {
        self.key
    }

    /// For how long it has waited for the answer.
    pub(super) fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| instant() - since)
    }

    /// What the decision has granted.
    pub(super) fn reserved(&self, decision: &Decision) -> Option<Reserved> {
        let (charged_at, age) = self.permit.or(self.since.map(|since| (since, 0)))?;
        Some(Reserved::new(decision.clone().later(-age), self.key, self.cost, charged_at))
    }

    /// What the request holds in flight.
    pub(super) fn take_lease(&mut self) -> Option<Lease> {
        self.lease.take()
    }
}
