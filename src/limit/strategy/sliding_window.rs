//! Sliding window of cells: a log that is kept by the cell instead of by the charge.
//!
//! **Idea.** Cut time into cells of `P / cells` and count what is granted in each. A check of cost `c` is allowed while
//! the cells that are not wholly older than `P` and `c` make no more than `L`. A cell counts until its end has left the
//! window, so that this never admits more than the log would; a caller waits up to one cell longer.
//!
//! **Cost.** One key, one read, one write; in Redis 12 bytes for each cell that something was granted in, and as many
//! here. Each cell is kept with the sum of all up to it, so that a denial finds those that must leave by a binary search.
//!
//! **Two quotas in turn**, of other cells or periods, keep the cells of both: a charge goes to the newest cell, or into
//! one after it if that ends before the one of now. Only what ends later than any cell of the period could is of a clock
//! that has gone back, and moves to the cell of now.
//!
//! **When not.** Where the wait of one cell matters, or one cell would do.
//!
//! **Source.** Hashes of timestamps to counts; Istio's redisquota `ROLLING_WINDOW` (bucketDuration).

use super::charges::Charges;
use super::{Followed, Loaded, Terms, Twin, clean, dirty};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// When each cell ends and what was granted in it, oldest first.
    cells: Charges,
}

/// The place of the base, where nothing counts.
const NOTHING: i64 = -1;

/// Loaded: the sum of the cells within the period; the place of the last that has left it, or [`NOTHING`]; when the newest
/// cell ends.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.period, terms.width, 0]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let Some((head, sum, newest)) = self.cells.after(now - terms.period) else { return clean([0, NOTHING, 0]) };
        if newest <= latest(terms, now) {
            return clean([sum, head as i64, newest]);
        }
        // Of a clock that has gone back, or of a longer period, since no cell of this one ends later: what does is as if it
        // had been charged now.
        let kept = self.cells.first_after(head, latest(terms, now)) - 1;
        let kept = if kept > head { self.cells.time(kept) } else { 0 };
        dirty([sum, head as i64, kept.max(cell_end(terms, now))])
    }

    fn room(terms: &Terms, _now: i64, [sum, ..]: Loaded) -> i64 {
        terms.capacity - sum
    }

    fn wait(&self, terms: &Terms, now: i64, cost: i64, [sum, head, newest]: Loaded) -> i64 {
        let frees = match head {
            NOTHING => None,
            head => self.cells.freeing(head as usize, sum + cost - terms.capacity),
        };
        let ends = frees.filter(|ends| *ends <= latest(terms, now));
        ends.unwrap_or(newest) + terms.period - now
    }

    fn charge(&mut self, terms: &Terms, now: i64, cost: i64, [sum, head, newest]: Loaded) -> Loaded {
        let sum = (sum + cost).max(0);
        if cost > 0 {
            return [sum, head, newest.max(cell_end(terms, now))];
        } else if sum > 0 && head != NOTHING {
            self.merge_late(terms, now, head as usize, newest);
            self.cells.give_back(head as usize, sum);
            return [sum, head, self.cells.newest().unwrap_or(newest)];
        }
        [sum, head, newest]
    }

    fn reset(terms: &Terms, now: i64, [sum, _, newest]: Loaded) -> i64 {
        if sum == 0 { 0 } else { newest + terms.period - now }
    }

    fn save(&mut self, terms: &Terms, now: i64, cost: i64, [sum, head, newest]: Loaded) {
        if head == NOTHING || sum == 0 {
            return self.cells.restart(newest, sum);
        }
        let head = head as usize;
        self.merge_late(terms, now, head, newest);
        if cost > 0 {
            self.cells.add(head, newest, cost);
        }
        self.cells.drop_before(head);
    }

    fn resume(terms: &Terms, now: i64, Followed { used, until }: Followed) -> Self {
        // All that is used goes with the newest cell: some of it may have gone before.
        Self { cells: Charges::one((until - terms.period).min(cell_end(terms, now)), used) }
    }
}

impl State {
    /// Makes one cell of those that end later than any of this period.
    fn merge_late(&mut self, terms: &Terms, now: i64, head: usize, ends: i64) {
        let latest = latest(terms, now);
        if self.cells.newest().is_some_and(|newest| newest > latest) {
            self.cells.merge(self.cells.first_after(head, latest), ends);
        }
    }
}

/// When a cell of this period ends at the latest.
fn latest(terms: &Terms, now: i64) -> i64 {
    now + terms.period
}

/// When the cell of now ends.
fn cell_end(terms: &Terms, now: i64) -> i64 {
    now - now.rem_euclid(terms.width) + terms.width
}
