//! Sliding counter: two fixed windows that stand for one that slides.
//!
//! **Idea.** Count what is granted in this window of the clock and in the one before. The sliding window overlaps a
//! part of the one before, and that part of its count is taken to be in it: a check of cost `c` is allowed while
//! `previous * (1 - elapsed / P) + current + c <= L`.
//!
//! **Cost.** One key, one read, one write, however high the limit.
//!
//! **When not.** It is an estimate: it takes what was granted in the window before to be spread evenly over it. If it
//! was not, more or less than the limit may pass in a period that straddles two windows, never more than twice the
//! limit. What is overlapped is rounded up: a single charge of the window before counts until that has left.
//!
//! **Source.** Cloudflare, "How we built rate limiting capable of scaling to millions of domains" (2017).

use super::{Followed, Loaded, Terms, Twin};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The time of the last charge.
    last: i64,
    /// What was granted in its window.
    current: i64,
    /// What was granted in the window before.
    previous: i64,
}

/// Loaded: the same three, for the window of now.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.period, 0, 0]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let future = self.last > now;
        let last = self.last.min(now);
        let current = self.current.clamp(0, 2 * terms.capacity);
        let previous = self.previous.clamp(0, 2 * terms.capacity);
        let start = now - now.rem_euclid(terms.period);
        if last < start - terms.period {
            ([now, 0, 0], false)
        } else if last < start {
            ([now, 0, current], false)
        } else {
            ([last, current, previous], future)
        }
    }

    fn room(terms: &Terms, now: i64, [_, current, previous]: Loaded) -> i64 {
        terms.capacity - current - overlap(terms, now, previous)
    }

    fn wait(&self, terms: &Terms, now: i64, cost: i64, [_, current, previous]: Loaded) -> i64 {
        let left = terms.period - now.rem_euclid(terms.period);
        if current + cost <= terms.capacity {
            return left - mul_div(terms.period, terms.capacity - current - cost, previous).0;
        }
        // In the next window, where this one is the one before.
        left + terms.period - mul_div(terms.period, terms.capacity - cost, current).0
    }

    /// Gives back from the current window first.
    fn charge(&mut self, _terms: &Terms, now: i64, cost: i64, [_, current, previous]: Loaded) -> Loaded {
        let rest = (current + cost).min(0);
        [now, (current + cost).max(0), (previous + rest).max(0)]
    }

    fn reset(terms: &Terms, now: i64, [_, current, previous]: Loaded) -> i64 {
        let left = terms.period - now.rem_euclid(terms.period);
        match (current, previous) {
            (0, 0) => 0,
            (0, _) => left,
            _ => left + terms.period,
        }
    }

    fn save(&mut self, _terms: &Terms, _now: i64, _cost: i64, [last, current, previous]: Loaded) {
        *self = Self { last, current, previous };
    }

    fn resume(terms: &Terms, now: i64, Followed { used, until }: Followed) -> Self {
        let left = terms.period - now.rem_euclid(terms.period);
        if until - now > left {
            return Self { last: now, current: used, previous: 0 };
        }
        // As much in the window before as still counts so much.
        let previous = i128::from(used) * i128::from(terms.period) / i128::from(left);
        Self { last: now, current: 0, previous: previous.min(2 * i128::from(terms.capacity)) as i64 }
    }
}

/// What the window before still counts, rounded up: its share that the sliding window overlaps.
fn overlap(terms: &Terms, now: i64, previous: i64) -> i64 {
    let (counts, rest) = mul_div(previous, terms.period - now.rem_euclid(terms.period), terms.period);
    counts + i64::from(rest > 0)
}

/// `n * x / d`, rounded down, and the rest. `x` is at most `d`, so that the quotient is at most `n`.
fn mul_div(n: i64, x: i64, d: i64) -> (i64, i64) {
    let (product, d) = (i128::from(n) * i128::from(x), i128::from(d));
    ((product / d) as i64, (product % d) as i64)
}
