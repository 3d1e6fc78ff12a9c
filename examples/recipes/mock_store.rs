//! Test your service: a store that denies on command.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use axum::{Router, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::store::{ErrorKind, Health, MockStore, Store, StoreError};
use tower_redis_ratelimit::{
    ConfigError, Fallback, LocalStore, Policy, Quota, RateLimitLayer, Strategy,
};

fn app(store: impl Store) -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(60))?;
    let limits =
        RateLimitLayer::new(store, Global, policy).cost(|request| match request.uri.path() {
            "/export" => 10,
            _ => 1,
        });
    Ok(Router::new()
        .route("/", get(|| async {}))
        .route("/export", get(|| async {}))
        .layer(limits))
}

#[tokio::test]
async fn the_store_denies_on_command() -> Result<(), Box<dyn std::error::Error>> {
    let store = MockStore::new();
    let app = app(store.clone())?;
    assert_eq!(
        app.clone()
            .oneshot(Request::get("/export").body(Body::empty())?)
            .await?
            .status(),
        200
    );
    assert_eq!(store.asked()[0].cost(), 10);

    store.deny(Duration::from_secs(30));
    let denied = app.clone().oneshot(Request::new(Body::empty())).await?;
    assert_eq!(
        (
            denied.status().as_u16(),
            denied.headers()["retry-after"].to_str()?
        ),
        (429, "30")
    );

    store.fail(StoreError::new(ErrorKind::Unreachable));
    assert_eq!(
        app.oneshot(Request::new(Body::empty())).await?.status(),
        503
    );
    Ok(())
}

/// The service with its health check. Its store is an `AnyStore` outside of tests.
fn health(store: impl Store) -> Result<Router, ConfigError> {
    let app = app(store.clone())?;
    let health = async move || match store.health() {
        Health::Failing => (StatusCode::SERVICE_UNAVAILABLE, "failing"),
        health => (StatusCode::OK, health.as_str()),
    };
    Ok(app.route("/health", get(health)))
}

#[tokio::test]
async fn the_health_changes_on_command() -> Result<(), Box<dyn std::error::Error>> {
    let redis = MockStore::new();
    let alone = health(redis.clone())?;
    let with_fallback = health(Fallback::new(redis.clone(), LocalStore::default()))?;
    let get = async |app: &Router, path| -> Result<_, Box<dyn std::error::Error>> {
        let request = Request::get(path).body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        let status = response.status().as_u16();
        Ok((status, to_bytes(response.into_body(), 1_000).await?))
    };
    for app in [&alone, &with_fallback] {
        assert_eq!(get(app, "/health").await?, (200, "ok".into()));
    }
    redis.fail(StoreError::new(ErrorKind::Unreachable));
    // Three failures open the breaker of the fallback.
    for _ in 0..3 {
        assert_eq!(get(&alone, "/").await?.0, 503);
        assert_eq!(get(&with_fallback, "/").await?.0, 200);
    }
    assert_eq!(get(&alone, "/health").await?, (503, "failing".into()));
    assert_eq!(get(&with_fallback, "/health").await?, (200, "local".into()));
    redis.allow();
    get(&alone, "/").await?;
    assert_eq!(get(&alone, "/health").await?, (200, "ok".into()));
    Ok(())
}
