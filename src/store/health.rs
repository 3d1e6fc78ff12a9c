use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::error::{ErrorKind, StoreError};

/// How the checks of a store are decided at the moment, for health checks: see [`Store::health`](super::Store::health). As
/// text: `ok`, `local` or `failing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Health {
    /// As intended, or no check was sent yet.
    Ok,
    /// The fallback decides, since its primary store cannot.
    Local,
    /// No store decides: the last check has failed.
    Failing,
}

impl Health {
    /// Returns the name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Local => "local",
            Self::Failing => "failing",
        }
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The outcome of a store's last check that was answered.
#[derive(Debug, Default)]
pub(super) struct LastOutcome(AtomicU8);

/// Values of [`LastOutcome`]. 0: no check was answered yet.
const DECIDED: u8 = 1;
const FAILED: u8 = 2;

impl LastOutcome {
    /// Records the outcome of a check. An error that concerns this check only is no evidence if the store has decided others.
    pub(super) fn record<T>(&self, outcome: &Result<T, StoreError>) {
        let last = self.0.load(Relaxed);
        let new = match outcome {
            Ok(_) => DECIDED,
            Err(error) if last == DECIDED && !shows_failure(error) => DECIDED,
            Err(_) => FAILED,
        };
        // Does not write for each check: the threads of a service share it.
        if new != last {
            self.0.store(new, Relaxed);
        }
    }

    pub(super) fn health(&self) -> Health {
        match self.0.load(Relaxed) {
            FAILED => Health::Failing,
            _ => Health::Ok,
        }
    }
}

/// Returns `true` if an error is evidence that the store fails. A full queue is not: the outcome of the queued checks is.
pub(super) fn shows_failure(error: &StoreError) -> bool {
    !error.is_check_only() && error.kind() != ErrorKind::QueueFull
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_evidence_counts() {
        let last = LastOutcome::default();
        assert_eq!(last.health(), Health::Ok, "no check yet");
        let unreachable = Err(StoreError::new(ErrorKind::Unreachable));
        let forbidden = Err(StoreError::new(ErrorKind::Permission).check_only());
        let full = Err(StoreError::new(ErrorKind::QueueFull));
        for (outcome, expected) in [
            (&forbidden, Health::Failing),
            (&Ok(()), Health::Ok),
            (&forbidden, Health::Ok),
            (&full, Health::Ok),
            (&unreachable, Health::Failing),
            (&forbidden, Health::Failing),
            (&Ok(()), Health::Ok),
        ] {
            last.record(outcome);
            assert_eq!(last.health(), expected, "{outcome:?}");
        }
    }
}
