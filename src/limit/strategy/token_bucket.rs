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

pub(crate) type State = super::meter::Meter<'t'>;

/// The definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model {
        limit,
        period,
        burst,
        ..
    } = model;
    if model.strategy == super::Strategy::TokenBucket(Refill::Greedy) {
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
