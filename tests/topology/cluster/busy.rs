//! A handler that keeps its thread, while another thread of the runtime is idle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::sleep;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

use crate::nodes::Cluster;
use crate::support::check;

/// The reply wakes the handler and the worker that reads the replies to all others.
#[test]
fn one_handler_delays_no_other_check() {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let cluster = runtime.block_on(Cluster::start_sized(1, false, |proxy| proxy));
    let redis = RedisStore::connect_lazy(cluster.url()).unwrap();
    let store = Fallback::new(redis, LocalStore::default());
    let ends = Arc::new(AtomicBool::new(false));
    let mut clients = vec![];
    let (slow, slow_ends) = (store.clone(), Arc::clone(&ends));
    runtime.spawn(async move {
        while !slow_ends.load(SeqCst) {
            let _ = slow.check(check("slow", "1000000/s")).await;
            thread::sleep(Duration::from_millis(150));
        }
    });
    for _ in 0..8 {
        let (store, ends) = (store.clone(), Arc::clone(&ends));
        clients.push(runtime.spawn(async move {
            let [mut by_redis, mut local] = [0, 0];
            while !ends.load(SeqCst) {
                let decision = store.check(check("ann", "100000/s")).await.unwrap();
                match decision.source() {
                    Source::Local => local += 1,
                    _ => by_redis += 1,
                }
                sleep(Duration::from_millis(2)).await;
            }
            [by_redis, local]
        }));
    }
    thread::sleep(Duration::from_secs(5));
    ends.store(true, SeqCst);
    let mut sum = [0, 0];
    for client in clients {
        let [by_redis, local] = runtime.block_on(client).unwrap();
        sum = [sum[0] + by_redis, sum[1] + local];
    }
    runtime.shutdown_background();
    // The first checks may wait for the connection.
    assert!(sum[1] * 50 <= sum[0], "by Redis and locally: {sum:?}");
}
