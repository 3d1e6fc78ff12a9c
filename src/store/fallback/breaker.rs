//! The circuit breaker: when to stop asking the primary store.
//!
//! A state machine without a clock: `now` is passed in, in microseconds.
//!
//! | state | until | who is admitted |
//! |---|---|---|
//! | closed | a check fails | every check |
//! | half-open | a trial is answered, or `threshold` failures count | one check at a time, as a trial |
//! | open | [`close`](Breaker::close) | nobody |
//!
//! It is half-open before it opens. After that a probe tries the primary store, off the request path, and no request.
//!
//! A failure counts if its check was sent when the one before was known: the first one of a streak, and then those of
//! trials. So all checks of one call count once, and so do all that were under way when the primary store fell silent. Only
//! these wait for the deadline then, and the trials after them, one after the other. A trial that ends only after the
//! next one was admitted counts as little as what was under way before it.

use std::num::NonZeroU32;
use std::time::Duration;

use super::sync::{AtomicU8, Mutex, Ordering, lock};

#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    /// What `streak` comes to. A check reads it without the lock.
    state: AtomicU8,
    streak: Mutex<FailureStreak>,
}

const CLOSED: u8 = 0;
const HALF_OPEN: u8 = 1;
const OPEN: u8 = 2;

/// Failures with no answer in between.
#[derive(Debug, Default)]
struct FailureStreak {
    /// Those that count.
    failures: u32,
    /// The check that was admitted, if there is one, and until when to wait for it.
    trial: Option<(u64, i64)>,
    /// How many trials there have ever been: each has a number.
    trials: u64,
    opened_at: Option<i64>,
}

/// The right to ask the primary store, to be returned with what came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ticket {
    /// Of any check while the breaker is closed.
    Free,
    /// No other check is admitted until this one has an answer. By its number.
    Trial(u64),
    /// Of the recovery task, which asks without being admitted. It counts as a trial.
    Probe,
}

impl Breaker {
    pub(super) const FIRST_DELAY: Duration = Duration::from_millis(50);
    /// Short enough that all instances are back within a second, though each waits for the others' probes.
    pub(super) const LONGEST_DELAY: Duration = Duration::from_millis(250);

    pub(super) fn new(threshold: u32) -> Self {
        Self {
            threshold,
            state: AtomicU8::new(CLOSED),
            streak: Mutex::default(),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) == CLOSED
    }

    pub(super) fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) == OPEN
    }

    /// Whether a check may go to the primary store. Half-open, the next one may after `patience` at the latest, as a check
    /// whose caller has gone away never ends.
    pub(super) fn admit(&self, now: impl FnOnce() -> i64, patience: Duration) -> Option<Ticket> {
        match self.state.load(Ordering::Acquire) {
            CLOSED => return Some(Ticket::Free),
            OPEN => return None,
            _ => {}
        }
        let mut streak = lock(&self.streak);
        if streak.opened_at.is_some() {
            return None;
        } else if streak.failures == 0 {
            return Some(Ticket::Free);
        }
        let now = now();
        if streak.trial.is_some_and(|(_, until)| now < until) {
            return None;
        }
        let patience = i64::try_from(patience.as_micros()).unwrap_or(i64::MAX);
        streak.trials += 1;
        streak.trial = Some((streak.trials, now.saturating_add(patience)));
        Some(Ticket::Trial(streak.trials))
    }

    /// The primary store has answered. Half-open, only a trial counts: what was under way before may have been answered
    /// before the failure.
    pub(super) fn succeeded(&self, ticket: Ticket) {
        if ticket != Ticket::Free && self.state.load(Ordering::Acquire) == HALF_OPEN {
            let mut streak = lock(&self.streak);
            if streak.opened_at.is_none() && streak.accepts(ticket) {
                self.end(&mut streak);
            }
        }
    }

    /// A check or a probe failed. `true` for the one failure that opens the breaker, as one that is
    /// `lasting` does at once.
    pub(super) fn failed(&self, ticket: Ticket, lasting: bool, now: i64) -> bool {
        let mut streak = lock(&self.streak);
        if streak.opened_at.is_some() {
            return false;
        }
        if streak.accepts(ticket) || streak.failures == 0 {
            streak.failures = streak.failures.saturating_add(1);
        }
        streak.release(ticket);
        let opens = lasting || streak.failures >= self.threshold;
        streak.opened_at = opens.then_some(now);
        self.state
            .store(if opens { OPEN } else { HALF_OPEN }, Ordering::Release);
        opens
    }

    /// A check was answered or failed in a way that says nothing of the primary store.
    pub(super) fn learned_nothing(&self, ticket: Ticket) {
        if ticket != Ticket::Free {
            lock(&self.streak).release(ticket);
        }
    }

    /// The primary store decides again. For how long the breaker was open, if it was.
    pub(super) fn close(&self, now: i64) -> Option<Duration> {
        let mut streak = lock(&self.streak);
        let opened_at = streak.opened_at;
        self.end(&mut streak);
        opened_at
            .map(|opened_at| Duration::from_micros(u64::try_from(now - opened_at).unwrap_or(0)))
    }

    fn end(&self, streak: &mut FailureStreak) {
        *streak = FailureStreak {
            trials: streak.trials,
            ..FailureStreak::default()
        };
        self.state.store(CLOSED, Ordering::Release);
    }

    /// Wait before the next probe, by the number of probes in this outage. It doubles up to `longest`.
    pub(super) fn delay(probes: u32, longest: Duration) -> Duration {
        Self::FIRST_DELAY
            .saturating_mul(1 << probes.min(10))
            .min(longest)
    }

    /// Longest wait between two probes.
    pub(super) fn longest_delay(instances: NonZeroU32) -> Duration {
        Self::spread(instances).max(Self::LONGEST_DELAY)
    }

    /// Time over which all instances spread a check of each: at most two checks per millisecond.
    pub(super) fn spread(instances: NonZeroU32) -> Duration {
        Duration::from_micros(500) * instances.get()
    }
}

impl FailureStreak {
    /// Whether the outcome of a check counts in this streak.
    fn accepts(&self, ticket: Ticket) -> bool {
        match ticket {
            Ticket::Free => false,
            Ticket::Trial(number) => self.trial.is_some_and(|(trial, _)| trial == number),
            Ticket::Probe => true,
        }
    }

    /// Admits another trial after this one.
    fn release(&mut self, ticket: Ticket) {
        if ticket != Ticket::Probe && self.accepts(ticket) {
            self.trial = None;
        }
    }
}
