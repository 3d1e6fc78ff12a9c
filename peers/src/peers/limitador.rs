//! `limitador`, without the service around it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use limitador::limit::{Context, Limit, Namespace};
use limitador::storage::redis::{AsyncRedisStorage, CachedRedisStorageBuilder};
use limitador::{AsyncRateLimiter, RateLimiter};
use redis_027::aio::{ConnectionManager, ConnectionManagerConfig};
use tokio::task::unconstrained;

use crate::peer::{Answer, Instance, Peer, Setup, name_of};
use crate::speed::Load;

#[derive(Clone, Copy, PartialEq)]
pub enum Limitador {
    InMemory,
    Redis,
    Cached,
}

impl Peer for Limitador {
    fn name(&self) -> &'static str {
        match self {
            Self::InMemory => "limitador, in memory",
            Self::Redis => "limitador, Redis",
            Self::Cached => "limitador, cached Redis",
        }
    }

    fn can(&self, _load: Load) -> bool {
        true
    }

    async fn instance(&self, setup: Setup<'_>) -> impl Instance {
        let limits = (0..setup.limits).map(|number| limit(number, setup));
        let namespace = Namespace::from("api");
        let limiter = match self {
            Self::InMemory => {
                let limiter = RateLimiter::new(CALLERS);
                limits.for_each(|limit| assert!(limiter.add_limit(limit)));
                return LimitadorInstance {
                    limiter: AnyLimiter::Local(Arc::new(limiter)),
                    namespace,
                };
            }
            Self::Redis => AsyncRateLimiter::new_with_storage(Box::new(redis(setup).await)),
            Self::Cached => {
                let storage = CachedRedisStorageBuilder::new(&setup.server.url())
                    .max_cached_counters(CALLERS as usize)
                    .batch_size(1_000)
                    .flushing_period(Duration::from_millis(100))
                    .response_timeout(setup.deadline);
                AsyncRateLimiter::new_with_storage(Box::new(storage.build().await.unwrap()))
            }
        };
        limits.for_each(|limit| assert!(limiter.add_limit(limit)));
        LimitadorInstance {
            limiter: AnyLimiter::Shared(Arc::new(limiter)),
            namespace,
        }
    }
}

/// Room for all of them.
const CALLERS: u64 = 200_000;

/// A limit is identified by its period and variables, so the limits of one request differ in their periods.
fn limit(number: u32, setup: Setup<'_>) -> Limit {
    let period = setup.quota.period().as_secs() + u64::from(number);
    let caller = "caller".to_owned().try_into().unwrap();
    Limit::new(
        "api",
        u64::from(setup.quota.limit()),
        period,
        vec![],
        vec![caller],
    )
}

/// Its default has no timeouts.
async fn redis(setup: Setup<'_>) -> AsyncRedisStorage {
    let config = ConnectionManagerConfig::new()
        .set_response_timeout(setup.deadline)
        .set_connection_timeout(setup.deadline)
        .set_number_of_retries(0);
    let client = redis_027::Client::open(setup.server.url()).unwrap();
    let connection = ConnectionManager::new_with_config(client, config)
        .await
        .unwrap();
    AsyncRedisStorage::new_with_conn_manager(connection)
        .await
        .unwrap()
}

#[derive(Clone)]
struct LimitadorInstance {
    limiter: AnyLimiter,
    namespace: Namespace,
}

#[derive(Clone)]
enum AnyLimiter {
    Local(Arc<RateLimiter>),
    Shared(Arc<AsyncRateLimiter>),
}

impl Instance for LimitadorInstance {
    async fn ask(&mut self, caller: u32) -> Answer {
        let context = Context::from(HashMap::from([("caller".to_owned(), name_of(caller))]));
        let result = match &self.limiter {
            AnyLimiter::Local(limiter) => {
                limiter.check_rate_limited_and_update(&self.namespace, &context, 1)
            }
            // Its cache holds a lock of a map while it acquires a permit, although enough are free
            // (`counters_cache.rs`, `Batcher::add`). If tokio makes it yield there, other tasks block their threads on
            // that lock, and all hang permanently. So prevent the yield.
            AnyLimiter::Shared(limiter) => {
                unconstrained(limiter.check_rate_limited_and_update(&self.namespace, &context, 1))
                    .await
            }
        };
        Answer::of(result.map(|result| !result.limited))
    }
}
