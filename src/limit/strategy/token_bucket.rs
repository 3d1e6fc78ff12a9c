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

use super::algorithm::{Algorithm, Refunded, Registers, clean};
use super::arithmetic::{div_ceil, drained, kept, kept_of};
use super::{Frees, Params, Snapshot, Strategy};
use crate::limit::Charged;

/// How tokens come into a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Refill {
    /// One by one, each after `period / limit`.
    #[default]
    Greedy,
    /// The whole limit at once, after each period; the period begins with the first charge of a full bucket.
    Interval,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// When the bucket was refilled last.
    refilled: i64,
    /// What it lacked then, in ticks.
    missing: i64,
    /// How many ticks made a token.
    interval: i64,
}

/// Registers: the tokens at now, in ticks, and when they were refilled last.
impl Algorithm for State {
    fn frees(strategy: Strategy) -> Frees {
        if strategy == Strategy::TokenBucket(Refill::Interval) { Frees::InBatches } else { Frees::Gradually }
    }

    fn parameter(strategy: Strategy) -> Option<String> {
        (strategy == Strategy::TokenBucket(Refill::Interval)).then(|| "interval".to_owned())
    }

    fn with_parameter(text: &str) -> Result<Strategy, &'static str> {
        match text {
            "greedy" => Ok(Strategy::TokenBucket(Refill::Greedy)),
            "interval" => Ok(Strategy::TokenBucket(Refill::Interval)),
            _ => Err("its refill is neither `greedy` nor `interval`"),
        }
    }

    fn load(&self, params: &Params, now: i64) -> (Registers, bool) {
        let Self { refilled, missing, interval } = *self;
        if !params.in_batches() {
            let (missing, future) = drained(params, now, refilled, missing, interval);
            return ([params.full - missing, now, 0], future);
        }
        let ((missing, _), future) = (drained(params, now, now, missing, interval), refilled > now);
        let refilled = refilled.min(now);
        let periods = (now - refilled).div_euclid(params.period).min(div_ceil(missing, params.ticks));
        let missing = missing - periods * params.ticks;
        if missing <= 0 {
            return clean([params.full, now, 0]);
        }
        ([params.full - missing, refilled + periods * params.period, 0], future)
    }

    fn room(params: &Params, _now: i64, [tokens, ..]: Registers) -> i64 {
        tokens.div_euclid(params.interval)
    }

    fn wait(&self, params: &Params, now: i64, cost: i64, [tokens, refilled, _]: Registers) -> i64 {
        refill(params, now, cost * params.interval - tokens, refilled)
    }

    fn charge(&mut self, params: &Params, _now: i64, cost: i64, [tokens, refilled, _]: Registers) -> Registers {
        [tokens - cost * params.interval, refilled, 0]
    }

    fn refund(&mut self, params: &Params, now: i64, cost: i64, of: &Charged, registers: Registers) -> Refunded {
        let [tokens, refilled, _] = registers;
        let ticks = match params.in_batches() {
            true => kept_of_periods(params, now, cost, of, refilled),
            false => kept(params, cost, of),
        };
        ([(tokens + ticks).min(params.full), refilled, 0], div_ceil(ticks, params.interval))
    }

    fn reset_after(params: &Params, now: i64, [tokens, refilled, _]: Registers) -> i64 {
        if tokens == params.full { 0 } else { refill(params, now, params.full - tokens, refilled) }
    }

    fn save(&mut self, params: &Params, _now: i64, _cost: i64, [tokens, refilled, _]: Registers) {
        *self = Self { refilled, missing: params.full - tokens, interval: params.interval };
    }

    fn resume(params: &Params, now: i64, Snapshot { used, until }: Snapshot) -> Self {
        if params.in_batches() {
            // The bucket is full at `until`, after so many whole periods. A share, of which more may be used, is full later:
            // none of these periods is over.
            let missing = used * params.interval;
            let periods = div_ceil(missing, params.ticks).min(div_ceil(until - now, params.period));
            return Self { refilled: until - periods * params.period, missing, interval: params.interval };
        }
        let missing = (until - now).clamp(0, params.furthest) * params.ticks;
        Self { refilled: now, missing, interval: params.interval }
    }
}

/// How long until so many ticks have come.
fn refill(params: &Params, now: i64, ticks: i64, refilled: i64) -> i64 {
    match params.in_batches() {
        true => refilled + div_ceil(ticks, params.ticks) * params.period - now,
        false => div_ceil(ticks, params.ticks),
    }
}

/// As [`kept`] where ticks come at once, by how many times they have come since the charge: as often as they were to come
/// until the bucket is full, less how often they still are. Each time is a period after another, and what lies in between is
/// the time that a check is on its way.
fn kept_of_periods(params: &Params, now: i64, cost: i64, of: &Charged, refilled: i64) -> i64 {
    // No debt takes more times.
    let (period, most) = (params.period, params.furthest);
    let reset = of.reset.min(most * period);
    let still = (now + (reset - of.age).max(0) - refilled + period / 2).div_euclid(period);
    let times = (div_ceil(reset, period) - still).clamp(0, most);
    kept_of(params, cost, of, times * params.ticks)
}

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model { limit, period, burst, .. } = model;
    if model.strategy == Strategy::TokenBucket(Refill::Greedy) {
        // Tokens by the period, so that a refill is whole.
        let (mut tokens, mut at) = (burst * period, 0);
        for (time, cost) in &model.grants {
            tokens = (burst * period).min(tokens + (time - at) * limit) - cost * period;
            at = *time;
        }
        return (burst * period).min(tokens + (now - at) * limit) >= cost * period;
    }
    let (mut tokens, mut refilled) = (burst, 0);
    let mut refill = |tokens: &mut i128, now: i128| {
        while *tokens < burst && refilled + period <= now {
            *tokens = burst.min(*tokens + limit);
            refilled += period;
        }
        if *tokens == burst {
            refilled = now;
        }
    };
    for (time, cost) in &model.grants {
        refill(&mut tokens, *time);
        tokens -= cost;
    }
    refill(&mut tokens, now);
    tokens >= cost
}
