//! Fixed windows: a counter that starts again at every window.
//!
//! **Idea.** Count what was granted since the window began; a check of cost `c` is allowed while `count + c <= L`.
//! [`Align::Clock`](super::Align::Clock) cuts time itself into windows; with
//! [`Align::FirstHit`](super::Align::FirstHit) a caller's window begins with its first charge.
//!
//! **Cost.** One key, two numbers, one read and one write.
//!
//! **When not.** At the border of two windows up to twice the limit can pass in a short time.
//!
//! **Source.** redis_rate v6 (slots of the clock); Istio's redisquota `FIXED_WINDOW` (from the first hit).

use super::{Followed, Loaded, Terms, Twin, clean};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// When the caller's window began; with windows of the clock, the time of the last charge.
    since: i64,
    count: i64,
}

/// Loaded: the same two, at now.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.period, terms.offset.unwrap_or(-1), 0]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let future = self.since > now;
        let since = self.since.min(now);
        let count = self.count.clamp(0, 2 * terms.capacity);
        if count == 0 || since < window_end(terms, now, since) - terms.period || since <= now - terms.period {
            return clean([now, 0, 0]);
        }
        ([since, count, 0], future)
    }

    fn room(terms: &Terms, _now: i64, [_, count, _]: Loaded) -> i64 {
        terms.capacity - count
    }

    fn wait(&self, terms: &Terms, now: i64, _cost: i64, [since, ..]: Loaded) -> i64 {
        window_end(terms, now, since) - now
    }

    fn charge(&mut self, terms: &Terms, now: i64, cost: i64, [since, count, _]: Loaded) -> Loaded {
        let since = if terms.offset.is_some() { now } else { since };
        [since, (count + cost).max(0), 0]
    }

    fn reset(terms: &Terms, now: i64, [since, count, _]: Loaded) -> i64 {
        if count == 0 { 0 } else { window_end(terms, now, since) - now }
    }

    fn save(&mut self, _terms: &Terms, _now: i64, _cost: i64, [since, count, _]: Loaded) {
        *self = Self { since, count };
    }

    fn resume(terms: &Terms, now: i64, Followed { used, until }: Followed) -> Self {
        match terms.offset {
            Some(_) => Self { since: now, count: used },
            None => Self { since: until - terms.period, count: used },
        }
    }
}

/// When the window that holds `now` ends.
fn window_end(terms: &Terms, now: i64, since: i64) -> i64 {
    match terms.offset {
        Some(offset) => now - (now - offset).rem_euclid(terms.period) + terms.period,
        None => since + terms.period,
    }
}
