//! Sliding counter: two fixed windows that stand for one that slides.
//!
//! **Idea.** Count what is granted in this window of the clock and in the one before. The sliding window overlaps a
//! part of the one before, and that part of its count is taken to be in it: a check of cost `c` is allowed while
//! `previous * (1 - elapsed / P) + current + c <= L`.
//!
//! **Cost.** One key, one read, one write, however high the limit.
//!
//! **When not.** It is an estimate: it takes what was granted in the window before to be spread evenly over it. If it
//! was not, more or less than the limit may pass in a period that straddles two windows, never more than twice the
//! limit. What is overlapped is rounded up: a single charge of the window before counts until that has left.
//!
//! **Source.** Cloudflare, "How we built rate limiting capable of scaling to millions of domains" (2017).

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::{Frees, Params, Snapshot, Strategy};
use crate::limit::Charged;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// When the window of the last charge began.
    start: i64,
    /// What was granted in it.
    current: i64,
    /// What was granted in the window before.
    previous: i64,
}

/// Registers: when the window began that holds now, what was granted in it, and what in the window before.
impl Algorithm for State {
    fn frees(_: Strategy) -> Frees {
        Frees::Fading
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let Self {
            start: begun,
            current,
            previous,
        } = *self;
        let start = window_start(params, now);
        if begun >= start {
            return ([start, current, previous], begun > start);
        } else if begun >= start - params.period {
            return clean([start, 0, current]);
        }
        clean([start, 0, 0])
    }

    fn room(params: &Params, now: i64, [start, current, previous]: Registers) -> i64 {
        // What the window before still counts, rounded up: its share that the sliding window overlaps.
        let (overlap, rest) = mul_div(previous, start + params.period - now, params.period);
        params.capacity - current - overlap - i64::from(rest > 0)
    }

    fn wait(
        &self,
        params: &Params,
        now: i64,
        cost: i64,
        [start, current, previous]: Registers,
    ) -> i64 {
        let left = start + params.period - now;
        if current + cost <= params.capacity {
            return left - mul_div(params.period, params.capacity - current - cost, previous).0;
        }
        // In the next window, where this one is the one before.
        left + params.period - mul_div(params.period, params.capacity - cost, current).0
    }

    fn charge(
        &mut self,
        _params: &Params,
        _now: i64,
        cost: i64,
        [start, current, previous]: Registers,
    ) -> Registers {
        [start, current + cost, previous]
    }

    /// From the window of the charge, which was to be gone with the end of the next one: this window, or the one before.
    /// No two such times are less than a period apart, and what lies in between is the time that a check is on its way.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &Charged,
        registers: Registers,
    ) -> Refunded {
        let ([start, current, previous], period) = (registers, params.period);
        let ahead = 2 * (start + 2 * period - now - of.left());
        if ahead < period {
            let rest = (cost - current).max(0);
            return (
                [start, (current - cost).max(0), (previous - rest).max(0)],
                cost,
            );
        } else if ahead < 3 * period {
            return (
                [start, current, (previous - cost).max(0)],
                cost.min(previous),
            );
        }
        (registers, 0)
    }

    fn reset_after(params: &Params, now: i64, [start, current, previous]: Registers) -> i64 {
        let left = start + params.period - now;
        match (current, previous) {
            (0, 0) => 0,
            (0, _) => left,
            _ => left + params.period,
        }
    }

    fn save(
        &mut self,
        _params: &Params,
        _now: i64,
        _cost: i64,
        [start, current, previous]: Registers,
    ) {
        *self = Self {
            start,
            current,
            previous,
        };
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until }: Snapshot) -> Self {
        let start = window_start(params, now);
        let left = start + params.period - now;
        if until - now > left {
            return Self {
                start,
                current: used,
                previous: 0,
            };
        }
        // As much in the window before as still counts so much.
        let previous = i128::from(used) * i128::from(params.period) / i128::from(left);
        Self {
            start,
            current: 0,
            previous: previous.min(2 * i128::from(params.capacity)) as i64,
        }
    }
}

/// When the window of the clock began that holds `now`.
fn window_start(params: &Params, now: i64) -> i64 {
    now - now.rem_euclid(params.period)
}

/// `n * x / d`, rounded down, and the rest. `x` is at most `d`, so that the quotient is at most `n`.
fn mul_div(n: i64, x: i64, d: i64) -> (i64, i64) {
    let (product, d) = (i128::from(n) * i128::from(x), i128::from(d));
    ((product / d) as i64, (product % d) as i64)
}

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let (limit, period) = (model.limit, model.period);
    let window = |time: i128| time.div_euclid(period);
    let current = model.granted(|time| window(time) == window(now));
    let previous = model.granted(|time| window(time) == window(now) - 1);
    let elapsed = now.rem_euclid(period);
    previous * (period - elapsed) + (current + cost) * period <= limit * period
}
