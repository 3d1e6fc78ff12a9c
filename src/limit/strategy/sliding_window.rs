//! Sliding window of cells: a log that is kept by the cell instead of by the charge.
//!
//! **Idea.** Cut time into cells of `P / cells` and count what is granted in each. A check of cost `c` is allowed while
//! the cells that are not wholly older than `P` and `c` make no more than `L`. A cell counts until its end has left the
//! window, so that this never admits more than the log would; a caller waits up to one cell longer.
//!
//! **Cost.** One key, one read, one write; in Redis 12 bytes for each cell that something was granted in, and as many
//! here. Each cell is kept with the sum of all up to it, so that a denial finds those that must leave by a binary
//! search.
//!
//! **When not.** Where the wait of one cell matters, or one cell would do.
//!
//! **Source.** Hashes of timestamps to counts; Istio's redisquota `ROLLING_WINDOW` (bucketDuration).

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::charges::Charges;
use super::{Frees, Params, Snapshot, Strategy};
use crate::error::ConfigError;
use crate::limit::{Charged, Quota, duration, quota};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// When each cell ends and what was granted in it, oldest first.
    cells: Charges,
}

/// The place of the base, where nothing counts.
const NOTHING: i64 = -1;

/// Registers: the sum of the cells within the period; the place of the last that has left it, or [`NOTHING`]; when the
/// newest cell ends.
impl Algorithm for State {
    fn frees(_: Strategy) -> Frees {
        Frees::WithWindow
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
                "a sliding window of {cells} cells: cut it into 1 to 1000"
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

    /// A number alone could as well be seconds.
    fn with_parameter(_: Strategy, text: &str) -> Result<Strategy, &'static str> {
        let (digits, unit) = duration::split(text);
        let cells = quota::whole(digits).filter(|_| matches!(unit.trim_start(), "cell" | "cells"));
        let cells = cells.ok_or("its parameter is not a number of cells, such as `10 cells`")?;
        // One that does not fit is too large in any case.
        Ok(Strategy::SlidingWindow {
            cells: u16::try_from(cells).unwrap_or(u16::MAX),
        })
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let start = now - params.period;
        let Some((head, sum, newest)) = self.cells.after(start) else {
            return clean([0, NOTHING, 0]);
        };
        // After the clock has gone back, charges of later cells count as charged now.
        let latest = cell_end(params, now);
        ([sum, head as i64, newest.min(latest)], newest > latest)
    }

    fn room(params: &Params, _now: i64, [sum, ..]: Registers) -> i64 {
        params.capacity - sum
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [sum, head, newest]: Registers) -> i64 {
        let frees = match head {
            NOTHING => None,
            head => self
                .cells
                .freeing(head as usize, sum + cost - params.capacity),
        };
        frees.map_or(newest, |ends| ends.min(newest)) + params.period - now
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

    /// Of a charge that counts still, from its cell on: see the sliding log.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &Charged,
        registers: Registers,
    ) -> Refunded {
        let [sum, head, mut newest] = registers;
        if of.left() <= 0 {
            return (registers, 0);
        } else if sum > cost && head != NOTHING {
            self.merge_later(params, now, head as usize);
            self.cells.take_out(head as usize, now - of.age, cost);
            newest = self.cells.newest().unwrap_or(newest);
        }
        ([(sum - cost).max(0), head, newest], cost)
    }

    fn reset_after(params: &Params, now: i64, [sum, _, newest]: Registers) -> i64 {
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

    fn resume(params: &Params, now: i64, Snapshot { used, until }: Snapshot) -> Self {
        // All that is used goes with the newest cell: some of it may have gone before.
        Self {
            cells: Charges::one((until - params.period).min(cell_end(params, now)), used),
        }
    }
}

impl State {
    /// Makes one cell, that of now, of all that end later: they are of a clock that has gone back.
    fn merge_later(&mut self, params: &Params, now: i64, head: usize) {
        let latest = cell_end(params, now);
        if self.cells.newest().is_some_and(|newest| newest > latest) {
            self.cells
                .merge(self.cells.first_after(head, latest - 1), latest);
        }
    }
}

/// When the cell of a time ends.
fn cell_end(params: &Params, time: i64) -> i64 {
    time - time.rem_euclid(params.width) + params.width
}

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let Strategy::SlidingWindow { cells } = model.strategy else {
        unreachable!()
    };
    let (limit, period) = (model.limit, model.period);
    let width = (period + i128::from(cells) - 1) / i128::from(cells);
    let cell_end = |time: i128| (time.div_euclid(width) + 1) * width;
    let allowed = model.granted(|time| cell_end(time) > now - period) + cost <= limit;
    assert!(
        !allowed || model.granted(|time| time > now - period) + cost <= limit,
        "more than the log"
    );
    allowed
}
