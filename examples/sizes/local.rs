//! Counts in the process: a `LocalStore`.

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::{LocalStore, Policy, RateLimitLayer, Strategy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = LocalStore::default();
    let policy = Policy::new("api", Strategy::Gcra, "10/min")?;
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(store, PeerIp, policy))
        .into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app).await?;
    Ok(())
}
