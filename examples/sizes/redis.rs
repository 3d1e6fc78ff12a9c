//! Counts in Redis, and in the process while Redis cannot decide: a `Fallback`.

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::{Fallback, LocalStore, Policy, RateLimitLayer, RedisStore, Strategy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let redis = RedisStore::connect_lazy("redis://127.0.0.1/")?;
    let store = Fallback::new(redis, LocalStore::default());
    let policy = Policy::new("api", Strategy::Gcra, "10/min")?;
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(store, PeerIp, policy))
        .into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app).await?;
    Ok(())
}
