//! Shared arithmetic of the strategies.

use super::Params;
use crate::limit::Charged;

/// `a / b`, rounded up. `b` is above zero.
pub(super) fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}

/// What is still owed at `now`, in ticks. At the time `at` so many ticks were owed, of which `interval` made a unit; since
/// then they flow back at the rate of this policy. If another quota counted them, as many units are owed: 2.5 units of 100
/// ticks each are 2.5 units of 7 ticks, rounded up to 18.
///
/// And whether `at` is after `now`: nothing has flowed back.
pub(super) fn drained(params: &Params, now: i64, at: i64, ticks: i64, interval: i64) -> (i64, bool) {
    let elapsed = now - at;
    if elapsed >= params.furthest {
        return (0, false);
    }
    let ticks = if interval == params.interval { ticks } else { converted(params, ticks, interval) };
    let ticks = ticks.min(2 * params.full);
    if elapsed < 0 {
        return (ticks, true);
    }
    ((ticks - elapsed * params.ticks).max(0), false)
}

/// How much of a `cost` in ticks is refunded of a charge. The charge alone is certain to have been there all the time: what
/// was charged before it may have been refunded, and what came after it counts by itself. So what could have flowed back
/// since is not refunded again, but for what is left of the rest of the charge, which flows back first.
pub(super) fn kept(params: &Params, cost: i64, of: &Charged) -> i64 {
    let flown = of.age.min(params.furthest) * params.ticks;
    kept_of(params, cost, of, flown)
}

/// How much of a `cost` in ticks is left of a charge of which so much has flowed back.
pub(super) fn kept_of(params: &Params, cost: i64, of: &Charged, flown: i64) -> i64 {
    let [cost, charge] = [cost, of.cost].map(|cost| cost.min(2 * params.capacity) * params.interval);
    (charge - flown).clamp(0, cost)
}

/// Ticks of which `interval` made a unit, in ticks of this policy.
#[cold]
fn converted(params: &Params, ticks: i64, interval: i64) -> i64 {
    let interval = interval.max(1);
    let (units, rest) = (ticks.div_euclid(interval), ticks.rem_euclid(interval));
    units.min(2 * params.capacity) * params.interval + share(params.interval, rest, interval)
}

/// How much of a count came at `border` or later. All of it came from `start` to `last`, and is taken to have come evenly:
/// of 10 that came in 60 s, 5 came in the last 30 s. Rounded up; and all of it if `last` is a period after `border`.
pub(super) fn late(params: &Params, count: i64, start: i64, last: i64, border: i64) -> i64 {
    if last - border >= params.period {
        return count;
    }
    share(count, last - border + 1, last - start + 1)
}

/// The part `x / d` of a number, rounded up. In doubles, whose rounding is the same in Lua and Rust.
fn share(number: i64, x: i64, d: i64) -> i64 {
    (x as f64 / d as f64 * number as f64).ceil() as i64
}
