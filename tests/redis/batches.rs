//! Requests in flight at the same moment share a script call, and none suffers from another.

use std::num::NonZeroUsize;
use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::{Check, ErrorKind, Key, RedisStore, Store, Strategy, redis};

use crate::support::{RedisServer, STRATEGIES, check, policy, until};

#[tokio::test]
async fn one_script_call_serves_many_requests() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    let before = server.calls("evalsha").await;
    for _ in 0..10 {
        let checks = (0..256).map(|i| store.check(check(&format!("caller-{i}"), "1000/h")));
        assert!(join_all(checks).await.into_iter().all(|decision| decision.unwrap().is_allowed()));
    }
    let calls = server.calls("evalsha").await - before;
    assert!((20..=100).contains(&calls), "2560 checks took {calls} script calls");
}

/// Redis forgets the script again and again while 64 tasks check: no check fails, and each is charged once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_notices_a_script_flush() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url()).timeout(Duration::from_secs(10)).connect().await.unwrap();
    let policies = policy(Strategy::Gcra, "1000000/d");
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let (store, policies) = (store.clone(), policies.clone());
            tokio::spawn(async move {
                for _ in 0..100 {
                    assert!(store.check(Check::take(Key::new("ann"), &policies, 1)).await.unwrap().is_allowed());
                }
            })
        })
        .collect();
    let mut connection = server.connection().await;
    let mut flushes = 0;
    while !tasks.iter().all(|task| task.is_finished()) {
        let _: String = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut connection).await.unwrap();
        flushes += 1;
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(flushes > 1 && server.calls("eval").await > 1, "the script was never forgotten");
    let left = store.check(Check::peek(Key::new("ann"), &policies, 1)).await.unwrap().remaining();
    // Some of a million a day flows back meanwhile, one per 86.4 ms.
    assert!((1_000_000 - 6_400..1_000_000 - 6_000).contains(&left), "{left} left");
}

/// Dropped futures neither poison a batch nor a connection, and what was not sent is not charged.
#[tokio::test]
async fn dropped_requests_harm_nobody() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url()).timeout(Duration::from_secs(20)).connect().await.unwrap();
    let policies = policy(Strategy::Gcra, "1000/h");
    let take = |caller: &str| store.check(Check::take(Key::new(caller), &policies, 1));

    // No task runs before we await: all of these are gone before they are sent.
    for _ in 0..100 {
        drop(take("ann"));
    }
    assert_eq!(take("ann").await.unwrap().remaining(), 999);

    let connections = server.info("stats", "total_connections_received").await;
    // Dropped at any later moment, while others of the same batch are kept.
    for yields in 0..100 {
        let mut checks: Vec<_> = (0..40).map(|i| take(&format!("{yields}-{i}"))).collect();
        for _ in 0..yields % 20 {
            tokio::task::yield_now().await;
        }
        let dropped = checks.split_off(20);
        drop(dropped);
        for decision in join_all(checks).await {
            assert_eq!(decision.unwrap().remaining(), 999);
        }
    }
    // Ours to look, and the store's second lane at most.
    let made = server.info("stats", "total_connections_received").await - connections;
    assert!(made <= 2, "{made} connections were made anew");
}

/// The queue is bounded: one check more fails at once, and those that wait fail with the call before them.
#[tokio::test]
async fn a_full_queue_and_a_frozen_server_are_errors_in_time() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .queue(NonZeroUsize::new(10).unwrap())
        .timeout(Duration::from_millis(200))
        .connect()
        .await
        .unwrap();
    server.freeze();
    let answers = join_all((0..20).map(|i| store.check(check(&i.to_string(), "10/s")))).await;
    let kinds: Vec<_> = answers.into_iter().map(|answer| answer.unwrap_err().kind()).collect();
    assert_eq!(kinds[..10], [ErrorKind::Timeout; 10]);
    assert_eq!(kinds[10..], [ErrorKind::QueueFull; 10]);
    server.thaw();
    until("it decides again", async || store.check(check("ann", "10/s")).await.is_ok()).await;
}

/// A value of another type, or bytes of another length, under our key: as if there were none, for every strategy.
#[tokio::test]
async fn foreign_values_cost_nobody_else() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "10/100d");
        let take = |caller: &str| store.check(Check::take(Key::new(caller), &policies, 1));
        assert!(take("ann").await.unwrap().is_allowed());
        let keys: Vec<String> = server.command("KEYS rl:{ann}*").await;
        let key_of = |caller: &str| keys[0].replace("ann", caller);
        let _: i64 = server.command(&format!("LPUSH {} x", key_of("list"))).await;
        let _: i64 = server.command(&format!("HSET {} f v", key_of("hash"))).await;
        let _: String = server.command(&format!("SET {} garbage", key_of("text"))).await;
        let _: String = server.command(&format!("SET {} 0123456789abcdef", key_of("alike"))).await;

        let callers = ["ann", "list", "hash", "text", "alike"];
        let decisions = join_all(callers.map(take)).await;
        for (caller, decision) in callers.iter().zip(decisions) {
            let decision = decision.unwrap();
            match *caller {
                // As long as a state of ours: at worst a caller deep in debt, never for longer than one could be.
                "alike" => {
                    assert!(
                        decision.retry_after().unwrap_or_default() <= Duration::from_secs(200 * 86_400),
                        "{decision:?}"
                    )
                }
                "ann" => assert_eq!(decision.remaining(), 8, "{strategy:?}"),
                _ => assert_eq!(decision.remaining(), 9, "{strategy:?} {caller}"),
            }
        }
        let _: String = server.command("FLUSHALL").await;
    }
}
