//! Sliding window of cells: a log with one entry per cell of time instead of one per charge.
//!
//! **Idea.** Divide time into cells of `P / cells` and count the grants in each. A check of cost
//! `c` is allowed while the cells that are not entirely older than `P` plus `c` are at most `L`. A
//! cell counts until its end has left the window, so this never grants more than the log would, but
//! a caller may wait up to one cell longer.
//!
//! **Cost.** One key, one read, one write; 12 bytes per cell with a grant, in Redis and here. Each
//! cell is stored with the running sum of all cells up to it, so binary search finds the cells that
//! must expire after a denial.
//!
//! **When not.** If a wait of one cell matters, or if one cell would be enough.
//!
//! **Source.** Hashes of timestamps to counts; Istio's redisquota `ROLLING_WINDOW` (bucketDuration).

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::charges::Charges;
use super::{Frees, Params, Snapshot, Strategy};
use crate::error::ConfigError;
use crate::limit::{PolicyCharge, Quota, duration, quota};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The end of each cell and the amount granted in it, oldest first.
    cells: Charges,
}

/// The index of the base if no cell counts.
const NOTHING: i64 = -1;

/// Registers: the sum of the cells within the period; the index of the last expired one, or
/// [`NOTHING`]; the end of the newest cell.
impl Algorithm for State {
    fn frees(_: Strategy) -> Frees {
        Frees::WithCell
    }

    fn adapt(strategy: Strategy, params: &mut Params, _: Quota) -> Result<(), ConfigError> {
        match strategy {
            Strategy::SlidingWindow {
                cells: cells @ 1..=1000,
            } => {
                params.width = (params.period as u64).div_ceil(cells.into()) as i64;
                Ok(())
            }
            Strategy::SlidingWindow { cells } => Err(ConfigError::new(format!(
                "a sliding window of {cells} cells: use 1 to 1000 cells"
            ))),
            _ => Ok(()),
        }
    }

    fn parameter(strategy: Strategy) -> Option<String> {
        let Strategy::SlidingWindow { cells } = strategy else {
            return None;
        };
        Some(format!("{cells} cells"))
    }

    /// Requires the unit: a number alone could be seconds.
    fn with_parameter(_: Strategy, text: &str) -> Result<Strategy, &'static str> {
        let (digits, unit) = duration::split(text);
        let cells = match unit.trim_start() {
            "cell" | "cells" => quota::whole(digits),
            _ => None,
        };
        let Some(cells) = cells else {
            return Err("its parameter is not a number of cells, such as `10 cells`");
        };
        // A number that does not fit is out of bounds in any case.
        Ok(Strategy::SlidingWindow {
            cells: u16::try_from(cells).unwrap_or(u16::MAX),
        })
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let start = now - params.period;
        let Some((head, sum, newest)) = self.cells.after(start) else {
            return clean([0, NOTHING, 0]);
        };
        // Cells in the future are from before the clock went back: treat them as charged now.
        let latest = cell_end(params, now);
        ([sum, head as i64, newest.min(latest)], newest > latest)
    }

    fn room(params: &Params, _now: i64, [sum, ..]: Registers) -> i64 {
        params.capacity - sum
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [sum, head, newest]: Registers) -> i64 {
        let over = sum + cost - params.capacity;
        let freeing = match head {
            NOTHING => None,
            head => self.cells.freeing(head as usize, over),
        };
        // A stored cell in the future expires as the current one: see `load`.
        let end = freeing.unwrap_or(newest).min(newest);
        end + params.period - now
    }

    fn charge(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        [sum, head, newest]: Registers,
    ) -> Registers {
        [sum + cost, head, newest.max(cell_end(params, now))]
    }

    /// Refunds a charge that still counts, starting at its cell: see the sliding log.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        registers: Registers,
    ) -> Refunded {
        let [sum, head, newest] = registers;
        if of.left() <= 0 {
            return (registers, 0);
        }
        let refunded = cost.min(sum);
        let left = sum - refunded;
        if head == NOTHING || left == 0 {
            return ([left, head, newest], refunded);
        }
        // First: the registers count the cells in the future as the current one.
        self.merge_later(params, now, head as usize);
        self.cells.take_out(head as usize, now - of.age, cost);
        let newest = self.cells.newest().unwrap_or(newest);
        ([left, head, newest], refunded)
    }

    fn reset_after(&self, params: &Params, now: i64, [sum, _, newest]: Registers) -> i64 {
        if sum == 0 {
            0
        } else {
            newest + params.period - now
        }
    }

    fn save(&mut self, params: &Params, now: i64, cost: i64, [sum, head, newest]: Registers) {
        if head == NOTHING || sum == 0 {
            self.cells.restart(newest, sum);
        } else {
            let head = head as usize;
            self.merge_later(params, now, head);
            if cost > 0 {
                self.cells.add(head, newest, cost);
            }
            self.cells.drop_before(head);
        }
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until, .. }: Snapshot) -> Self {
        // All used units expire together with the newest cell, although some may expire earlier.
        Self {
            cells: Charges::one((until - params.period).min(cell_end(params, now)), used),
        }
    }

    fn to_numbers(&self) -> Vec<i64> {
        self.cells.to_numbers()
    }

    fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let cells = Charges::of_numbers(numbers)?;
        Some(Self { cells })
    }
}

impl State {
    /// After the clock went back, merges all cells that end later than the current one into the
    /// current one.
    fn merge_later(&mut self, params: &Params, now: i64, head: usize) {
        let latest = cell_end(params, now);
        if self.cells.newest().is_some_and(|newest| newest > latest) {
            // Together with the current cell, if it is stored: two entries never have one end.
            let first = self.cells.first_after(head, latest - 1);
            self.cells.merge(first, latest);
        }
    }
}

/// Returns the end of the cell that contains a time.
fn cell_end(params: &Params, time: i64) -> i64 {
    time - time.rem_euclid(params.width) + params.width
}

/// The strategy's definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let Strategy::SlidingWindow { cells } = model.strategy else {
        unreachable!()
    };
    let limit = model.limit;
    let period = model.period;
    let width = (period + i128::from(cells) - 1) / i128::from(cells);
    let cell_end = |time: i128| (time.div_euclid(width) + 1) * width;
    let allowed = model.granted(|time| cell_end(time) > now - period) + cost <= limit;
    assert!(
        !allowed || model.granted(|time| time > now - period) + cost <= limit,
        "more than the log"
    );
    allowed
}
