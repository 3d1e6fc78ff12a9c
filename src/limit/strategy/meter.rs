//! A meter: each charge raises its level, and it drains at the rate of the quota.
//!
//! [`LeakyBucket`](super::Strategy::LeakyBucket), [`Gcra`](super::Strategy::Gcra) and
//! [`TokenBucket`](super::Strategy::TokenBucket) are three descriptions of this algorithm. The level is that of the
//! leaky bucket, the backlog of GCRA (how far its theoretical arrival time lies in the future), and the number of
//! tokens missing in a token bucket. A token bucket refilled by the [interval](Refill::Interval) drains after each
//! period; all other meters drain every microsecond. The strategies keep separate counts.
//!
//! # Numbers
//!
//! A unit of cost is `interval` ticks, and a full meter `full` = capacity * `interval`. `ticks` drain each microsecond, or
//! after each period. [`Params`] chooses both so that `interval / ticks` is exact where possible, and no product reaches
//! 2^53.
//!
//! - **A take** of `c` ticks is allowed if `level + c <= full`. Otherwise its wait is `(level + c - full) / ticks`.
//! - **A turn** is a take ahead: it is charged now even if that exceeds `full`, and is due after that wait. So turns are due
//!   in the order in which they were charged, each when the level without the later ones has drained to `full`.
//! - **The end** of a charge is the time at which the level that it left behind has drained. A charge knows it: the
//!   `reset` of its decision minus its `age`.
//!
//! # Turns
//!
//! A quota of `1/s`, with a burst of 1. At 0 s, one request passes (P), and two reserve turns (A, B):
//!
//! ```text
//! level
//!   3 *                       P, A and B are charged
//!     | *
//!   2 |   *                   at 1 s, A is due: without B, the meter is full
//!     |     *
//!   1 |-------*------- full   at 2 s, B is due
//!     |         *
//!   0 +---+---+---*---
//!     0   1   2   3    s      P ends at 1 s, A at 2 s, B at 3 s
//! ```
//!
//! Now a waiter leaves, at 0.5 s and level 2.5:
//!
//! - **B, the last turn**, is refunded whole. The meter was not empty since B was charged, and nothing was charged after it,
//!   so the level is exactly B's cost above that of a meter without B. [`is_last`](Meter::is_last) recognizes it without a list of turns: the
//!   level drains exactly until its end, in 2.5 s. Then A is the last one.
//! - **A, before another turn**, is not refunded. B keeps its time, 2 s. With one unit less, the level would be 1.5, and the
//!   next turn would be due at 2 s too: two units at a time, with a burst of 1. So as long as the level is above `full`,
//!   which means that the last turn is not due yet, no other turn is refunded.
//! - **Once all turns are due**, a turn that is not the last is a plain charge, made when it was due. Under a meter that drains
//!   after each period, every turn is a plain charge.
//!
//! A plain charge is refunded even while turns are reserved. The next request may then get the time of a turn, so the burst
//! may be exceeded by the refunded units. The level is lower than the last turn's end says, so that turn is not recognized;
//! an earlier one may be, if it ends when the level does.
//!
//! # Refunds
//!
//! A refund of `r` ticks, of a charge of `c` ticks that is `a` microseconds old. The result must not be below the level
//! `y` of a meter that was charged `c - r` in the first place. Its level `x` is `r` above `y` after the charge, and both
//! drain equally, until `y` is empty: then `x` comes closer. With `c - r` charged, `y` cannot be empty sooner than
//! `(c - r) / ticks` after the charge, so
//!
//! ```text
//! x - y  >=  r - max(0, a * ticks - (c - r))  =  min(r, c - a * ticks)
//! ```
//!
//! This is what a refund deducts, if it is above 0. It is exact for a meter that held nothing else. Otherwise `y` was empty
//! later or never, but the level does not show it: what was charged before may have been refunded since. (The last turn
//! does show it, by its end.)
//!
//! A meter that drains after each period has `a` in periods: see [`drains_since`](Meter::drains_since).

use super::algorithm::{Algorithm, NO_PARAMETER, Refunded, Registers};
use super::{Frees, Params, Refill, Snapshot, Strategy};
use crate::limit::PolicyCharge;

/// Precision of the end of a turn, in microseconds: its reset and its age are rounded.
const ROUNDING: i64 = 3;

/// A separate type for each strategy, identified by its letter: shared functions would not be inlined, and a take would
/// execute 5 % more instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Meter<const LETTER: char> {
    /// The time since which it drains.
    at: i64,
    /// The level at that time, in ticks.
    level: i64,
}

/// Registers: the current level in ticks, and the time since which the meter drains.
impl<const LETTER: char> Algorithm for Meter<LETTER> {
    fn frees(strategy: Strategy) -> Frees {
        if strategy == Strategy::TokenBucket(Refill::Interval) {
            Frees::InBatches
        } else {
            Frees::Gradually
        }
    }

    fn parameter(strategy: Strategy) -> Option<String> {
        (strategy == Strategy::TokenBucket(Refill::Interval)).then(|| "interval".to_owned())
    }

