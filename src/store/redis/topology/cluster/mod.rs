//! Redis Cluster: several masters, which share the 16,384 slots.
//!
//! All keys of a script call must be in one slot. If each caller had its own slot, the checks of
//! different callers could not share a call. Therefore callers are assigned to a fixed number of
//! *partitions*. The keys of a partition have its hash tag, as in `rl:{17}:{ann}:api:g`, so a
//! partition is in one slot. The checks in flight of a partition share a script call, and the calls
//! for all partitions of one master share a pipeline.
//!
//! Any of the [`nodes`] may provide the map of [`slots`], which is queried at startup, and again
//! when a connection is lost or a slot has moved: see [`refresh`]. A call that a node
//! [rejects](NodeError) because it does not serve the slot is sent to the node that does, since it
//! was not executed. No other call is sent twice.
//!
//! Two instances with different numbers of partitions would count the same callers under different
//! keys. So a marker in the cluster stores the number, and a new instance with another number is
//! rejected. If the marker cannot be read, because its master is unreachable or its slot migrates,
//! the instance checks it again within a minute. An instance whose number was confirmed by another
//! instance restores the marker if it was lost or replaced: after a `FLUSHALL`, the first instance
//! may have the wrong number, and then gives way.

mod nodes;
mod refresh;
mod slots;

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use redis::{ConnectionInfo, RedisError};
use siphasher::sip::SipHasher13;

pub(crate) use nodes::{NodeError, no_address};
pub(crate) use refresh::{Planned, Refresher, Why};
pub(crate) use slots::{SHARED, SlotMap};

use self::nodes::Nodes;
use super::addresses::AddressMap;
use super::node::Node;
use crate::error::{ErrorKind, StoreError};
use crate::limit::Key;
use crate::store::redis::link::{Dialer, Driven};
use crate::util::Clock;

pub(crate) struct Cluster {
    nodes: Nodes,
    partitions: Box<[ClusterPartition]>,
    map: ArcSwap<SlotMap>,
    pub(crate) refresher: Refresher,
    /// The error of all checks, if this store has another number of partitions.
    pub(crate) marker_error: OnceLock<StoreError>,
    clock: Clock,
}

struct ClusterPartition {
    slot: u16,
    /// The prefix of its keys: `rl:{17}`.
    prefix: Box<str>,
    /// The time until which its slot is assumed to be migrating, in microseconds.
    moves_until: AtomicI64,
}

impl Cluster {
    pub(crate) const MAX_PARTITIONS: usize = 1_024;
    /// A slot is assumed to be migrating for this long after a node has reported it.
    const MIGRATION_TTL: Duration = Duration::from_secs(1);

    pub(crate) fn new(
        seeds: Vec<ConnectionInfo>,
        dialer: Dialer,
        addresses: AddressMap,
        prefix: &str,
        partitions: usize,
    ) -> Self {
        let mut each = vec![];
        for tag in slots::tags(partitions) {
            each.push(ClusterPartition {
                slot: slots::slot(tag.to_string().as_bytes()),
                prefix: format!("{prefix}:{{{tag}}}").into(),
                moves_until: AtomicI64::new(i64::MIN),
            });
        }
        Self {
            nodes: Nodes::new(seeds, dialer, addresses),
            partitions: each.into(),
            map: ArcSwap::from_pointee(SlotMap::empty()),
            refresher: Refresher::default(),
            marker_error: OnceLock::new(),
            clock: Clock::new(),
        }
    }

    pub(crate) fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// Returns the partition of a caller. It is in the caller's keys, so all versions of this crate
    /// must agree on it.
    pub(crate) fn partition(&self, key: &Key) -> u16 {
        (SipHasher13::new().hash(key.as_bytes()) % self.partitions.len() as u64) as u16
    }

    /// Returns the prefix of the keys of a partition.
    pub(crate) fn prefix(&self, partition: u16) -> &str {
        &self.partitions[usize::from(partition)].prefix
    }

    /// Returns the master of a partition. `None` until a node has reported it.
    pub(crate) fn node(&self, partition: u16) -> Option<Node> {
        self.map
            .load()
            .owner(self.partitions[usize::from(partition)].slot)
    }

    /// Returns the master of the keys that belong to no partition.
    pub(crate) fn shared_node(&self) -> Option<Node> {
        self.map.load().shared_owner()
    }

    /// Returns one partition of each master that has any.
    pub(crate) fn partition_of_each(&self) -> Vec<u16> {
        let mut partitions = vec![];
        for (_, partition) in self.each_master() {
            partitions.push(partition);
        }
        partitions
    }

