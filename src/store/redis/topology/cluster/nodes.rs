//! The nodes of a cluster, and what they say of its slots.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::sync::Mutex;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{ConnectionInfo, ErrorKind as Kind, RedisError, ServerErrorKind, Value};
use tokio::time::{Instant, timeout};

use super::slots::{self, Address, SlotMap, Slots};
use crate::error::{ConfigError, ErrorKind, StoreError};
use crate::store::redis::link::{Dialer, Driven, error_of, with_address, within};
use crate::store::redis::topology::node::Node;
use crate::util::{RandomState, instant, lock};

pub(super) struct Nodes {
    /// Those that the application named: at least one.
    seeds: Vec<ConnectionInfo>,
    dialer: Dialer,
    known: Mutex<Known>,
    /// Since when none of those that were asked was of the cluster.
    gone_since: Mutex<Option<Instant>>,
}

/// The addresses of nodes, by their numbers, and the other way round. It only grows: a cluster hardly ever gains a
/// node.
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

/// What a node means by a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another node serves the slot.
    Moved {
        slot: u16,
        node: Node,
    },
    /// The keys are not here, but on the node to which the slot is being moved.
    Ask(Node),
    /// Some of the keys are here and some are there.
    TryAgain,
    /// Nobody decides just now.
    NotReady,
    Other,
}

/// After so long without any node of the cluster it may have been set up anew. It is longer than a failover takes with
/// Redis's defaults.
const GONE: Duration = Duration::from_secs(30);
/// How many nodes are asked, and into how many parts the time for one of them is cut: after each, the next is asked
/// too.
const ASKED: usize = 6;
const SIDE_BY_SIDE: u32 = 8;

impl Nodes {
    pub(super) fn new(seeds: Vec<ConnectionInfo>, dialer: Dialer) -> Self {
        Self {
            seeds,
            dialer,
            known: Mutex::new(Known::new()),
            gone_since: Mutex::default(),
        }
    }

    /// The number of the node at an address.
    pub(super) fn number(&self, address: Address) -> Node {
        lock(&self.known).number(address)
    }

    pub(super) fn address(&self, node: Node) -> Option<Address> {
        lock(&self.known).address(node).cloned()
    }

    /// A new connection to a node, which tells that it is of the same cluster: by now, its address may be that of
    /// another server.
    pub(super) async fn connect(
        &self,
        node: Node,
        is_ours: impl Fn(&Slots) -> bool,
    ) -> Result<Driven, StoreError> {
        let address = self
            .address(node)
            .ok_or_else(|| StoreError::new(ErrorKind::Unreachable))?;
        match self.ask(&address).await {
            Ok((connection, slots)) if is_ours(&slots) => Ok(connection),
            Err(error) if error.kind() != ErrorKind::Configuration => Err(error),
            _ => Err(of_another(&address)),
        }
    }

    /// The address of a node, or those that the application has named.
    pub(super) fn name(&self, node: Option<Node>) -> String {
        let seeds = || {
            self.seeds
                .iter()
                .map(|seed| seed.addr().to_string())
                .collect::<Vec<_>>()
                .join(", ")
        };
        node.and_then(|node| self.address(node))
            .map_or_else(seeds, |address| address.to_string())
    }

    /// What a node says of the slots, and the connection that it was asked over.
    async fn ask(&self, address: &Address) -> Result<(Driven, Slots), StoreError> {
        let mut connection = self
            .dialer
            .dial(&with_address(&self.seeds[0], &address.host, address.port))
            .await?;
        let mut cmd = redis::cmd("CLUSTER");
        cmd.arg("SLOTS");
        match connection.send_packed_command(&cmd).await {
            Ok(Value::ServerError(error))
                if error
                    .details()
                    .is_some_and(|text| text.contains("cluster support disabled")) =>
            {
                let text = format!(
                    "the server {address} is not a node of a Redis Cluster: for a single Redis write `redis://{address}`, \
                     and connect with `RedisStore::connect`, not with `RedisStore::cluster`"
                );
                Err(ConfigError::new(text).into())
            }
            Ok(Value::ServerError(error)) => Err(error_of(&error.into()).at(address)),
            Ok(reply) => match slots::read(&reply, address) {
                Some(slots) if !slots.ranges.is_empty() => Ok((connection, slots)),
                // It has not met the others yet, or was told to forget them.
                Some(_) => Err(StoreError::new(ErrorKind::NotReady).at(address)),
                None => Err(StoreError::new(ErrorKind::Protocol).at(address)),
            },
            Err(error) => Err(error_of(&error).at(address)),
        }
    }

