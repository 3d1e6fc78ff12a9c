use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use crate::store::Digest;
use crate::util::Clock;

/// Detects busy callers in constant memory.
///
/// Only one check in [`OFTEN`] reads a clock, because most callers are not busy and pay nothing else. A cell counts the
/// checks of the callers that share it and stores the time of its last full count. An idle caller that shares a cell with a
/// busy one may be taken for busy: it gets a block, which is refunded unspent.
pub(super) struct HotCallers {
    /// The number of checks in the lowest bits, and the time of the last full count in the others.
    cells: Box<[AtomicU32]>,
    clock: Clock,
}

const CELLS: usize = 1 << 16;
/// Minimum number of checks within a lease time of a busy caller. With fewer, a block saves less than it costs.
pub(super) const OFTEN: u32 = 1 << COUNT_BITS;
const COUNT_BITS: u32 = 3;
/// Times are in units of 2^`UNIT_BITS` microseconds, about 0.25 ms. They wrap around after a day and a half; a caller
/// that sends a check at that moment may be taken for busy.
const UNIT_BITS: u32 = 8;

impl HotCallers {
    pub(super) fn new() -> Self {
        Self {
            cells: (0..CELLS).map(|_| AtomicU32::new(0)).collect(),
            clock: Clock::new(),
        }
    }

    /// Counts a check. Returns `true` if it is the last of [`OFTEN`] checks within `time`. Concurrent checks may be
    /// missed.
    pub(super) fn count(&self, caller: Digest, time: Duration) -> bool {
        let cell = &self.cells[caller.part(CELLS)];
        let last = cell.load(Relaxed);
        let count = last % OFTEN + 1;
        if count < OFTEN {
            cell.store(last + 1, Relaxed);
            return false;
        }
        let now = ((self.clock.micros() >> UNIT_BITS) as u32) << COUNT_BITS;
        cell.store(now, Relaxed);
        let units = now.wrapping_sub(last - last % OFTEN) >> COUNT_BITS;
        Duration::from_micros(u64::from(units) << UNIT_BITS) < time
    }
}
