//! Slots: which one a hash tag is in, and which node serves each.

use redis::Value;

use super::Address;
use crate::store::redis::transport::Node;

/// How many there are in every cluster.
pub(in super::super) const SLOTS: u16 = 16_384;

/// The slot of a hash tag: CRC-16/XMODEM, as Redis counts it.
pub(in super::super) fn slot(tag: &[u8]) -> u16 {
    let crc = tag.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 })
    });
    crc % SLOTS
}

/// The tags of so many buckets: the n-th is the smallest number whose slot is in the n-th part of all slots. Masters mostly
/// have ranges of slots that are about equally long, so each of them has about as many buckets.
pub(super) fn tags(buckets: usize) -> Vec<u32> {
    let mut tags = vec![None; buckets];
    let (mut number, mut left) = (0, tags.len());
    while left > 0 {
        let slot = slot(number.to_string().as_bytes());
        let bucket = usize::from(slot) * tags.len() / usize::from(SLOTS);
        if tags[bucket].is_none() {
            tags[bucket] = Some(number);
            left -= 1;
        }
        number += 1;
    }
    tags.into_iter().flatten().collect()
}

/// Which node serves each slot.
#[derive(Debug)]
pub(in super::super) struct SlotMap {
    owners: Box<[Node]>,
    /// All that the cluster named, replicas too: any of them may be asked for the slots.
    pub(super) nodes: Vec<Node>,
}

/// Slots and who serves them: first the master, then its replicas.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Range {
    first: u16,
    last: u16,
    nodes: Vec<Address>,
}

impl SlotMap {
    /// Before the cluster was asked.
    pub(super) fn empty() -> Self {
        Self { owners: Box::default(), nodes: vec![] }
    }

    pub(super) fn new(ranges: &[Range], mut node: impl FnMut(&Address) -> Node) -> Self {
        let mut map = Self { owners: vec![Node::NOWHERE; usize::from(SLOTS)].into(), nodes: vec![] };
        for range in ranges {
            let nodes: Vec<Node> = range.nodes.iter().map(&mut node).collect();
            map.owners[usize::from(range.first)..=usize::from(range.last)].fill(nodes[0]);
            map.nodes.extend(nodes);
        }
        map.nodes.sort_unstable();
        map.nodes.dedup();
        map
    }

    pub(super) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// The master of a slot, or [`Node::NOWHERE`].
    pub(super) fn owner(&self, slot: u16) -> Node {
        self.owners.get(usize::from(slot)).copied().unwrap_or(Node::NOWHERE)
    }

    /// Whether each slot has the same master in both.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.owners == other.owners
    }

    /// The same map, but for one slot.
    pub(super) fn with(&self, slot: u16, owner: Node) -> Self {
        let (mut owners, mut nodes) = (self.owners.clone(), self.nodes.clone());
        if let Some(place) = owners.get_mut(usize::from(slot)) {
            *place = owner;
        }
        if !nodes.contains(&owner) {
            nodes.push(owner);
        }
        Self { owners, nodes }
    }
}

/// Reads the reply to `CLUSTER SLOTS`, that a node at this address gave. `None` if it is another.
///
/// A node without a name, or of the name `""`, is the one that was asked. One of the name `?` has one that the cluster does not
/// know: it is left out, as is a range whose master is.
pub(super) fn read(reply: &Value, asked: &Address) -> Option<Vec<Range>> {
    let Value::Array(ranges) = reply else { return None };
    let mut read = vec![];
    for range in ranges {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), master, replicas @ ..] = parts.as_slice() else { return None };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        if first > last || last >= SLOTS {
            return None;
        }
        if let Some(master) = node(master, asked)? {
            let mut nodes = vec![master];
            for replica in replicas {
                nodes.extend(node(replica, asked)?);
            }
            read.push(Range { first, last, nodes });
        }
    }
    Some(read)
}

/// The address of a node: `[host, port, ...]`. The inner `None` if the cluster does not know its host.
fn node(node: &Value, asked: &Address) -> Option<Option<Address>> {
    let Value::Array(parts) = node else { return None };
    let [host, Value::Int(port), ..] = parts.as_slice() else { return None };
    let host = match host {
        Value::BulkString(host) => str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        Value::Nil => "",
        _ => return None,
    };
    let port = u16::try_from(*port).ok().filter(|port| *port > 0)?;
    Some((host != "?").then(|| asked.sibling(host, port)))
}

