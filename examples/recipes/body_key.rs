//! A limit by a field of a JSON body.

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::post};
use serde::Deserialize;
use tower::ServiceExt;
use tower_redis_ratelimit::extract::by_extension;
use tower_redis_ratelimit::{ConfigError, Key, LocalStore, Policy, RateLimitLayer, Strategy};

/// Maximum length of a body.
const BYTES: usize = 64 << 10;

#[derive(Clone, Deserialize)]
struct Order {
    tenant: String,
}

/// Reads the body, and names its tenant in the request's extensions.
async fn name_tenant(request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let Ok(bytes) = to_bytes(body, BYTES).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let Ok(order) = serde_json::from_slice::<Order>(&bytes) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    parts.extensions.insert(order);
    next.run(Request::from_parts(parts, Body::from(bytes)))
        .await
}

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("orders", Strategy::Gcra, "1/h")?;
    let by_tenant = by_extension(|order: &Order| Key::new(&order.tenant));
    let limits = RateLimitLayer::new(LocalStore::default(), by_tenant, policy);
    Ok(Router::new()
        .route("/orders", post(|body: String| async { body }))
        .layer(limits)
        .layer(from_fn(name_tenant)))
}

#[tokio::test]
async fn each_tenant_has_a_count() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    let large = format!(r#"{{"tenant":"{}"}}"#, "a".repeat(BYTES));
    for (body, expected) in [
        (r#"{"tenant":"ann"}"#, 200),
        (r#"{"tenant":"ann"}"#, 429),
        (r#"{"tenant":"bob"}"#, 200),
        (r#"{"tenant":7}"#, 400),
        (&large, 413),
    ] {
        let request = Request::post("/orders").body(Body::from(body.to_owned()))?;
        let response = app.clone().oneshot(request).await?;
        assert_eq!(response.status(), expected, "{body:.40}");
        if expected == 200 {
            assert_eq!(to_bytes(response.into_body(), BYTES).await?, body);
        }
    }
    Ok(())
}
