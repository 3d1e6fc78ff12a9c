//! The compared limiters, each with its best settings: see `README.md`.

mod governor;
mod limitador;
mod ours;
mod rate_limit_redis;
mod rate_tier;
mod redis_cell;
mod trypema;

use std::convert::Infallible;

use axum::body::Body;
use http::{Request, Response};
use redis::aio::{ConnectionManager, ConnectionManagerConfig};

use crate::peer::{Measured, Setup};

/// They count in Redis. The first is who the others are compared with.
pub const SHARED: [&dyn Measured; 9] = [
    &ours::WithFallback,
    &ours::Alone,
    &redis_cell::RedisCell,
    &rate_tier::RateTier,
    &rate_limit_redis::RateLimitRedis,
    &limitador::Limitador::Redis,
    &limitador::Limitador::Cached,
    &trypema::Trypema::Redis,
    &trypema::Trypema::Hybrid,
];

/// They count in the process.
pub const LOCAL: [&dyn Measured; 5] = [
    &ours::Local,
    &governor::Governor,
    &rate_tier::InMemory,
    &limitador::Limitador::InMemory,
    &trypema::Trypema::Local,
];

async fn inner(_: Request<()>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::empty()))
}

/// The connection that redis-rs advises, with the deadline, and one attempt to connect for a request. Its defaults are
/// 500 ms, a second, and six more attempts.
fn connection(setup: Setup<'_>) -> ConnectionManager {
    let config = ConnectionManagerConfig::new()
        .set_response_timeout(Some(setup.deadline))
        .set_connection_timeout(Some(setup.deadline))
        .set_number_of_retries(0);
    let client = redis::Client::open(setup.server.url()).unwrap();
    client.get_connection_manager_lazy(config).unwrap()
}
