use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::Tracker;
use crate::util::instant;

/// Who looks after the entries: one task at a time, on the runtime of whoever came first. If that ends or stands still,
/// whoever comes next on another takes over.
#[derive(Debug)]
pub(super) struct Heartbeat {
    start: Instant,
    /// When the renewer was last seen, in microseconds since the start.
    beat: AtomicI64,
    /// The number of the last renewer.
    renewer: AtomicU64,
    /// When entries were last looked at to renew them.
    looked: AtomicI64,
    /// The shortest lease time, in microseconds.
    shortest: AtomicI64,
}

/// How often the renewer looks for what is in doubt.
const TICK: Duration = Duration::from_millis(250);
/// After how long without a beat another takes over.
const PATIENCE: i64 = 2_000_000;
/// A beat of nobody.
const NEVER: i64 = i64::MIN / 2;

impl Heartbeat {
    pub(super) fn new(start: Instant) -> Self {
        let (beat, looked, shortest) = (AtomicI64::new(NEVER), AtomicI64::new(NEVER), AtomicI64::new(i64::MAX));
        Self { start, beat, renewer: AtomicU64::new(0), looked, shortest }
    }

    fn micros(&self, now: Instant) -> i64 {
        i64::try_from(now.saturating_duration_since(self.start).as_micros()).unwrap_or(i64::MAX)
    }

    /// Among the entries is one of this lease time.
    pub(super) fn note(&self, lease: Duration) {
        let lease = i64::try_from(lease.as_micros()).unwrap_or(i64::MAX);
        // Each request tells it, and hardly one makes it shorter.
        if lease < self.shortest.load(Ordering::Relaxed) {
            self.shortest.fetch_min(lease, Ordering::Relaxed);
        }
    }

    /// From one look to the next: what is renewed after a quarter of the lease time is renewed within a third.
    fn gap(&self) -> Duration {
        Duration::from_micros(self.shortest.load(Ordering::Relaxed).unsigned_abs() / 12)
    }

    /// Whether it is time to look at every entry.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let (now, gap) = (self.micros(now), self.gap().min(Duration::from_secs(1)).as_micros() as i64);
        let is_due = now.saturating_sub(self.looked.load(Ordering::Relaxed)) >= gap;
        if is_due {
            self.looked.store(now, Ordering::Relaxed);
        }
        is_due
    }

    /// Whether there is no renewer.
    fn is_left(&self, now: Instant) -> bool {
        self.micros(now).saturating_sub(self.beat.load(Ordering::Acquire)) >= PATIENCE
    }

    /// Whether there is none. Then the caller is the one of this number.
    fn enlist(&self, now: Instant) -> Option<u64> {
        let (now, beat) = (self.micros(now), self.beat.load(Ordering::Acquire));
        if now.saturating_sub(beat) < PATIENCE {
            return None;
        }
        self.beat.compare_exchange(beat, now, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        Some(self.renewer.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// Says that the renewer of this number is there. `false` if there is another.
    fn beat(&self, number: u64, now: Instant) -> bool {
        let is_current = self.renewer.load(Ordering::Acquire) == number;
        if is_current {
            self.beat.store(self.micros(now), Ordering::Release);
        }
        is_current
    }

    fn leave(&self, number: u64) {
        if self.renewer.load(Ordering::Acquire) == number {
            self.beat.store(NEVER, Ordering::Release);
        }
    }
}

impl Tracker {
    /// Starts a renewer, if there is none. Outside of a runtime there can be none: whoever comes does its work, before
    /// the store is asked.
    pub(super) fn attend(self: &Arc<Self>, now: Instant) {
        match Handle::try_current() {
            Ok(runtime) => {
                if let Some(number) = self.heartbeat.enlist(now) {
                    // A runtime that has ended drops it at once.
                    runtime.spawn(Renewer { tracker: Arc::clone(self), number }.run());
                }
            }
            Err(_) if self.heartbeat.is_left(now) => self.look(now),
            Err(_) => {}
        }
    }
}

struct Renewer {
    tracker: Arc<Tracker>,
    number: u64,
}

impl Renewer {
    async fn run(self) {
        loop {
            sleep(TICK.min(self.tracker.heartbeat.gap())).await;
            let now = instant();
            if !self.tracker.heartbeat.beat(self.number, now) {
                return;
            }
            self.tracker.look(now);
            if self.tracker.len.load(Ordering::Acquire) == 0 {
                self.tracker.heartbeat.leave(self.number);
                // Who came just before that has found a renewer.
                if self.tracker.len.load(Ordering::Acquire) > 0 {
                    self.tracker.attend(now);
                }
                return;
            }
        }
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        self.tracker.heartbeat.leave(self.number);
    }
}
