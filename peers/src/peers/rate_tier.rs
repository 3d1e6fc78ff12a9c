//! `tower-rate-tier`.

use std::sync::Arc;
use std::time::Duration;

use benches::cases::HEADER;
use http::HeaderMap;
use tower::{Layer, service_fn};
use tower_rate_tier::storage::Storage;
use tower_rate_tier::storage::memory::MemoryStorage;
use tower_rate_tier::{
    CircuitBreaker, Quota, RateTier as Tiers, RedisStorage, TierIdentity, TierLimitLayer,
};

use super::{connection, inner};
use crate::peer::{Instance, Layered, Peer, Setup, by_header};

#[derive(Clone, Copy)]
pub struct RateTier;

impl Peer for RateTier {
    fn name(&self) -> &'static str {
        "tower-rate-tier"
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        let redis = RedisStorage::new(connection(setup)).timeout(setup.deadline);
        // It asks Redis again once a second, not every five.
        let storage =
            CircuitBreaker::new(redis, MemoryStorage::new()).open_for(Duration::from_secs(1));
        service(Arc::new(storage), setup)
    }
}

#[derive(Clone, Copy)]
pub struct InMemory;

impl Peer for InMemory {
    fn name(&self) -> &'static str {
        "tower-rate-tier, `MemoryStorage`"
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        service(Arc::new(MemoryStorage::new()), setup)
    }
}

fn service(storage: Arc<dyn Storage>, setup: Setup<'_>) -> impl Instance {
    let identity = |headers: &HeaderMap| {
        Some(TierIdentity::new(
            headers.get(HEADER)?.to_str().ok()?,
            "tier",
        ))
    };
    let quota = Quota::with_window(setup.quota.limit(), setup.quota.period());
    let tiers = Tiers::builder()
        .tier("tier", quota)
        .storage(storage)
        .build();
    Layered(
        TierLimitLayer::new(tiers)
            .identifier_fn(identity)
            .layer(service_fn(inner)),
        by_header,
    )
}
