//! Blocks of all instances of a cluster are in one slot.

use std::time::Duration;

use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::{Key, Limiter, Policy, RedisStore, Strategy};

use crate::nodes::Cluster;
use crate::support::until;

const HOUR: Duration = Duration::from_secs(3_600);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_all_masters_are_blocked() {
    let cluster = Cluster::start(false).await;
    let mut instances = vec![];
    for _ in 0..2 {
        let store: RedisStore = cluster.builder().connect().await.unwrap();
        let policy = Policy::new("api", Strategy::Gcra, "1/d").unwrap();
        let limiter = Limiter::new(store, policy);
        instances.push(limiter.block_after("3/h", HOUR).unwrap());
    }
    let keys = (0..10_u64).map(Key::from);
    for key in keys.clone() {
        for _ in 0..4 {
            let _ = instances[0].take(key, 1).await.unwrap();
        }
    }
    for key in keys {
        for limiter in &instances {
            until("the caller is blocked", async || {
                limiter.peek(key, 0).await.unwrap().source() == Source::Blocked
            })
            .await;
        }
    }
}
