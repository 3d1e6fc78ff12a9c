//! A block after repeated denials.

use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::{Request, State, connect_info::MockConnectInfo};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::{Router, body::Body, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::check::Decision;
use tower_redis_ratelimit::extract::{KeyExtractor, PeerIp};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::throttle::Pause;
use tower_redis_ratelimit::{
    Limiter, LocalStore, Policies, Policy, Quota, RateLimitLayer, Strategy,
};

/// Time of a block.
const TIME: Duration = Duration::from_secs(3_600);

#[derive(Clone)]
struct Blocks<S: Store> {
    /// The denials that a caller may have.
    denials: Limiter<S>,
    block: Pause<S>,
}

/// Blocks a caller whose requests are denied too often.
async fn block<S: Store>(
    State(blocks): State<Blocks<S>>,
    request: Request,
    next: Next,
) -> Response {
    let (parts, body) = request.into_parts();
    let key = PeerIp.extract(&parts);
    let response = next.run(Request::from_parts(parts, body)).await;
    // The policy of the block denies a caller that is blocked already.
    if let Ok(key) = key
        && let Some(denied) = response.extensions().get::<Decision>()
        && denied.policy().name() == "api"
        && let Ok(denials) = blocks.denials.take(key, 1).await
        && !denials.is_allowed()
    {
        // Without the block, the limit still holds.
        let _ = blocks.block.begin(key, TIME).await;
    }
    response
}

fn app<S: Store>(store: S) -> Result<Router, Box<dyn std::error::Error>> {
    let api = Policy::new("api", Strategy::Gcra, Quota::per_second(2))?;
    let denials = Policy::new("denials", Strategy::SlidingLog, Quota::per_minute(3))?;
    let pause = Pause::new(store.clone(), "block", TIME)?;
    let policies = Policies::new([api, pause.policy()])?;
    let limits = RateLimitLayer::new(store.clone(), PeerIp, policies);
    let blocks = Blocks {
        denials: Limiter::new(store, denials),
        block: pause,
    };
    Ok(Router::new()
        .route("/", get(|| async {}))
        .layer(limits)
        .layer(from_fn_with_state(blocks, block)))
}

#[tokio::test(start_paused = true)]
async fn too_many_denials_block_a_caller() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(LocalStore::default())?;
    let send = async |host: u8| {
        let peer = MockConnectInfo(SocketAddr::from(([192, 0, 2, host], 4711)));
        let app = app.clone().layer(peer);
        let response = app.oneshot(Request::new(Body::empty())).await?;
        let wait = response.headers().get("retry-after");
        let wait = wait.and_then(|wait| wait.to_str().ok()?.parse().ok());
        Ok::<_, Box<dyn std::error::Error>>((response.status().as_u16(), wait.unwrap_or(0)))
    };
    // Three denials are allowed, and the fourth one blocks.
    for expected in [(200, 0), (200, 0), (429, 1), (429, 1), (429, 1), (429, 1)] {
        assert_eq!(send(7).await?, expected);
    }
    let (status, wait) = send(7).await?;
    // A pause is rounded up.
    assert_eq!(status, 429);
    assert!((3_600..=3_601).contains(&wait), "{wait}");
    assert_eq!(send(8).await?, (200, 0), "another caller");
    // A blocked caller's requests do not prolong the block.
    tokio::time::advance(TIME - Duration::from_secs(1)).await;
    for _ in 0..5 {
        assert_eq!(send(7).await?.0, 429);
    }
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(send(7).await?, (200, 0));
    Ok(())
}
