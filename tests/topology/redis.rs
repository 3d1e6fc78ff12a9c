//! A node of a Redis Cluster is not a single Redis: the store reports that instead of deciding some
//! of the checks. Also tests that need only one node.

use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

use crate::support::{RedisServer, check, until};

/// A node that serves these slots, and is not connected to any other node.
async fn node(slots: Range<u16>) -> RedisServer {
    let server = RedisServer::start_with(&[
        "--cluster-enabled",
        "yes",
        "--cluster-require-full-coverage",
        "no",
    ]);
    if !slots.is_empty() {
        let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
        let _: String = server
            .command(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")))
            .await;
        until("the node serves its slots", async || {
            server
                .command::<String>("CLUSTER INFO")
                .await
                .contains("cluster_state:ok")
        })
        .await;
    }
    server
}

#[tokio::test]
async fn a_node_is_not_taken() {
    for slots in [0..16384, 0..8192, 0..0] {
        let server = node(slots.clone()).await;
        let error = RedisStore::connect(server.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ClusterNode, "{slots:?}: {error:?}");
        assert!(error.to_string().contains("redis+cluster://"), "{error}");
        let node = format!(
            "the server 127.0.0.1:{} is a node of a Redis Cluster",
            server.port()
        );
        assert!(error.to_string().starts_with(&node), "{error}");
    }
}

/// Also if the checks are sent one at a time.
#[tokio::test]
async fn callers_of_another_node_are_refused() {
    let (one, other) = (node(0..8192).await, node(8192..16384).await);
    let _: String = one
        .command(&format!("CLUSTER MEET 127.0.0.1 {}", other.port()))
        .await;
    until("they know each other", async || {
        one.command::<String>("CLUSTER INFO")
            .await
            .contains("cluster_slots_ok:16384")
    })
    .await;
    let store = RedisStore::connect_lazy(one.url()).unwrap();
    let mut refused = 0;
    for i in 0..40 {
        if let Err(error) = store.check(check(&format!("caller-{i}"), "10/s")).await {
            assert_eq!(error.kind(), ErrorKind::ClusterNode, "{error:?}");
            refused += 1;
        }
    }
    assert!(
        (5..=35).contains(&refused),
        "{refused} of 40 are of the other node"
    );
}

/// The probe of a `Fallback` detects it too: a single check may be decided, but most batches are
/// not.
#[tokio::test]
async fn a_fallback_stays_degraded() {
    let server = node(0..16384).await;
    let store = Fallback::new(
        RedisStore::connect_lazy(server.url()).unwrap(),
        LocalStore::default(),
    );
    until("a batch has failed often enough", async || {
        let checks = (0..20).map(|i| store.check(check(&format!("caller-{i}"), "10/s")));
        futures_util::future::join_all(checks).await;
        store.is_degraded()
    })
    .await;
    let refused = async || {
        let stats: String = server.command("INFO commandstats").await;
        let line = stats
            .lines()
            .find(|line| line.starts_with("cmdstat_evalsha:"))
            .unwrap_or_default();
        let count = line
            .split("rejected_calls=")
            .nth(1)
            .and_then(|rest| rest.split(',').next());
        count.map_or(0, |count| count.parse::<u64>().unwrap())
    };
    let before = refused().await;
    until("it has probed twice more", async || {
        refused().await >= before + 2
    })
    .await;
    assert!(store.is_degraded());
}

/// The seed accepts connections, but never replies.
#[tokio::test]
async fn a_silent_seed_causes_no_delay() {
    let server = node(0..16384).await;
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(
        "redis+cluster://{},127.0.0.1:{}",
        silent.local_addr().unwrap(),
        server.port()
    );
    // A busy machine may be late itself, but not each time.
    until("it connects", async || {
        RedisStore::connect(url.as_str()).await.is_ok()
    })
    .await;
}

/// The runtime has stalled just before it would query the slots.
#[test]
fn a_stalled_runtime_stops_no_other() {
    let runtime = || -> Runtime { Builder::new_current_thread().enable_all().build().unwrap() };
    let (still, other) = (runtime(), runtime());
    let server = other.block_on(node(0..16384));
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    let store = RedisStore::builder(url)
        .timeout(Duration::from_secs(5))
        .connect_lazy()
        .unwrap();
    let entered = still.enter();
    let waits = store.check(check("ann", "10/s"));
    drop(entered);
    still.block_on(async {
        // The worker, and the tasks that it starts.
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    });
    assert!(
        other
            .block_on(async { store.check(check("bob", "10/s")).await })
            .unwrap()
            .is_allowed()
    );
    assert!(still.block_on(waits).unwrap().is_allowed());
}

/// A confirmed number is set again. The first instance after the flush has another number, and
/// gives way.
#[tokio::test]
async fn the_partitions_survive_a_flush() {
    let server = node(0..16384).await;
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    let builder = |partitions| {
        let partitions = NonZeroUsize::new(partitions).unwrap();
        RedisStore::builder(url.as_str())
            .partitions(partitions)
            .timeout(Duration::from_secs(20))
    };
    let first = builder(12).connect().await.unwrap();
    let second = builder(12).connect().await.unwrap();
    let _: String = server.command("FLUSHALL").await;
    let wrong = builder(5).connect().await.unwrap();
    let later = async |seconds| {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        tokio::time::resume();
    };
    // Each store checks the marker every hour, within a minute.
    later(3_601).await;
    assert!(
        second
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    later(61).await;
    until("the number is set again", async || {
        server.command::<String>("GET rl:{rl}:partitions").await == "12"
    })
    .await;
    until("the wrong instance gives way", async || {
        later(61).await;
        let refused = wrong.check(check("ann", "10/s")).await;
        refused.is_err_and(|error| error.kind() == ErrorKind::Configuration)
    })
    .await;
    for store in [first, second] {
        later(3_601).await;
        assert!(
            store
                .check(check("ann", "1000/s"))
                .await
                .unwrap()
                .is_allowed()
        );
        later(61).await;
        assert!(
            store
                .check(check("ann", "1000/s"))
                .await
                .unwrap()
                .is_allowed()
        );
    }
    assert_eq!(
        server.command::<String>("GET rl:{rl}:partitions").await,
        "12"
    );
}
