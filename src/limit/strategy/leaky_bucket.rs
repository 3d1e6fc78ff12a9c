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

use super::{Followed, Loaded, Terms, Twin, div_ceil, drained};

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
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.interval, terms.ticks, 0]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let (level, future) = drained(terms, now, self.filled, self.level, self.interval);
        ([level, 0, 0], future)
    }

    fn room(terms: &Terms, _now: i64, [level, ..]: Loaded) -> i64 {
        (terms.full - level).div_euclid(terms.interval)
    }

    fn wait(&self, terms: &Terms, _now: i64, cost: i64, [level, ..]: Loaded) -> i64 {
        div_ceil(level + cost * terms.interval - terms.full, terms.ticks)
    }

    fn charge(&mut self, terms: &Terms, _now: i64, cost: i64, [level, ..]: Loaded) -> Loaded {
        [(level + cost * terms.interval).max(0), 0, 0]
    }

    fn reset(terms: &Terms, _now: i64, [level, ..]: Loaded) -> i64 {
        div_ceil(level, terms.ticks)
    }

    fn save(&mut self, terms: &Terms, now: i64, _cost: i64, [level, ..]: Loaded) {
        *self = Self { filled: now, level, interval: terms.interval };
    }

    fn resume(terms: &Terms, now: i64, Followed { until, .. }: Followed) -> Self {
        let level = (until - now).clamp(0, terms.furthest) * terms.ticks;
        Self { filled: now, level, interval: terms.interval }
    }
}
