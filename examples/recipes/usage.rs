//! A page that shows callers their usage.

use axum::body::{Body, to_bytes};
use axum::{Extension, Json, Router, http::Request, routing::get};
use serde_json::{Value, json};
use tower::ServiceExt;
use tower_redis_ratelimit::check::Decision;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::strategy::{Align, Calendar};
use tower_redis_ratelimit::{ConfigError, LocalStore, Policies, Policy, RateLimitLayer, Strategy};

async fn usage(Extension(decision): Extension<Decision>) -> Json<Value> {
    let mut plans = vec![];
    for each in decision.each() {
        plans.push(json!({
            "plan": each.policy().name(),
            "used": each.used(),
            "of": each.capacity(),
            "ends_in_seconds": each.reset_after().as_secs(),
        }));
    }
    Json(plans.into())
}

fn app() -> Result<Router, ConfigError> {
    let months = Strategy::FixedWindow(Align::Calendar(Calendar::month()));
    let policies = Policies::new([
        Policy::new("burst", Strategy::Gcra, "2/h")?,
        Policy::new("plan", months, "10000/month")?,
    ])?;
    let key = HeaderKey::new("x-api-key")?;
    let limits = RateLimitLayer::new(LocalStore::default(), key, policies)
        // A cost of 0 charges nothing, and is allowed to callers who have used everything.
        .cost(|request| match request.uri.path() {
            "/usage" => 0,
            _ => 1,
        });
    Ok(Router::new()
        .route("/", get(|| async {}))
        .route("/usage", get(usage))
        .layer(limits))
}

#[tokio::test(start_paused = true)]
async fn a_page_shows_what_was_used() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    let send = async |path: &str| {
        let request = Request::get(path)
            .header("x-api-key", "k-1")
            .body(Body::empty())?;
        Ok::<_, Box<dyn std::error::Error>>(app.clone().oneshot(request).await?)
    };
    for status in [200, 200, 429] {
        assert_eq!(send("/").await?.status(), status);
    }
    for _ in 0..3 {
        let response = send("/usage").await?;
        assert_eq!(response.status(), 200);
        let body = to_bytes(response.into_body(), 10_000).await?;
        let page: Value = serde_json::from_slice(&body)?;
        assert_eq!(
            (
                &page[0]["used"],
                &page[0]["of"],
                &page[0]["ends_in_seconds"]
            ),
            (&json!(2), &json!(2), &json!(3_600))
        );
        assert_eq!(
            (&page[1]["plan"], &page[1]["used"], &page[1]["of"]),
            (&json!("plan"), &json!(2), &json!(10_000))
        );
    }
    Ok(())
}
