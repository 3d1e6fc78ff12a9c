//! A cluster of three masters compared with a single server in the same run: with a replica per master, and without.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::sync::OnceCell;
use tower_redis_ratelimit::{RedisStore, redis};

use crate::cases::{Load, address, by_address, limited, one_by_one, serve};
use crate::meter::{Amount, Measure, load};
use crate::nodes::{Cluster, MASTERS};
use crate::support::{RedisServer, until};

const LOAD: Load = Load::Many;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusterCase {
    pub design: Design,
    /// Whether each master has a replica, to which it sends its writes.
    pub replicas: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Design {
    /// `RedisStore` on a single server.
    Single,
    /// `RedisStore` on a cluster.
    Cluster,
    /// A script call per request, in pipelines, over one connection to each master of a cluster.
    OneByOne,
}

/// Servers that are started on demand, without and with replicas.
#[derive(Default)]
pub struct ClusterServers {
    single: [OnceCell<Vec<RedisServer>>; 2],
    cluster: [OnceCell<Cluster>; 2],
}

impl ClusterCase {
    const fn of(design: Design, replicas: bool) -> Self {
        Self { design, replicas }
    }

    /// All cases, in the order of a round.
    pub const ALL: [Self; 6] = [
        Self::of(Design::Single, false),
        Self::of(Design::Cluster, false),
        Self::of(Design::OneByOne, false),
        Self::of(Design::Single, true),
        Self::of(Design::Cluster, true),
        Self::of(Design::OneByOne, true),
    ];

    pub fn name(self) -> String {
        let what = match self.design {
            Design::Single => "RedisStore on one server",
            Design::Cluster => "RedisStore on 3 masters",
            Design::OneByOne => "a script call each, pipelined, on 3 masters",
        };
        format!(
            "cluster: {what}{}",
            if self.replicas { ", with replicas" } else { "" }
        )
    }

    pub async fn run(self, started: &ClusterServers, tasks: u64, amount: Amount) -> Measure {
        let index = usize::from(self.replicas);
        let (url, masters): (_, Vec<&RedisServer>) = match self.design {
            Design::Single => {
                let servers = started.single[index]
                    .get_or_init(|| single(self.replicas))
                    .await;
                (servers[0].url(), vec![&servers[0]])
            }
            Design::Cluster | Design::OneByOne => {
                let cluster = started.cluster[index]
                    .get_or_init(|| cluster(self.replicas))
                    .await;
                (
                    cluster.url(),
                    cluster
                        .nodes
                        .iter()
                        .take(MASTERS)
                        .map(|node| &node.server)
                        .collect(),
                )
            }
        };
        for master in &masters {
            let _: String = master.command("FLUSHALL").await;
        }
        if self.design == Design::OneByOne {
            return pipelined(&masters, tasks, amount).await;
        }
        let service = limited(RedisStore::connect(url).await.unwrap(), LOAD);
        serve(&masters, &[service], by_address, LOAD, tasks, amount).await
    }
}

async fn single(replicas: bool) -> Vec<RedisServer> {
    let server = RedisServer::start();
    if !replicas {
        return vec![server];
    }
    let replica =
        RedisServer::start_with(&["--replicaof", "127.0.0.1", &server.port().to_string()]);
    until("the replica follows", async || {
        replica
            .command::<String>("INFO replication")
            .await
            .contains("master_link_status:up")
    })
    .await;
    vec![server, replica]
}

async fn cluster(replicas: bool) -> Cluster {
    let cluster = Cluster::start(replicas).await;
    for node in &cluster.nodes {
        // Under this load a node may respond late, and must not be considered dead.
        let _: String = node
            .server
            .command("CONFIG SET cluster-node-timeout 60000")
            .await;
    }
    cluster
}

async fn pipelined(masters: &[&RedisServer], tasks: u64, amount: Amount) -> Measure {
    let mut connections = vec![];
    for master in masters {
        let mut connection = master.connection().await;
        connection.set_response_timeout(Duration::from_secs(20));
        connections.push(connection);
    }
    load(masters, tasks, amount, |mut meter| {
        let mut connections: Vec<MultiplexedConnection> = connections.clone();
        async move {
            while meter.should_continue() {
                let caller = meter.rng.u32(..LOAD.callers());
                let slot = usize::from(slot(address(caller).to_string().as_bytes()));
                let master = (1..MASTERS)
                    .filter(|master| slot >= SLOTS * master / MASTERS)
                    .count();
                one_by_one(&mut connections[master], LOAD.quota(), caller).await;
                meter.record();
            }
            meter
        }
    })
    .await
}

const SLOTS: usize = 16_384;

/// The slot of a hash tag: CRC-16/XMODEM.
fn slot(tag: &[u8]) -> u16 {
    let crc = tag.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 {
                crc << 1
            } else {
                crc << 1 ^ 0x1021
            }
        })
    });
    crc % SLOTS as u16
}
