use std::cmp::Ordering;

use tokio::time::Instant;

use super::Post;
use super::mail::Mail;
use crate::limit::{Decision, Key};

/// What a decision has granted to a caller, until it is settled.
#[derive(Debug)]
pub(crate) struct Reserved {
    pub(super) decision: Decision,
    key: Key,
    /// When it was asked for, or before.
    since: Instant,
}

impl Reserved {
    pub(crate) fn new(decision: Decision, key: Key, since: Instant) -> Self {
        Self { decision, key, since }
    }

    /// How much.
    pub(super) fn cost(&self) -> u32 {
        self.decision.granted()
    }

    /// Has the caller charged `cost` instead.
    pub(super) fn settle(self, cost: u32, post: &dyn Post) {
        let reserved = self.cost();
        match cost.cmp(&reserved) {
            Ordering::Less => post.put(Mail::give_back(self.decision, self.key, reserved - cost, self.since)),
            Ordering::Equal => {}
            Ordering::Greater => {
                if let Some(policies) = self.decision.policies().whole().without_in_flight() {
                    post.put(Mail::charge(self.key, policies, cost - reserved));
                }
            }
        }
    }
}
