//! Several limits of one caller.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policies, Policy, RateLimitLayer, Strategy};

fn app() -> Result<Router, ConfigError> {
    let policies = Policies::new([
        Policy::new("burst", Strategy::Gcra, "2/h")?,
        Policy::new("daily", Strategy::FixedWindow(Align::FirstHit), "1000/d")?,
    ])?;
    let limits = RateLimitLayer::new(
        LocalStore::default(),
        HeaderKey::new("x-api-key")?,
        policies,
    );
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test(start_paused = true)]
async fn all_limits_are_charged_or_none() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    for (status, left) in [
        (200, r#""burst";r=1;t=1800, "daily";r=999;t=86400"#),
        (200, r#""burst";r=0;t=1800, "daily";r=998;t=86400"#),
        (429, r#""burst";r=0;t=1800, "daily";r=998;t=86400"#),
    ] {
        let request = Request::get("/")
            .header("x-api-key", "k-1")
            .body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        assert_eq!(
            (
                response.status().as_u16(),
                response.headers()["ratelimit"].to_str()?
            ),
            (status, left)
        );
    }
    Ok(())
}
