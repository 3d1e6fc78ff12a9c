//! The breaker: when to stop asking the primary store, and when to try again.
//!
//! A state machine without a clock: `now` is passed in, in microseconds. It is closed until `threshold` failures come
//! in a row, then open until a probe succeeds. Who is asked while it is open, and who probes, is the caller's affair.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    /// In a row.
    failures: AtomicU32,
    /// When it opened; [`CLOSED`] if it is not open.
    opened_at: AtomicI64,
}

const CLOSED: i64 = i64::MIN;

impl Breaker {
    const FIRST_DELAY: Duration = Duration::from_millis(50);
    /// Short enough that all instances are back within two seconds, though each waits for the others' probes.
    pub(super) const LONGEST_DELAY: Duration = Duration::from_millis(500);

    pub(super) fn new(threshold: u32) -> Self {
        Self { threshold, failures: AtomicU32::new(0), opened_at: AtomicI64::new(CLOSED) }
    }

    pub(super) fn is_open(&self) -> bool {
        self.opened_at.load(Relaxed) != CLOSED
    }

    /// A check succeeded.
    pub(super) fn succeeded(&self) {
        // Mostly zero already: a load is cheaper for the other cores than a store.
        if self.failures.load(Relaxed) != 0 {
            self.failures.store(0, Relaxed);
        }
    }

    /// A check failed. `true` for the one failure that opens the breaker.
    pub(super) fn failed(&self, now: i64) -> bool {
        self.failures.fetch_add(1, Relaxed).saturating_add(1) >= self.threshold
            && self.opened_at.compare_exchange(CLOSED, now, Relaxed, Relaxed).is_ok()
    }

    /// A probe succeeded. For how long the breaker was open, if it was.
    pub(super) fn close(&self, now: i64) -> Option<Duration> {
        self.failures.store(0, Relaxed);
        match self.opened_at.swap(CLOSED, Relaxed) {
            CLOSED => None,
            opened_at => Some(Duration::from_micros(u64::try_from(now - opened_at).unwrap_or(0))),
        }
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

    #[test]
    fn opens_once_at_the_threshold_and_closes_once() {
        let breaker = Breaker::new(3);
        assert!(!breaker.failed(10));
        assert!(!breaker.failed(20));
        assert!(!breaker.is_open());
        assert!(breaker.failed(30));
        assert!(breaker.is_open());
        assert!(!breaker.failed(40), "it is open already");
        assert_eq!(breaker.close(1_000_030), Some(Duration::from_secs(1)));
        assert!(!breaker.is_open());
        assert_eq!(breaker.close(1_000_040), None);
    }

    #[test]
    fn a_success_starts_the_count_again() {
        let breaker = Breaker::new(2);
        assert!(!breaker.failed(0));
        breaker.succeeded();
        assert!(!breaker.failed(1));
        assert!(breaker.failed(2));
    }

    #[test]
    fn failures_before_a_recovery_do_not_count_after_it() {
        let breaker = Breaker::new(2);
        breaker.failed(0);
        breaker.failed(1);
        breaker.close(2);
        assert!(!breaker.failed(3));
    }

    #[test]
    fn probes_back_off_up_to_half_a_second() {
        let delays: Vec<u128> = (0..8).map(|probes| Breaker::delay(probes, 0.0).as_millis()).collect();
        assert_eq!(delays, [50, 100, 200, 400, 500, 500, 500, 500]);
        assert_eq!(Breaker::delay(u32::MAX, 1.0), Duration::from_millis(250));
    }
}
