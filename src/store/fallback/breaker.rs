//! The circuit breaker: decides which checks are sent to the primary store.
//!
//! A state machine without a clock: `now` is passed in, in microseconds.
//!
//! | state | until | admitted checks |
//! |---|---|---|
//! | closed | a check fails | all |
//! | half-open | a trial or probe succeeds, or `threshold` failures count | one at a time, as a trial |
//! | open | [`close`](Breaker::close) | none; the recovery task sends probes |
//!
//! The breaker is half-open only before it opens. The first failure of a streak counts, and then the failures of trials
//! and probes. So all checks of one call, and all checks in flight when the primary store stalls, count as one failure.
//! Only these checks wait for the deadline, and the trials after them, one at a time.

use std::num::NonZeroU32;
use std::time::Duration;

use super::sync::{AtomicU8, Mutex, Ordering, lock};

#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    /// The state that follows from `streak`, which checks read without the lock.
    state: AtomicU8,
    streak: Mutex<FailureStreak>,
}

const CLOSED: u8 = 0;
const HALF_OPEN: u8 = 1;
const OPEN: u8 = 2;

/// Failures without a success in between.
#[derive(Debug, Default)]
struct FailureStreak {
    /// The failures that count.
    failures: u32,
    /// Whether a trial is in flight. If it is never polled, a probe ends the streak.
    has_trial: bool,
    opened_at: Option<i64>,
}

/// Permission to send a check to the primary store. Report its outcome to the breaker, also if it is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ticket {
    /// A check while the breaker is closed.
    Free,
    /// The only check of a half-open breaker, until its outcome is reported.
    Trial,
    /// A probe of the recovery task, which needs no admission. Its outcome counts like that of a trial.
    Probe,
}

impl Breaker {
    pub(super) const FIRST_DELAY: Duration = Duration::from_millis(50);
    /// Maximum pause between two probes of up to 500 instances. Short enough that all recover within a second, although
    /// each waits for the probes of the others.
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

    /// Returns permission to send a check to the primary store, or `None`.
    pub(super) fn admit(&self) -> Option<Ticket> {
        // Without the lock, since every check gets here.
        match self.state.load(Ordering::Acquire) {
            CLOSED => return Some(Ticket::Free),
            OPEN => return None,
            _ => {}
        }
        let mut streak = lock(&self.streak);
        // It may have opened since the load.
        if streak.opened_at.is_some() || streak.has_trial {
            return None;
        }
        // It may have closed since the load.
        if streak.failures == 0 {
            return Some(Ticket::Free);
        }
        streak.has_trial = true;
        Some(Ticket::Trial)
    }

    /// Reports a reply of the primary store. While half-open, only that of a trial or probe counts: other checks may
    /// have been decided before the failure.
    pub(super) fn succeeded(&self, ticket: Ticket) {
        // A free check may have been answered before the first failure, so its success shows nothing.
        if ticket != Ticket::Free && self.state.load(Ordering::Acquire) == HALF_OPEN {
            let mut streak = lock(&self.streak);
            // Once open, it stays open until the local grants are reconciled.
            if streak.opened_at.is_none() {
                self.end(&mut streak);
            }
        }
    }

    /// Reports the failure of a check or probe. A `lasting` failure opens the breaker immediately. Returns `true` if
    /// the breaker opens.
    pub(super) fn failed(&self, ticket: Ticket, lasting: bool, now: i64) -> bool {
        let mut streak = lock(&self.streak);
        if streak.opened_at.is_some() {
            return false;
        }
        // The free checks of a streak were in flight at its first failure, and count as one with it.
        if ticket != Ticket::Free || streak.failures == 0 {
            streak.failures = streak.failures.saturating_add(1);
        }
        streak.has_trial &= ticket != Ticket::Trial;
        let opens = lasting || streak.failures >= self.threshold;
        streak.opened_at = opens.then_some(now);
        self.state
            .store(if opens { OPEN } else { HALF_OPEN }, Ordering::Release);
        opens
    }

    /// Reports an outcome that is no evidence about the primary store, or that the check was dropped.
    pub(super) fn learned_nothing(&self, ticket: Ticket) {
        if ticket == Ticket::Trial {
            lock(&self.streak).has_trial = false;
        }
    }

    /// Closes the breaker. Returns how long it was open, or `None` if it was not.
    pub(super) fn close(&self, now: i64) -> Option<Duration> {
        let mut streak = lock(&self.streak);
        let opened_at = streak.opened_at;
        self.end(&mut streak);
        opened_at
            .map(|opened_at| Duration::from_micros(u64::try_from(now - opened_at).unwrap_or(0)))
    }

    fn end(&self, streak: &mut FailureStreak) {
        *streak = FailureStreak::default();
        self.state.store(CLOSED, Ordering::Release);
    }

    /// Pause before the next probe, which doubles with each probe of an outage, up to `longest`.
    pub(super) fn delay(probes: u32, longest: Duration) -> Duration {
        Self::FIRST_DELAY
            .saturating_mul(1 << probes.min(10))
            .min(longest)
    }

    /// Maximum pause between two probes.
    pub(super) fn longest_delay(instances: NonZeroU32) -> Duration {
        Self::spread(instances).max(Self::LONGEST_DELAY)
    }

    /// Time over which the instances spread one check of each, so that at most two are sent per millisecond.
    pub(super) fn spread(instances: NonZeroU32) -> Duration {
        Duration::from_micros(500) * instances.get()
    }
}
