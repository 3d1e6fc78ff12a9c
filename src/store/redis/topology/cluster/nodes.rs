//! The nodes of a cluster, and their replies about the slots.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::sync::Mutex;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{
    ConnectionInfo, ErrorKind as RedisErrorKind, RedisError, ServerError, ServerErrorKind, Value,
};
use tokio::time::{Instant, timeout};

use super::slots::{self, Address, SlotMap, SlotRanges};
use crate::error::{ConfigError, ErrorKind, StoreError};
use crate::store::redis::link::{Dialer, Driven, error_of, with_address, within};
use crate::store::redis::topology::addresses::{AddressMap, host_and_port};
use crate::store::redis::topology::node::Node;
use crate::util::{RandomState, instant, lock};

pub(super) struct Nodes {
    /// The nodes that the application named: at least one.
    seeds: Vec<ConnectionInfo>,
    dialer: Dialer,
    addresses: AddressMap,
    known: Mutex<Known>,
    /// The time since which none of the queried nodes belonged to the cluster.
    gone_since: Mutex<Option<Instant>>,
}

/// Maps nodes to addresses and back. It only grows, since a cluster rarely gets new nodes.
#[derive(Debug)]
pub(super) struct Known<A = Address> {
    addresses: Vec<A>,
    numbers: HashMap<A, Node>,
}

impl<A: Clone + Eq + Hash> Known<A> {
    pub(super) fn new() -> Self {
        Self {
            addresses: vec![],
            numbers: HashMap::new(),
        }
    }

    pub(super) fn number(&mut self, address: A) -> Node {
        let Self { addresses, numbers } = self;
        *numbers.entry(address).or_insert_with_key(|address| {
            addresses.push(address.clone());
            Node::new(addresses.len() as u32 - 1)
        })
    }

    pub(super) fn address(&self, node: Node) -> Option<&A> {
        self.addresses.get(node.index())
    }
}

/// A node to query.
struct NodeToAsk {
    address: Address,
    /// Whether a node has announced the address. Addresses from the application are reachable.
    is_announced: bool,
}

/// The reply of a queried node.
struct Queried {
    address: Address,
    slots: Result<SlotRanges, StoreError>,
}

/// The meaning of a node's error reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeError {
    /// Another node serves the slot.
    Moved {
        slot: u16,
        node: Node,
    },
    /// The keys are on the node to which the slot is migrating.
    Ask(Node),
    /// Some keys are here, and some are on the other node.
    TryAgain,
    /// Another node serves the slot, and announces no address.
    NoAddress,
    /// No node can decide at the moment.
    NotReady,
    Other,
}

/// If no node of the cluster has replied for this long, the cluster may have been recreated. Longer
/// than a failover with Redis's default settings.
const CLUSTER_LOST_AFTER: Duration = Duration::from_secs(30);
/// Maximum number of known nodes that are queried.
const MAX_QUERIED: usize = 6;

impl Nodes {
    pub(super) fn new(seeds: Vec<ConnectionInfo>, dialer: Dialer, addresses: AddressMap) -> Self {
        Self {
            seeds,
            dialer,
            addresses,
            known: Mutex::new(Known::new()),
            gone_since: Mutex::default(),
        }
    }

    /// Returns the number of the node at an address.
    pub(super) fn number(&self, address: Address) -> Node {
        lock(&self.known).number(address)
    }

    pub(super) fn address(&self, node: Node) -> Option<Address> {
        lock(&self.known).address(node).cloned()
    }

    /// Opens a connection to a node, and verifies that it belongs to the same cluster: its address
    /// may have been reassigned to another server.
    pub(super) async fn connect(
        &self,
        node: Node,
        is_ours: impl Fn(&SlotRanges) -> bool,
    ) -> Result<Driven, StoreError> {
        let Some(address) = self.address(node) else {
            return Err(StoreError::new(ErrorKind::Unreachable));
        };
        let reached = self.addresses.reach(&address.host, address.port)?;
        match self.query(&address, reached).await {
            Ok((connection, slots)) if is_ours(&slots) => Ok(connection),
            Ok(_) => Err(of_another(&address)),
            // Not the application's mistake: a single Redis has the address of a former node.
            Err(error) if error.kind() == ErrorKind::Configuration => Err(of_another(&address)),
            Err(error) => Err(error),
        }
    }

    /// Returns the address of a node, or the addresses that the application named.
    pub(super) fn name(&self, node: Option<Node>) -> String {
        if let Some(node) = node
            && let Some(address) = self.address(node)
        {
            return address.to_string();
        }
        let mut seeds = vec![];
        for seed in &self.seeds {
            seeds.push(seed.addr().to_string());
        }
        seeds.join(", ")
    }

