//! By route, with one layer.

use axum::http::{Method, Request};
use axum::{Router, body::Body, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::{HeaderKey, MatchedRoute};
use tower_redis_ratelimit::select::Routes;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app() -> Result<Router, ConfigError> {
    let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_minute(limit));
    let policies = Routes::new(policy("route", 2)?)
        .route("/reports/{id}", policy("report", 1)?)?
        .method(Method::POST, "/users/{id}", policy("edit", 1)?)?
        .exempt("/health")?;
    let by_key_and_route = (HeaderKey::new("x-api-key")?, MatchedRoute);
    let ok = || async { "ok" };
    Ok(Router::new()
        .route("/users/{id}", get(ok).post(ok))
        .route("/orders/{id}", get(ok))
        .route("/reports/{id}", get(ok))
        .route("/health", get(ok))
        .layer(RateLimitLayer::new(
            LocalStore::default(),
            by_key_and_route,
            policies,
        )))
}

#[tokio::test]
async fn routes_have_separate_limits() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    for (method, path, status) in [
        ("GET", "/users/1", 200),
        ("GET", "/users/2", 200),
        ("GET", "/users/3", 429),
        ("POST", "/users/1", 200),
        ("POST", "/users/2", 429),
        ("GET", "/orders/1", 200),
        ("GET", "/reports/1", 200),
        ("GET", "/reports/2", 429),
        ("GET", "/health", 200),
    ] {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("x-api-key", "k-1")
            .body(Body::empty())?;
        assert_eq!(
            app.clone().oneshot(request).await?.status(),
            status,
            "{method} {path}"
        );
    }
    Ok(())
}
