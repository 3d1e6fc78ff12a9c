use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use crate::store::Digest;
use crate::util::Clock;

/// Finds the callers that come often, in memory that does not grow with callers, and reads a clock for one check in
/// [`OFTEN`] only: most callers come rarely, and this is all that they cost.
///
/// A cell counts the checks of some callers, and remembers when it has last counted so many. By chance a caller may share
/// one with a caller that comes often: then a block is charged for it, and refunded.
pub(super) struct HotCallers {
    /// In the lowest bits how many checks, and above when the last full count was.
    cells: Box<[AtomicU32]>,
    clock: Clock,
}

const CELLS: usize = 1 << 16;
/// How many checks within a lease time are often. Below that a block saves less than it costs.
pub(super) const OFTEN: u32 = 1 << COUNT_BITS;
const COUNT_BITS: u32 = 3;
/// Times are in units of 2 to this power of microseconds: about a quarter of a millisecond. They start again after a day
/// and a half, and a caller that comes just then may count as one that comes often.
const UNIT_BITS: u32 = 8;

impl HotCallers {
    pub(super) fn new() -> Self {
        Self {
            cells: (0..CELLS).map(|_| AtomicU32::new(0)).collect(),
            clock: Clock::new(),
        }
    }

    /// Counts a check. Returns whether it is the last of [`OFTEN`] within this time. Of checks at the same moment some may
    /// be missed.
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
