//! Requests in flight are counted by the master of the caller's slot.

use tower_redis_ratelimit::RedisStore;

use crate::in_flight_load::{
    an_outage, ann, is_worker, limiter, patient, processes_are_killed, work,
};
use crate::nodes::{Cluster, MASTERS};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_processes_never_exceed_the_limit() {
    if is_worker() {
        return work().await;
    }
    let cluster = Cluster::start(false).await;
    processes_are_killed(
        "in_flight::cluster::killed_processes_never_exceed_the_limit",
        &cluster.url(),
    )
    .await;
}

/// The master's replica takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_is_killed() {
    if is_worker() {
        return work().await;
    }
    let mut cluster = Cluster::start(true).await;
    let url = cluster.url();
    let limiter = limiter::<RedisStore>(patient(&url));
    let one = limiter.reserve(ann(), 1).await.unwrap();
    let mut master = 0;
    for (i, node) in cluster.nodes.iter().enumerate().take(MASTERS) {
        if !node
            .server
            .command::<Vec<String>>("KEYS *{ann}*")
            .await
            .is_empty()
        {
            master = i;
        }
    }
    drop(one);
    an_outage(
        "in_flight::cluster::a_master_is_killed",
        &url,
        async |has_begun| {
            if !has_begun {
                cluster.nodes[master].server.kill();
            }
        },
    )
    .await;
}
