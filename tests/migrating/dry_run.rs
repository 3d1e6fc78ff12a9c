//! A dry run next to the old limiter: when this crate takes over, it has counted the requests that the old one allowed.

use std::convert::Infallible;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{Policy, RateLimitLayer, RedisStore, Strategy, redis};

use crate::support::RedisServer;
use crate::theirs::REDIS_RATE;

#[tokio::test]
async fn a_dry_run_leaves_no_free_burst() {
    let server = RedisServer::start();
    let mut redis = server.connection().await;
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    // No unit refills while the test runs.
    let policy = Policy::new("api", Strategy::Gcra, "10/h").unwrap();
    let ours = RateLimitLayer::new(store, Global, policy);
    let dry = ours.clone().dry_run();
    let handler =
        service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new())));

    let mut passed = 0;
    for _ in 0..7 {
        let mut old = redis::cmd("EVAL");
        old.arg(REDIS_RATE)
            .arg(1)
            .arg("rate:all")
            .arg(0)
            .arg(1)
            .arg(10)
            .arg(3_600)
            .arg(10);
        if old.query_async::<bool>(&mut redis).await.unwrap() {
            let response = dry.layer(handler).oneshot(Request::new(())).await.unwrap();
            passed += u32::from(response.status() == StatusCode::OK);
        }
    }
    for _ in 0..20 {
        let response = ours.layer(handler).oneshot(Request::new(())).await.unwrap();
        passed += u32::from(response.status() == StatusCode::OK);
    }
    assert_eq!(passed, 10, "seven by the old limiter, and three by ours");
}
