//! Requests in flight, once per store.

#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tower_redis_ratelimit::check::{Check, Decision};
use tower_redis_ratelimit::store::{AnyStore, Store, StoreConfig, StoreKind};
use tower_redis_ratelimit::{Fallback, Key, Limiter, LocalStore, Policies, Policy, Quota, RedisStore, Strategy};

use crate::support::RedisServer;

#[tokio::test]
async fn local() {
    counts_requests(LocalStore::default()).await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    counts_requests(RedisStore::builder(server.url()).denials(0).connect().await.unwrap()).await;
}

#[tokio::test]
async fn fallback() {
    let server = RedisServer::start();
    let redis = RedisStore::builder(server.url()).denials(0).connect().await.unwrap();
    counts_requests(Fallback::new(redis, LocalStore::default()).deadline(Duration::from_secs(60))).await;
}

#[tokio::test]
async fn any_redis() {
    let server = RedisServer::start();
    let mut config = StoreConfig::default();
    (config.kind, config.url) = (StoreKind::Redis, Some(server.url()));
    counts_requests(AnyStore::from_config(&config).unwrap()).await;
}

/// Granted, and what remains of each policy.
fn numbers(decision: &Decision) -> (u32, Vec<u32>) {
    (decision.granted(), decision.each().map(|each| each.remaining()).collect())
}

async fn counts_requests(store: impl Store) {
    let streams = Policy::in_flight("streams", 3).unwrap();
    let alone = Policies::from(streams.clone());
    let tokens = Policy::new("tokens", Strategy::SlidingLog, Quota::per_day(100)).unwrap();
    let both = Policies::new([tokens, streams]).unwrap();
    let (ann, bob) = (Key::new("ann"), Key::new("bob"));
    let ask = async |check: Check| numbers(&store.check(check).await.unwrap());

    // A request is one, whatever it costs.
    assert_eq!(ask(Check::take(ann, &alone, 1)).await, (1, vec![2]));
    assert_eq!(ask(Check::take(ann, &both, 40)).await, (40, vec![60, 1]));
    assert_eq!(ask(Check::take(ann, &both, 0)).await, (0, vec![60, 0]));
    assert_eq!(ask(Check::peek(ann, &both, 40)).await, (0, vec![60, 0]));

    // It is all or nothing.
    let denied = store.check(Check::take(ann, &both, 40)).await.unwrap();
    assert_eq!(numbers(&denied), (0, vec![60, 0]));
    assert_eq!((denied.policy().name(), denied.retry_after()), ("streams", Some(Duration::from_millis(100))));
    assert_eq!(ask(Check::refund(ann, &alone, 1)).await, (1, vec![1]));
    assert_eq!(ask(Check::take(ann, &both, 61)).await, (0, vec![60, 1]));
    assert_eq!(ask(Check::up_to(ann, &both, 70)).await, (60, vec![0, 0]));

    // No more is released than is held.
    assert_eq!(ask(Check::refund(ann, &alone, 2)).await, (2, vec![2]));
    assert_eq!(ask(Check::refund(ann, &alone, 2)).await, (1, vec![3]));
    assert_eq!(ask(Check::refund(ann, &alone, 1)).await, (0, vec![3]));

    // What is held is renewed as it is, and made up for if it is gone.
    assert_eq!(ask(Check::take(bob, &alone, 1)).await, (1, vec![2]));
    assert_eq!(ask(Check::renew(bob, &alone, 2)).await, (1, vec![2]));
    assert_eq!(ask(Check::hold(bob, &alone, 3)).await, (3, vec![0]));
    assert_eq!(ask(Check::take(bob, &alone, 1)).await, (0, vec![0]));
    assert_eq!(ask(Check::hold(bob, &alone, 5)).await, (5, vec![0]), "beyond the limit too");
    assert_eq!(ask(Check::reset(bob, &alone)).await, (5, vec![3]));
    assert_eq!(ask(Check::renew(bob, &both, 2)).await, (0, vec![100, 1]));
    assert_eq!(ask(Check::hold(bob, &both, 0)).await, (0, vec![100, 3]));
    assert_eq!(ask(Check::charge(bob, &alone, 9)).await, (6, vec![0]), "down to a debt of one limit");
    assert_eq!(ask(Check::hold(bob, &alone, 0)).await, (0, vec![3]));
}

#[tokio::test(start_paused = true)]
async fn unrenewed_requests_expire_after_the_lease() {
    let store = LocalStore::default();
    let policies = Policy::in_flight("streams", 1).unwrap().slot_ttl(Duration::from_secs(3)).unwrap().into();
    let take = async || store.check(Check::take(Key::new("ann"), &policies, 1)).await.unwrap();
    let first = take().await;
    assert!(first.is_allowed() && first.reset_after() == Duration::from_secs(3));
    for _ in 0..5 {
        tokio::time::advance(Duration::from_millis(2_999)).await;
        assert!(!take().await.is_allowed());
        assert_eq!(store.check(Check::renew(Key::new("ann"), &policies, 1)).await.unwrap().granted(), 1);
    }
    tokio::time::advance(Duration::from_millis(3_000)).await;
    assert!(take().await.is_allowed());
}

/// Each instance has an entry of its own, and a caller has as many keys in Redis as policies.
#[tokio::test]
async fn instances_count_together_and_apart() {
    let server = RedisServer::start();
    let store = || RedisStore::builder(server.url()).denials(0).connect_lazy().unwrap();
    let (one, two) = (store(), store());
    let policies = Policy::in_flight("streams", 4).unwrap().into();
    let ann = Key::new("ann");
    for store in [&one, &two, &one] {
        assert!(store.check(Check::take(ann, &policies, 1)).await.unwrap().is_allowed());
    }
    let length: usize = server.command("STRLEN rl:{ann}:streams:i").await;
    assert_eq!(length, 2 * 22);
    let back = async |store: &RedisStore| numbers(&store.check(Check::refund(ann, &policies, 9)).await.unwrap());
    assert_eq!(back(&two.clone()).await, (1, vec![2]), "a clone is the same instance");
    assert_eq!(back(&two).await, (0, vec![2]), "nobody releases what another holds");
    assert_eq!(back(&one).await, (2, vec![4]));
    assert_eq!(server.command::<usize>("DBSIZE").await, 0);
}

/// Nothing renews them there but the next request.
#[test]
fn requests_outside_runtimes_stay_counted() {
    let streams = Policy::in_flight("streams", 2).unwrap().slot_ttl(Duration::from_secs(1)).unwrap();
    let limiter = Limiter::new(LocalStore::default(), streams);
    let reserve = || limiter.reserve(Key::GLOBAL, 1).now_or_never().expect("it is answered at once").ok();
    let mut held = vec![reserve().unwrap(), reserve().unwrap()];
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1_200) {
        held.extend(reserve());
        std::thread::sleep(Duration::from_millis(10));
    }
    // Nobody comes for longer than the lease time.
    std::thread::sleep(Duration::from_millis(1_100));
    held.extend(reserve());
    assert_eq!(held.len(), 2);
    drop(held);
    assert_eq!([reserve(), reserve(), reserve()].iter().flatten().count(), 2);
}
