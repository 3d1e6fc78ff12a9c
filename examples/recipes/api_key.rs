//! Per API key, with a costlier route and an exempt health check.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(10))?;
    let limits = RateLimitLayer::new(LocalStore::default(), HeaderKey::new("x-api-key")?, policy)
        .cost(|request| match request.uri.path() {
            "/search" => 5,
            _ => 1,
        })
        .skip(|request| request.uri.path() == "/health");
    let ok = || async { "ok" };
    Ok(Router::new()
        .route("/", get(ok))
        .route("/search", get(ok))
        .route("/health", get(ok))
        .layer(limits))
}

#[tokio::test]
async fn keys_have_counts_and_routes_a_cost() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    for (path, status) in [("/search", 200), ("/search", 200), ("/", 429)] {
        let request = Request::get(path)
            .header("x-api-key", "k-1")
            .body(Body::empty())?;
        assert_eq!(app.clone().oneshot(request).await?.status(), status);
    }
    for (path, status) in [("/health", 200), ("/", 400)] {
        let without_key = Request::get(path).body(Body::empty())?;
        assert_eq!(app.clone().oneshot(without_key).await?.status(), status);
    }
    Ok(())
}
