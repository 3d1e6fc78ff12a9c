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
    state: Mutex<BreakerState>,
    /// Which state it is, so that checks need no lock. Written under the lock.
    mirror: AtomicU8,
}

const CLOSED: u8 = 0;
const HALF_OPEN: u8 = 1;
const OPEN: u8 = 2;

#[derive(Debug, Clone, Copy)]
enum BreakerState {
    Closed,
    HalfOpen {
        /// The failures of the streak that count.
        failures: u32,
        /// Whether a trial is in flight. If it is never polled, a probe ends the streak.
        has_trial: bool,
    },
    Open {
        since: i64,
    },
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
            state: Mutex::new(BreakerState::Closed),
            mirror: AtomicU8::new(CLOSED),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.mirror.load(Ordering::Acquire) == CLOSED
    }

    pub(super) fn is_open(&self) -> bool {
        self.mirror.load(Ordering::Acquire) == OPEN
    }

    /// Returns permission to send a check to the primary store, or `None`.
    pub(super) fn admit(&self) -> Option<Ticket> {
        // Without the lock, since every check gets here.
        match self.mirror.load(Ordering::Acquire) {
            CLOSED => return Some(Ticket::Free),
            OPEN => return None,
            _ => {}
        }
        match &mut *lock(&self.state) {
            // It has closed since the load.
            BreakerState::Closed => Some(Ticket::Free),
            BreakerState::HalfOpen { has_trial, .. } if !*has_trial => {
                *has_trial = true;
                Some(Ticket::Trial)
            }
            BreakerState::HalfOpen { .. } | BreakerState::Open { .. } => None,
        }
    }

    /// Reports a reply of the primary store. Closes a half-open breaker if it is that of a trial or probe: a free check may
    /// have been decided before the first failure. Changes nothing while it is open: the recovery task closes it.
    pub(super) fn succeeded(&self, ticket: Ticket) {
        if ticket != Ticket::Free && self.mirror.load(Ordering::Acquire) == HALF_OPEN {
            let mut state = lock(&self.state);
            if let BreakerState::HalfOpen { .. } = *state {
                self.set(&mut state, BreakerState::Closed);
            }
        }
    }

    /// Reports the failure of a check or probe. A `lasting` failure, as of one node of a cluster, opens the breaker
    /// immediately. Returns `true` if the breaker opens.
    pub(super) fn failed(&self, ticket: Ticket, lasting: bool, now: i64) -> bool {
        let mut state = lock(&self.state);
        let (mut failures, mut has_trial) = match *state {
            BreakerState::Closed => (0, false),
            BreakerState::HalfOpen {
                failures,
                has_trial,
            } => (failures, has_trial),
            BreakerState::Open { .. } => return false,
        };
        // The free checks of a streak were in flight at its first failure, and count as one with it.
        if failures == 0 || ticket != Ticket::Free {
            failures = failures.saturating_add(1);
        }
        has_trial &= ticket != Ticket::Trial;
        let opens = lasting || failures >= self.threshold;
        let next = if opens {
            BreakerState::Open { since: now }
        } else {
            BreakerState::HalfOpen {
                failures,
                has_trial,
            }
        };
        self.set(&mut state, next);
        opens
    }

    /// Reports an outcome that is no evidence about the primary store, or that the check was dropped.
    pub(super) fn learned_nothing(&self, ticket: Ticket) {
        if ticket == Ticket::Trial
            && let BreakerState::HalfOpen { has_trial, .. } = &mut *lock(&self.state)
        {
            *has_trial = false;
        }
    }

    /// Closes the breaker. Returns how long it was open, or `None` if it was not.
    pub(super) fn close(&self, now: i64) -> Option<Duration> {
        let mut state = lock(&self.state);
        let before = *state;
        self.set(&mut state, BreakerState::Closed);
        match before {
            BreakerState::Open { since } => Some(Duration::from_micros(
                u64::try_from(now - since).unwrap_or(0),
            )),
            BreakerState::Closed | BreakerState::HalfOpen { .. } => None,
        }
    }

    fn set(&self, state: &mut BreakerState, to: BreakerState) {
        *state = to;
        let mirror = match to {
            BreakerState::Closed => CLOSED,
            BreakerState::HalfOpen { .. } => HALF_OPEN,
            BreakerState::Open { .. } => OPEN,
        };
        self.mirror.store(mirror, Ordering::Release);
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
