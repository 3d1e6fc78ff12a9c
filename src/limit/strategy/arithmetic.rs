//! Shared arithmetic of the strategies.

use super::Params;

/// `a / b`, rounded up. `b` is above zero.
pub(super) fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
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
pub(super) fn share(number: i64, x: i64, d: i64) -> i64 {
    (x as f64 / d as f64 * number as f64).ceil() as i64
}
