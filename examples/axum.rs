//! `cargo run --example axum`
//!
//! The program of `docs/start.md`: an axum service with 10 requests a minute for each API key, or for each address without
//! one. `PORT` is 3000 by default, and `REDIS_URL` shares the count among instances:
//! `REDIS_URL=redis://127.0.0.1/ PORT=3001 cargo run --example axum`
//!
//! The page serves by `axum::serve`, in one file. That bounds no connections, keeps those that never send a whole head, and
//! handles no signals, so PID 1 of a container ignores SIGTERM.

mod listen;
mod serve;

use axum::{Router, routing::get};
use tower_redis_ratelimit::extract::{HeaderKey, KeyExtractor, PeerIp};
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{Policy, RateLimitLayer, Strategy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let store = AnyStore::from_env("REDIS_URL")?;
    let key = HeaderKey::new("x-api-key")?.or(PeerIp);
    let policy = Policy::new("api", Strategy::Gcra, "10/min")?;
    let limits = RateLimitLayer::new(store, key, policy);
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(limits);

    let port = std::env::var("PORT").unwrap_or("3000".to_owned());
    let listener = tokio::net::TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    println!("http://{}/", listener.local_addr()?);
    serve::serve(listener, app).await?;
    Ok(())
}
