//! Chooses and reaches the server that has a caller's keys: provides the [`Node`] of a partition,
//! and a [`NodePool`] of connections to it.
//!
//! A single server is one node, and so is the master that sentinels report. A cluster has a node
//! per master.

mod addresses;
pub(super) mod cluster;
mod logins;
mod node;
mod sentinel;

use std::sync::Arc;

use redis::ConnectionInfo;

pub(super) use addresses::AddressMap;
pub(in crate::store) use addresses::{host_and_port, two_to_one};
pub(super) use logins::{CredentialSources, Logins};
pub(super) use node::Node;

use self::cluster::Cluster;
use self::sentinel::Sentinels;
use super::link::{self, Connect, Dialer, Link, Times, Tls, kept_alive};
use crate::error::{ConfigError, ErrorKind, StoreError};
use crate::limit::Key;
use crate::store::config::RedisSettings;

/// The servers that the application has named.
#[derive(Clone)]
pub(super) enum NamedServers {
    Server(Box<ConnectionInfo>),
    Sentinel {
        name: String,
        /// The settings of the master, except its address.
        master: Box<ConnectionInfo>,
        /// At least one.
        sentinels: Vec<ConnectionInfo>,
    },
    /// At least one.
    Cluster(Vec<ConnectionInfo>),
}

impl NamedServers {
    /// Returns all named servers.
    pub(super) fn all(&mut self) -> Vec<&mut ConnectionInfo> {
        match self {
            Self::Server(server) => vec![server],
            Self::Sentinel {
                master, sentinels, ..
            } => std::iter::once(&mut **master).chain(sentinels).collect(),
            Self::Cluster(nodes) => nodes.iter_mut().collect(),
        }
    }
}

#[derive(Clone)]
pub(super) enum Topology {
    /// One server, at one address.
    Server(Arc<(ConnectionInfo, Dialer)>),
    /// One server at a time, at the address that its sentinels report.
    Sentinel(Arc<Sentinels>),
    /// Many masters.
    Cluster(Arc<Cluster>),
}

/// Connections to a node.
pub(super) type NodePool = link::Pool<NodeRoute>;

/// Connects to a node.
pub(super) struct NodeRoute {
    topology: Topology,
    node: Node,
}

impl Topology {
    pub(super) fn new(
        mut servers: NamedServers,
        settings: &RedisSettings,
        tls: &Tls,
        logins: Logins,
        addresses: AddressMap,
    ) -> Result<Self, ConfigError> {
        // A NAT between drops idle connections without a word.
        for server in servers.all() {
            *server = kept_alive(server.clone());
        }
        tls.apply(servers.all())?;
        let time_to_connect = settings.time_to_connect();
        // Two for sentinels and their master: each dialer learns whether its servers use TLS.
        let dialer = |login| {
            let client_name = settings.client_name.clone();
            Dialer::new(time_to_connect, tls.server_name(), client_name).with_login(login)
        };
        Ok(match servers {
            NamedServers::Server(server) => {
                Self::Server(Arc::new((*server, dialer(logins.servers))))
            }
            NamedServers::Sentinel {
                name,
                master,
                sentinels,
            } => Self::Sentinel(Arc::new(Sentinels::new(
                name,
                *master,
                dialer(logins.servers),
                sentinels,
                dialer(logins.sentinels),
                addresses,
                time_to_connect,
            ))),
            NamedServers::Cluster(seeds) => {
                let partitions = settings.partitions.get();
                let dialer = dialer(logins.servers);
                let cluster = Cluster::new(seeds, dialer, addresses, &settings.prefix, partitions);
                Self::Cluster(Arc::new(cluster))
            }
        })
    }

    pub(super) fn cluster(&self) -> Option<&Arc<Cluster>> {
        match self {
            Self::Server(_) | Self::Sentinel(_) => None,
            Self::Cluster(cluster) => Some(cluster),
        }
    }

    /// Returns the partition of a caller. Only checks of the same partition share a script call.
    #[inline]
    pub(super) fn partition(&self, key: &Key) -> u16 {
        match self.cluster() {
            Some(cluster) => cluster.partition(key),
            None => 0,
        }
    }

    pub(super) fn partitions(&self) -> usize {
        match self.cluster() {
            Some(cluster) => cluster.partitions(),
            None => 1,
        }
    }

    /// Returns the node with the keys of this partition. `None` until a node has reported it.
    #[inline]
    pub(super) fn node(&self, partition: u16) -> Option<Node> {
        match self.cluster() {
            Some(cluster) => cluster.node(partition),
            None => Some(Node::ONLY),
        }
    }

    /// Returns the error of a check whose partition has no known node.
    pub(super) fn no_master(&self) -> StoreError {
        match self.cluster() {
            Some(cluster) => cluster.no_master(),
            None => StoreError::new(ErrorKind::NotReady),
        }
    }

    /// Returns the nodes with callers' keys. `None` while one of them is unknown.
    pub(super) fn masters(&self) -> Option<Vec<Node>> {
        match self.cluster() {
            Some(cluster) => cluster.masters(),
            None => Some(vec![Node::ONLY]),
        }
    }

    /// Returns the prefixes of the keys of counts, up to the caller.
    pub(super) fn prefixes(&self, prefix: &str) -> Vec<String> {
        let Some(cluster) = self.cluster() else {
            return vec![prefix.to_owned()];
        };
        // All keys of a partition have its tag, which keeps them in one slot.
        let mut prefixes = vec![];
        for partition in 0..cluster.partitions() {
            prefixes.push(cluster.prefix(partition as u16).to_owned());
        }
        prefixes
    }

    /// Returns the node with the keys that belong to no partition.
    pub(super) fn shared_node(&self) -> Option<Node> {
        match self.cluster() {
            Some(cluster) => cluster.shared_node(),
            None => Some(Node::ONLY),
        }
    }

    /// Returns the address of a node, or of all nodes, for errors: without user and password.
    pub(super) fn address(&self, node: Option<Node>) -> String {
        match self {
            Self::Server(server) => server.0.addr().to_string(),
            Self::Sentinel(sentinels) => sentinels.address(),
            Self::Cluster(cluster) => cluster.address(node),
        }
    }

    /// Returns a key that belongs to no partition, for a store with this prefix.
    pub(super) fn shared_key(&self, prefix: &str, name: &str) -> String {
        match self.cluster() {
            None => format!("{prefix}:{name}"),
            // With the tag whose slot `shared_node` finds.
            Some(_) => format!("{prefix}:{{{}}}:{name}", cluster::SHARED),
        }
    }

    /// Creates a pool of at most `max` connections to a node.
    pub(super) fn pool(&self, node: Node, max: usize, times: Times) -> NodePool {
        NodePool::new(
            NodeRoute {
                topology: self.clone(),
                node,
            },
            max,
            times,
        )
    }
}

impl Connect for NodeRoute {
    async fn connect(&self) -> Result<Link, StoreError> {
        let inner = match &self.topology {
            Topology::Server(server) => server.1.dial(&server.0).await?,
            Topology::Sentinel(sentinels) => return sentinels.connect().await,
            Topology::Cluster(cluster) => cluster.connect(self.node).await?,
        };
        Ok(Link { inner, epoch: None })
    }
}
