//! Sliding window of cells: a log that is kept by the cell instead of by the charge.
//!
//! **Idea.** Cut time into cells of `P / cells` and count what is granted in each. A check of cost `c` is allowed while
//! the cells that are not wholly older than `P` and `c` make no more than `L`. A cell counts until its end has left the
//! window, so that this never admits more than the log would; a caller waits up to one cell longer.
//!
//! **Cost.** One key, one read, one write; in Redis 12 bytes for each cell that something was granted in.
//!
//! **When not.** Where the wait of one cell matters, or one cell would do.
//!
//! **Source.** Hashes of timestamps to counts; Istio's redisquota `ROLLING_WINDOW` (bucketDuration).

use super::charges::Charges;
use super::{Followed, Loaded, Terms, Twin, clean, dirty};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The sum of the cells.
    sum: i64,
    /// When each cell ends and what was granted in it, oldest first.
    cells: Charges,
}

/// Loaded: the sum of the cells within the period; one more than the cells at the front that are to go, or 0 if all
/// are; when the newest cell ends.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.period, terms.width, 0]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let old = self.cells.iter().take_while(|(ends, _)| *ends <= now - terms.period);
        let (gone, count) = old.fold((0, 0), |(gone, sum), (_, count)| (gone + 1, sum + count));
        let sum = (self.sum - count).clamp(0, 2 * terms.capacity);
        match self.cells.back() {
            Some((ends, _)) if sum > 0 && *ends > now - terms.period => {
                if *ends > cell_end(terms, now) {
                    // Of a clock that has gone back, or of wider cells: as if all had been charged now.
                    dirty([sum, 0, cell_end(terms, now)])
                } else {
                    clean([sum, 1 + gone, *ends])
                }
            }
            _ => clean([0, 0, 0]),
        }
    }

    fn room(terms: &Terms, _now: i64, [sum, ..]: Loaded) -> i64 {
        terms.capacity - sum
    }

    fn wait(&self, terms: &Terms, now: i64, cost: i64, [sum, head, newest]: Loaded) -> i64 {
        let mut last = newest;
        if head > 0 {
            let mut over = sum + cost - terms.capacity;
            for (ends, count) in self.cells.iter().skip(head as usize - 1) {
                last = *ends;
                over -= count;
                if over <= 0 {
                    break;
                }
            }
        }
        last + terms.period - now
    }

    fn charge(&mut self, terms: &Terms, now: i64, cost: i64, [sum, head, newest]: Loaded) -> Loaded {
        let sum = (sum + cost).max(0);
        if cost > 0 {
            [sum, head, cell_end(terms, now)]
        } else if sum > 0 && head > 0 {
            [sum, head, self.cells.give_back(-cost).unwrap_or(newest)]
        } else {
            [sum, head, newest]
        }
    }

    fn reset(terms: &Terms, now: i64, [sum, _, newest]: Loaded) -> i64 {
        if sum == 0 { 0 } else { newest + terms.period - now }
    }

    fn save(&mut self, _terms: &Terms, _now: i64, cost: i64, [sum, head, newest]: Loaded) {
        if head == 0 || sum == 0 {
            // One cell of everything that counts.
            self.cells.clear();
            if sum > 0 {
                self.cells.push_back((newest, sum));
            }
        } else {
            self.cells.drain(..head as usize - 1);
            match self.cells.back_mut() {
                Some((ends, count)) if cost > 0 && *ends == newest => *count += cost,
                _ if cost > 0 => self.cells.push_back((newest, cost)),
                _ => {}
            }
        }
        self.sum = sum;
    }

    fn resume(terms: &Terms, now: i64, Followed { used, until }: Followed) -> Self {
        // All that is used goes with the newest cell: some of it may have gone before.
        let ends = (until - terms.period).min(cell_end(terms, now));
        Self { sum: used, cells: Charges::one(ends, used) }
    }
}

/// When the cell of now ends.
fn cell_end(terms: &Terms, now: i64) -> i64 {
    now - now.rem_euclid(terms.width) + terms.width
}
