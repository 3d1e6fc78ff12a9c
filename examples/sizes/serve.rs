//! The service that all programs with this crate share.

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Policy, RateLimitLayer, Strategy};

pub(crate) async fn serve(store: impl Store) -> Result<(), Box<dyn std::error::Error>> {
    let policy = Policy::new("api", Strategy::Gcra, "10/min")?;
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(RateLimitLayer::new(store, PeerIp, policy))
        .into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app).await?;
    Ok(())
}
