//! `tower-redis-cell`, with its module.

use axum::body::Body;
use benches::cases::HEADER;
use benches::redis_cell;
use benches::support::RedisServer;
use http::{Request, Response, StatusCode};
use tower::{Layer, service_fn};
use tower_redis_cell::redis_cell::Policy;
use tower_redis_cell::{
    Error, ProvideRule, ProvideRuleResult, RateLimitConfig, RateLimitLayer, Rule,
};

use super::{connection, inner};
use crate::peer::{Instance, Layered, Peer, Setup, by_header};

#[derive(Clone, Copy)]
pub struct RedisCell;

impl Peer for RedisCell {
    fn name(&self) -> &'static str {
        "tower-redis-cell"
    }

    fn server(&self, args: &[&str]) -> RedisServer {
        redis_cell::start(args)
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        let status = |error: Error<'_>, _request: &Request<()>| match error {
            Error::RateLimit(_) => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let response = move |error: Error<'_>, request: &Request<()>| {
            Response::builder()
                .status(status(error, request))
                .body(Body::empty())
                .unwrap()
        };
        let (quota, connection) = (setup.quota, connection(setup));
        // It lets one more pass at once than its burst says.
        let policy = Policy::new(
            quota.capacity() as usize - 1,
            quota.limit() as usize,
            quota.period(),
            1,
        );
        let config: RateLimitConfig<_, _, _, _> = RateLimitConfig::new(ByHeader(policy), response);
        let layer: RateLimitLayer<_, Request<()>, Response<Body>, Response<Body>, _> =
            RateLimitLayer::new(config, connection);
        Layered(layer.layer(service_fn(inner)), by_header)
    }
}

#[derive(Clone)]
struct ByHeader(Policy);

impl ProvideRule<Request<()>> for ByHeader {
    fn provide<'a>(&self, request: &'a Request<()>) -> ProvideRuleResult<'a> {
        let value = request
            .headers()
            .get(HEADER)
            .and_then(|value| value.to_str().ok());
        Ok(value.map(|value| Rule::new(value, self.0)))
    }
}
