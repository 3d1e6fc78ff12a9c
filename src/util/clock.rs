use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// Longer than anything takes, and short enough to be multiplied and added to any time.
pub(crate) const FOREVER: Duration = Duration::from_secs(365 * 86_400);

/// Microseconds since the Unix epoch, from a clock that never goes back.
///
/// Reads the wall clock once and then adds the time of Tokio's clock, which tests can pause.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    /// The wall clock at `start`, in microseconds since the Unix epoch.
    wall_at_start: i64,
    start: Instant,
}

impl Clock {
    pub(crate) fn new() -> Self {
        // Only once: it may go back later, and a difference of instants cannot.
        let wall = unix_time();
        #[cfg(test)]
        let wall = super::Seed::wall().unwrap_or(wall);
        Self {
            wall_at_start: micros(wall),
            start: instant(),
        }
    }

    #[inline]
    pub(crate) fn micros(&self) -> i64 {
        self.micros_at(instant())
    }

    #[inline]
    pub(crate) fn micros_at(&self, instant: Instant) -> i64 {
        self.wall_at_start + micros(instant - self.start)
    }
}

/// Converts to whole microseconds. `Duration::as_micros` multiplies 128-bit numbers, which is
/// slower.
fn micros(duration: Duration) -> i64 {
    // At most 34,000 years, so that sums of times do not overflow.
    let seconds = duration.as_secs().min(1 << 40) as i64;
    seconds * 1_000_000 + i64::from(duration.subsec_micros())
}

/// Returns the current time of Tokio's clock.
#[allow(clippy::disallowed_methods, reason = "the stores read the time here")]
pub(crate) fn instant() -> Instant {
    #[cfg(test)]
    if let Some(now) = super::Seed::now() {
        return now;
    }
    Instant::now()
}

/// Returns the wall clock's time since the Unix epoch. It may go back, and tests cannot pause it.
#[allow(
    clippy::disallowed_methods,
    reason = "the one place that reads the wall clock"
)]
pub(crate) fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}
