//! Slots: the slot of a hash tag, and the node that serves a slot.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, Value};

use crate::store::redis::topology::node::Node;

/// The number of slots of every cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The tag of keys that belong to no partition.
pub(crate) const SHARED: &str = "rl";

/// Returns the slot of a hash tag: its CRC-16/XMODEM, as in Redis.
pub(super) fn slot(tag: &[u8]) -> u16 {
    let mut crc = 0u16;
    for byte in tag {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            let is_high_bit_set = crc & 0x8000 != 0;
            crc <<= 1;
            if is_high_bit_set {
                crc ^= 0x1021;
            }
        }
    }
    crc % SLOTS
}

/// Returns the tags of the partitions: the n-th is the smallest number whose slot is in the n-th
/// part of all slots. Masters usually have contiguous ranges of slots of similar length, so each
/// master has a similar number of partitions.
pub(super) fn tags(partitions: usize) -> Vec<u32> {
    // All instances must find the same tags: keys contain them. So this order must not change.
    let mut tags = vec![None; partitions];
    let mut number = 0;
    let mut left = partitions;
    while left > 0 {
        let slot = slot(number.to_string().as_bytes());
        let partition = usize::from(slot) * tags.len() / usize::from(SLOTS);
        if tags[partition].is_none() {
            tags[partition] = Some(number);
            left -= 1;
        }
        number += 1;
    }
    tags.into_iter().flatten().collect()
}

/// Maps each slot to the node that serves it.
#[derive(Debug)]
pub(crate) struct SlotMap {
    owners: Box<[Option<Node>]>,
    /// All nodes that the cluster reported, including replicas: any may be queried for the slots.
    /// Sorted, except for nodes that were learned later.
    pub(super) nodes: Vec<Node>,
    /// Whether the cluster reported a master without its address.
    pub(super) lacks_address: bool,
    ids: Arc<Ids>,
}

/// The ids of all nodes of a cluster. A node keeps its id while it belongs to that cluster.
type Ids = HashSet<Box<str>>;

/// A node's reply about the slots.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlotRanges {
    pub(super) ranges: Vec<Range>,
    /// Whether a range was omitted because its master has no address.
    pub(super) lacks_address: bool,
    ids: Ids,
}

impl SlotRanges {
    /// Returns the announced addresses of all nodes, some of them repeatedly.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (&str, u16)> {
        let nodes = self.ranges.iter().flat_map(|range| &range.nodes);
        nodes.map(|node| (&*node.host, node.port))
    }
}

/// A range of slots and its nodes: the master, then its replicas.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Range {
    first: u16,
    last: u16,
    nodes: Vec<Address>,
}

/// The address of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: Box<str>,
    pub(super) port: u16,
}

