//! Retries that are charged once.

use axum::body::Body;
use axum::{Router, routing::post};
use http::Request;
use tower::ServiceExt;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::{
    ConfigError, Key, LocalStore, Policy, Quota, RateLimitLayer, Strategy,
};

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("orders", Strategy::Gcra, Quota::per_minute(60).burst(2))?;
    let limits = RateLimitLayer::new(LocalStore::default(), HeaderKey::new("x-api-key")?, policy)
        .id(|request| request.headers.get("idempotency-key").map(Key::new));
    Ok(Router::new()
        .route("/orders", post(|| async { "ordered" }))
        .layer(limits))
}

#[tokio::test(start_paused = true)]
async fn retries_are_charged_once() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    let order = |id: &str| {
        let request = Request::post("/orders")
            .header("x-api-key", "ann")
            .header("idempotency-key", id);
        request.body(Body::empty())
    };
    for (id, status) in [("a", 200), ("b", 200), ("a", 200), ("b", 200), ("c", 429)] {
        assert_eq!(app.clone().oneshot(order(id)?).await?.status(), status);
    }
    Ok(())
}
