//! This crate.

use std::time::Duration;

use axum::body::Body;
use benches::cases::{HEADER, by_address};
use http::{Request, Response};
use tower::{Layer, Service, service_fn};
use tower_redis_ratelimit::extract::{HeaderKey, KeyExtractor, PeerIp};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, LocalStore, Policies, Policy, RateLimitLayer, RedisStore, Strategy,
};

use super::inner;
use crate::peer::{Instance, Layered, Peer, Setup, by_header};
use crate::speed::Load;

/// The two stores that its examples have.
#[derive(Clone, Copy)]
pub struct WithFallback;

impl Peer for WithFallback {
    fn name(&self) -> &'static str {
        "this crate, `Fallback`"
    }

    fn can(&self, _load: Load) -> bool {
        true
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        // The store's own timeout is longer, as it is by default.
        let redis = redis(setup, setup.deadline * 5 / 2);
        let store = Fallback::builder(redis, LocalStore::default())
            .deadline(setup.deadline)
            .unwrap()
            .share(setup.instances)
            .build();
        Layered(service(store, header(), setup), by_header)
    }
}

#[derive(Clone, Copy)]
pub struct Alone;

impl Peer for Alone {
    fn name(&self) -> &'static str {
        "this crate, `RedisStore`"
    }

    fn can(&self, _load: Load) -> bool {
        true
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        Layered(
            service(redis(setup, setup.deadline), header(), setup),
            by_header,
        )
    }
}

#[derive(Clone, Copy)]
pub struct Local;

impl Peer for Local {
    fn name(&self) -> &'static str {
        "this crate, `LocalStore`"
    }

    fn can(&self, _load: Load) -> bool {
        true
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        Layered(service(LocalStore::default(), PeerIp, setup), by_address)
    }
}

fn redis(setup: Setup<'_>, timeout: Duration) -> RedisStore {
    RedisStore::builder(setup.server.url())
        .timeout(timeout)
        .connect_lazy()
        .unwrap()
}

fn header() -> HeaderKey {
    HeaderKey::new(HEADER).unwrap()
}

fn service(
    store: impl Store,
    key: impl KeyExtractor,
    setup: Setup<'_>,
) -> impl Service<Request<()>, Response = Response<Body>, Error: std::fmt::Debug, Future: Send>
+ Clone
+ Send
+ Sync
+ 'static {
    let policy =
        |number| Policy::new(&format!("limit-{number}"), Strategy::Gcra, setup.quota).unwrap();
    let policies = Policies::new((0..setup.limits).map(policy)).unwrap();
    RateLimitLayer::new(store, key, policies).layer(service_fn(inner))
}
