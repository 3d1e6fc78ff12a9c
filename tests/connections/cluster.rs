//! Credentials that change, for all nodes.

use tower_redis_ratelimit::RedisStore;

use crate::nodes::Cluster;
use crate::rotation::Rotation;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_under_load_is_not_noticed() {
    let cluster = Cluster::start(false).await;
    let nodes: Vec<_> = cluster.nodes.iter().map(|node| &node.server).collect();
    let rotation = Rotation::start(&nodes).await;
    let builder = RedisStore::builder(cluster.servers());
    rotation.is_not_noticed(&nodes, builder).await;
}
