//! GCRA, the generic cell rate algorithm.
//!
//! **Idea.** Spread the limit evenly over the period: each unit of cost takes one interval `I = P / L`. The state
//! stands for one time, the theoretical arrival time (TAT): when everything granted so far will have been paid off. A
//! check of cost `c` is allowed while the TAT would run ahead of now by no more than the burst: `max(TAT, now) + c*I -
//! B*I <= now`.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** A client that counts "100 per calendar minute" sees denials that a fixed window would not make.
//!
//! **Source.** ITU-T I.371; the semantics are those of redis-cell's `CL.THROTTLE` (its `max_burst` is `B - 1`) and
//! of redis_rate since v9.
//!
//! Kept is how far the TAT was ahead at the last charge, the backlog, and when that was. An interval is a whole number of
//! ticks, and some ticks make a microsecond, so that 3 per second and 300,000 per second are both exact.
//!
//! **Two quotas under one name.** The TAT itself would not do: it is in the time of one quota. With 10 per minute, 5
//! units put it 30 s ahead; with 20 per minute they are paid off in 15 s. So each quota reads the backlog in units, and
//! takes it as paid off at its own rate since the last charge. A denial writes nothing, so what one quota denies does
//! not touch what the other would grant.

use super::arithmetic::{div_ceil, drained};
use super::twin::{Loaded, Twin};
use super::{Followed, Params};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The time of the last charge.
    at: i64,
    /// How far the TAT was ahead then, in ticks.
    backlog: i64,
    /// How many ticks made a unit of cost.
    interval: i64,
}

/// Loaded: the backlog, how far the TAT is ahead of now, in ticks.
impl Twin for State {
    fn load(&self, params: &Params, now: i64) -> (Loaded, bool) {
        let (backlog, future) = drained(params, now, self.at, self.backlog, self.interval);
        ([backlog, 0, 0], future)
    }

    fn room(params: &Params, _now: i64, [backlog, ..]: Loaded) -> i64 {
        (params.full - backlog).div_euclid(params.interval)
    }

    fn wait(&self, params: &Params, _now: i64, cost: i64, [backlog, ..]: Loaded) -> i64 {
        div_ceil(backlog + cost * params.interval - params.full, params.ticks)
    }

    fn charge(&mut self, params: &Params, _now: i64, cost: i64, [backlog, ..]: Loaded) -> Loaded {
        [(backlog + cost * params.interval).max(0), 0, 0]
    }

    fn reset_after(params: &Params, _now: i64, [backlog, ..]: Loaded) -> i64 {
        div_ceil(backlog, params.ticks)
    }

    fn save(&mut self, params: &Params, now: i64, _cost: i64, [backlog, ..]: Loaded) {
        *self = Self { at: now, backlog, interval: params.interval };
    }

    fn resume(params: &Params, now: i64, Followed { until, .. }: Followed) -> Self {
        let backlog = (until - now).clamp(0, params.furthest) * params.ticks;
        Self { at: now, backlog, interval: params.interval }
    }
}

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model { limit, period, burst, .. } = model;
    // Times by the limit, so that an interval is whole.
    let mut tat = 0;
    for (time, cost) in &model.grants {
        tat = tat.max(time * limit) + cost * period;
    }
    tat.max(now * limit) + cost * period - burst * period <= now * limit
}
