//! A meter: each charge raises its level, and it drains at the rate of the quota.
//!
//! [`LeakyBucket`](super::Strategy::LeakyBucket), [`Gcra`](super::Strategy::Gcra) and
//! [`TokenBucket`](super::Strategy::TokenBucket) are three descriptions of this algorithm. The level is that of the
//! leaky bucket, the backlog of GCRA (how far its theoretical arrival time lies in the future), and the number of
//! tokens missing in a token bucket. A token bucket refilled by the [interval](Refill::Interval) drains after each
//! period; all other meters drain every microsecond. The strategies keep separate counts.

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
        let (at, in_batches) = (self.at.min(now), Self::in_batches(params));
        let (elapsed, future) = (now - at, self.at > now);
        if !in_batches && elapsed >= params.furthest {
            return ([0, now, 0], false);
        }
        let level = self.level.min(params.deepest);
        let (level, at) = if in_batches {
            let periods = elapsed
                .div_euclid(params.period)
                .min(div_ceil(level, params.ticks));
            (level - periods * params.ticks, at + periods * params.period)
        } else {
            (level - elapsed * params.ticks, now)
        };
        (
            if level > 0 {
                [level, at, 0]
            } else {
                [0, now, 0]
            },
            future,
        )
    }

    fn room(params: &Params, _now: i64, [level, ..]: Registers) -> i64 {
        (params.full - level).div_euclid(params.interval)
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [level, at, _]: Registers) -> i64 {
        Self::drains_in(
            params,
            now,
            level + cost * params.interval - params.full,
            at,
        )
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
        let [cost, charge] =
            [cost, of.cost].map(|cost| cost.min(2 * params.capacity) * params.interval);
        let is_turn = of.is_turn && !Self::in_batches(params);
        let ticks = if is_turn && Self::is_last(params, of, level) {
            cost
        } else if is_turn && level > params.full {
            // Later turns are not due yet. Not even a part is refunded: new turns would be due at the same times.
            0
        } else {
            (charge - Self::times_since(params, now, of, at) * params.ticks).clamp(0, cost)
        };
        let ticks = ticks.min(level);
        ([level - ticks, at, 0], div_ceil(ticks, params.interval))
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
        let ends = of.left().min(params.furthest);
        (level - ends * params.ticks).abs() <= ROUNDING * params.ticks
    }

    /// Counts the drains since a charge, at most [`Params::furthest`]. Only this charge is certain to have been in the
    /// meter all the time: earlier charges may have been refunded, and later ones drain after it. So whatever the
    /// charge may have drained is not refunded. The part of the charge that is not refunded counts as drained first.
    ///
    /// A meter that drains after each period counts the drains that were due at the charge, minus those still due.
    fn times_since(params: &Params, now: i64, of: &PolicyCharge, at: i64) -> i64 {
        let (period, most) = (params.period, params.furthest);
        if !Self::in_batches(params) {
            return of.age.min(most);
        }
        let reset = of.reset.min(most * period);
        let still = (now + (reset - of.age).max(0) - at + period / 2).div_euclid(period);
        (div_ceil(reset, period) - still).clamp(0, most)
    }
}

/// `a / b`, rounded up. `b` is above zero.
fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}
