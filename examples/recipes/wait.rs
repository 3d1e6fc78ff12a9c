//! A wait instead of a 429.

use std::num::NonZeroUsize;
use std::time::Duration;

use axum::{Router, body::Body, http::Request, routing::get};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::wait::Wait;
use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};

#[tokio::test(start_paused = true)]
async fn requests_wait_in_turn() -> Result<(), Box<dyn std::error::Error>> {
    const FEW: NonZeroUsize = NonZeroUsize::new(10).unwrap();
    let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(1))?;
    let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
        .wait(Wait::up_to(Duration::from_secs(2)).per_caller(FEW));
    let app: Router = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(layer);

    let start = Instant::now();
    let send = || app.clone().oneshot(Request::new(Body::empty()));
    let (first, second, third, fourth) = tokio::try_join!(send(), send(), send(), send())?;
    let statuses = [first, second, third, fourth].map(|response| response.status().as_u16());
    assert_eq!(statuses, [200, 200, 200, 429]);
    assert_eq!(start.elapsed().as_secs(), 2);
    Ok(())
}
