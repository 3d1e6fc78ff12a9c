//! A limit for the whole service and for each caller.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::{Global, HeaderKey};
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app(store: LocalStore) -> Result<Router, ConfigError> {
    let all = Policy::new("all", Strategy::Gcra, Quota::per_minute(3))?;
    let each = Policy::new("each", Strategy::Gcra, Quota::per_minute(2))?;
    Ok(Router::new()
        .route("/", get(|| async {}))
        .layer(RateLimitLayer::new(store.clone(), Global, all))
        .layer(RateLimitLayer::new(
            store,
            HeaderKey::new("x-api-key")?,
            each,
        )))
}

#[tokio::test]
async fn the_service_and_each_caller_are_limited() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(LocalStore::default())?;
    for (key, status) in [
        ("k-1", 200),
        ("k-1", 200),
        ("k-1", 429),
        ("k-2", 200),
        ("k-3", 429),
    ] {
        let request = Request::get("/")
            .header("x-api-key", key)
            .body(Body::empty())?;
        assert_eq!(app.clone().oneshot(request).await?.status(), status);
    }
    Ok(())
}