    /// Queries a node for the slots; also returns the connection. `reached` is its reachable address, if that differs.
    async fn query(
        &self,
        address: &Address,
        reached: Option<(String, u16)>,
    ) -> Result<(Driven, SlotRanges), StoreError> {
        let server = with_address(&self.seeds[0], &address.host, address.port);
        let mut connection = self.dialer.dial_at(&server, reached).await?;
        let mut cmd = redis::cmd("CLUSTER");
        cmd.arg("SLOTS");
        match connection.send_packed_command(&cmd).await {
            Ok(Value::ServerError(error)) if is_of_single_redis(&error) => {
                let text = format!(
                    "the server {address} is not a node of a Redis Cluster: for a single Redis write `redis://{address}`, \
                     and connect with `RedisStore::connect`, not with `RedisStore::cluster`"
                );
                Err(ConfigError::new(text).into())
            }
            Ok(Value::ServerError(error)) => Err(error_of(&error.into()).with_server(address)),
            Ok(reply) => match slots::read(&reply, address) {
                Some(slots) if !slots.ranges.is_empty() => Ok((connection, slots)),
                Some(slots) if slots.lacks_address => Err(no_address().with_server(address)),
                // The node has not joined the cluster yet, or has been reset.
                Some(_) => Err(StoreError::new(ErrorKind::NotReady).with_server(address)),
                None => Err(StoreError::new(ErrorKind::Protocol).with_server(address)),
            },
            Err(error) => Err(error_of(&error).with_server(address)),
        }
    }

    /// Queries several nodes, each for at most `patience`, starting the next one after a pause or as soon as one has
    /// failed, so that a node that does not respond causes no delay. The `lost` node is queried
    /// last. Returns the map, and whether it is of another cluster.
    ///
    /// The address of a node may have been reassigned to another cluster. So a map must have a node
    /// in common with the current one. Only if no such node has replied for a long time, the nodes
    /// that the application named define the cluster, as at startup.
    pub(super) async fn query_any(
        &self,
        present: &SlotMap,
        lost: Option<Node>,
        patience: Duration,
        pause: Duration,
    ) -> Result<(SlotMap, bool), StoreError> {
        // At startup, any node may be down: query all in parallel.
        let is_first = present.is_empty();
        let pause_between = if is_first { Duration::ZERO } else { pause };
        let mut left = self.candidates(present, lost).into_iter();
        let mut replies = FuturesUnordered::new();
        let mut failure = StoreError::new(ErrorKind::Unreachable);
        // The slots of another cluster, at an address that the application named.
        let mut other = None;
        let slots = loop {
            if let Some(candidate) = left.next() {
                replies.push(self.query_within(patience, candidate));
            }
            let is_last = left.len() == 0;
            let reply = if is_last {
                replies.next().await
            } else {
                match timeout(pause_between, replies.next()).await {
                    Ok(reply) => reply,
                    Err(_) => continue,
                }
            };
            let Some(Queried { address, slots }) = reply else {
                // All have replied, and none belongs to the cluster.
                let lost_for = self.record_lost_cluster();
                match other {
                    Some(slots) if lost_for >= CLUSTER_LOST_AFTER => break slots,
                    _ => return Err(failure),
                }
            };
            match slots {
                Ok(slots) if present.is_of_cluster(&slots) => break slots,
                Ok(slots) => {
                    failure = failure.or_telling(of_another(&address));
                    if other.is_none() && self.is_seed(&address) {
                        other = Some(slots);
                    }
                }
                Err(error) => failure = failure.or_telling(error.with_server(address)),
            }
        };
        self.addresses.check(slots.addresses())?;
        *lock(&self.gone_since) = None;
        let is_other = !present.is_of_cluster(&slots);
        let map = SlotMap::new(slots, |address| self.number(address));
        Ok((map, is_other))
    }

    async fn query_within(&self, patience: Duration, candidate: NodeToAsk) -> Queried {
        let slots = match self.reach(&candidate) {
            Ok(reached) => within(patience, self.query(&candidate.address, reached)).await,
            Err(error) => Err(error.into()),
        };
        Queried {
            address: candidate.address,
            slots: slots.map(|(_, slots)| slots),
        }
    }

    /// Returns the reachable address of a node, if it differs.
    fn reach(&self, candidate: &NodeToAsk) -> Result<Option<(String, u16)>, ConfigError> {
        let Address { host, port } = &candidate.address;
        if candidate.is_announced {
            self.addresses.reach(host, *port)
        } else {
            Ok(None)
        }
    }

