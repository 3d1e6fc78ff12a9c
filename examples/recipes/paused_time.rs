//! Test your service: the time.

use std::time::Duration;

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};

#[tokio::test(start_paused = true)]
async fn tests_need_not_wait() -> Result<(), Box<dyn std::error::Error>> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_hour(1))?;
    let limits = RateLimitLayer::new(LocalStore::default(), Global, policy);
    let app: Router = Router::new().route("/", get(|| async {})).layer(limits);
    for (seconds, status) in [(0, 200), (3_599, 429), (1, 200)] {
        tokio::time::advance(Duration::from_secs(seconds)).await;
        assert_eq!(
            app.clone()
                .oneshot(Request::new(Body::empty()))
                .await?
                .status(),
            status
        );
    }
    Ok(())
}
