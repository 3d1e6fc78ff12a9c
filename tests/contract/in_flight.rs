//! Requests in flight, once per store.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::store::{AnyStore, Store, StoreConfig, StoreKind};
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
};

use crate::remote::{Remote, Table};
use crate::support::RedisServer;

#[tokio::test]
async fn local() {
    counts_requests(LocalStore::default()).await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    counts_requests(
        RedisStore::builder(server.url())
            .denials(0)
            .connect()
            .await
            .unwrap(),
    )
    .await;
}

#[tokio::test]
async fn fallback() {
    let server = RedisServer::start();
    let redis = RedisStore::builder(server.url())
        .denials(0)
        .connect()
        .await
        .unwrap();
    counts_requests(Fallback::new(redis, LocalStore::default()).deadline(Duration::from_secs(60)))
        .await;
}

#[tokio::test]
async fn remote() {
    counts_requests(Remote::new(Table::default())).await;
}

#[tokio::test]
async fn any_redis() {
    let server = RedisServer::start();
    let mut config = StoreConfig::default();
    (config.kind, config.url) = (StoreKind::Redis, Some(server.url()));
    counts_requests(AnyStore::from_config(&config).unwrap()).await;
}

/// The granted units, and the remaining capacity under each policy.
fn numbers(decision: &Decision) -> (u32, Vec<u32>) {
    (
        decision.granted(),
        decision.each().map(|each| each.remaining()).collect(),
    )
}

async fn counts_requests(store: impl Store) {
    let streams = Policy::in_flight("streams", 3).unwrap();
    let alone = Policies::from(streams.clone());
    let tokens = Policy::new("tokens", Strategy::SlidingLog, Quota::per_day(100)).unwrap();
    let both = Policies::new([tokens, streams]).unwrap();
    let (ann, bob) = (Key::new("ann"), Key::new("bob"));
    let ask = async |check: Check| numbers(&store.check(check).await.unwrap());

    // A request takes one slot, regardless of its cost.
    let takes = [
        Check::take(ann, &alone, 1),
        Check::take(ann, &both, 40),
        Check::take(ann, &both, 0),
    ];
    let slots = takes.each_ref().map(|take| take.slot().unwrap());
    let [one, two, three] = takes;
    assert_eq!(ask(one.clone()).await, (1, vec![2]));
    assert_eq!(ask(two).await, (40, vec![60, 1]));
    assert_eq!(ask(three).await, (0, vec![60, 0]));
    assert_eq!(ask(Check::peek(ann, &both, 40)).await, (0, vec![60, 0]));

    // All policies grant the check, or none.
    let denied = store.check(Check::take(ann, &both, 40)).await.unwrap();
    assert_eq!(numbers(&denied), (0, vec![60, 0]));
    assert_eq!(
        (denied.policy().name(), denied.retry_after()),
        ("streams", Some(Duration::from_millis(100)))
    );
    assert_eq!(ask(one).await, (1, vec![0]), "its slot is taken already");
    assert_eq!(
        ask(Check::release(ann, &alone, slots[0])).await,
        (1, vec![1])
    );
    assert_eq!(ask(Check::take(ann, &both, 61)).await, (0, vec![60, 1]));
    assert_eq!(ask(Check::up_to(ann, &both, 70)).await, (60, vec![0, 0]));

    // A second release has no effect, and the cost is ignored.
    assert_eq!(ask(Check::release(ann, &alone, slots[1])).await.1, [1]);
    assert_eq!(ask(Check::release(ann, &alone, slots[1])).await.1, [1]);
    assert_eq!(ask(Check::charge(ann, &alone, 2)).await, (0, vec![1]));
    assert_eq!(ask(Check::refund(ann, &alone, 2)).await, (0, vec![1]));
    assert_eq!(
        ask(Check::release(ann, &both, slots[2])).await,
        (0, vec![0, 2])
    );

    // A slot that the store has lost is taken again, even beyond the limit.
    for (slot, left) in slots.into_iter().zip([2, 1, 0]) {
        for _ in 0..2 {
            assert_eq!(ask(Check::renew(bob, &alone, slot)).await, (1, vec![left]));
        }
    }
    assert_eq!(ask(Check::take(bob, &alone, 1)).await, (0, vec![0]));
    let fourth = Check::take(bob, &alone, 1).slot().unwrap();
    assert_eq!(
        ask(Check::renew(bob, &both, fourth)).await,
        (0, vec![100, 0])
    );
    assert_eq!(ask(Check::reset(bob, &alone)).await, (4, vec![3]));
}

