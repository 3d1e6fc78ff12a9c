//! The figures of an outage, which all partitions share, for its reports.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::observe::Event;
use crate::util::lock;

/// Interval between two reports of an outage that continues.
const INTERVAL: i64 = 60_000_000;

#[derive(Debug, Default)]
pub(super) struct Outage {
    breakers: Mutex<OpenBreakers>,
    /// The checks decided locally.
    checks: AtomicU64,
    /// The cost granted by these.
    granted: AtomicU64,
    charged: AtomicU64,
    dropped: AtomicU64,
}

/// Times are in microseconds.
#[derive(Debug, Default)]
struct OpenBreakers {
    /// Number of partitions with an open breaker. Briefly too small by one if a breaker closes immediately after it has
    /// opened.
    count: i64,
    since: i64,
    reported: i64,
}

impl Outage {
    /// Records that a breaker has opened. Returns `true` if it is the first one.
    pub(super) fn opened(&self, now: i64) -> bool {
        let mut breakers = lock(&self.breakers);
        breakers.count += 1;
        let is_first = breakers.count == 1;
        if is_first {
            breakers.since = now;
            breakers.reported = now;
        }
        is_first
    }

    /// Records that a breaker has closed after this time. Returns the report if it was the last one.
    pub(super) fn closed(&self, after: Duration) -> Option<Event<'static>> {
        let mut breakers = lock(&self.breakers);
        breakers.count -= 1;
        (breakers.count == 0).then(|| Event::Recovered {
            after,
            checks: self.checks.swap(0, Relaxed),
            granted: self.granted.swap(0, Relaxed),
            charged: self.charged.swap(0, Relaxed),
            dropped: self.dropped.swap(0, Relaxed),
        })
    }

    pub(super) fn decided(&self, granted: u32) {
        self.checks.fetch_add(1, Relaxed);
        self.granted.fetch_add(granted.into(), Relaxed);
    }

    pub(super) fn reconciled(&self, charged: u64, dropped: u64) {
        self.charged.fetch_add(charged, Relaxed);
        self.dropped.fetch_add(dropped, Relaxed);
    }

    /// Returns how long an outage has continued and how many checks were decided locally, if the last report was a minute
    /// ago.
    pub(super) fn due(&self, now: i64) -> Option<(Duration, u64)> {
        let mut breakers = lock(&self.breakers);
        if breakers.count <= 0 || now - breakers.reported < INTERVAL {
            return None;
        }
        breakers.reported = now;
        let after = Duration::from_micros(u64::try_from(now - breakers.since).unwrap_or(0));
        Some((after, self.checks.load(Relaxed)))
    }

    /// Drops the figures of failures that opened no breaker.
    pub(super) fn forget_failures(&self) {
        let breakers = lock(&self.breakers);
        if breakers.count <= 0 {
            for figure in [&self.checks, &self.granted, &self.charged, &self.dropped] {
                figure.store(0, Relaxed);
            }
        }
    }
}
