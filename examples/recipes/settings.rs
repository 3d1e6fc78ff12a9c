//! Limits and the store in a file.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::store::{AnyStore, StoreConfig};
use tower_redis_ratelimit::{Policies, RateLimitLayer};

const FILE: &str = r#"
[store]
kind = "local"              # without this line: Redis if there is a url, with a fallback
url = "redis://127.0.0.1/"
prefix = "shop"

[[policies]]
name = "burst"
quota = "2/s burst 3"

[[policies]]
name = "daily"
strategy = "fixed-window(first-hit)"
quota = "2 per day"
"#;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    store: StoreConfig,
    policies: Policies,
}

fn app(file: &str) -> Result<Router, Box<dyn std::error::Error>> {
    let settings: Settings = toml::from_str(file)?;
    let store = AnyStore::from_config(&settings.store)?;
    let limits = RateLimitLayer::new(store, HeaderKey::new("x-api-key")?, settings.policies);
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test]
async fn limits_come_from_a_file() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(FILE)?;
    for status in [200, 200, 429] {
        let request = Request::get("/")
            .header("x-api-key", "k-1")
            .body(Body::empty())?;
        assert_eq!(app.clone().oneshot(request).await?.status(), status);
    }

    let error = self::app(&FILE.replace("2 per day", "2 per dya"))
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(r#""2 per dya" is not a valid quota: the duration's unit is not one of ns, us, ms, s, m, h, d"#),
        "{error}"
    );
    Ok(())
}
