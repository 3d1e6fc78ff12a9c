//! Waiting at a real server, on several threads.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use fastrand::Rng;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, Key, LocalStore, Policies, RedisStore, Strategy, ThrottleLayer,
};
use tower_service::Service;

use crate::support::{RedisServer, policy, until};

const KEY: Key = Key::GLOBAL;

/// Tasks that wait, give up at any time, hold what they get for a while, and call or do not. How many calls they made.
async fn storm(layers: &[ThrottleLayer], rounds: usize) -> u32 {
    let called = Arc::new(AtomicU32::new(0));
    let tasks = (0..90).map(|i| {
        let (layer, called) = (layers[i % layers.len()].clone(), Arc::clone(&called));
        tokio::spawn(async move {
            let mut rng = Rng::with_seed(i as u64);
            for _ in 0..rounds {
                let mut service = layer.layer(service_fn(async |()| Ok::<_, Infallible>(())));
                let patience = Duration::from_micros(rng.u64(..10_000));
                if let Ok(ready) = timeout(patience, service.ready()).await {
                    if rng.bool() {
                        sleep(Duration::from_micros(rng.u64(..3_000))).await;
                    }
                    if rng.u8(..4) > 0 {
                        ready.unwrap().call(()).await.unwrap();
                        called.fetch_add(1, SeqCst);
                    }
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    called.load(SeqCst)
}

fn nobody_waits(layers: &[ThrottleLayer]) -> bool {
    layers
        .iter()
        .all(|layer| format!("{layer:?}").contains("waiting: 0"))
}

/// Redis has counted exactly the calls, regardless of cancelled waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_storm_of_cancels_loses_no_permit() {
    let server = RedisServer::start();
    let policies: Policies = policy(Strategy::Gcra, "1000000/100d");
    let mut layers = vec![];
    for _ in 0..3 {
        let store = server.store();
        layers.push(ThrottleLayer::new(store, KEY, policies.clone()));
    }
    let store = server.store();
    // The last storm finds too few units: the rest would be a debt, and no task waits for that time.
    let mut expected = 0;
    for left in [900_000, 500] {
        let remaining = store
            .check(Check::peek(KEY, &policies, 0))
            .await
            .unwrap()
            .remaining();
        let charged = store
            .check(Check::charge(KEY, &policies, remaining - left))
            .await
            .unwrap()
            .granted();
        let called = storm(&layers, 20).await;
        assert!(called > 100, "{called} calls");
        expected += charged + called;
        let counted = async || {
            let peek = store.check(Check::peek(KEY, &policies, 0)).await.unwrap();
            (peek.capacity() - peek.remaining()).abs_diff(expected)
        };
        // A unit refills in 8.64 s.
        until("Redis counts what was called", async || {
            nobody_waits(&layers) && counted().await <= 1
        })
        .await;
        expected = store
            .check(Check::peek(KEY, &policies, 0))
            .await
            .unwrap()
            .remaining();
        expected = policies[0].quota().capacity() - expected;
    }
}

/// Redis dies and returns while tasks wait: none is stuck, and none fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nobody_is_stuck_if_redis_dies_meanwhile() {
    let mut server = RedisServer::start();
    let layers: Vec<_> = (0..3)
        .map(|_| {
            let redis = RedisStore::connect_lazy(server.url()).unwrap();
            let store = Fallback::builder(redis, LocalStore::default())
                .share(3)
                .build();
            ThrottleLayer::new(store, KEY, policy(Strategy::Gcra, "600/s burst 60"))
        })
        .collect();
    let stop = Arc::new(AtomicBool::new(false));
    let calls: Arc<Vec<AtomicU32>> = Arc::new((0..60).map(|_| AtomicU32::new(0)).collect());
    let tasks: Vec<_> = (0..60)
        .map(|i| {
            let (layer, stop, calls) =
                (layers[i % 3].clone(), Arc::clone(&stop), Arc::clone(&calls));
            tokio::spawn(async move {
                let mut service = layer.layer(service_fn(async |()| Ok::<_, Infallible>(())));
                while !stop.load(SeqCst) {
                    service.ready().await.unwrap().call(()).await.unwrap();
                    calls[i].fetch_add(1, SeqCst);
                }
            })
        })
        .collect();
    let all = || {
        calls
            .iter()
            .map(|calls| calls.load(SeqCst))
            .collect::<Vec<_>>()
    };
    for _ in 0..2 {
        for kill in [true, false] {
            if kill {
                server.kill();
            } else {
                server.restart();
            }
            let before = all();
            let start = Instant::now();
            storm(&layers, 5).await;
            until("each of them continues", async || {
                all().iter().zip(&before).all(|(now, then)| now > then)
            })
            .await;
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{:?}",
                start.elapsed()
            );
        }
    }
    stop.store(true, SeqCst);
    for task in tasks {
        timeout(Duration::from_secs(20), task)
            .await
            .expect("no task is stuck")
            .unwrap();
    }
    until("no task waits", async || nobody_waits(&layers)).await;
}
