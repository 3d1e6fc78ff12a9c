//! `AnyStore`: the store that a configuration selects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use allocation_counter::measure;
use tokio::runtime;
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{AnyStore, ErrorKind, Health, Store, StoreConfig, StoreKind};
use tower_redis_ratelimit::{Fallback, Key, Leased, LocalStore, RedisStore, Strategy};

use crate::support::{RedisServer, policy, until};

const UNUSED: &str = "redis://127.0.0.1:1/";

fn redis() -> RedisStore {
    RedisStore::connect_lazy(UNUSED).unwrap()
}

fn config(kind: StoreKind, url: String) -> StoreConfig {
    let mut config = StoreConfig::default();
    (config.kind, config.url) = (kind, Some(url));
    config
}

#[tokio::test]
async fn instances_share_the_count_of_one_redis() {
    let server = RedisServer::start();
    let policies = policy(Strategy::Gcra, "10/d");
    let mut left = vec![];
    for kind in [
        StoreKind::Auto,
        StoreKind::Fallback,
        StoreKind::Redis,
        StoreKind::Local,
    ] {
        let mut config = config(kind, server.url());
        (config.deadline, config.timeout) =
            (Some(Duration::from_secs(60)), Duration::from_secs(150));
        let store = AnyStore::from_config(&config).unwrap();
        let decision = store
            .check(Check::take(Key::new("ann"), &policies, 1))
            .await
            .unwrap();
        left.push((decision.source(), decision.remaining()));
    }
    assert_eq!(
        left,
        [
            (Source::Redis, 9),
            (Source::Redis, 8),
            (Source::Redis, 7),
            (Source::Local, 9)
        ]
    );
}

#[tokio::test]
async fn the_health_names_who_decides() {
    let policies = policy(Strategy::Gcra, "1000/d");
    let take = async |store: &AnyStore| {
        store
            .check(Check::take(Key::new("ann"), &policies, 1))
            .await
    };
    let (fallback, redis, local) = (
        AnyStore::from(Fallback::new(redis(), LocalStore::default())),
        AnyStore::from(redis()),
        AnyStore::local(),
    );
    for store in [&fallback, &redis, &local] {
        assert_eq!(store.health(), Health::Ok, "no check yet");
    }
    until("the fallback decides", async || {
        assert_eq!(take(&fallback).await.unwrap().source(), Source::Local);
        fallback.health() == Health::Local
    })
    .await;
    for _ in 0..5 {
        assert_eq!(
            take(&redis).await.unwrap_err().kind(),
            ErrorKind::Unreachable
        );
        assert_eq!(take(&local).await.unwrap().source(), Source::Local);
    }
    let stores = [redis.clone(), local].map(Leased::new);
    assert_eq!(
        stores.map(|store| store.health()),
        [Health::Failing, Health::Ok],
        "clones and wrappers agree"
    );
}

#[tokio::test]
async fn a_store_is_failing_until_redis_decides() {
    let mut server = RedisServer::start();
    let policies = policy(Strategy::Gcra, "1/d");
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    let take = async |name: &str| store.check(Check::take(Key::new(name), &policies, 1)).await;
    assert!(take("ann").await.unwrap().is_allowed());
    assert!(!take("ann").await.unwrap().is_allowed());
    server.kill();
    until("a check fails", async || take("bob").await.is_err()).await;
    assert_eq!(store.health(), Health::Failing);
    assert_eq!(take("ann").await.unwrap().source(), Source::Cached);
    assert_eq!(store.health(), Health::Failing, "Redis did not decide that");
    server.restart();
    until("a check succeeds", async || take("bob").await.is_ok()).await;
    assert_eq!(store.health(), Health::Ok);
}

/// An observer set on the store reaches the store that it contains.
#[tokio::test]
async fn the_store_notifies_its_observer() {
    #[derive(Default)]
    struct Count(AtomicU32);

    impl Observer for Count {
        fn notify(&self, event: &Event<'_>) {
            match *event {
                Event::Failed { .. } | Event::Sent { .. } => {
                    self.0.fetch_add(1, Relaxed);
                }
                _ => {}
            }
        }
    }

    let server = RedisServer::start();
    let policies = policy(Strategy::Gcra, "10/d");
    let redis = AnyStore::from_config(&config(StoreKind::Redis, server.url())).unwrap();
    for store in [
        redis,
        Fallback::new(self::redis(), LocalStore::default()).into(),
    ] {
        let count = Arc::new(Count::default());
        let store = store.observer(Arc::clone(&count));
        let _ = store
            .check(Check::take(Key::new("ann"), &policies, 1))
            .await
            .unwrap();
        assert!(count.0.load(Relaxed) > 0, "{store:?}");
    }
}

/// The runtime is never driven, so the tasks of a store allocate nothing during the test.
#[test]
fn it_allocates_nothing_itself() {
    fn allocations(store: &impl Store) -> u64 {
        let policies = policy(Strategy::Gcra, "1000/d");
        let send = || drop(store.check(Check::take(Key::new("ann"), &policies, 1)));
        send();
        measure(|| (0..100).for_each(|_| send())).count_total
    }
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _guard = runtime.enter();
    let fallback = || Fallback::new(redis(), LocalStore::default());
    let alone = [
        allocations(&redis()),
        allocations(&fallback()),
        allocations(&LocalStore::default()),
    ];
    let any =
        [redis().into(), fallback().into(), AnyStore::local()].map(|store| allocations(&store));
    assert_eq!(any, alone);
    assert!(alone[0] >= 100 && alone[2] == 0, "allocations: {alone:?}");
}
