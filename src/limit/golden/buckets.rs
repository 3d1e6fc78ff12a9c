//! Spring Cloud Gateway.

use super::*;

/// `RedisRateLimiter` with a `replenishRate` of 10 and a `burstCapacity` of 20. Tokens are added
/// one by one, Spring's with every full second.
#[test]
fn token_bucket_bursts_match_spring() {
    let mut caller = Caller::new(
        Strategy::TokenBucket(Refill::Greedy),
        Quota::per_second(10).burst(20),
    );
    let mut spend = |at: i64, tokens: u32| {
        for left in (0..tokens).rev() {
            let decision = caller.take(at, 1);
            assert_eq!(
                (decision.is_allowed(), decision.remaining()),
                (true, left),
                "at {at} us"
            );
        }
        let denied = caller.take(at, 1);
        assert_eq!(
            (denied.is_allowed(), denied.remaining()),
            (false, 0),
            "at {at} us"
        );
    };
    spend(0, 20);
    spend(S, 10);
    spend(S + 100 * MS, 1);
    spend(2 * S - 1, 8);
    spend(2 * S, 1);
    spend(MINUTE, 20);
}

/// `requestedTokens` allows rates below one per second: 60 tokens per request at one per second are
/// one request per minute.
#[test]
fn token_bucket_costs_match_spring() {
    for tokens in [3, 60] {
        let seconds = i64::from(tokens);
        let mut caller = Caller::new(
            Strategy::TokenBucket(Refill::Greedy),
            Quota::per_second(1).burst(tokens),
        );
        for (at, allowed, remaining) in [
            (0, true, 0),
            (0, false, 0),
            (S, false, 1),
            (seconds * S - 1, false, tokens - 1),
            (seconds * S, true, 0),
            (2 * seconds * S - 1, false, tokens - 1),
            (3 * seconds * S, true, 0),
        ] {
            let decision = caller.take(at, tokens);
            assert_eq!(
                (decision.is_allowed(), decision.remaining()),
                (allowed, remaining),
                "{tokens} at {at} us"
            );
        }
    }
}

/// A `burstCapacity` of 0 blocks every request in Spring; here it is an invalid policy.
#[test]
fn a_bucket_of_no_capacity_is_invalid() {
    let none = Policy::new(
        "p",
        Strategy::TokenBucket(Refill::Greedy),
        Quota::per_second(10).burst(0),
    );
    assert!(
        none.unwrap_err()
            .to_string()
            .contains("its burst must be at least 1")
    );
}