    /// Asks nodes side by side, each a moment after the one before or as soon as that has failed: one that does not
    /// answer keeps nobody waiting. The one that is `lost` is asked last. Returns the map, and whether it is of another
    /// cluster.
    ///
    /// The address of a node may have become that of another cluster, which is not believed: a map must have a node in
    /// common with the present one. Only if none of those has answered for long is it as at the start, when what the
    /// application has named is the cluster.
    pub(super) async fn ask_any(
        &self,
        present: &SlotMap,
        lost: Option<Node>,
        patience: Duration,
    ) -> Result<(SlotMap, bool), StoreError> {
        // At the start nothing is known of any of them.
        let pause = if present.is_empty() {
            Duration::ZERO
        } else {
            patience / SIDE_BY_SIDE
        };
        let ask = async |address: Address| (within(patience, self.ask(&address)).await, address);
        let mut left = self.to_ask(present, lost).into_iter();
        let mut answers = FuturesUnordered::new();
        let (mut failure, mut other) = (StoreError::new(ErrorKind::Unreachable), None);
        let slots = loop {
            answers.extend(left.next().map(ask));
            let answer = match left.len() {
                0 => answers.next().await,
                _ => match timeout(pause, answers.next()).await {
                    Ok(answer) => answer,
                    Err(_) => continue,
                },
            };
            match answer {
                None => break self.are_gone().then_some(other).flatten().ok_or(failure)?,
                Some((Ok((_, slots)), _)) if present.is_of_cluster(&slots) => break slots,
                Some((Ok((_, slots)), address)) => {
                    failure = failure.or_telling(of_another(&address));
                    other = other.or(self.is_seed(&address).then_some(slots));
                }
                Some((Err(error), address)) => failure = failure.or_telling(error.at(address)),
            }
        };
        *lock(&self.gone_since) = None;
        let is_other = !present.is_of_cluster(&slots);
        Ok((
            SlotMap::new(slots, |address| self.number(address)),
            is_other,
        ))
    }

    /// What the node that was asked means by an error.
    pub(super) fn refusal(&self, error: &RedisError, asked: Node) -> Refusal {
        let elsewhere = || {
            let (address, slot) = error.redirect_node()?;
            let (host, port) = address.rsplit_once(':')?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let address = self
                .address(asked)?
                .sibling(host, port.parse().ok().filter(|port| *port > 0)?);
            (host != "?").then(|| (slot, self.number(address)))
        };
        match error.kind() {
            Kind::Server(ServerErrorKind::Moved) => {
                elsewhere().map_or(Refusal::NotReady, |(slot, node)| Refusal::Moved {
                    slot,
                    node,
                })
            }
            Kind::Server(ServerErrorKind::Ask) => {
                elsewhere().map_or(Refusal::NotReady, |(_, node)| Refusal::Ask(node))
            }
            Kind::Server(ServerErrorKind::TryAgain) => Refusal::TryAgain,
            Kind::Server(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown,
            ) => Refusal::NotReady,
            _ => Refusal::Other,
        }
    }

    /// Whether none was of the cluster for so long that it is asked for as at the start. None is now.
    fn are_gone(&self) -> bool {
        lock(&self.gone_since).get_or_insert_with(instant).elapsed() >= GONE
    }

    fn is_seed(&self, address: &Address) -> bool {
        self.seeds
            .iter()
            .filter_map(Address::of)
            .any(|seed| seed == *address)
    }

    /// Some nodes that are known, in any order, and then those that the application named.
    fn to_ask(&self, present: &SlotMap, lost: Option<Node>) -> Vec<Address> {
        let random = RandomState::new();
        let mut nodes = present.nodes.clone();
        nodes.sort_by_cached_key(|node| (lost == Some(*node), random.hash_one(node.index())));
        nodes.truncate(ASKED);
        let mut addresses: Vec<Address> = nodes
            .into_iter()
            .filter_map(|node| self.address(node))
            .collect();
        for seed in self.seeds.iter().filter_map(Address::of) {
            if !addresses.contains(&seed) {
                addresses.push(seed);
            }
        }
        addresses
    }
}

/// A server at the address of a node of the cluster that is none.
fn of_another(address: &Address) -> StoreError {
    let reason =
        format!("{address} is not of this cluster any more: another one may have its address now");
    StoreError::explained(ErrorKind::NotReady, reason).at(address)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::store::redis::topology::cluster::slots::SLOTS;

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
