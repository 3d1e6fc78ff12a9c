//! A fixed window for each address, by a script over one connection. If Redis fails, so do the requests.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{StatusCode, header::RETRY_AFTER};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use redis::aio::MultiplexedConnection;
use redis::{Client, Script};

const LIMIT: u64 = 10;
const SCRIPT: &str = "local count = redis.call('INCR', KEYS[1])
if count == 1 then redis.call('EXPIRE', KEYS[1], 60) end
return {count, redis.call('TTL', KEYS[1])}";

async fn limit(
    State(mut redis): State<MultiplexedConnection>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    let key = format!("limit:{}", peer.ip());
    let reply = Script::new(SCRIPT).key(key).invoke_async(&mut redis).await;
    let (count, wait): (u64, u64) = match reply {
        Ok(reply) => reply,
        Err(_) => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
    };
    if count > LIMIT {
        let wait = [(RETRY_AFTER, wait.to_string())];
        return (StatusCode::TOO_MANY_REQUESTS, wait).into_response();
    }
    next.run(request).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::open("redis://127.0.0.1/")?;
    let redis = client.get_multiplexed_async_connection().await?;
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(from_fn_with_state(redis, limit))
        .into_make_service_with_connect_info::<SocketAddr>();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app).await?;
    Ok(())
}
