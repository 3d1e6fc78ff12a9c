//! New limits without a restart.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::select::Live;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, RateLimitLayer, Strategy};

fn policy(quota: &str) -> Result<Policy, ConfigError> {
    Policy::new("api", Strategy::Gcra, quota)
}

fn reload(live: &Live<Policy>, quota: &str) -> Result<(), ConfigError> {
    live.replace(policy(quota)?);
    Ok(())
}

#[tokio::test]
async fn new_limits_keep_counts() -> Result<(), Box<dyn std::error::Error>> {
    let live = Live::new(policy("2/m")?);
    let limits = RateLimitLayer::new(LocalStore::default(), Global, live.clone());
    let app: Router = Router::new().route("/", get(|| async {})).layer(limits);
    let status = async || {
        app.clone()
            .oneshot(Request::new(Body::empty()))
            .await
            .map(|response| response.status())
    };

    for expected in [200, 200, 429] {
        assert_eq!(status().await?, expected);
    }
    assert!(reload(&live, "0/m").is_err());
    assert_eq!(status().await?, 429);
    reload(&live, "1000/m")?;
    assert_eq!(status().await?, 200);
    Ok(())
}
