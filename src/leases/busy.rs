use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::util::{Clock, Digest};

/// Detects busy callers in constant memory.
///
/// Only one check in [`BUSY_CHECKS`] reads a clock, because most callers are not busy and pay nothing else. A cell counts the
/// checks of the callers that share it and stores the time of its last full count. An idle caller that shares a cell with a
/// busy one may be detected as busy: it gets a block, which is refunded unspent.
pub(super) struct BusyDetector {
    /// The time of the last full count in microseconds, a multiple of [`BUSY_CHECKS`], plus the number of checks since.
    cells: Box<[AtomicU64]>,
    clock: Clock,
}

const CELLS: usize = 1 << 16;
/// Minimum number of checks within a lease time of a busy caller. With fewer, a block saves less than it costs.
pub(super) const BUSY_CHECKS: u32 = 8;

impl BusyDetector {
    pub(super) fn new() -> Self {
        Self {
            cells: (0..CELLS).map(|_| AtomicU64::new(0)).collect(),
            clock: Clock::new(),
        }
    }

    /// Counts a check. Returns `true` if it is the last of [`BUSY_CHECKS`] checks within `time`. Concurrent checks may be
    /// missed.
    pub(super) fn count_check(&self, caller: Digest, time: Duration) -> bool {
        let needed = u64::from(BUSY_CHECKS);
        let cell = &self.cells[caller.part(CELLS)];
        let last = cell.load(Relaxed);
        if last % needed + 1 < needed {
            cell.store(last + 1, Relaxed);
            return false;
        }
        let now = self.clock.micros() as u64;
        cell.store(now - now % needed, Relaxed);
        Duration::from_micros(now.saturating_sub(last)) < time
    }
}
