use tokio::time::Instant;

use crate::limit::{Decision, Key};
use crate::settle::Reserved;
use crate::store::{Observer, StoreError, event, instant};

/// What an observer is told of a check beside its answer.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    key: Key,
    /// How much was asked for.
    cost: u32,
    since: Instant,
    /// When what it waited for was taken, which may have been for another who waited; and how many microseconds had passed
    /// since the store's answer when it was told.
    taken: Option<(Instant, i64)>,
}

impl Asked {
    /// A check for this caller of this cost, asked now.
    pub(super) fn now(key: Key, cost: u32) -> Self {
        Self { key, cost, since: instant(), taken: None }
    }

    /// The same of a permit.
    pub(super) fn of_permit(self, taken: Option<(Instant, i64)>) -> Self {
        Self { taken, ..self }
    }

    /// What was granted by this decision.
    pub(super) fn reserved(&self, decision: Decision) -> Reserved {
        let (taken_at, age) = self.taken.unwrap_or((self.since, 0));
        Reserved::new(decision.later(-age), self.key, self.cost, taken_at)
    }

    /// Tells what came of it.
    pub(super) fn tell(&self, observer: &dyn Observer, answer: &Result<Decision, StoreError>, dry_run: bool) {
        match answer {
            Ok(decision) => {
                let mut event = event::Decided::new(&self.key, decision, instant() - self.since);
                event.dry_run = dry_run;
                observer.decided(&event);
            }
            Err(error) => observer.failed(&event::Failed::new(Some(&self.key), error)),
        }
    }
}
