//! A block after repeated denials.

use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::{Request, connect_info::MockConnectInfo};
use axum::{Router, body::Body, routing::get};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::reject::BlockAfter;
use tower_redis_ratelimit::select::Tiers;
use tower_redis_ratelimit::store::{Store, StoreError};
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, RateLimitLayer, Strategy};

/// Blocks by denials.
fn app(store: impl Store, api: Policy) -> Result<Router, Box<dyn std::error::Error>> {
    let limits =
        RateLimitLayer::new(store, PeerIp, api).block_after("4/min", Duration::from_secs(3_600))?;
    Ok(Router::new().route("/", get(|| async {})).layer(limits))
}

/// Blocks and unblocks a caller.
async fn by_an_operator(store: impl Store, api: Policy, key: Key) -> Result<(), StoreError> {
    let blocks = Limiter::new(store, api).with_blocks();
    blocks.block(key, Duration::from_secs(86_400)).await?;
    blocks.unblock(key).await?;
    Ok(())
}

const FILE: &str = r#"
block-after = "20/min for 10m, extended"

[api]
default = { name = "api", quota = "100/s" }

[api.callers]
"ip:192.0.2.66, ip:198.51.100.0/24" = "blocked"
"#;

/// The limits of a settings file.
#[derive(serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Limits {
    api: Tiers,
    block_after: BlockAfter,
}

fn from_settings(
    store: impl Store,
    limits: Limits,
) -> Result<RateLimitLayer<impl Store, PeerIp>, Box<dyn std::error::Error>> {
    let rule = limits.block_after;
    let layer = RateLimitLayer::new(store, PeerIp, limits.api)
        .block_after(rule.strikes(), rule.time())?
        .extend_blocks(rule.is_extended());
    Ok(layer)
}

fn api() -> Policy {
    Policy::new("api", Strategy::Gcra, "2/s").expect("a valid quota")
}

#[tokio::test(start_paused = true)]
async fn too_many_denials_block_a_caller() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(LocalStore::default(), api())?;
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
    tokio::time::sleep(Duration::from_secs(3_599)).await;
    for _ in 0..5 {
        assert_eq!(send(7).await?.0, 429);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(send(7).await?, (200, 0));
    Ok(())
}

#[tokio::test]
async fn an_operator_ends_a_block() -> Result<(), Box<dyn std::error::Error>> {
    let store = LocalStore::default();
    let user = Key::new("user-42");
    let blocks = Limiter::new(store.clone(), api()).with_blocks();
    blocks.block(user, Duration::from_secs(60)).await?;
    assert!(!blocks.take(user, 1).await?.is_allowed());
    by_an_operator(store, api(), user).await?;
    assert!(blocks.take(user, 1).await?.is_allowed());
    Ok(())
}

#[tokio::test]
async fn a_file_has_the_rule() -> Result<(), Box<dyn std::error::Error>> {
    let limits: Limits = toml::from_str(FILE)?;
    assert_eq!(limits.block_after.time(), Duration::from_secs(600));
    let layer = from_settings(LocalStore::default(), limits)?;
    let app = Router::new().route("/", get(|| async {})).layer(layer);
    for (host, status) in [(65, 200), (66, 429)] {
        let peer = MockConnectInfo(SocketAddr::from(([192, 0, 2, host], 4711)));
        let request = Request::new(Body::empty());
        let response = app.clone().layer(peer).oneshot(request).await?;
        assert_eq!(response.status(), status);
        assert!(!response.headers().contains_key("retry-after"));
    }
    Ok(())
}
