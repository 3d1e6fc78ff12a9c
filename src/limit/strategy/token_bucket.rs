//! Token bucket: a stock of tokens that requests take from and time refills.
//!
//! **Idea.** A new caller has `B` tokens. A check of cost `c` is allowed while there are as many: `tokens + refill >=
//! c`. [`Refill::Greedy`](super::Refill::Greedy) adds them one by one, each after `P / L`;
//! [`Refill::Interval`](super::Refill::Interval) adds `L` at once after each period, which begins with the first charge
//! of a full bucket.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** Refilled greedily it decides as GCRA does: choose it if you think in tokens. Refilled by the interval
//! it lets a burst pass at every refill.
//!
//! **Source.** Spring Cloud Gateway's `RedisRateLimiter` (replenishRate, burstCapacity, requestedTokens), but to the
//! microsecond; bucket4j's `refillGreedy` and `refillIntervally`.

use super::{Followed, Loaded, Terms, Twin, clean, div_ceil};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    /// When the bucket was refilled last.
    refilled: i64,
    /// Its whole tokens, which another quota shares.
    tokens: i64,
    /// The rest of them, in ticks.
    rest: i64,
}

/// A full bucket of any quota, refilled in time immemorial.
impl Default for State {
    fn default() -> Self {
        Self { refilled: 0, tokens: i64::from(u32::MAX), rest: 0 }
    }
}

/// Loaded: the tokens at now, in ticks, and when they were refilled last.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.interval, terms.ticks, if terms.batches { terms.period } else { 0 }]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let Self { refilled, tokens, rest } = *self;
        let future = refilled > now;
        let mut refilled = refilled.min(now);
        let mut tokens = tokens.clamp(-terms.capacity, terms.capacity) * terms.interval + rest.min(terms.interval - 1);
        if terms.batches {
            let missing = div_ceil(terms.full - tokens, terms.ticks);
            let periods = (now - refilled).div_euclid(terms.period).min(missing);
            (tokens, refilled) = (tokens + periods * terms.ticks, refilled + periods * terms.period);
        } else {
            (tokens, refilled) = (tokens + (now - refilled).min(terms.furthest) * terms.ticks, now);
        }
        if tokens >= terms.full {
            return clean([terms.full, now, 0]);
        }
        ([tokens, refilled, 0], future)
    }

    fn room(terms: &Terms, _now: i64, [tokens, ..]: Loaded) -> i64 {
        tokens.div_euclid(terms.interval)
    }

    fn wait(&self, terms: &Terms, now: i64, cost: i64, [tokens, refilled, _]: Loaded) -> i64 {
        refill(terms, now, cost * terms.interval - tokens, refilled)
    }

    fn charge(&mut self, terms: &Terms, _now: i64, cost: i64, [tokens, refilled, _]: Loaded) -> Loaded {
        [(tokens - cost * terms.interval).min(terms.full), refilled, 0]
    }

    fn reset(terms: &Terms, now: i64, [tokens, refilled, _]: Loaded) -> i64 {
        if tokens == terms.full { 0 } else { refill(terms, now, terms.full - tokens, refilled) }
    }

    fn save(&mut self, terms: &Terms, _now: i64, _cost: i64, [tokens, refilled, _]: Loaded) {
        let (tokens, rest) = (tokens.div_euclid(terms.interval), tokens.rem_euclid(terms.interval));
        *self = Self { refilled, tokens, rest };
    }

    fn resume(terms: &Terms, now: i64, Followed { used, until }: Followed) -> Self {
        if terms.batches {
            // The bucket is full at `until`, after so many whole periods.
            let periods = div_ceil(used, terms.ticks);
            return Self { refilled: until - periods * terms.period, tokens: terms.capacity - used, rest: 0 };
        }
        let tokens = terms.full - (until - now).clamp(0, terms.furthest) * terms.ticks;
        Self { refilled: now, tokens: tokens.div_euclid(terms.interval), rest: tokens.rem_euclid(terms.interval) }
    }
}

/// How long until so many ticks have come.
fn refill(terms: &Terms, now: i64, ticks: i64, refilled: i64) -> i64 {
    match terms.batches {
        true => refilled + div_ceil(ticks, terms.ticks) * terms.period - now,
        false => div_ceil(ticks, terms.ticks),
    }
}
