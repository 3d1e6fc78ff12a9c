//! A meter: what is charged fills it, and it drains at the rate of the quota.
//!
//! [`LeakyBucket`](super::Strategy::LeakyBucket), [`Gcra`](super::Strategy::Gcra) and
//! [`TokenBucket`](super::Strategy::TokenBucket) are three ways to say this. The level of the leaky bucket is the backlog
//! of GCRA: how far its theoretical arrival time is ahead of now. And it is what a token bucket lacks, which drains at once
//! after each period if it is refilled by the [interval](Refill::Interval). Each has its own counts.

use super::algorithm::{Algorithm, NO_PARAMETER, Refunded, Registers};
use super::{Frees, Params, Refill, Snapshot, Strategy};
use crate::limit::Charged;

/// A type for each, by its letter: functions that several call are not inlined, and a take then runs a twentieth more
/// instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Meter<const LETTER: char> {
    /// Since when it drains.
    at: i64,
    /// Its level then, in ticks.
    level: i64,
}

/// Registers: the level at now, in ticks, and since when it drains.
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
        of: &Charged,
        [level, at, _]: Registers,
    ) -> Refunded {
        let [cost, charge] =
            [cost, of.cost].map(|cost| cost.min(2 * params.capacity) * params.interval);
        if of.is_turn && !Self::in_batches(params) {
            let ticks = (cost - Self::stands_on(params, of, level)).max(0);
            return (
                [(level - ticks).max(0), at, 0],
                div_ceil(ticks, params.interval),
            );
        }
        let ticks = (charge - Self::times_since(params, now, of, at) * params.ticks).clamp(0, cost);
        (
            [(level - ticks).max(0), at, 0],
            div_ceil(ticks, params.interval),
        )
    }

    fn reset_after(params: &Params, now: i64, [level, at, _]: Registers) -> i64 {
        Self::drains_in(params, now, level, at)
    }

    fn save(&mut self, _params: &Params, _now: i64, _cost: i64, [level, at, _]: Registers) {
        *self = Self { at, level };
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until }: Snapshot) -> Self {
        if Self::in_batches(params) {
            // It is empty at `until`, after so many whole periods. A share, of which more may be used, is empty later: none
            // of these periods is over.
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
}

impl<const LETTER: char> Meter<LETTER> {
    /// A meter that drains in every microsecond, with this level in ticks at a time.
    pub(crate) fn new(at: i64, level: i64) -> Self {
        Self { at, level }
    }

    /// Whether it drains at once, after each period. Of the others this is known when they are compiled.
    fn in_batches(params: &Params) -> bool {
        LETTER == 't' && params.frees == Frees::InBatches
    }

    /// In how long so many ticks have drained.
    fn drains_in(params: &Params, now: i64, ticks: i64, at: i64) -> i64 {
        let times = div_ceil(ticks, params.ticks);
        if Self::in_batches(params) && times > 0 {
            at + times * params.period - now
        } else {
            times
        }
    }

    /// How many ticks of later turns stand on this one: how far the end of the last turn is after that of this one. What
    /// they stand on is not refunded, or new turns would be due at the same time as they are.
    ///
    /// The reset was rounded up, so the turn has ended up to a microsecond before that.
    fn stands_on(params: &Params, of: &Charged, level: i64) -> i64 {
        let ends = (of.reset - of.age - 1).clamp(-params.furthest, params.furthest);
        (level - (ends * params.ticks + 1)).max(0)
    }

    /// How many times ticks have drained since a charge, which alone is certain to have been there all the time: what was
    /// charged before it may have been refunded, and what came after it counts by itself. So what could have flowed back
    /// since is not refunded again, but for what is left of the rest of the charge, which flows back first.
    ///
    /// Where they drain at once, it is as often as they were to when it was charged, but for how often they still are to:
    /// no debt takes more times.
    fn times_since(params: &Params, now: i64, of: &Charged, at: i64) -> i64 {
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
