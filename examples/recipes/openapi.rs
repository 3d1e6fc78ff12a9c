//! OpenAPI: the rejections of a layer, in the description of an API.

use std::error::Error;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use axum::response::Response;
use axum::{Router, routing::get};
use serde_json::Value;
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{ConfigError, Policy, RateLimitLayer, Strategy};
use utoipa::{IntoResponses, OpenApi, ToSchema};

/// The body of a rejection, by RFC 9457.
#[derive(ToSchema)]
#[schema(rename_all = "kebab-case")]
#[expect(dead_code, reason = "it describes the layer's JSON")]
struct Problem {
    #[schema(rename = "type")]
    kind: String,
    title: String,
    status: u16,
    detail: String,
    /// The policies that have denied, in a 429.
    #[schema(required = false)]
    violated_policies: Vec<String>,
}

/// The responses of the layer.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "it describes the layer's responses")]
enum Rejected {
    /// A quota is used up.
    #[response(
        status = 429,
        content_type = "application/problem+json",
        headers(
            ("retry-after" = u32, description = "Seconds. Missing if no wait helps"),
            ("ratelimit" = String, description = "What remains, by policy"),
            ("ratelimit-policy" = String, description = "The quotas")
        )
    )]
    Denied(Problem),
    /// No store can decide.
    #[response(
        status = 503,
        content_type = "application/problem+json",
        headers(("retry-after" = u32, description = "Seconds"))
    )]
    Unavailable(Problem),
}

#[utoipa::path(get, path = "/", responses((status = 200, body = String), Rejected))]
async fn hello() -> &'static str {
    "hello"
}

#[derive(OpenApi)]
#[openapi(paths(hello), components(schemas(Problem)))]
struct Api;

fn app(store: impl Store) -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, "10/min")?;
    let limits = RateLimitLayer::new(store, Global, policy);
    Ok(Router::new().route("/", get(hello)).layer(limits))
}

#[tokio::test]
async fn rejections_are_as_described() -> Result<(), Box<dyn Error>> {
    let store = MockStore::new();
    let app = app(store.clone())?;
    store.deny(Duration::from_secs(30));
    is_described(429, app.clone().oneshot(Request::new(Body::empty())).await?).await?;
    store.fail(StoreError::new(ErrorKind::Unreachable));
    is_described(503, app.oneshot(Request::new(Body::empty())).await?).await
}

/// Compares a response with the description of its status.
async fn is_described(status: u16, response: Response) -> Result<(), Box<dyn Error>> {
    let api = serde_json::to_value(Api::openapi())?;
    let described = &api["paths"]["/"]["get"]["responses"][status.to_string()];
    assert_eq!(response.status(), status);
    for (name, _) in described["headers"].as_object().unwrap() {
        assert!(response.headers().contains_key(name), "{name}");
    }
    let content_type = response.headers()["content-type"].to_str()?;
    let schema = &described["content"][content_type]["schema"]["$ref"];
    assert_eq!(schema, "#/components/schemas/Problem", "{described}");

    let problem = &api["components"]["schemas"]["Problem"];
    let body: Value = serde_json::from_slice(&to_bytes(response.into_body(), 1_000).await?)?;
    for (name, value) in body.as_object().unwrap() {
        let is_of_type = match problem["properties"][name]["type"].as_str() {
            Some("string") => value.is_string(),
            Some("integer") => value.is_u64(),
            Some("array") => value.is_array(),
            _ => false,
        };
        assert!(is_of_type, "{name}: {value} is not as in {problem}");
    }
    for name in problem["required"].as_array().unwrap() {
        assert!(body.get(name.as_str().unwrap()).is_some(), "{name}");
    }
    Ok(())
}
