//! Costs of requests, and the time at which a denied request passes.

use std::time::Duration;

use tokio::time::advance;
use tower_redis_ratelimit::check::Outcome;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::store::{ErrorKind, MockStore, StoreError};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Fallback, Key, Limiter, LocalStore, Policy, RateLimitLayer, Strategy};

use crate::mocks::*;

#[tokio::test]
async fn a_request_is_charged_fully_or_nothing() {
    let service = limited(layer("10/h").cost(by_header));
    for (cost, status, remaining) in [(7, 200, 3), (4, 429, 3), (3, 200, 0), (1, 429, 0)] {
        let response = send(&service, costing(cost)).await;
        assert_eq!(
            (
                response.status().as_u16(),
                decision(&response).unwrap().remaining()
            ),
            (status, remaining)
        );
    }
}

#[tokio::test]
async fn a_zero_cost_is_decided_but_free() {
    let service = limited(layer("1/h").cost(by_header));
    for (cost, remaining) in [(0, 1), (1, 0), (0, 0)] {
        let response = send(&service, costing(cost)).await;
        assert_eq!(response.status(), 200);
        let limit = field(&response, "ratelimit").unwrap();
        assert!(
            limit.starts_with(&format!("\"api\";r={remaining};t=")),
            "{limit}"
        );
        assert_eq!(decision(&response).unwrap().granted(), cost);
    }
}

#[tokio::test]
async fn a_cost_above_capacity_has_no_retry() {
    let service = limited(layer("10/h burst 5").cost(by_header));
    for cost in [6, u32::MAX] {
        let response = send(&service, costing(cost)).await;
        assert_eq!(response.status(), 429);
        assert_eq!(field(&response, "retry-after"), None);
        assert_eq!(
            decision(&response).unwrap().outcome(),
            Outcome::ExceedsCapacity
        );
        let limit = field(&response, "ratelimit").unwrap();
        assert!(
            limit.starts_with("\"api\";r=5;t="),
            "nothing was charged: {limit}"
        );
        let problem = json(response).await;
        assert_eq!(
            problem["detail"],
            "The request's cost exceeds the maximum burst of 5."
        );
        assert_eq!(problem["violated-policies"], serde_json::json!(["api"]));
    }
    assert_eq!(send(&service, costing(5)).await.status(), 200);
}

/// The fallback decides under a share of 25, but Redis would never allow a cost above 100.
#[tokio::test]
async fn an_outage_reports_the_whole_burst() {
    let redis = MockStore::new();
    redis.fail(StoreError::new(ErrorKind::Unreachable));
    let store = Fallback::builder(redis, LocalStore::default())
        .share(4)
        .build();
    let (policy, problems) = (gcra("api", "100/h"), Problems::default());
    let service = limited(
        RateLimitLayer::new(store.clone(), Global, policy.clone())
            .cost(by_header)
            .observer(problems.clone()),
    );
    let problem = json(send(&service, costing(101)).await).await;
    assert_eq!(
        problem["detail"],
        "The request's cost exceeds the maximum burst of 100."
    );
    let seen = problems.0.lock().unwrap().clone();
    assert!(
        seen[0].contains("the burst of the policy \"api\" is 100"),
        "{seen:?}"
    );
    let denied = Limiter::new(store, policy).reserve(Key::GLOBAL, 101).await;
    assert_eq!(
        denied.unwrap_err().to_string(),
        "the call's cost exceeds the maximum burst of 100 (api)"
    );
}

#[tokio::test(start_paused = true)]
async fn a_denied_caller_passes_exactly_after_waiting() {
    for strategy in [
        Strategy::Gcra,
        Strategy::FixedWindow(Align::FirstHit),
        Strategy::FixedWindow(Align::default()),
    ] {
        let policy = Policy::new("api", strategy, "3/10s").unwrap();
        let service = limited(RateLimitLayer::new(LocalStore::default(), Global, policy));
        for _ in 0..3 {
            assert_eq!(
                send(&service, anonymous()).await.status(),
                200,
                "{strategy:?}"
            );
        }
        let denied = send(&service, anonymous()).await;
        assert_eq!(denied.status(), 429, "{strategy:?}");
        let wait = decision(&denied).unwrap().retry_after().unwrap();

        let last = Duration::from_micros(1);
        advance(wait - last).await;
        assert_eq!(
            send(&service, anonymous()).await.status(),
            429,
            "{strategy:?}"
        );
        advance(last).await;
        assert_eq!(
            send(&service, anonymous()).await.status(),
            200,
            "{strategy:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_rounds_up_to_seconds() {
    for (period, expected) in [
        ("1us", 1),
        ("1ms", 1),
        ("900ms", 1),
        ("1s", 1),
        ("1001ms", 2),
        ("59999ms", 60),
        ("1m", 60),
        ("366d", 31_622_400),
    ] {
        let service = limited(layer(&format!("1/{period}")));
        assert_eq!(send(&service, request("alice")).await.status(), 200);
        let denied = send(&service, request("alice")).await;
        assert_eq!(denied.status(), 429, "{period}");
        let seconds: u64 = field(&denied, "retry-after").unwrap().parse().unwrap();
        assert_eq!(seconds, expected, "{period}");
        advance(Duration::from_secs(seconds)).await;
        assert_eq!(
            send(&service, request("alice")).await.status(),
            200,
            "{period}"
        );
    }
}
