//! Token bucket: a stock of tokens, which requests take and time refills.
//!
//! **Idea.** A new caller has `B` tokens. A check of cost `c` is allowed if the tokens suffice:
//! `tokens + refill >= c`. [`Refill::Greedy`](super::Refill::Greedy) adds them one by one, each
//! after `P / L`; [`Refill::Interval`](super::Refill::Interval) adds all `L` together after each
//! period. The period starts with the first charge of a full bucket.
//!
//! **Cost.** One key, one read, one write.
//!
//! **When not.** Refilled greedily, it decides as GCRA does: choose it if you think in tokens.
//! Refilled by the interval, it allows a burst after every refill.
//!
//! **Source.** Spring Cloud Gateway's `RedisRateLimiter` (replenishRate, burstCapacity, requestedTokens), but to the
//! microsecond; bucket4j's `refillGreedy` and `refillIntervally`.

/// How tokens are added to a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Refill {
    /// One by one, each after `period / limit`.
    #[default]
    Greedy,
    /// The whole limit after each period. The period starts with the first charge of a full bucket.
    Interval,
}

pub(crate) type State = super::meter::Meter<'t'>;

/// The strategy's definition: see `tests`.
#[cfg(test)]
pub(super) fn allows(model: &super::tests::Model, cost: i128, now: i128) -> bool {
    let &super::tests::Model {
        limit,
        period,
        burst,
        ..
    } = model;
    if model.strategy == super::Strategy::TokenBucket(Refill::Greedy) {
        // Multiply tokens by the period to keep refills integral.
        let mut tokens = burst * period;
        let mut at = 0;
        for (time, cost) in &model.grants {
            tokens = (burst * period).min(tokens + (time - at) * limit) - cost * period;
            at = *time;
        }
        return (burst * period).min(tokens + (now - at) * limit) >= cost * period;
    }
    let mut tokens = burst;
    let mut refilled = 0;
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