#[cfg(test)]
mod tests {
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
        // Of the cluster's specification, and of `CLUSTER KEYSLOT`.
        for (tag, expected) in [("", 0), ("123456789", 0x31c3), ("foo", 12_182), ("user1000", 3_443), ("1", 9_842)] {
            assert_eq!(slot(tag.as_bytes()), expected, "{tag}");
        }
    }

    #[test]
    fn buckets_are_spread_over_the_slots() {
        for buckets in [1, 2, 3, 32, 1_000] {
            let tags = tags(buckets);
            assert_eq!(tags.len(), buckets);
            for (i, tag) in tags.iter().enumerate() {
                let part = usize::from(slot(tag.to_string().as_bytes())) * tags.len() / usize::from(SLOTS);
                assert_eq!(part, i, "{buckets}: {tag}");
            }
        }
        // They stand in keys: another tag would be another count.
        assert_eq!(tags(4), [3, 2, 1, 0]);
    }

    /// What `docs/running.md` says of the numbers to choose. The masters have the ranges that `redis-cli --cluster create` gives.
    #[test]
    fn buckets_are_spread_over_the_masters() {
        let slots = |buckets: usize| -> Vec<usize> {
            tags(buckets).into_iter().map(|tag| slot(tag.to_string().as_bytes()).into()).collect()
        };
        let each = |slots: &[usize], masters: usize| {
            let range = f64::from(SLOTS) / masters as f64;
            let mut each = vec![0; masters];
            let mut master = 0;
            for slot in slots {
                while master + 1 < masters && *slot > (range * (master + 1) as f64 - 1.0).round() as usize {
                    master += 1;
                }
                each[master] += 1;
            }
            each
        };
        for (buckets, masters) in [(12, 3), (16, 4), (64, 16)] {
            assert_eq!(each(&slots(buckets), masters), vec![4; masters]);
        }
        for masters in [1, 2, 3, 4, 6, 12] {
            assert_eq!(each(&slots(12), masters), vec![12 / masters; masters]);
        }
        assert_eq!(each(&slots(12), 5).into_iter().max(), Some(3));
        assert_eq!(each(&slots(16), 3), [5, 6, 5]);
        assert_eq!(each(&slots(400), 100).into_iter().max(), Some(5));
        for buckets in [16, 50, 100, 128, 400, 1_024] {
            let slots = slots(buckets);
            for masters in 1..=buckets / 4 {
                let busiest = each(&slots, masters).into_iter().max().unwrap_or(0);
                assert!(2 * busiest * masters <= 3 * buckets, "{buckets} on {masters}: {busiest}");
            }
        }
    }

    #[test]
    fn a_map_is_read_as_it_is_told() {
        let reply = Value::Array(vec![
            range(0, 5_460, &[host(text("a"), 7000), host(text("b"), 7001)]),
            range(5_461, 5_461, &[host(text(""), 7002), host(Value::Nil, 7003)]),
            range(5_462, 5_470, &[host(text("?"), 7004), host(text("c"), 7005)]),
            range(5_471, 16_383, &[host(Value::SimpleString("d".to_owned()), 7006), host(text("?"), 7007)]),
        ]);
        let ranges = read(&reply, &asked()).unwrap();
        let mut known: Vec<Address> = vec![];
        let mut intern = |address: &Address| match known.iter().position(|known| known == address) {
            Some(place) => Node::new(place as u32),
            None => {
                known.push(address.clone());
                Node::new(known.len() as u32 - 1)
            }
        };
        let map = SlotMap::new(&ranges, &mut intern);
        let owner = |slot, host, port| assert_eq!(map.owner(slot), intern(&Address::new(host, port)), "{slot}");
        let mut owner = owner;
        owner(0, "a", 7000);
        owner(5_460, "a", 7000);
        owner(5_461, "asked", 7002);
        owner(16_383, "d", 7006);
        assert_eq!(map.owner(5_462), Node::NOWHERE);
        assert_eq!(map.nodes.len(), 5);
        let moved = map.with(5_462, Node::new(9));
        assert_eq!((moved.owner(5_462), moved.owner(0)), (Node::new(9), map.owner(0)));
        assert_eq!(SlotMap::empty().owner(7), Node::NOWHERE);
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
            Value::Array(vec![range(0, 1, &[host(text("a"), 0)])]),
            Value::Array(vec![range(0, 1, &[host(text("a"), 65_536)])]),
            Value::Array(vec![range(0, 1, &[host(Value::Int(7), 1)])]),
            Value::Array(vec![range(0, 1, &[host(Value::BulkString(vec![0xff]), 1)])]),
            Value::Array(vec![range(0, 1, &[text("a:1")])]),
            Value::Array(vec![range(0, 1, &[host(text("a"), 1), Value::Array(vec![])])]),
        ] {
            assert_eq!(read(&reply, &asked()), None, "{reply:?}");
        }
        assert_eq!(read(&Value::Array(vec![]), &asked()), Some(vec![]));
    }
}
