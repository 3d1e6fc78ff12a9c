//! A cluster of three masters with a replica each, on free ports. It stops with the test.

use std::time::Duration;

use futures_util::future::join_all;
use redis::{Value, cmd};
use tower_redis_ratelimit::store::{RedisStoreBuilder, Servers};
use tower_redis_ratelimit::{RedisStore, redis};

use crate::support::{RedisServer, until};

pub const MASTERS: usize = 3;
const SLOTS: usize = 16_384;

pub struct Cluster {
    /// First the masters, then the replica of each, then added nodes.
    pub nodes: Vec<Node>,
    masters: usize,
}

pub struct Node {
    pub server: RedisServer,
    pub id: String,
}

impl Node {
    /// Starts a node. `known_as` maps its port to the one that it announces.
    async fn start(number: usize, known_as: impl Fn(u16) -> u16) -> Self {
        let mut server = RedisServer::start_with(&[
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "1000",
            "--cluster-require-full-coverage",
            "no",
            // A master that has exported its last slot stays a master.
            "--cluster-allow-replica-migration",
            "no",
            "--repl-diskless-sync-delay",
            "0",
        ]);
        let port = known_as(server.port());
        if port != server.port() {
            // Redis 6.2 accepts this at startup only.
            server.kill();
            server.restart_with(&["--cluster-announce-port", &port.to_string()]);
        }
        let id = server.command("CLUSTER MYID").await;
        let _: String = server
            .command(&format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1))
            .await;
        Self { server, id }
    }

    pub async fn sees(&self, what: &str) -> bool {
        self.server
            .command::<String>("CLUSTER INFO")
            .await
            .contains(what)
    }

    /// Returns `true` if it is a master with slots.
    pub async fn is_master(&self) -> bool {
        let nodes: String = self.server.command("CLUSTER NODES").await;
        nodes
            .lines()
            .any(|line| line.contains("myself,master") && line.split(' ').count() > 8)
    }
}

impl Cluster {
    /// Starts three masters, with a replica each if `with_replicas`.
    pub async fn start(with_replicas: bool) -> Self {
        Self::start_known_as(with_replicas, |port| port).await
    }

    /// Like [`start`](Self::start), with nodes that announce another port than their own, such as
    /// that of a proxy.
    pub async fn start_known_as(with_replicas: bool, known_as: impl Fn(u16) -> u16) -> Self {
        Self::start_sized(MASTERS, with_replicas, known_as).await
    }

