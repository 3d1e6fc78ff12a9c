//! Denied callers, in the log.

use std::io;
use std::sync::Mutex;

use axum::{Router, body::Body, http::Request, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::observe::TracingObserver;
use tower_redis_ratelimit::{ConfigError, LocalStore, Policy, Quota, RateLimitLayer, Strategy};

fn app() -> Result<Router, ConfigError> {
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_minute(1))?;
    let by_user = HeaderKey::new("x-user")?.readable();
    let limits = RateLimitLayer::new(LocalStore::default(), by_user, policy)
        .observer(TracingObserver::new().reveal_keys());
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

#[tokio::test]
async fn the_log_names_denied_callers() -> Result<(), Box<dyn std::error::Error>> {
    // Instead of `tracing_subscriber::fmt::init()`, so that the test can read the lines.
    let (log, writer) = io::pipe()?;
    let subscriber = tracing_subscriber::fmt()
        .with_writer(Mutex::new(writer))
        .with_ansi(false)
        .without_time()
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let app = app()?;
    for _ in 0..3 {
        let request = Request::get("/")
            .header("x-user", "ann")
            .body(Body::empty())?;
        app.clone().oneshot(request).await?;
    }
    drop((app, guard));
    let log = io::read_to_string(log)?;
    assert!(
        log.contains(r#"rate limit exceeded policy="api" caller="ann" denied=1 dry_run=false"#),
        "{log}"
    );
    Ok(())
}