impl Address {
    pub(super) fn new(host: &str, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
        }
    }

    /// Returns the address of a server that the application named; `None` for a unix socket.
    pub(super) fn of(server: &ConnectionInfo) -> Option<Self> {
        match server.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                Some(Self::new(host, *port))
            }
            _ => None,
        }
    }

    /// Returns the address that this node reports for a node. An empty host means this node's own.
    pub(super) fn sibling(&self, host: &str, port: u16) -> Self {
        Self::new(if host.is_empty() { &self.host } else { host }, port)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl SlotMap {
    /// The map before the first query.
    pub(super) fn empty() -> Self {
        Self {
            owners: Box::default(),
            nodes: vec![],
            lacks_address: false,
            ids: Arc::default(),
        }
    }

    pub(super) fn new(slots: SlotRanges, mut node: impl FnMut(Address) -> Node) -> Self {
        let owners = vec![None; usize::from(SLOTS)].into();
        let mut map = Self {
            owners,
            nodes: vec![],
            lacks_address: slots.lacks_address,
            ids: Arc::new(slots.ids),
        };
        for range in slots.ranges {
            let own = map.nodes.len();
            for address in range.nodes {
                map.nodes.push(node(address));
            }
            // The first node of a range is its master, and `read` returns no range without nodes.
            let master = map.nodes[own];
            map.owners[usize::from(range.first)..=usize::from(range.last)].fill(Some(master));
        }
        map.nodes.sort_unstable();
        map.nodes.dedup();
        map
    }

    pub(super) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns the master of a slot. `None` if no node serves it, or until a node has reported it.
    pub(super) fn owner(&self, slot: u16) -> Option<Node> {
        *self.owners.get(usize::from(slot))?
    }

    /// Returns the master of the keys that belong to no partition.
    pub(crate) fn shared_owner(&self) -> Option<Node> {
        self.owner(slot(SHARED.as_bytes()))
    }

    /// Returns `true` if the cluster reported this node; `false` for a node that was learned later.
    pub(crate) fn names(&self, node: Node) -> bool {
        // Exact for a map without learned nodes only. Its caller has just queried the map.
        self.nodes.binary_search(&node).is_ok()
    }

    /// Returns `true` if each slot has the same master in both maps.
    pub(super) fn same_owners(&self, other: &Self) -> bool {
        self.owners == other.owners
    }

    /// Returns `true` if `slots` may be of the same cluster: it has a node in common with this map,
    /// or one of both has no ids.
    pub(super) fn is_of_cluster(&self, slots: &SlotRanges) -> bool {
        self.ids.is_empty() || slots.ids.is_empty() || !self.ids.is_disjoint(&slots.ids)
    }

    /// Returns a copy of the map with another owner of one slot.
    pub(super) fn with(&self, slot: u16, owner: Node) -> Self {
        let mut owners = self.owners.clone();
        let mut nodes = self.nodes.clone();
        // A faulty node may report a slot that does not exist.
        if let Some(place) = owners.get_mut(usize::from(slot)) {
            *place = Some(owner);
        }
        if !nodes.contains(&owner) {
            nodes.push(owner);
        }
        Self {
            owners,
            nodes,
            lacks_address: self.lacks_address,
            ids: Arc::clone(&self.ids),
        }
    }
}

/// Parses the reply to `CLUSTER SLOTS` of a node at this address. `None` for any other reply.
///
/// A node without a host, or with the host `""`, is the queried node itself. A node with the host
/// `?` or the port 0 is omitted, since the cluster does not know its address; so is a range whose
/// master is omitted.
pub(super) fn read(reply: &Value, asked: &Address) -> Option<SlotRanges> {
    let Value::Array(ranges) = reply else {
        return None;
    };
    let mut read = vec![];
    let mut ids = HashSet::new();
    let mut lacks_address = false;
    for range in ranges {
        let Value::Array(parts) = range else {
            return None;
        };
        let [Value::Int(first), Value::Int(last), master, replicas @ ..] = parts.as_slice() else {
            return None;
        };
        let first = u16::try_from(*first).ok()?;
        let last = u16::try_from(*last).ok()?;
        if first > last || last >= SLOTS {
            return None;
        }
        let mut nodes = vec![];
        nodes.extend(node(master, asked, &mut ids)?);
        for replica in replicas {
            // Parsed in any case: its id identifies the cluster.
            let replica = node(replica, asked, &mut ids)?;
            // The first node must be the master.
            if !nodes.is_empty() {
                nodes.extend(replica);
            }
        }
        if nodes.is_empty() {
            lacks_address = true;
        } else {
            read.push(Range { first, last, nodes });
        }
    }
    Some(SlotRanges {
        ranges: read,
        lacks_address,
        ids,
    })
}

/// Parses a node: `[host, port, id, ...]`. The inner value is `None` if the cluster does not know
/// its address.
fn node(node: &Value, asked: &Address, ids: &mut Ids) -> Option<Option<Address>> {
    let Value::Array(parts) = node else {
        return None;
    };
    let [host, Value::Int(port), rest @ ..] = parts.as_slice() else {
        return None;
    };
    if let Some(Value::BulkString(id)) = rest.first() {
        let id = str::from_utf8(id).ok()?;
        if !ids.contains(id) {
            ids.insert(id.into());
        }
    }
    let host = match host {
        Value::BulkString(host) => str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        Value::Nil => "",
        _ => return None,
    };
    let port = u16::try_from(*port).ok()?;
    if host == "?" || port == 0 {
        return Some(None);
    }
    Some(Some(asked.sibling(host, port)))
}

#[cfg(test)]
mod tests {
    use super::super::nodes::Known;
    use super::*;

    fn asked() -> Address {
        Address::new("asked", 1)
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn host(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), text("id")])
    }

    fn range(first: i64, last: i64, nodes: &[Value]) -> Value {
        Value::Array([&[Value::Int(first), Value::Int(last)], nodes].concat())
    }

    #[test]
    fn a_slot_is_that_of_redis() {
        // From the cluster specification, and from `CLUSTER KEYSLOT`.
        for (tag, expected) in [
            ("", 0),
            ("123456789", 0x31c3),
            ("foo", 12_182),
            ("user1000", 3_443),
            ("1", 9_842),
        ] {
            assert_eq!(slot(tag.as_bytes()), expected, "{tag}");
        }
    }

    #[test]
    fn partitions_are_spread_over_the_slots() {
        for partitions in [1, 2, 3, 32, 1_000] {
            let tags = tags(partitions);
            assert_eq!(tags.len(), partitions);
            for (i, tag) in tags.iter().enumerate() {
                let part =
                    usize::from(slot(tag.to_string().as_bytes())) * tags.len() / usize::from(SLOTS);
                assert_eq!(part, i, "{partitions}: {tag}");
            }
        }
        // Keys contain the tags, so other tags would start new counts.
        assert_eq!(tags(4), [3, 2, 1, 0]);
    }

    /// Checks the recommendations in `docs/sizing.md`. The masters have the ranges that `redis-cli
    /// --cluster create` gives them.
    #[test]
    fn partitions_are_spread_over_the_masters() {
        let slots = |partitions: usize| -> Vec<usize> {
            tags(partitions)
                .into_iter()
                .map(|tag| slot(tag.to_string().as_bytes()).into())
                .collect()
        };
        let each = |slots: &[usize], masters: usize| {
            let range = f64::from(SLOTS) / masters as f64;
            let mut each = vec![0; masters];
            let mut master = 0;
            for slot in slots {
                while master + 1 < masters
                    && *slot > (range * (master + 1) as f64 - 1.0).round() as usize
                {
                    master += 1;
                }
                each[master] += 1;
            }
            each
        };
        for (partitions, masters) in [(12, 3), (16, 4), (64, 16)] {
            assert_eq!(each(&slots(partitions), masters), vec![4; masters]);
        }
        for masters in [1, 2, 3, 4, 6, 12] {
            assert_eq!(each(&slots(12), masters), vec![12 / masters; masters]);
        }
        assert_eq!(each(&slots(12), 5).into_iter().max(), Some(3));
        assert_eq!(each(&slots(16), 3), [5, 6, 5]);
        assert_eq!(each(&slots(400), 100).into_iter().max(), Some(5));
        for partitions in [16, 50, 100, 128, 400, 1_024] {
            let slots = slots(partitions);
            for masters in 1..=partitions / 4 {
                let busiest = each(&slots, masters).into_iter().max().unwrap_or(0);
                assert!(
                    2 * busiest * masters <= 3 * partitions,
                    "{partitions} on {masters}: {busiest}"
                );
            }
        }
    }

    #[test]
    fn slot_maps_are_parsed() {
        let reply = Value::Array(vec![
            range(0, 5_460, &[host(text("a"), 7000), host(text("b"), 7001)]),
            range(
                5_461,
                5_461,
                &[host(text(""), 7002), host(Value::Nil, 7003)],
            ),
            range(
                5_462,
                5_470,
                &[host(text("?"), 7004), host(text("c"), 7005)],
            ),
            range(5_471, 5_480, &[host(text("e"), 0), host(text("c"), 7005)]),
            range(
                5_481,
                16_383,
                &[
                    host(Value::SimpleString("d".to_owned()), 7006),
                    host(text("?"), 7007),
                    host(text("f"), 0),
                ],
            ),
        ]);
        let slots = read(&reply, &asked()).unwrap();
        let mut known = Known::new();
        let mut intern = |address| known.number(address);
        let map = SlotMap::new(slots, &mut intern);
        let owner = |slot, host, port| {
            assert_eq!(
                map.owner(slot),
                Some(intern(Address::new(host, port))),
                "{slot}"
            )
        };
        let mut owner = owner;
        owner(0, "a", 7000);
        owner(5_460, "a", 7000);
        owner(5_461, "asked", 7002);
        owner(16_383, "d", 7006);
        assert_eq!((map.owner(5_462), map.owner(5_471)), (None, None));
        assert!(map.lacks_address && !SlotMap::empty().lacks_address);
        assert_eq!(map.nodes.len(), 5);
        let moved = map.with(5_462, Node::new(9));
        assert_eq!(
            (moved.owner(5_462), moved.owner(0)),
            (Some(Node::new(9)), map.owner(0))
        );
        assert_eq!(SlotMap::empty().owner(7), None);
    }

    #[test]
    fn any_other_reply_is_none() {
        for reply in [
            Value::Nil,
            Value::Okay,
            text("1 2 3"),
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(0, 1, &[])]),
            Value::Array(vec![range(1, 0, &[host(text("a"), 1)])]),
            Value::Array(vec![range(-1, 0, &[host(text("a"), 1)])]),
            Value::Array(vec![range(0, 16_384, &[host(text("a"), 1)])]),
            Value::Array(vec![range(0, i64::MAX, &[host(text("a"), 1)])]),
            Value::Array(vec![range(0, 1, &[host(text("a"), -1)])]),
            Value::Array(vec![range(0, 1, &[host(text("a"), 65_536)])]),
            Value::Array(vec![range(0, 1, &[host(Value::Int(7), 1)])]),
            Value::Array(vec![range(0, 1, &[host(Value::BulkString(vec![0xff]), 1)])]),
            Value::Array(vec![range(0, 1, &[text("a:1")])]),
            Value::Array(vec![range(
                0,
                1,
                &[host(text("a"), 1), Value::Array(vec![])],
            )]),
        ] {
            assert_eq!(read(&reply, &asked()), None, "{reply:?}");
        }
        assert_eq!(
            read(&Value::Array(vec![]), &asked()).unwrap().ranges,
            vec![]
        );
    }

    #[test]
    fn a_cluster_is_identified_by_its_nodes() {
        let slots = |ids: &[&str]| {
            let node = |id: &&str| Value::Array(vec![text("a"), Value::Int(1), text(id)]);
            let nodes: Vec<Value> = ids.iter().map(node).collect();
            read(&Value::Array(vec![range(0, 16_383, &nodes)]), &asked()).unwrap()
        };
        let map = |ids: &[&str]| SlotMap::new(slots(ids), |_| Node::new(0));
        let ours = map(&["a", "b", "c"]);
        for ids in [&["a", "b", "c"][..], &["c"], &["x", "y", "a"]] {
            assert!(
                ours.is_of_cluster(&slots(ids))
                    && ours.with(7, Node::new(1)).is_of_cluster(&slots(ids)),
                "{ids:?}"
            );
        }
        assert!(!ours.is_of_cluster(&slots(&["x", "y", "z"])));
        assert!(!ours.with(7, Node::new(1)).is_of_cluster(&slots(&["x"])));
        // Before the first reply, and with a server that reports no ids.
        assert!(SlotMap::empty().is_of_cluster(&slots(&["x"])));
        let nameless = Value::Array(vec![range(
            0,
            1,
            &[Value::Array(vec![text("a"), Value::Int(1)])],
        )]);
        assert!(ours.is_of_cluster(&read(&nameless, &asked()).unwrap()));
    }
}
