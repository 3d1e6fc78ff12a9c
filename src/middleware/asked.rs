use tokio::time::Instant;

use crate::limit::{Decision, Key};
use crate::store::{Error, Observer, event, instant};

/// What an observer is told of a check beside its answer.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    key: Key,
    since: Instant,
}

impl Asked {
    /// A check for this caller, asked now.
    pub(super) fn now(key: Key) -> Self {
        Self { key, since: instant() }
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
