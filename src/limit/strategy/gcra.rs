//! GCRA, the generic cell rate algorithm.
//!
//! **Idea.** Spread the limit evenly over the period: each unit of cost takes one interval `I = P / L`. The state is
//! one time, the theoretical arrival time (TAT): when everything granted so far will have been paid off. A check
//! of cost `c` is allowed while the TAT would run ahead of now by no more than the burst: `max(TAT, now) + c*I - B*I <=
//! now`.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** A client that counts "100 per calendar minute" sees denials that a fixed window would not make.
//!
//! **Source.** ITU-T I.371; the semantics are those of redis-cell's `CL.THROTTLE` (its `max_burst` is `B - 1`) and
//! of redis_rate since v9.
//!
//! The TAT is kept in whole microseconds and a rest in ticks, `ticks` of which make a microsecond, so that an interval
//! is a whole number of ticks: 3 per second and 300,000 per second are both exact. What it was reckoned with is kept
//! beside it: under another quota the same number of units is owed.

use super::{Followed, Loaded, MOST_TICKS, Terms, Twin, clean, dirty, div_ceil};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    tat: i64,
    rest: i64,
    interval: i64,
    ticks: i64,
}

/// Loaded: the backlog, how far the TAT is ahead of now, in ticks.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.interval, terms.ticks, 0]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let Self { tat, rest, interval, ticks } = *self;
        if tat < now {
            return clean([0; 3]);
        }
        let ahead = tat - now;
        if interval == terms.interval && ticks == terms.ticks {
            let most = 2 * terms.full;
            if ahead <= terms.furthest {
                let backlog = ahead * ticks + rest;
                if backlog <= most {
                    return clean([backlog, 0, 0]);
                }
            }
            return dirty([most, 0, 0]);
        }
        // Of another quota: as many units are owed, at the new rate.
        let (interval, ticks) = (interval.max(1), ticks.max(1));
        let ahead = ahead.min(MOST_TICKS / ticks);
        let units = div_ceil(ahead * ticks + rest, interval);
        dirty([units.min(2 * terms.capacity) * terms.interval, 0, 0])
    }

    fn room(terms: &Terms, _now: i64, [backlog, ..]: Loaded) -> i64 {
        (terms.full - backlog).div_euclid(terms.interval)
    }

    fn wait(&self, terms: &Terms, _now: i64, cost: i64, [backlog, ..]: Loaded) -> i64 {
        div_ceil(backlog + cost * terms.interval - terms.full, terms.ticks)
    }

    fn charge(&mut self, terms: &Terms, _now: i64, cost: i64, [backlog, ..]: Loaded) -> Loaded {
        [(backlog + cost * terms.interval).max(0), 0, 0]
    }

    fn reset(terms: &Terms, _now: i64, [backlog, ..]: Loaded) -> i64 {
        div_ceil(backlog, terms.ticks)
    }

    fn save(&mut self, terms: &Terms, now: i64, _cost: i64, [backlog, ..]: Loaded) {
        let (tat, rest) = (now + backlog.div_euclid(terms.ticks), backlog.rem_euclid(terms.ticks));
        *self = Self { tat, rest, interval: terms.interval, ticks: terms.ticks };
    }

    fn resume(terms: &Terms, _now: i64, Followed { until, .. }: Followed) -> Self {
        Self { tat: until, rest: 0, interval: terms.interval, ticks: terms.ticks }
    }
}
