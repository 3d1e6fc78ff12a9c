//! Redis Cluster: many masters, each of which has some of the 16,384 slots.
//!
//! All keys of a script call must be in one slot, so that checks of callers who are in slots of their own could not share a
//! call. Therefore callers are put into a fixed number of *partitions*. The keys of a partition have its hash tag, as in
//! `rl:{17}:{ann}:api:g`, so a partition is in one slot. What is in flight for a partition is one script call, and the
//! calls for all partitions of one master are one pipeline: see [`calls`](super::calls).
//!
//! The map of [`slots`] is asked of any node at the start, and again when a connection is lost or a slot has
//! [moved](redirect): [`refresh`] does so off the request path. What has no node yet [waits](waiting) for the map. A call that a
//! node refuses because it does not serve the slot is sent to the one that does; the server has said that it did not run it.
//! No other call is sent twice.
//!
//! Two instances with other numbers of partitions would count the same callers under other keys. A [`marker`] in the cluster
//! tells the number.

pub(super) mod marker;
pub(super) mod redirect;
pub(super) mod refresh;
mod slots;
mod waiting;

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::io;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, ConnectionInfo, Value};
use siphasher::sip::SipHasher13;

use self::refresh::Refresher;
use self::slots::{SlotMap, Slots};
use super::dial::Dialer;
use super::errors::{error_of, other_cluster};
use super::transport::{Node, with_address};
use crate::limit::{ConfigError, Key};
use crate::store::clock::Clock;
use crate::store::{ErrorKind, StoreError, lock};

/// The tag of keys that are of no partition.
const SHARED: &str = "rl";

pub(super) struct Cluster {
    /// The nodes that the application named.
    seeds: Vec<ConnectionInfo>,
    dialer: Dialer,
    partitions: Box<[Partition]>,
    map: ArcSwap<SlotMap>,
    known: Mutex<Known>,
    refresher: Refresher,
    /// Why no check may be sent: another number of partitions.
    refused: OnceLock<StoreError>,
    clock: Clock,
}

struct Partition {
    slot: u16,
    /// What its keys begin with: `rl:{17}`.
    prefix: Box<str>,
    /// Until when its slot is taken for one that is being moved, in microseconds.
    moves_until: AtomicI64,
}

/// Where a node is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Address {
    host: Box<str>,
    port: u16,
}

/// The addresses of nodes, by their numbers, and the other way round. It only grows: a cluster hardly ever gains a node.
#[derive(Debug)]
struct Known<A = Address> {
    addresses: Vec<A>,
    numbers: HashMap<A, Node>,
}

impl<A: Clone + Eq + Hash> Known<A> {
    fn new() -> Self {
        Self { addresses: vec![], numbers: HashMap::new() }
    }

    fn number(&mut self, address: A) -> Node {
        let Self { addresses, numbers } = self;
        *numbers.entry(address).or_insert_with_key(|address| {
            addresses.push(address.clone());
            Node::new(addresses.len() as u32 - 1)
        })
    }
}

impl Cluster {
    pub(super) const MAX_PARTITIONS: usize = 1_024;
    /// A slot that a node has said to be moving is taken for one for so long.
    const MOVES: Duration = Duration::from_secs(1);

    pub(super) fn new(seeds: Vec<ConnectionInfo>, dialer: Dialer, prefix: &str, partitions: usize) -> Self {
        let partition = |tag: u32| Partition {
            slot: slots::slot(tag.to_string().as_bytes()),
            prefix: format!("{prefix}:{{{tag}}}").into(),
            moves_until: AtomicI64::new(i64::MIN),
        };
        Self {
            seeds,
            dialer,
            partitions: slots::tags(partitions).into_iter().map(partition).collect(),
            map: ArcSwap::from_pointee(SlotMap::empty()),
            known: Mutex::new(Known::new()),
            refresher: Refresher::default(),
            refused: OnceLock::new(),
            clock: Clock::new(),
        }
    }

    pub(super) fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// The partition of a caller. It stands in the caller's keys, so all versions of this crate must agree on it.
    pub(super) fn partition(&self, key: &Key) -> u16 {
        (SipHasher13::new().hash(key.as_bytes()) % self.partitions.len() as u64) as u16
    }

    /// What the keys of a partition begin with.
    pub(super) fn prefix(&self, partition: u16) -> &str {
        &self.partitions[usize::from(partition)].prefix
    }

    /// The master of a partition, or [`Node::NOWHERE`].
    pub(super) fn node(&self, partition: u16) -> Node {
        self.map.load().owner(self.partitions[usize::from(partition)].slot)
    }