    /// Returns the masters of all partitions. `None` while one of them is unknown.
    pub(crate) fn masters(&self) -> Option<Vec<Node>> {
        let mut masters = vec![];
        for (node, _) in self.each_master() {
            masters.push(node?);
        }
        Some(masters)
    }

    /// Returns each master that has partitions, with one of these. The master is `None` for partitions without a known
    /// one.
    fn each_master(&self) -> Vec<(Option<Node>, u16)> {
        // Loaded once, since it may be replaced concurrently: a sort by values that change may panic.
        let map = self.map.load();
        let mut each = vec![];
        for (partition, number) in self.partitions.iter().zip(0..) {
            each.push((map.owner(partition.slot), number));
        }
        // By node, so that the partitions of one are adjacent.
        each.sort_unstable();
        each.dedup_by_key(|(node, _)| *node);
        each
    }

    /// Returns `true` if a partition's slot is migrating. A call with keys on both nodes is then
    /// rejected, so its callers' checks are sent one at a time.
    pub(crate) fn moves(&self, partition: u16) -> bool {
        // Relaxed: a call that misses the report is rejected too, and its checks are sent again one at a time.
        let until = self.partitions[usize::from(partition)]
            .moves_until
            .load(Relaxed);
        // Most slots have never moved: skip the clock for these.
        until > i64::MIN && self.clock.micros() < until
    }

    pub(crate) fn notice_move(&self, partition: u16) {
        let until = self.clock.micros() + Self::MIGRATION_TTL.as_micros() as i64;
        self.partitions[usize::from(partition)]
            .moves_until
            .store(until, Relaxed);
    }

    /// Returns the address of a node, or of the whole cluster, for errors.
    pub(crate) fn address(&self, node: Option<Node>) -> String {
        self.nodes.name(node)
    }

    /// Opens a connection to a node of this cluster.
    pub(crate) async fn connect(&self, node: Node) -> Result<Driven, StoreError> {
        self.nodes
            .connect(node, |slots| self.map.load().is_of_cluster(slots))
            .await
    }

    /// Interprets the error of a node.
    pub(crate) fn node_error(&self, error: &RedisError, asked: Node) -> NodeError {
        self.nodes.node_error(error, asked)
    }

    /// Records that `node` serves this slot.
    pub(crate) fn learn(&self, slot: u16, node: Node) {
        self.map.rcu(|map| {
            // All checks of a call report the same move.
            if map.owner(slot) == Some(node) {
                Arc::clone(map)
            } else {
                map.with(slot, node).into()
            }
        });
    }

    /// Queries the nodes for the map of slots, each for at most `patience`, and the next one after `pause`. Returns the
    /// map, and whether it differs from the current one.
    pub(crate) async fn query_any(
        &self,
        why: Why,
        patience: Duration,
        pause: Duration,
    ) -> Result<(Arc<SlotMap>, bool), StoreError> {
        let present = self.map.load_full();
        let lost = match why {
            Why::Lost(node) => Some(node),
            Why::Unknown | Why::Moved | Why::Marker => None,
        };
        let queried = self.nodes.query_any(&present, lost, patience, pause).await;
        let (map, is_other) = queried?;
        // The other cluster has its own marker, which must be checked before its map is adopted.
        if is_other {
            self.refresher.forget_marker();
        }
        let changed = !map.same_owners(&present);
        Ok((map.into(), changed))
    }

    pub(crate) fn adopt(&self, map: Arc<SlotMap>) {
        self.map.store(map);
    }

    /// Returns the error of a check whose slot has no known master.
    pub(crate) fn no_master(&self) -> StoreError {
        if self.map.load().lacks_address {
            no_address()
        } else {
            StoreError::new(ErrorKind::NotReady)
        }
    }

