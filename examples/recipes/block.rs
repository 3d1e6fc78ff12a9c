//! A block after repeated denials.

use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::{Request, connect_info::MockConnectInfo};
use axum::{Router, body::Body, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};

/// Time of a block.
const TIME: Duration = Duration::from_secs(3_600);

fn app(store: impl Store) -> Result<Router, Box<dyn std::error::Error>> {
    let api = Policy::new("api", Strategy::Gcra, Quota::per_second(2))?;
    let limits = RateLimitLayer::new(store, PeerIp, api).block_after("4/min", TIME)?;
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
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
    // The fourth denial blocks, once it is counted.
    for expected in [(200, 0), (200, 0), (429, 1), (429, 1), (429, 1), (429, 1)] {
        assert_eq!(send(7).await?, expected);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(send(7).await?, (429, 3_600));
    assert_eq!(send(8).await?, (200, 0), "another caller");
    // A blocked caller's requests do not extend the block.
    tokio::time::sleep(TIME - Duration::from_secs(1)).await;
    for _ in 0..5 {
        assert_eq!(send(7).await?.0, 429);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(send(7).await?, (200, 0));
    Ok(())
}