    /// The master of the keys that are of no partition.
    pub(super) fn shared_node(&self) -> Node {
        self.map.load().owner(slots::slot(SHARED.as_bytes()))
    }

    /// A key that is of no partition.
    pub(super) fn shared_key(prefix: &str, name: &str) -> String {
        format!("{prefix}:{{{SHARED}}}:{name}")
    }

    /// A partition of each master that has one.
    pub(super) fn partition_of_each(&self) -> Vec<u16> {
        let mut partitions: Vec<u16> = (0..self.partitions.len() as u16).collect();
        partitions.sort_by_key(|partition| self.node(*partition));
        partitions.dedup_by_key(|partition| self.node(*partition));
        partitions
    }

    /// Whether a partition's slot is being moved. Then some of its keys are here and some are there, and a call that has both
    /// is refused: its callers are asked one by one.
    pub(super) fn moves(&self, partition: u16) -> bool {
        let until = self.partitions[usize::from(partition)].moves_until.load(Relaxed);
        until > i64::MIN && self.clock.micros() < until
    }

    fn notice_move(&self, partition: u16) {
        let until = self.clock.micros() + Self::MOVES.as_micros() as i64;
        self.partitions[usize::from(partition)].moves_until.store(until, Relaxed);
    }

    pub(super) fn refused(&self) -> Option<&StoreError> {
        self.refused.get()
    }

    /// The number of the node at an address.
    fn number(&self, address: Address) -> Node {
        lock(&self.known).number(address)
    }

    fn address(&self, node: Node) -> Option<Address> {
        lock(&self.known).addresses.get(node.index()).cloned()
    }

    /// A new connection to a node, which tells that it is of the same cluster: by now, its address may be that of another server.
    pub(super) async fn connect(&self, node: Node) -> Result<MultiplexedConnection, StoreError> {
        let Some(address) = self.address(node) else {
            let cause = io::Error::new(io::ErrorKind::NotFound, "no node of the cluster serves the slot");
            return Err(StoreError::with_source(ErrorKind::Unreachable, cause));
        };
        match self.ask(&address).await {
            Ok((connection, slots)) if self.map.load().is_of_cluster(&slots) => Ok(connection),
            Err(error) if error.kind() != ErrorKind::Configuration => Err(error),
            _ => Err(other_cluster(&address)),
        }
    }

    /// What a node says of the slots, and the connection that it was asked over.
    async fn ask(&self, address: &Address) -> Result<(MultiplexedConnection, Slots), StoreError> {
        // There is at least one seed.
        let mut connection = self.dialer.dial(&with_address(&self.seeds[0], &address.host, address.port)).await?;
        let mut cmd = redis::cmd("CLUSTER");
        cmd.arg("SLOTS");
        match connection.send_packed_command(&cmd).await {
            Ok(Value::ServerError(error))
                if error.details().is_some_and(|text| text.contains("cluster support disabled")) =>
            {
                Err(ConfigError::NoCluster(address.to_string()).into())
            }
            Ok(Value::ServerError(error)) => Err(error_of(&error.into())),
            Ok(reply) => match slots::read(&reply, address) {
                Some(slots) if !slots.ranges.is_empty() => Ok((connection, slots)),
                // It has not met the others yet, or was told to forget them.
                Some(_) => Err(StoreError::new(ErrorKind::NotReady)),
                None => Err(StoreError::new(ErrorKind::Protocol)),
            },
            Err(error) => Err(error_of(&error)),
        }
    }
}

impl Address {
    fn new(host: &str, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// Of a server that the application named.
    fn of(server: &ConnectionInfo) -> Option<Self> {
        match server.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Some(Self::new(host, *port)),
            _ => None,
        }
    }

    /// What a node at this address calls so. Without a host it means itself.
    fn sibling(&self, host: &str, port: u16) -> Self {
        Self::new(if host.is_empty() { &self.host } else { host }, port)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("partitions", &self.partitions.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts how often it is compared.
    #[derive(Debug, Clone, Eq, Hash)]
    #[allow(clippy::derived_hash_with_manual_eq, reason = "both are of its number")]
    struct Counted(u16);

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            COMPARED.set(COMPARED.get() + 1);
            self.0 == other.0
        }
    }

    /// A map may have another one for each slot, and the runtime waits for it.
    #[test]
    fn an_address_is_found_without_a_search() {
        let mut known = Known::new();
        for _ in 0..2 {
            for address in 0..slots::SLOTS {
                assert_eq!(known.number(Counted(address)), Node::new(address.into()));
            }
        }
        let compared = COMPARED.get();
        assert!(compared < 4 * usize::from(slots::SLOTS), "{compared} comparisons of {} addresses", slots::SLOTS);
    }
}