    /// Returns the slot and the target of a redirect.
    ///
    /// # Errors
    ///
    /// Says why the reply has no usable address.
    fn redirection(&self, error: &RedisError, asked: Node) -> Result<(u16, Node), NodeError> {
        let Some((address, slot)) = error.redirect_node() else {
            return Err(NodeError::NotReady);
        };
        let (host, port) = host_and_port(address).ok_or(NodeError::NotReady)?;
        // The cluster does not know the address.
        if host == "?" || port == 0 {
            return Err(NodeError::NoAddress);
        }
        let asked = self.address(asked).ok_or(NodeError::NotReady)?;
        Ok((slot, self.number(asked.sibling(host, port))))
    }

    /// Interprets the error of the node `asked`.
    pub(super) fn node_error(&self, error: &RedisError, asked: Node) -> NodeError {
        match error.kind() {
            RedisErrorKind::Server(ServerErrorKind::Moved) => {
                match self.redirection(error, asked) {
                    Ok((slot, node)) => NodeError::Moved { slot, node },
                    Err(error) => error,
                }
            }
            RedisErrorKind::Server(ServerErrorKind::Ask) => match self.redirection(error, asked) {
                Ok((_, node)) => NodeError::Ask(node),
                Err(error) => error,
            },
            RedisErrorKind::Server(ServerErrorKind::TryAgain) => NodeError::TryAgain,
            RedisErrorKind::Server(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown,
            ) => NodeError::NotReady,
            _ => NodeError::Other,
        }
    }

    /// Records that no queried node belongs to the cluster. Returns the time since the first such record.
    fn record_lost_cluster(&self) -> Duration {
        lock(&self.gone_since).get_or_insert_with(instant).elapsed()
    }

    fn is_seed(&self, address: &Address) -> bool {
        self.seeds
            .iter()
            .filter_map(Address::of)
            .any(|seed| seed == *address)
    }

    /// Returns some known nodes, in random order, followed by the nodes that the application named.
    fn candidates(&self, present: &SlotMap, lost: Option<Node>) -> Vec<NodeToAsk> {
        // Otherwise a thousand instances would all query the same node after a failover.
        let random = RandomState::new();
        let mut nodes = present.nodes.clone();
        nodes.sort_by_cached_key(|node| (lost == Some(*node), random.hash_one(node.index())));
        nodes.truncate(MAX_QUERIED);
        let mut candidates: Vec<NodeToAsk> = vec![];
        for address in nodes.into_iter().filter_map(|node| self.address(node)) {
            candidates.push(NodeToAsk {
                address,
                is_announced: true,
            });
        }
        for address in self.seeds.iter().filter_map(Address::of) {
            if !candidates.iter().any(|other| other.address == address) {
                candidates.push(NodeToAsk {
                    address,
                    is_announced: false,
                });
            }
        }
        candidates
    }
}

/// Returns `true` for the error with which a Redis that is not in cluster mode replies to `CLUSTER`.
fn is_of_single_redis(error: &ServerError) -> bool {
    match error.details() {
        Some(text) => text.contains("cluster support disabled"),
        None => false,
    }
}

/// The error of a slot whose master has no address, such as the host `?` without a host name that it should announce.
pub(crate) fn no_address() -> StoreError {
    StoreError::new(ErrorKind::NotReady).with_message(
        "the server reports a node of the cluster without its address (`?`): set `cluster-announce-hostname` on that node, or \
         `cluster-preferred-endpoint-type ip`, and no `cluster-announce-port 0`",
    )
}

/// The error for an address at which a server of another cluster responds.
fn of_another(address: &Address) -> StoreError {
    let reason = format!(
        "{address} no longer belongs to this cluster; its address may have been reassigned"
    );
    StoreError::explained(ErrorKind::NotReady, reason).with_server(address)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::store::redis::topology::cluster::slots::SLOTS;

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts its comparisons.
    #[derive(Debug, Clone, Eq, Hash)]
    #[allow(
        clippy::derived_hash_with_manual_eq,
        reason = "both use the number only"
    )]
    struct Counted(u16);

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            COMPARED.set(COMPARED.get() + 1);
            self.0 == other.0
        }
    }

    /// A map may have a different address per slot, and parsing it blocks the runtime.
    #[test]
    fn an_address_is_found_without_a_search() {
        let mut known = Known::new();
        for _ in 0..2 {
            for address in 0..SLOTS {
                assert_eq!(known.number(Counted(address)), Node::new(address.into()));
            }
        }
        let compared = COMPARED.get();
        assert!(
            compared < 4 * usize::from(SLOTS),
            "{compared} comparisons of {} addresses",
            SLOTS
        );
    }
}
