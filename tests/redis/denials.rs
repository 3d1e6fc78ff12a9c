//! Denials are remembered until their `retry_after`: a flood on one key costs Redis nothing, and nobody is denied for
//! longer.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::{Check, Decision, Key, Outcome, Policies, RedisStore, Source, Store, Strategy};

use crate::support::{RedisServer, STRATEGIES, policy, until};

const ANN: Key = Key::GLOBAL;

async fn ask(store: &RedisStore, check: Check) -> Decision {
    store.check(check).await.unwrap()
}

async fn take(store: &RedisStore, policies: &Policies, cost: u32) -> Decision {
    ask(store, Check::take(ANN, policies, cost)).await
}

#[tokio::test]
async fn a_flood_on_an_exhausted_key_costs_one_call() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "10/100d");
        take(&store, &policies, 10).await;
        let before = server.calls("evalsha").await;
        let first = take(&store, &policies, 1).await;
        assert_eq!(first.source(), Source::Redis);
        let flood = join_all((0..1_000).map(|_| take(&store, &policies, 1))).await;
        assert_eq!(server.calls("evalsha").await - before, 1, "{strategy:?}");
        for denied in flood {
            assert_eq!(denied.source(), Source::Cached);
            let (wait, first) = (denied.retry_after().unwrap(), first.retry_after().unwrap());
            assert!(wait < first && wait > first - Duration::from_secs(20), "{strategy:?}: {wait:?} of {first:?}");
        }
        // A larger cost is denied too, a smaller one is for Redis to say; one that never fits says so.
        assert_eq!(take(&store, &policies, 5).await.source(), Source::Cached);
        assert_eq!(take(&store, &policies, 0).await.outcome(), Outcome::Allowed);
        assert_eq!(take(&store, &policies, 11).await.outcome(), Outcome::NeverFits);
        ask(&store, Check::reset(ANN, &policies)).await;
    }
}

#[tokio::test]
async fn it_passes_when_it_was_told_to() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "2/400ms");
        // A window may end between two takes.
        let wait = loop {
            if let Some(wait) = take(&store, &policies, 2).await.retry_after() {
                break wait;
            }
        };
        let start = tokio::time::Instant::now();
        until("it passes", async || take(&store, &policies, 2).await.is_allowed()).await;
        let waited = start.elapsed();
        assert!(waited + Duration::from_millis(50) >= wait, "{strategy:?}: after {waited:?} of {wait:?}");
        ask(&store, Check::reset(ANN, &policies)).await;
    }
}

/// What this instance gives back or forgets, it knows; another policy is another question.
#[tokio::test]
async fn a_denial_is_forgotten_with_its_reason() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    let policies = policy(Strategy::Gcra, "10/100d");
    let exhaust = async || {
        ask(&store, Check::up_to(ANN, &policies, 10)).await;
        assert!(!take(&store, &policies, 1).await.is_allowed());
        assert_eq!(take(&store, &policies, 1).await.source(), Source::Cached);
    };
    exhaust().await;
    ask(&store, Check::give_back(ANN, &policies, 1)).await;
    assert!(take(&store, &policies, 1).await.is_allowed());

    exhaust().await;
    ask(&store, Check::reset(ANN, &policies)).await;
    assert!(take(&store, &policies, 1).await.is_allowed());

    exhaust().await;
    let more = policy(Strategy::Gcra, "20/100d");
    assert!(take(&store, &more, 1).await.is_allowed(), "the quota has been raised");

    exhaust().await;
    assert_eq!(ask(&store, Check::take(ANN, &policies, 1).id("request-1")).await.source(), Source::Redis);
    let forgetful = RedisStore::builder(server.url()).denials(0).connect().await.unwrap();
    for _ in 0..3 {
        assert_eq!(take(&forgetful, &policies, 1).await.source(), Source::Redis);
    }
}

/// Refunds and denials at once: nobody is denied by a memory of before the refund.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_is_never_outlived_by_a_denial() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    let policies = policy(Strategy::Gcra, "1/100d");
    for _ in 0..300 {
        take(&store, &policies, 1).await;
        let flood = (0..8).map(|_| {
            let (store, policies) = (store.clone(), policies.clone());
            tokio::spawn(async move { take(&store, &policies, 1).await.granted() })
        });
        let flood: Vec<_> = flood.collect();
        ask(&store, Check::reset(ANN, &policies)).await;
        let granted: u32 = join_all(flood).await.into_iter().map(Result::unwrap).sum();
        if granted == 0 {
            assert!(take(&store, &policies, 1).await.is_allowed(), "denied by a memory");
        }
        ask(&store, Check::reset(ANN, &policies)).await;
    }
}
