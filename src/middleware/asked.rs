use tokio::time::Instant;

use crate::limit::{Decision, Key};
use crate::settle::Reserved;
use crate::store::{Error, Observer, event, instant};

/// What an observer is told of a check beside its answer.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    key: Key,
    since: Instant,
    /// When it was charged, if that was before it was asked: as the turn of another.
    taken_at: Option<Instant>,
}

impl Asked {
    /// A check for this caller, asked now.
    pub(super) fn now(key: Key) -> Self {
        Self { key, since: instant(), taken_at: None }
    }

    /// The same of a permit that was taken then.
    pub(super) fn taken_at(self, taken_at: Instant) -> Self {
        Self { taken_at: Some(taken_at), ..self }
    }

    /// What was granted by this decision.
    pub(super) fn reserved(&self, decision: Decision) -> Reserved {
        Reserved::new(decision, self.key, self.taken_at.map_or(self.since, |at| at.min(self.since)))
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
