//! Redis where there is one.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::check::{Decision, Source};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{Policy, Quota, RateLimitLayer, Strategy};

fn app(variable: &str) -> Result<Router, Box<dyn std::error::Error>> {
    let store = AnyStore::from_env(variable)?;
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(60))?;
    let layer = RateLimitLayer::new(store, Global, policy).decision_in_response();
    Ok(Router::new().route("/", get(|| async {})).layer(layer))
}

#[tokio::test]
async fn without_a_url_counts_are_local() -> Result<(), Box<dyn std::error::Error>> {
    // In a service this is `REDIS_URL`.
    let response = app("REDIS_URL_OF_THE_RECIPES")?
        .oneshot(Request::new(Body::empty()))
        .await?;
    assert_eq!(response.status(), 200);
    assert_eq!(
        response.extensions().get().map(Decision::source),
        Some(Source::Local)
    );
    Ok(())
}
