//! A JSON answer of your own.

use axum::response::{IntoResponse, Json};
use axum::{Router, body::Body, body::to_bytes, http::Request, routing::get};
use serde_json::{Value, json};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(1))?;
    let limits =
        RateLimitLayer::new(LocalStore::default(), Global, policy).reject_with(|rejection| {
            (
                rejection.status(),
                Json(json!({ "error": rejection.to_string() })),
            )
                .into_response()
        });
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test(start_paused = true)]
async fn denials_have_a_json_body() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    assert_eq!(
        app.clone()
            .oneshot(Request::new(Body::empty()))
            .await?
            .status(),
        200
    );
    let denied = app.oneshot(Request::new(Body::empty())).await?;
    assert_eq!(
        (
            denied.status().as_u16(),
            denied.headers()["retry-after"].to_str()?
        ),
        (429, "60")
    );
    let body: Value = serde_json::from_slice(&to_bytes(denied.into_body(), 1_000).await?)?;
    assert_eq!(
        body,
        json!({ "error": "The quota of 1 per minute is used up. Try again in 60 s." })
    );
    Ok(())
}
