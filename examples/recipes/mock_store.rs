//! Test your service: a store that denies on command.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::{Router, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
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

/// The health check of the service, whose store is a `Fallback<RedisStore, LocalStore>` outside of tests.
fn health<P: Store>(store: Fallback<P, LocalStore>) -> Result<Router, ConfigError> {
    let app = app(store.clone())?;
    Ok(app.route(
        "/health",
        get(async move || match store.is_degraded() {
            true => "degraded",
            false => "ok",
        }),
    ))
}

#[tokio::test]
async fn the_service_is_degraded_on_command() -> Result<(), Box<dyn std::error::Error>> {
    let redis = MockStore::new();
    let app = health(Fallback::new(redis.clone(), LocalStore::default()))?;
    let get = async |path| -> Result<_, Box<dyn std::error::Error>> {
        let request = Request::get(path).body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        assert_eq!(response.status(), 200, "{path}");
        Ok(to_bytes(response.into_body(), 100).await?)
    };
    assert_eq!(get("/health").await?, "ok");
    redis.fail(StoreError::new(ErrorKind::Unreachable));
    // Three failures open the breaker, and the fallback decides.
    for _ in 0..3 {
        get("/").await?;
    }
    assert_eq!(get("/health").await?, "degraded");
    Ok(())
}
