//! Several policies on one request.

use serde_json::json;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::{LocalStore, Policies, RateLimitLayer};

use crate::mocks::*;

fn layer_of<const N: usize>(policies: [(&str, &str); N]) -> RateLimitLayer<LocalStore, HeaderKey> {
    let policies = policies.map(|(name, quota)| gcra(name, quota));
    RateLimitLayer::new(
        LocalStore::default(),
        HeaderKey::new(USER).unwrap(),
        Policies::new(policies).unwrap(),
    )
}

#[tokio::test(start_paused = true)]
async fn fields_list_all_policies_in_order() {
    let service = limited(layer_of([("wide", "5/m"), ("narrow", "1/m")]));
    let expected = [
        (200, "\"wide\";r=4;t=48, \"narrow\";r=0;t=60"),
        (429, "\"wide\";r=4;t=48, \"narrow\";r=0;t=60"),
    ];
    for (status, fields) in expected {
        let response = send(&service, request("alice")).await;
        assert_eq!(response.status(), status);
        assert_eq!(field(&response, "ratelimit"), Some(fields));
        assert_eq!(
            field(&response, "ratelimit-policy"),
            Some("\"wide\";q=5;w=60, \"narrow\";q=1;w=60")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn one_denying_policy_prevents_all_charges() {
    let service = limited(layer_of([("wide", "5/m"), ("narrow", "1/m")]));
    send(&service, request("alice")).await;
    for _ in 0..10 {
        let denied = send(&service, request("alice")).await;
        assert_eq!(denied.status(), 429);
        let remaining: Vec<u32> = decision(&denied)
            .unwrap()
            .each()
            .map(|each| each.remaining())
            .collect();
        assert_eq!(remaining, [4, 0]);
    }
}

#[tokio::test]
async fn the_problem_names_only_denying_policies() {
    let service = limited(layer_of([("a", "9/h"), ("b", "5/h"), ("c", "2/h")]).cost(by_header));
    assert_eq!(send(&service, costing(1)).await.status(), 200);
    for (cost, violated) in [
        (2, json!(["c"])),
        (5, json!(["b", "c"])),
        (9, json!(["a", "b", "c"])),
    ] {
        let denied = send(&service, costing(cost)).await;
        assert_eq!(denied.status(), 429);
        assert_eq!(json(denied).await["violated-policies"], violated, "{cost}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_longest_wait_counts() {
    let service = limited(layer_of([
        ("second", "1/s"),
        ("hour", "1/h"),
        ("minute", "1/m"),
    ]));
    send(&service, request("alice")).await;
    let denied = send(&service, request("alice")).await;
    assert_eq!(field(&denied, "retry-after"), Some("3600"));
    assert_eq!(
        json(denied).await["detail"],
        "The quota of 1 per hour is used up. Try again in 3600 s."
    );
}

#[tokio::test]
async fn one_policys_capacity_bounds_the_cost() {
    let service = limited(layer_of([("used-up", "5/h"), ("small", "2/h")]).cost(by_header));
    for cost in [2, 3] {
        let response = send(&service, costing(cost)).await;
        assert_eq!(response.status(), if cost == 2 { 200 } else { 429 });
        assert_eq!(
            field(&response, "retry-after"),
            None,
            "no wait makes room for 3 of 2"
        );
    }
}
