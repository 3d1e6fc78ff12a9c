//! A dry run next to an enforced limit.

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::check::DryRun;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app() -> Result<Router, ConfigError> {
    let policy = |name, limit| Policy::new(name, Strategy::Gcra, Quota::per_minute(limit));
    let limits = RateLimitLayer::new(LocalStore::default(), Global, policy("api", 2)?)
        .shadow(policy("tighter", 1)?);
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test]
async fn a_shadow_rejects_nothing() -> Result<(), Box<dyn std::error::Error>> {
    let app = app()?;
    for (status, would_pass) in [(200, Some(true)), (200, Some(false)), (429, None)] {
        let response = app.clone().oneshot(Request::new(Body::empty())).await?;
        assert_eq!(response.status(), status);
        assert_eq!(
            response.extensions().get().map(DryRun::is_allowed),
            would_pass
        );
    }
    Ok(())
}