    /// Returns `true` if a node has reported the slots.
    pub(crate) fn is_known(&self) -> bool {
        !self.map.load().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use redis::{IntoConnectionInfo, parse_redis_value};

    use super::slots::Address;
    use super::*;

    fn cluster() -> Cluster {
        let seed = "redis://seed:1".into_connection_info().unwrap();
        Cluster::new(
            vec![seed],
            Dialer::new(Duration::from_secs(1), None, None),
            AddressMap::default(),
            "rl",
            1,
        )
    }

    #[test]
    fn a_master_without_an_address_is_named() {
        let cluster = cluster();
        let general = cluster.no_master();
        let reply = b"*2\r\n*3\r\n:0\r\n:99\r\n*3\r\n$1\r\n?\r\n:1\r\n$1\r\na\r\n\
                      *3\r\n:100\r\n:16383\r\n*3\r\n$1\r\nh\r\n:2\r\n$1\r\nb\r\n";
        let slots = slots::read(&parse_redis_value(reply).unwrap(), &Address::new("seed", 1));
        let map = SlotMap::new(slots.unwrap(), |address| cluster.nodes.number(address));
        cluster.adopt(map.into());
        for error in [&general, &cluster.no_master()] {
            assert_eq!(error.kind(), ErrorKind::NotReady);
        }
        assert!(
            general
                .to_string()
                .starts_with("the server is loading its data")
        );
        let told = cluster.no_master().to_string();
        assert!(
            told.starts_with(
                "the server reports a node of the cluster without its address (`?`): set"
            ),
            "{told}"
        );
    }

    #[test]
    fn node_errors_are_parsed_or_none() {
        let cluster = cluster();
        let asked = cluster.nodes.number(Address::new("seed", 1));
        let node_error = |line: &str| {
            let error = parse_redis_value(line.as_bytes())
                .unwrap()
                .extract_error()
                .unwrap_err();
            cluster.node_error(&error, asked)
        };
        let node = |host, port| cluster.nodes.number(Address::new(host, port));
        for (line, expected) in [
            (
                "-MOVED 3999 b:6381\r\n",
                NodeError::Moved {
                    slot: 3999,
                    node: node("b", 6381),
                },
            ),
            (
                "-MOVED 0 :6381\r\n",
                NodeError::Moved {
                    slot: 0,
                    node: node("seed", 6381),
                },
            ),
            (
                "-MOVED 0 ::1:6381\r\n",
                NodeError::Moved {
                    slot: 0,
                    node: node("::1", 6381),
                },
            ),
            (
                "-ASK 3999 [::1]:6381\r\n",
                NodeError::Ask(node("::1", 6381)),
            ),
            ("-MOVED 3999 ?:6381\r\n", NodeError::NoAddress),
            ("-MOVED 3999 b:0\r\n", NodeError::NoAddress),
            ("-MOVED 3999 b:port\r\n", NodeError::NotReady),
            ("-MOVED 3999\r\n", NodeError::NotReady),
            ("-MOVED\r\n", NodeError::NotReady),
            ("-MOVED 99999 b:1\r\n", NodeError::NotReady),
            ("-ASK all of it\r\n", NodeError::NotReady),
            (
                "-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
                NodeError::TryAgain,
            ),
            ("-CLUSTERDOWN The cluster is down\r\n", NodeError::NotReady),
            (
                "-LOADING Redis is loading the dataset in memory\r\n",
                NodeError::NotReady,
            ),
            (
                "-CROSSSLOT Keys in request don't hash to the same slot\r\n",
                NodeError::Other,
            ),
            ("-ERR no\r\n", NodeError::Other),
        ] {
            assert_eq!(node_error(line), expected, "{line}");
        }
        // A nonexistent slot, reported by a faulty node.
        cluster.learn(60_000, node("b", 1));
        assert_eq!(cluster.node(0), None);
    }

    /// Sorting by a value that changes concurrently may panic.
    #[test]
    fn masters_may_change_meanwhile() {
        let seed = "redis://seed:1".into_connection_info().unwrap();
        let cluster = Cluster::new(
            vec![seed],
            Dialer::new(Duration::from_secs(1), None, None),
            AddressMap::default(),
            "rl",
            1_024,
        );
        let mut rng = fastrand::Rng::with_seed(0);
        let mut map = || {
            let mut reply = format!("*{}\r\n", cluster.partitions.len());
            for ClusterPartition { slot, .. } in &cluster.partitions {
                let port = rng.u16(1..=9);
                reply += &format!(
                    "*3\r\n:{slot}\r\n:{slot}\r\n*3\r\n$1\r\nn\r\n:{port}\r\n$2\r\ni{port}\r\n"
                );
            }
            let reply = parse_redis_value(reply.as_bytes()).unwrap();
            let slots = slots::read(&reply, &Address::new("seed", 1)).unwrap();
            Arc::new(SlotMap::new(slots, |address| cluster.nodes.number(address)))
        };
        let maps = [map(), map(), map(), map()];
        cluster.adopt(Arc::clone(&maps[0]));
        let ends = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let each = maps.iter().cycle();
                each.take_while(|_| !ends.load(Relaxed))
                    .for_each(|map| cluster.adopt(Arc::clone(map)));
            });
            let masters = || {
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    cluster.partition_of_each().len()
                }))
            };
            let counts: Vec<_> = (0..500).map(|_| masters().ok()).collect();
            ends.store(true, Relaxed);
            assert!(counts.iter().all(|count| *count == Some(9)), "{counts:?}");
        });
    }
}
