//! The address of a node is reassigned to another cluster.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::Store;

use crate::nodes::Cluster;
use crate::support::{check, until};

const STORES: usize = 20;
const CALLERS: usize = 30;

/// For example, a failed machine's address is given to a machine of another service.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_counted_in_another_cluster() {
    let mut cluster = Cluster::start(false).await;
    let connect = || {
        RedisStore::builder(cluster.servers())
            .timeout(Duration::from_secs(5))
            .connect()
    };
    let stores: Vec<RedisStore> = join_all((0..STORES).map(|_| connect()))
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let decided = async |store: &RedisStore| {
        let checks = (0..CALLERS).map(|i| store.check(check(&format!("caller-{i}"), "100000/h")));
        join_all(checks)
            .await
            .into_iter()
            .filter(Result::is_ok)
            .count()
    };
    for store in &stores {
        assert_eq!(decided(store).await, CALLERS);
    }
    let other = &mut cluster.nodes[0].server;
    other.kill();
    other.restart_with(&["--cluster-config-file", "another.conf"]);
    let slots: Vec<String> = (0..16_384).map(|slot: u16| slot.to_string()).collect();
    let _: String = other
        .command(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")))
        .await;
    let other = &cluster.nodes[0];
    until("the other cluster is well", async || {
        other.sees("cluster_state:ok").await
    })
    .await;
    for _ in 0..5 {
        for store in &stores {
            let decided = decided(store).await;
            assert!(
                (1..CALLERS).contains(&decided),
                "{decided} of {CALLERS} are decided, though a part of the cluster has left"
            );
        }
    }
    assert_eq!(
        other.server.command::<u64>("DBSIZE").await,
        0,
        "keys in another cluster"
    );
}
