//! A meter: what is charged fills it, and it drains at the rate of the quota.
//!
//! [`LeakyBucket`](super::Strategy::LeakyBucket) and [`Gcra`](super::Strategy::Gcra) are two ways to say this. The
//! level of the bucket is the backlog of GCRA: how far its theoretical arrival time is ahead of now. Each has its own
//! counts.

use super::algorithm::{Algorithm, Refunded, Registers};
use super::arithmetic::{div_ceil, drained, kept};
use super::{Frees, Params, Snapshot, Strategy};
use crate::limit::Charged;

/// A type for each of the two: functions that both call are not inlined, and a take then runs a twentieth more instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Meter<const IS_GCRA: bool> {
    /// When it was filled last.
    filled: i64,
    /// Its level then, in ticks.
    level: i64,
    /// How many ticks made a unit of cost.
    interval: i64,
}

/// Registers: the level at now, in ticks.
impl<const IS_GCRA: bool> Algorithm for Meter<IS_GCRA> {
    fn frees(_: Strategy) -> Frees {
        Frees::Gradually
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let (level, future) = drained(params, now, self.filled, self.level, self.interval);
        ([level, 0, 0], future)
    }

    fn room(params: &Params, _now: i64, [level, ..]: Registers) -> i64 {
        (params.full - level).div_euclid(params.interval)
    }

    fn wait(&self, params: &Params, _now: i64, cost: i64, [level, ..]: Registers) -> i64 {
        div_ceil(level + cost * params.interval - params.full, params.ticks)
    }

    fn charge(&mut self, params: &Params, _now: i64, cost: i64, [level, ..]: Registers) -> Registers {
        [level + cost * params.interval, 0, 0]
    }

    fn refund(&mut self, params: &Params, _now: i64, cost: i64, of: &Charged, [level, ..]: Registers) -> Refunded {
        let ticks = kept(params, cost, of);
        ([(level - ticks).max(0), 0, 0], div_ceil(ticks, params.interval))
    }

    fn reset_after(params: &Params, _now: i64, [level, ..]: Registers) -> i64 {
        div_ceil(level, params.ticks)
    }

    fn save(&mut self, params: &Params, now: i64, _cost: i64, [level, ..]: Registers) {
        *self = Self { filled: now, level, interval: params.interval };
    }

    fn resume(params: &Params, now: i64, Snapshot { until, .. }: Snapshot) -> Self {
        let level = (until - now).clamp(0, params.furthest) * params.ticks;
        Self { filled: now, level, interval: params.interval }
    }
}
