//! The breaker: when to stop asking the primary store.
//!
//! A state machine without a clock: `now` is passed in, in microseconds.
//!
//! | state | until | who is let through |
//! |---|---|---|
//! | sound | a call fails | every check |
//! | doubtful | an answer comes, or `threshold` calls in a row have failed | one check at a time |
//! | open | [`close`](Breaker::close) | nobody |
//!
//! In doubt one check at a time is enough to find out. So when the primary store falls silent, only the checks that are
//! under way then wait for the deadline, and up to `threshold` that are let through one after the other.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use crate::store::lock;

#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    /// What `row` comes to. A check reads it without the lock.
    state: AtomicU8,
    row: Mutex<Row>,
}

const SOUND: u8 = 0;
const DOUBTFUL: u8 = 1;
const OPEN: u8 = 2;

/// Failures with no answer in between.
#[derive(Debug, Default)]
struct Row {
    /// One of each call, up to the threshold.
    failures: Vec<Failure>,
    /// Until when to wait for the check that was let through, if there is one.
    trial_until: Option<i64>,
    opened_at: Option<i64>,
}

/// What failed. All checks of one call fail together, and count once.
#[derive(Debug, Clone, Copy)]
pub(super) enum Failure {
    /// A call of the primary store, by a number of its own.
    Call(u64),
    /// A check that was made at this time and was part of no call that is known of: it ran out of its deadline, or the
    /// queue was full. Those of one moment were likely part of one call.
    Check(i64),
    /// What one check alone would not meet, and others always will: a node of a cluster refuses a batch. It opens the
    /// breaker by itself.
    Lasting,
}

impl Failure {
    /// How long a moment is.
    const MOMENT: u64 = 1_000;

    fn is_of_same_call(self, other: Self) -> bool {
        match (self, other) {
            (Self::Call(call), Self::Call(other)) => call == other,
            (Self::Check(made), Self::Check(other)) => made.abs_diff(other) < Self::MOMENT,
            _ => false,
        }
    }
}

/// Lets a check go to the primary store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// As any other.
    Free,
    /// No other is let through until this one has an answer.
    Trial,
}

impl Breaker {
    const FIRST_DELAY: Duration = Duration::from_millis(50);
    /// Short enough that all instances are back within two seconds, though each waits for the others' probes.
    pub(super) const LONGEST_DELAY: Duration = Duration::from_millis(500);

    pub(super) fn new(threshold: u32) -> Self {
        Self { threshold, state: AtomicU8::new(SOUND), row: Mutex::default() }
    }

    pub(super) fn is_sound(&self) -> bool {
        self.state.load(Ordering::Acquire) == SOUND
    }

