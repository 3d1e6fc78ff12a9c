//! GCRA, the generic cell rate algorithm.
//!
//! **Idea.** Spread the limit evenly over the period: each unit of cost takes one interval `I = P / L`. The state is
//! one time, the theoretical arrival time (TAT): when everything granted so far will have been paid off. A check
//! of cost `c` is allowed while the TAT would run ahead of now by no more than the burst: `TAT + c*I - B*I <= now`.
//!
//! **Cost.** One key, two numbers, one read and one write.
//!
//! **When not.** It never lets a whole limit pass at once a second time within the period, but a client that counts
//! "100 per calendar minute" sees denials that a fixed window would not make.
//!
//! **Source.** ITU-T I.371; the semantics are those of redis-cell's `CL.THROTTLE` (its `max_burst` is `B - 1`) and
//! of redis_rate since v9.
//!
//! The TAT is kept in whole microseconds and a rest in ticks, `ticks` of which make a microsecond, so that an interval is
//! a whole number of ticks: 3 per second and 300,000 per second are both exact.

use super::{Loaded, Terms, Twin, div_ceil};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    tat: i64,
    rest: i64,
}

/// Loaded: the backlog, how far the TAT is ahead of now, in ticks.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 3] {
        [terms.capacity, terms.interval, terms.ticks]
    }

    fn load(&self, terms: &Terms, now: i64) -> Loaded {
        if self.tat < now {
            return [0; 3];
        }
        let ahead = (self.tat - now).min(terms.furthest);
        let rest = self.rest.clamp(0, terms.ticks - 1);
        [(ahead * terms.ticks + rest).min(2 * terms.full), 0, 0]
    }

    fn room(terms: &Terms, _now: i64, [backlog, ..]: Loaded) -> i64 {
        (terms.full - backlog).div_euclid(terms.interval)
    }

    fn wait(&self, terms: &Terms, _now: i64, cost: i64, [backlog, ..]: Loaded) -> i64 {
        div_ceil(backlog + cost * terms.interval - terms.full, terms.ticks)
    }

    fn charge(terms: &Terms, _now: i64, cost: i64, [backlog, ..]: Loaded) -> Loaded {
        [(backlog + cost * terms.interval).max(0), 0, 0]
    }

    fn reset(&self, terms: &Terms, _now: i64, [backlog, ..]: Loaded) -> i64 {
        div_ceil(backlog, terms.ticks)
    }

    fn save(&mut self, terms: &Terms, now: i64, [backlog, ..]: Loaded) {
        self.tat = now + backlog.div_euclid(terms.ticks);
        self.rest = backlog.rem_euclid(terms.ticks);
    }
}
