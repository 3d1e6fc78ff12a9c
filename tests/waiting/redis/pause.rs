//! Pauses shared by all instances.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::throttle::Pause;
use tower_redis_ratelimit::{Key, RedisStore};

use crate::support::RedisServer;

#[tokio::test]
async fn instances_told_together_pause_once() {
    const SECOND: Duration = Duration::from_secs(1);
    let server = RedisServer::start();
    let mut instances = vec![];
    for _ in 0..8 {
        let store = RedisStore::builder(server.url())
            .timeout(20 * SECOND)
            .connect()
            .await
            .unwrap();
        instances.push((
            store.clone(),
            Pause::new(store, "pause", 600 * SECOND).unwrap(),
        ));
    }
    let key = Key::new("geocoder");
    let take = async |instance: usize| {
        let (store, pause) = &instances[instance];
        store
            .check(Check::take(key, &pause.policy().into(), 1))
            .await
            .unwrap()
    };
    assert!(take(0).await.is_allowed());
    let told = instances.iter().flat_map(|(_, pause)| [pause, pause]);
    assert!(
        join_all(told.map(|pause| pause.begin(key, 120 * SECOND)))
            .await
            .iter()
            .all(Result::is_ok)
    );
    let denied = take(7).await.retry_after().unwrap();
    assert!(
        (110 * SECOND..=120 * SECOND).contains(&denied),
        "{denied:?}"
    );
    instances[3].1.begin(key, 10 * SECOND).await.unwrap();
    instances[3].1.begin(key, 9_000 * SECOND).await.unwrap();
    let denied = take(3).await.retry_after().unwrap();
    assert!(
        (590 * SECOND..=600 * SECOND).contains(&denied),
        "{denied:?}"
    );
}
