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
//!
//! **Two quotas under one name.** They share what the bucket lacks, in tokens, and each refills at its own rate since it
//! was refilled last.

use super::{Followed, Loaded, Terms, Twin, clean, div_ceil, drained};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// When the bucket was refilled last.
    refilled: i64,
    /// What it lacked then, in ticks.
    missing: i64,
    /// How many ticks made a token.
    interval: i64,
}

/// Loaded: the tokens at now, in ticks, and when they were refilled last.
impl Twin for State {
    fn arguments(terms: &Terms) -> [i64; 4] {
        [terms.capacity, terms.interval, terms.ticks, if terms.batches { terms.period } else { 0 }]
    }

    fn load(&self, terms: &Terms, now: i64) -> (Loaded, bool) {
        let Self { refilled, missing, interval } = *self;
        if !terms.batches {
            let (missing, future) = drained(terms, now, refilled, missing, interval);
            return ([terms.full - missing, now, 0], future);
        }
        let ((missing, _), future) = (drained(terms, now, now, missing, interval), refilled > now);
        let refilled = refilled.min(now);
        let periods = (now - refilled).div_euclid(terms.period).min(div_ceil(missing, terms.ticks));
        let missing = missing - periods * terms.ticks;
        if missing <= 0 {
            return clean([terms.full, now, 0]);
        }
        ([terms.full - missing, refilled + periods * terms.period, 0], future)
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
        *self = Self { refilled, missing: terms.full - tokens, interval: terms.interval };
    }

    fn resume(terms: &Terms, now: i64, Followed { used, until }: Followed) -> Self {
        if terms.batches {
            // The bucket is full at `until`, after so many whole periods.
            let missing = used * terms.interval;
            let periods = div_ceil(missing, terms.ticks);
            return Self { refilled: until - periods * terms.period, missing, interval: terms.interval };
        }
        let missing = (until - now).clamp(0, terms.furthest) * terms.ticks;
        Self { refilled: now, missing, interval: terms.interval }
    }
}

/// How long until so many ticks have come.
fn refill(terms: &Terms, now: i64, ticks: i64, refilled: i64) -> i64 {
    match terms.batches {
        true => refilled + div_ceil(ticks, terms.ticks) * terms.period - now,
        false => div_ceil(ticks, terms.ticks),
    }
}