    fn with_parameter(strategy: Strategy, text: &str) -> Result<Strategy, &'static str> {
        match (strategy, text) {
            (Strategy::TokenBucket(_), "greedy") => Ok(Strategy::TokenBucket(Refill::Greedy)),
            (Strategy::TokenBucket(_), "interval") => Ok(Strategy::TokenBucket(Refill::Interval)),
            (Strategy::TokenBucket(_), _) => Err("its refill is neither `greedy` nor `interval`"),
            _ => Err(NO_PARAMETER),
        }
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        // After the clock went back, the level starts to drain now.
        let is_future = self.at > now;
        let since = self.at.min(now);
        let elapsed = now - since;
        let level = self.level.min(params.deepest);
        let (level, at) = if Self::in_batches(params) {
            let due = elapsed.div_euclid(params.period);
            let periods = due.min(div_ceil(level, params.ticks));
            (
                level - periods * params.ticks,
                since + periods * params.period,
            )
        } else if elapsed >= params.furthest {
            // The product of a longer time might exceed 2^53.
            return ([0, now, 0], false);
        } else {
            (level - elapsed * params.ticks, now)
        };
        // An empty meter drains from its next charge on.
        let registers = if level > 0 {
            [level, at, 0]
        } else {
            [0, now, 0]
        };
        (registers, is_future)
    }

    fn room(params: &Params, _now: i64, [level, ..]: Registers) -> i64 {
        (params.full - level).div_euclid(params.interval)
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [level, at, _]: Registers) -> i64 {
        let over = level + cost * params.interval - params.full;
        Self::drains_in(params, now, over, at)
    }

    fn charge(
        &mut self,
        params: &Params,
        _now: i64,
        cost: i64,
        [level, at, _]: Registers,
    ) -> Registers {
        [level + cost * params.interval, at, 0]
    }

    fn refund(
        &mut self,
        params: &Params,
        now: i64,
        cost: i64,
        of: &PolicyCharge,
        [level, at, _]: Registers,
    ) -> Refunded {
        // Under another policy, the charge may count for longer.
        if of.left() <= 0 {
            return ([level, at, 0], 0);
        }
        // No grant is larger, and the products of larger ones might exceed 2^53.
        let most = 2 * params.capacity;
        let part = cost.min(most) * params.interval;
        let charge = of.cost.min(most) * params.interval;
        let is_turn = of.is_turn && !Self::in_batches(params);
        let left = if is_turn && Self::is_last(params, of, level) {
            part
        } else if is_turn && level > params.full {
            // Later turns are not due yet. Not even a part is refunded: new turns would be due at the same times.
            0
        } else {
            let drained = Self::drains_since(params, now, of, at) * params.ticks;
            (charge - drained).clamp(0, part)
        };
        let refunded = left.min(level);
        let units = div_ceil(refunded, params.interval);
        ([level - refunded, at, 0], units)
    }

    fn reset_after(params: &Params, now: i64, [level, at, _]: Registers) -> i64 {
        Self::drains_in(params, now, level, at)
    }

    fn save(&mut self, _params: &Params, _now: i64, _cost: i64, [level, at, _]: Registers) {
        *self = Self { at, level };
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until }: Snapshot) -> Self {
        if Self::in_batches(params) {
            // The meter must be empty at `until`, after whole periods. If the level needs more periods than are left
            // until then, as it may for a share of a quota, it is empty later; no period has ended yet.
            let level = used * params.interval;
            let periods = div_ceil(level, params.ticks).min(div_ceil(until - now, params.period));
            return Self {
                at: until - periods * params.period,
                level,
            };
        }
        let level = (until - now).clamp(0, params.furthest) * params.ticks;
        Self { at: now, level }
    }

    fn to_numbers(&self) -> Vec<i64> {
        vec![self.at, self.level]
    }

    fn of_numbers(numbers: &[i64]) -> Option<Self> {
        let &[at, level] = numbers else {
            return None;
        };
        Some(Self { at, level })
    }
}

impl<const LETTER: char> Meter<LETTER> {
    /// Creates a meter that drains every microsecond, with this level in ticks at time `at`.
    pub(crate) fn new(at: i64, level: i64) -> Self {
        Self { at, level }
    }

    /// Returns `true` if the meter drains after each period. For other strategies than the token bucket this is known
    /// at compile time.
    fn in_batches(params: &Params) -> bool {
        LETTER == 't' && params.frees == Frees::InBatches
    }

    /// Returns the microseconds until `ticks` have drained.
    fn drains_in(params: &Params, now: i64, ticks: i64, at: i64) -> i64 {
        let times = div_ceil(ticks, params.ticks);
        if Self::in_batches(params) && times > 0 {
            at + times * params.period - now
        } else {
            times
        }
    }

    /// Returns `true` if the meter is empty when this turn ends: no charge follows it.
    fn is_last(params: &Params, of: &PolicyCharge, level: i64) -> bool {
        let left = of.left().min(params.furthest);
        (level - left * params.ticks).abs() <= ROUNDING * params.ticks
    }

    /// Returns the number of drains since a charge, at most [`Params::furthest`].
    ///
    /// A meter that drains every microsecond has drained as often as the charge is old. A meter that drains after each period
    /// counts the drains that were due at the charge, minus those still due. The grid of its periods starts with the first
    /// charge of an empty meter, so the age alone does not show how many have ended.
    fn drains_since(params: &Params, now: i64, of: &PolicyCharge, at: i64) -> i64 {
        let Params {
            period, furthest, ..
        } = *params;
        if !Self::in_batches(params) {
            return of.age.min(furthest);
        }
        let reset = of.reset.min(furthest * period);
        let due = div_ceil(reset, period);
        let end = now + (reset - of.age).max(0);
        // From a drain to the end are whole periods. The age may be wrong by less than half of one.
        let still_due = (end - at + period / 2).div_euclid(period);
        (due - still_due).clamp(0, furthest)
    }
}

/// `a / b`, rounded up. `b` is above zero.
fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}
