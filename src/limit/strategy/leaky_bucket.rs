//! Leaky bucket, as a meter: what is charged fills it, and it leaks at the rate of the quota.
//!
//! **Idea.** The state is a level, which falls by `L / P`. A check of cost `c` is allowed while it fits:
//! `level - leaked + c <= B`.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** It decides as GCRA does: choose it if you think in levels. It does not delay
//! requests, as a leaky bucket that is a queue would.
//!
//! **Source.** Turner, "New directions in communications" (1986); the funnel of redis tutorials (capacity, leaking
//! rate).
//!
//! **Two quotas under one name.** They share the level, in units, and it leaks at the rate of who asks since it was filled
//! last.

use super::arithmetic::{div_ceil, drained};
use super::twin::{Loaded, Twin};
use super::{Followed, Params};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// When the bucket was filled last.
    filled: i64,
    /// Its level then, in ticks.
    level: i64,
    /// How many ticks made a unit of cost.
    interval: i64,
}

/// Loaded: the level at now, in ticks.
impl Twin for State {
    fn load(&self, params: &Params, now: i64) -> (Loaded, bool) {
        let (level, future) = drained(params, now, self.filled, self.level, self.interval);
        ([level, 0, 0], future)
    }

    fn room(params: &Params, _now: i64, [level, ..]: Loaded) -> i64 {
        (params.full - level).div_euclid(params.interval)
    }

    fn wait(&self, params: &Params, _now: i64, cost: i64, [level, ..]: Loaded) -> i64 {
        div_ceil(level + cost * params.interval - params.full, params.ticks)
    }

    fn charge(&mut self, params: &Params, _now: i64, cost: i64, [level, ..]: Loaded) -> Loaded {
        [(level + cost * params.interval).max(0), 0, 0]
    }

    fn reset_after(params: &Params, _now: i64, [level, ..]: Loaded) -> i64 {
        div_ceil(level, params.ticks)
    }

    fn save(&mut self, params: &Params, now: i64, _cost: i64, [level, ..]: Loaded) {
        *self = Self { filled: now, level, interval: params.interval };
    }

    fn resume(params: &Params, now: i64, Followed { until, .. }: Followed) -> Self {
        let level = (until - now).clamp(0, params.furthest) * params.ticks;
        Self { filled: now, level, interval: params.interval }
    }
}

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model { limit, period, burst, .. } = model;
    let (mut level, mut at) = (0, 0);
    for (time, cost) in &model.grants {
        level = 0.max(level - (time - at) * limit) + cost * period;
        at = *time;
    }
    0.max(level - (now - at) * limit) + cost * period <= burst * period
}