    /// Like [`start_known_as`](Self::start_known_as), with `masters` masters.
    pub async fn start_sized(
        masters: usize,
        with_replicas: bool,
        known_as: impl Fn(u16) -> u16,
    ) -> Self {
        let count = if with_replicas { 2 * masters } else { masters };
        let nodes = join_all((0..count).map(|number| Node::start(number, &known_as))).await;
        for (i, node) in nodes.iter().enumerate().take(masters) {
            // Slot by slot: Redis 6.2 does not support ranges.
            let slots: Vec<String> = (SLOTS * i / masters..SLOTS * (i + 1) / masters)
                .map(|slot| slot.to_string())
                .collect();
            let _: String = node
                .server
                .command(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")))
                .await;
        }
        let cluster = Self { nodes, masters };
        for node in &cluster.nodes[1..] {
            cluster.meet(node).await;
        }
        cluster.know_each_other().await;
        for i in masters..count {
            let (node, master) = (&cluster.nodes[i], &cluster.nodes[i - masters]);
            until("a replica knows its master", async || {
                redis::cmd("CLUSTER")
                    .arg("REPLICATE")
                    .arg(&master.id)
                    .query_async::<()>(&mut node.server.connection().await)
                    .await
                    .is_ok()
            })
            .await;
        }
        for i in masters..count {
            let node = &cluster.nodes[i];
            until("a replica follows its master", async || {
                node.server
                    .command::<String>("INFO replication")
                    .await
                    .contains("master_link_status:up")
            })
            .await;
        }
        until("all nodes know all replicas", async || {
            let maps = join_all(
                cluster
                    .nodes
                    .iter()
                    .map(|node| node.server.command::<String>("CLUSTER NODES")),
            )
            .await;
            maps.iter().all(|map| {
                map.matches(" slave ").count() + map.matches(",slave ").count() == count - masters
            })
        })
        .await;
        until("the cluster is well", async || {
            join_all(
                cluster
                    .nodes
                    .iter()
                    .map(|node| node.sees("cluster_state:ok")),
            )
            .await
            .into_iter()
            .all(|ok| ok)
        })
        .await;
        cluster
    }

    async fn meet(&self, node: &Node) {
        let first = &self.nodes[0].server;
        let _: String = first
            .command(&format!("CLUSTER MEET 127.0.0.1 {}", node.server.port()))
            .await;
    }

    async fn know_each_other(&self) {
        let known = format!("cluster_known_nodes:{}", self.nodes.len());
        until("all nodes know each other", async || {
            join_all(self.nodes.iter().map(|node| node.sees(&known)))
                .await
                .into_iter()
                .all(|ok| ok)
        })
        .await;
        until("no handshake is in progress", async || {
            let maps = join_all(
                self.nodes
                    .iter()
                    .map(|node| node.server.command::<String>("CLUSTER NODES")),
            )
            .await;
            maps.iter().all(|map| {
                !map.contains("handshake") && map.matches(" connected").count() == self.nodes.len()
            })
        })
        .await;
    }

    /// Adds a master without slots.
    pub async fn add(&mut self) -> usize {
        let node = Node::start(self.nodes.len(), |port| port).await;
        self.meet(&node).await;
        self.nodes.push(node);
        self.know_each_other().await;
        let added = self.nodes.len() - 1;
        until("it takes part", async || {
            self.nodes[added].sees("cluster_state:ok").await
        })
        .await;
        added
    }

    pub fn url(&self) -> String {
        let hosts: Vec<String> = self
            .nodes
            .iter()
            .take(self.masters)
            .map(|node| format!("127.0.0.1:{}", node.server.port()))
            .collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    pub fn servers(&self) -> Servers {
        Servers::from(self.url())
    }

    /// A builder with a timeout for tests without a fault, which a loaded machine does not reach.
    pub fn builder(&self) -> RedisStoreBuilder {
        RedisStore::builder(self.servers()).timeout(Duration::from_secs(10))
    }

    /// Returns how many times the masters have executed a command.
    pub async fn calls(&self, command: &str) -> u64 {
        join_all(
            self.nodes
                .iter()
                .take(self.masters)
                .map(|node| node.server.calls(command)),
        )
        .await
        .into_iter()
        .sum()
    }

    /// Returns the node that serves a slot, according to that node.
    pub async fn owner(&self, slot: u16) -> usize {
        for (i, node) in self.nodes.iter().enumerate() {
            let Ok(Value::Array(ranges)) = cmd("CLUSTER")
                .arg("SLOTS")
                .query_async::<Value>(&mut node.server.connection().await)
                .await
            else {
                continue;
            };
            for range in ranges {
                let Value::Array(parts) = range else { continue };
                let [
                    Value::Int(first),
                    Value::Int(last),
                    Value::Array(master),
                    ..,
                ] = parts.as_slice()
                else {
                    continue;
                };
                if (*first..=*last).contains(&i64::from(slot))
                    && master.get(1) == Some(&Value::Int(node.server.port().into()))
                {
                    return i;
                }
            }
        }
        panic!("no node serves slot {slot}")
    }

    /// Begins a slot migration.
    pub async fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let (from, to) = (&self.nodes[from], &self.nodes[to]);
        let _: String = to
            .server
            .command(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", from.id))
            .await;
        let _: String = from
            .server
            .command(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", to.id))
            .await;
    }

    /// Moves at most `most` keys of the slot, one at a time. Returns the number of moved keys.
    pub async fn move_keys(&self, slot: u16, from: usize, to: usize, most: usize) -> usize {
        let mut connection = self.nodes[from].server.connection().await;
        let keys: Vec<Vec<u8>> = cmd("CLUSTER")
            .arg("GETKEYSINSLOT")
            .arg(slot)
            .arg(most)
            .query_async(&mut connection)
            .await
            .unwrap();
        for key in &keys {
            let mut migrate = cmd("MIGRATE");
            migrate
                .arg("127.0.0.1")
                .arg(self.nodes[to].server.port())
                .arg(key)
                .arg(0)
                .arg(5_000);
            let _: String = migrate.query_async(&mut connection).await.unwrap();
        }
        keys.len()
    }

    /// Ends a slot migration.
    pub async fn end_move(&self, slot: u16, from: usize, to: usize) {
        let id = &self.nodes[to].id;
        for node in [to, from] {
            let _: String = self.nodes[node]
                .server
                .command(&format!("CLUSTER SETSLOT {slot} NODE {id}"))
                .await;
        }
    }

    /// Migrates a slot with all of its keys.
    pub async fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to).await;
        while self.move_keys(slot, from, to, 10).await > 0 {}
        self.end_move(slot, from, to).await;
    }
}

/// Returns the slot of a key, as computed by Redis.
pub async fn slot_of(cluster: &Cluster, key: &str) -> u16 {
    cluster.nodes[0]
        .server
        .command(&format!("CLUSTER KEYSLOT {key}"))
        .await
}