    pub(super) fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) == OPEN
    }

    /// Whether a check may go to the primary store. In doubt, the next one may after `patience` at the latest, as
    /// nobody tells of a check whose caller has gone away.
    pub(super) fn admit(&self, now: impl FnOnce() -> i64, patience: Duration) -> Option<Pass> {
        match self.state.load(Ordering::Acquire) {
            SOUND => return Some(Pass::Free),
            OPEN => return None,
            _ => {}
        }
        let mut row = lock(&self.row);
        if row.opened_at.is_some() {
            return None;
        } else if row.failures.is_empty() {
            return Some(Pass::Free);
        }
        let now = now();
        if row.trial_until.is_some_and(|until| now < until) {
            return None;
        }
        let patience = i64::try_from(patience.as_micros()).unwrap_or(i64::MAX);
        row.trial_until = Some(now.saturating_add(patience));
        Some(Pass::Trial)
    }

    /// The primary store has answered.
    pub(super) fn succeeded(&self) {
        if self.state.load(Ordering::Acquire) == DOUBTFUL {
            let mut row = lock(&self.row);
            if row.opened_at.is_none() {
                self.set(&mut row, Row::default());
            }
        }
    }

    /// A check failed. `true` for the one failure that opens the breaker.
    pub(super) fn failed(&self, failure: Failure, pass: Pass, now: i64) -> bool {
        let mut row = lock(&self.row);
        if row.opened_at.is_some() {
            return false;
        }
        if pass == Pass::Trial {
            row.trial_until = None;
        }
        if !row.failures.iter().any(|other| failure.is_of_same_call(*other)) {
            row.failures.push(failure);
        }
        let opens = matches!(failure, Failure::Lasting) || row.failures.len() >= self.threshold as usize;
        row.opened_at = opens.then_some(now);
        self.state.store(if opens { OPEN } else { DOUBTFUL }, Ordering::Release);
        opens
    }

    /// A check was answered or failed in a way that says nothing of the primary store.
    pub(super) fn learned_nothing(&self, pass: Pass) {
        if pass == Pass::Trial {
            lock(&self.row).trial_until = None;
        }
    }

    /// The primary store decides again. For how long the breaker was open, if it was.
    pub(super) fn close(&self, now: i64) -> Option<Duration> {
        let mut row = lock(&self.row);
        let opened_at = row.opened_at;
        self.set(&mut row, Row::default());
        opened_at.map(|opened_at| Duration::from_micros(u64::try_from(now - opened_at).unwrap_or(0)))
    }

    fn set(&self, row: &mut Row, sound: Row) {
        *row = sound;
        self.state.store(SOUND, Ordering::Release);
    }

    /// How long to wait before the next probe, after so many in this outage: doubling up to half a second, and then
    /// shorter by up to a half, by `jitter` from 0 to 1, so that instances do not come back all at once.
    pub(super) fn delay(probes: u32, jitter: f64) -> Duration {
        let delay = Self::FIRST_DELAY.saturating_mul(1 << probes.min(10)).min(Self::LONGEST_DELAY);
        delay.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three failures of calls of their own, at 10, 20 and 30.
    fn fail(breaker: &Breaker) -> [bool; 3] {
        [10, 20, 30].map(|now| breaker.failed(Failure::Call(now as u64), Pass::Free, now))
    }

    #[test]
    fn opens_once_at_the_threshold_and_closes_once() {
        let breaker = Breaker::new(3);
        assert_eq!(fail(&breaker), [false, false, true]);
        assert!(breaker.is_open());
        assert!(!breaker.failed(Failure::Call(40), Pass::Free, 40), "it is open already");
        assert_eq!(breaker.close(1_000_030), Some(Duration::from_secs(1)));
        assert!(breaker.is_sound());
        assert_eq!(breaker.close(1_000_040), None);
    }

    #[test]
    fn a_success_starts_the_count_again() {
        let breaker = Breaker::new(4);
        for _ in 0..10 {
            assert_eq!(fail(&breaker), [false; 3]);
            breaker.succeeded();
            assert!(breaker.is_sound());
        }
    }

    #[test]
    fn failures_before_a_recovery_do_not_count_after_it() {
        let breaker = Breaker::new(4);
        fail(&breaker);
        breaker.close(40);
        assert_eq!(fail(&breaker), [false; 3]);
    }

    #[test]
    fn a_call_counts_once_in_whatever_order_its_checks_fail() {
        let breaker = Breaker::new(3);
        for call in [1, 2, 1, 2, 2, 1] {
            assert!(!breaker.failed(Failure::Call(call), Pass::Free, 0));
        }
        for made in [5_000, 5_999, 4_001] {
            assert_eq!(breaker.failed(Failure::Check(made), Pass::Free, 0), made == 5_000);
        }
        let breaker = Breaker::new(2);
        assert!(![7_000, 7_999, 6_001].map(|made| breaker.failed(Failure::Check(made), Pass::Free, 0)).contains(&true));
        assert!(breaker.failed(Failure::Check(8_000), Pass::Free, 0));
    }

    #[test]
    fn in_doubt_one_check_at_a_time_is_let_through() {
        let breaker = Breaker::new(3);
        let admit = |now: i64| breaker.admit(|| now, Duration::from_micros(100));
        assert_eq!(admit(0), Some(Pass::Free));
        breaker.failed(Failure::Call(1), Pass::Free, 0);
        assert_eq!([admit(0), admit(99), admit(100)], [Some(Pass::Trial), None, Some(Pass::Trial)]);
        // One that was under way before says nothing of the trial.
        breaker.failed(Failure::Call(1), Pass::Free, 110);
        assert_eq!(admit(110), None);
        breaker.failed(Failure::Call(2), Pass::Trial, 120);
        assert_eq!([admit(120), admit(120)], [Some(Pass::Trial), None]);
        breaker.learned_nothing(Pass::Trial);
        assert_eq!(admit(130), Some(Pass::Trial));
        breaker.succeeded();
        assert_eq!([admit(140), admit(140)], [Some(Pass::Free); 2]);
    }

    #[test]
    fn probes_back_off_up_to_half_a_second() {
        let delays: Vec<u128> = (0..8).map(|probes| Breaker::delay(probes, 0.0).as_millis()).collect();
        assert_eq!(delays, [50, 100, 200, 400, 500, 500, 500, 500]);
        assert_eq!(Breaker::delay(u32::MAX, 1.0), Duration::from_millis(250));
    }
}
