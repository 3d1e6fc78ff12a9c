//! `Limiter`: requests that wait for a permit in Redis.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::{Key, Limiter, Strategy};

use crate::support::{RedisServer, policy, until};

const ANN: Key = Key::GLOBAL;

/// A dropped wait leaves the queue and charges nothing, at whichever moment it is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_wait_takes_nothing() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store(), policy(Strategy::Gcra, "1000/100d"));
    let mut granted = 0;
    for micros in 0..200 {
        let wait = limiter.wait(ANN, 1, Duration::from_secs(10));
        if let Ok(decision) = tokio::time::timeout(Duration::from_micros(micros * 5), wait).await {
            granted += decision.unwrap().granted();
        }
    }
    until("the rest is refunded", async || {
        limiter.peek(ANN, 1).await.unwrap().remaining() == 1000 - granted
    })
    .await;
    let shown = format!("{limiter:?}");
    assert!(
        shown.contains("WaitQueues { waiting: 0, .. }"),
        "a request still waits: {shown}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_works_with_redis() {
    let server = RedisServer::start();
    let store = server.store();
    let limiter = Limiter::new(store, policy(Strategy::Gcra, "100/s burst 10"));
    let waits = (0..40).map(|_| limiter.wait(ANN, 1, Duration::from_secs(20)));
    let decisions: Vec<_> = join_all(waits)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(
        decisions
            .iter()
            .all(|decision| decision.is_allowed() && decision.source() == Source::Redis)
    );
}
