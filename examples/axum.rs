//! `cargo run --example axum`
//!
//! An axum service behind a rate limit, 10 requests a minute for each client address. Settings by the environment:
//! `PORT` (3000), `RATE_LIMIT` (`10/min`), and `REDIS_URL` to share the count among instances:
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ PORT=3001 cargo run --example axum
//! ```
//!
//! `axum::serve` keeps connections that never send a whole head, and handles no signals, so PID 1 of a container ignores SIGTERM.
//! In production serve as `examples/serve.rs` does, or use a proxy with a header timeout and `with_graceful_shutdown`.

use std::env;
use std::error::Error;
use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_redis_ratelimit::extract::PeerIp;
use tower_redis_ratelimit::observe::{Observer, event};
use tower_redis_ratelimit::store::AnyStore;
use tower_redis_ratelimit::{Policy, Quota, RateLimitLayer, Strategy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = setting("PORT", "3000")?;
    let quota: Quota = setting("RATE_LIMIT", "10/min")?;
    let policy = Policy::new("example", Strategy::Gcra, quota)?;
    let store = AnyStore::from_env("REDIS_URL")?;
    let counted = match store {
        AnyStore::Local(_) => "counted in this process; set REDIS_URL to share the count",
        _ => "counted in Redis, for all instances",
    };

    let layer = RateLimitLayer::new(store, PeerIp, policy).observer(Log);
    let app = Router::new()
        .route("/", get(|| async { "Hello!\n" }))
        .layer(layer);

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port))
        .await
        .map_err(|error| format!("PORT {port}: {error}"))?;
    println!(
        "{quota} per address, {counted}. Try: curl -i localhost:{}/",
        listener.local_addr()?.port()
    );
    axum::serve(
        listener,
        app.into_make_service_with_connect_info::<SocketAddr>(),
    )
    .await?;
    Ok(())
}

/// Prints to the terminal when Redis is lost and recovered.
struct Log;

impl Observer for Log {
    fn degraded(&self, event: &event::Degraded<'_>) {
        eprintln!(
            "degraded: this instance counts by itself now: {}",
            event.error
        );
    }

    fn recovered(&self, event: &event::Recovered) {
        eprintln!(
            "recovered: counted in Redis again, after {:.1?}",
            event.after
        );
    }
}

/// Returns a setting from the environment, or its default.
fn setting<T>(name: &str, default: &str) -> Result<T, String>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    let text = env::var(name).unwrap_or_else(|_| default.to_owned());
    text.parse()
        .map_err(|error| format!("{name}={text}: {error}"))
}
