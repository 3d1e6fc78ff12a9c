use tokio::time::Instant;

use crate::limit::{Decision, Key};
use crate::settle::Reserved;
use crate::store::{Error, Observer, event, instant};

/// What an observer is told of a check beside its answer.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    key: Key,
    /// How much was asked for.
    cost: u32,
    since: Instant,
    /// When what it waited for was taken, which may have been for another who waited.
    taken_at: Option<Instant>,
}

impl Asked {
    /// A check for this caller of this cost, asked now.
    pub(super) fn now(key: Key, cost: u32) -> Self {
        Self { key, cost, since: instant(), taken_at: None }
    }

    /// The same of a permit that was taken then.
    pub(super) fn taken_at(self, taken_at: Instant) -> Self {
        Self { taken_at: Some(taken_at), ..self }
    }

    /// What was granted by this decision.
    pub(super) fn reserved(&self, decision: Decision) -> Reserved {
        Reserved::new(decision, self.key, self.cost, self.taken_at.unwrap_or(self.since))
    }

    /// Tells what came of it.
    pub(super) fn tell(&self, observer: &dyn Observer, answer: &Result<Decision, Error>, dry_run: bool) {
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
