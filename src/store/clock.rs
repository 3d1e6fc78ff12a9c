use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// Microseconds since the Unix epoch, from a clock that never goes back.
///
/// Read from the wall once and from then on from tokio's clock, which tests can pause.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    wall: Duration,
    start: Instant,
}

impl Clock {
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
    pub(super) fn new() -> Self {
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { wall, start: instant() }
    }

    pub(super) fn micros(&self) -> i64 {
        i64::try_from((self.wall + self.start.elapsed()).as_micros()).unwrap_or(i64::MAX)
    }
}

/// Now, by tokio's clock.
#[allow(clippy::disallowed_methods, reason = "the stores read the time here")]
pub(crate) fn instant() -> Instant {
    Instant::now()
}
