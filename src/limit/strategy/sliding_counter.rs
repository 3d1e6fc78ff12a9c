//! Sliding counter: estimates a sliding window from two fixed windows.
//!
//! **Idea.** Count the grants in the current window of the clock and in the previous one. The
//! sliding window overlaps a part of the previous one, and the same part of its count is assumed to
//! be inside: a check of cost `c` is allowed while `previous * (1 - elapsed / P) + current + c <=
//! L`.
//!
//! **Cost.** One key, one read, one write, for any limit.
//!
//! **When not.** If an estimate is not enough: it assumes that the grants of the previous window
//! were spread evenly. If they were not, more or less than the limit may be granted in a period
//! that straddles two windows, but never more than twice the limit. The overlapping count is
//! rounded up: a single charge in the previous window counts until that window has left the sliding
//! one.
//!
//! **Source.** Cloudflare, "How we built rate limiting capable of scaling to millions of domains" (2017).

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::{Frees, Params, Snapshot, Strategy};
use crate::limit::PolicyCharge;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The start of the window of the last charge.
    start: i64,
    /// The amount granted in that window.
    current: i64,
    /// The amount granted in the window before it.
    previous: i64,
}

/// Registers: the start of the current window, the amount granted in it, and the amount granted in
/// the previous one.
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
        // The part of the previous count that the sliding window overlaps, rounded up.
        let overlap = mul_div(previous, start + params.period - now, params.period);
        params.capacity - current - overlap.whole - i64::from(overlap.rest > 0)
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
            let fits = mul_div(params.period, params.capacity - current - cost, previous);
            return left - fits.whole;
        }
        // In the next window, when the current one is the previous one.
        let fits = mul_div(params.period, params.capacity - cost, current);
        left + params.period - fits.whole
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

    /// Refunds from the window of the charge, the current or the previous one. Their charges expire
    /// at the end of the window after theirs, so at least a period apart. The tolerance of half a
    /// period covers the time that a check takes to arrive.
    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        registers: Registers,
    ) -> Refunded {
        let [start, current, previous] = registers;
        let period = params.period;
        let window_expires = start + 2 * period - now;
        let ahead = 2 * (window_expires - of.left());
        if ahead < period {
            // If the current window holds less, the rest is from the previous one.
            let rest = (cost - current).max(0);
            let left = [start, (current - cost).max(0), (previous - rest).max(0)];
            (left, cost.min(current + previous))
        } else if ahead < 3 * period {
            let left = [start, current, (previous - cost).max(0)];
            (left, cost.min(previous))
        } else {
            (registers, 0)
        }
    }

    fn reset_after(&self, params: &Params, now: i64, [start, current, previous]: Registers) -> i64 {
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

    fn resume(params: &Params, now: i64, Snapshot { used, until, .. }: Snapshot) -> Self {
        let start = window_start(params, now);
        let left = start + params.period - now;
        if until - now > left {
            return Self {
                start,
                current: used,
                previous: 0,
            };
        }
        // Choose a previous count whose overlapping part is the used amount.
        let previous = i128::from(used) * i128::from(params.period) / i128::from(left);
        Self {
            start,
            current: 0,
            previous: previous.min(2 * i128::from(params.capacity)) as i64,
        }
    }

    fn to_numbers(&self) -> Vec<i64> {
        vec![self.start, self.current, self.previous]
    }

    fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let &[start, current, previous] = numbers else {
            return None;
        };
        Some(Self {
            start,
            current,
            previous,
        })
    }
}

/// Returns the start of the clock's window that contains `now`.
fn window_start(params: &Params, now: i64) -> i64 {
    now - now.rem_euclid(params.period)
}

/// A quotient, rounded down, and its remainder.
struct Quotient {
    whole: i64,
    rest: i64,
}

/// Returns `n * x / d`. `x` is at most `d`, so the quotient is at most `n`.
fn mul_div(n: i64, x: i64, d: i64) -> Quotient {
    let product = i128::from(n) * i128::from(x);
    let divisor = i128::from(d);
    Quotient {
        whole: (product / divisor) as i64,
        rest: (product % divisor) as i64,
    }
}

/// The strategy's definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let limit = model.limit;
    let period = model.period;
    let window = |time: i128| time.div_euclid(period);
    let current = model.granted(|time| window(time) == window(now));
    let previous = model.granted(|time| window(time) == window(now) - 1);
    let elapsed = now.rem_euclid(period);
    previous * (period - elapsed) + (current + cost) * period <= limit * period
}
