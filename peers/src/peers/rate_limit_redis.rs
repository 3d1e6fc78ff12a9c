//! `tower-rate-limit-redis`.

use axum::body::Body;
use benches::cases::HEADER;
use http::{Request, Response};
use tower::{Layer, service_fn};
use tower_rate_limit_redis::{KeyResolver, RateLimitLayer};

use super::inner;
use crate::peer::{Instance, Layered, Peer, Setup, by_header};
use crate::speed::Load;

#[derive(Clone, Copy)]
pub struct RateLimitRedis;

impl Peer for RateLimitRedis {
    fn name(&self) -> &'static str {
        "tower-rate-limit-redis"
    }

    /// It allows a caller at most 1,000 requests a second.
    fn can(&self, load: Load) -> bool {
        !matches!(load, Load::Granted | Load::TenLimits)
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        let client = redis_032::Client::open(setup.server.url()).unwrap();
        // The only connection that it takes.
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        let layer = RateLimitLayer::builder()
            .conn(connection)
            .key_resolver(ByHeader)
            .capacity(u16::try_from(setup.quota.capacity()).unwrap())
            .emission_interval(setup.quota.period() / setup.quota.limit())
            .timeout(setup.deadline)
            .fail_open(true)
            .build();
        Layered(layer.layer(service_fn(inner)), by_header)
    }
}

#[derive(Clone)]
struct ByHeader;

impl KeyResolver for ByHeader {
    type Key = String;
    type ErrorBody = Body;

    fn key<T>(&self, request: &Request<T>) -> Result<String, Response<Body>> {
        Ok(request.headers()[HEADER].to_str().unwrap().to_owned())
    }
}