#[tokio::test(start_paused = true)]
async fn unrenewed_slots_expire() {
    let store = LocalStore::default();
    let policies = Policy::in_flight("streams", 1)
        .unwrap()
        .slot_ttl(Duration::from_secs(3))
        .unwrap()
        .into();
    let check = || Check::take(Key::new("ann"), &policies, 1);
    let take = async || store.check(check()).await.unwrap();
    let first = check();
    let slot = first.slot().unwrap();
    let first = store.check(first).await.unwrap();
    assert!(first.is_allowed() && first.reset_after() == Duration::from_secs(3));
    for _ in 0..5 {
        tokio::time::advance(Duration::from_millis(2_999)).await;
        assert!(!take().await.is_allowed());
        assert_eq!(
            store
                .check(Check::renew(Key::new("ann"), &policies, slot))
                .await
                .unwrap()
                .granted(),
            1
        );
    }
    tokio::time::advance(Duration::from_millis(3_000)).await;
    assert!(take().await.is_allowed());
}

/// The key of a caller and policy in Redis is deleted with its last slot.
#[tokio::test]
async fn instances_count_together() {
    let server = RedisServer::start();
    let store = || {
        RedisStore::builder(server.url())
            .denials(0)
            .connect_lazy()
            .unwrap()
    };
    let stores = [store(), store()];
    let policies = Policy::in_flight("streams", 4).unwrap().into();
    let ann = Key::new("ann");
    let mut slots = vec![];
    for store in stores.iter().cycle().take(4) {
        let take = Check::take(ann, &policies, 1);
        slots.push(take.slot().unwrap());
        assert!(store.check(take).await.unwrap().is_allowed());
    }
    assert!(
        !stores[0]
            .check(Check::take(ann, &policies, 1))
            .await
            .unwrap()
            .is_allowed()
    );
    let count: usize = server.command("ZCARD rl:{ann}:streams:s").await;
    assert_eq!(count, 4);
    let expires: i64 = server.command("PTTL rl:{ann}:streams:s").await;
    assert!((29_000..=30_001).contains(&expires), "{expires} ms");
    for (left, slot) in slots.into_iter().enumerate() {
        let released = stores[1]
            .check(Check::release(ann, &policies, slot))
            .await
            .unwrap();
        assert_eq!(released.remaining(), left as u32 + 1);
    }
    assert_eq!(server.command::<usize>("DBSIZE").await, 0);
}

/// On that runtime only the next request renews them.
#[test]
fn requests_outside_runtimes_stay_counted() {
    let streams = Policy::in_flight("streams", 2)
        .unwrap()
        .slot_ttl(Duration::from_secs(1))
        .unwrap();
    let limiter = Limiter::new(LocalStore::default(), streams);
    let reserve = || {
        limiter
            .reserve(Key::GLOBAL, 1)
            .now_or_never()
            .expect("an immediate answer")
            .ok()
    };
    let mut held = vec![reserve().unwrap(), reserve().unwrap()];
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1_200) {
        held.extend(reserve());
        std::thread::sleep(Duration::from_millis(10));
    }
    // Send no request until the slots have expired.
    std::thread::sleep(Duration::from_millis(1_100));
    held.extend(reserve());
    assert_eq!(held.len(), 2);
    drop(held);
    assert_eq!(
        [reserve(), reserve(), reserve()].iter().flatten().count(),
        2
    );
}
