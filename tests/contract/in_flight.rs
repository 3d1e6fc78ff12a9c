//! Requests in flight, once per store.

use std::time::Duration;

use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::store::{AnyStore, Store, StoreConfig, StoreKind};
use tower_redis_ratelimit::{
    Fallback, Key, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
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
        .timeout(Duration::from_secs(60))
        .connect()
        .await
        .unwrap();
    counts_requests(
        Fallback::builder(redis, LocalStore::default())
            .deadline(Duration::from_secs(60))
            .unwrap()
            .build(),
    )
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
