use std::sync::atomic::{AtomicI64, Ordering};

use tokio::time::Instant;

use crate::util::Clock;

/// An estimate of Redis's time: this process's clock, plus the difference that was last seen.
#[derive(Debug)]
pub(crate) struct RedisClock {
    own: Clock,
    /// Microseconds that Redis is ahead of the own clock.
    ahead: AtomicI64,
}

impl RedisClock {
    pub(super) fn new() -> Self {
        Self {
            own: Clock::new(),
            ahead: AtomicI64::new(0),
        }
    }

    /// Returns the estimate in microseconds since the Unix epoch.
    pub(super) fn micros_at(&self, now: Instant) -> i64 {
        let ahead = self.ahead.load(Ordering::Relaxed);
        self.own.micros_at(now).saturating_add(ahead)
    }

    /// Records Redis's time.
    pub(in crate::store::redis) fn set(&self, at: i64) {
        let ahead = at.saturating_sub(self.own.micros());
        self.ahead.store(ahead, Ordering::Relaxed);
    }
}
