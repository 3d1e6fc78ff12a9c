//! All known faults of a single master of a cluster.

#[macro_use]
mod matrix;

use std::time::Duration;

use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

use crate::fault::Fault;
use crate::proxy::Mode;
use crate::support::{check, until};

rows!(tests);

/// The query of the slots and the connections to the masters take several round trips each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn far_masters_are_reached() {
    const ROUND_TRIP: Duration = Duration::from_millis(240);
    let (_cluster, proxies) = matrix::behind_proxies().await;
    for proxy in &proxies {
        proxy.set(Mode::Delay(ROUND_TRIP));
    }
    let url = proxies[0].url().replace("redis://", "redis+cluster://");
    let redis = RedisStore::builder(url).timeout(ROUND_TRIP * 5 / 3);
    let redis = redis.connect_timeout(Duration::from_secs(20));
    let store = Fallback::builder(redis.connect_lazy().unwrap(), LocalStore::default())
        .deadline(ROUND_TRIP * 5 / 4)
        .unwrap()
        .build();
    for caller in 0..8 {
        let caller = format!("caller-{caller}");
        until("its master decides", async || {
            let decision = store.check(check(&caller, "10000/s")).await;
            decision.unwrap().source() == Source::Redis
        })
        .await;
    }
}
