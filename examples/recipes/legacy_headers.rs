//! Old clients.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(3))?;
    let limits = RateLimitLayer::new(LocalStore::default(), Global, policy)
        .headers(Headers::DRAFT_11.and(Headers::X_SECONDS));
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test(start_paused = true)]
async fn responses_have_legacy_fields() -> Result<(), Box<dyn std::error::Error>> {
    let response = app()?.oneshot(Request::new(Body::empty())).await?;
    assert_eq!(response.headers()["x-ratelimit-limit"], "3");
    assert_eq!(response.headers()["x-ratelimit-remaining"], "2");
    assert_eq!(response.headers()["x-ratelimit-reset"], "20");
    assert_eq!(response.headers()["ratelimit"], r#""api";r=2;t=40"#);
    Ok(())
}
