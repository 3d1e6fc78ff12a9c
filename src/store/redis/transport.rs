//! How Redis is reached. What is above asks two things only: which node has a caller's keys, and for a connection to that
//! node.
//!
//! Each node has a queue, workers and a pool of its own. A single server is one node, and a cluster has one for each master.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{ConnectionAddr, ConnectionInfo};

use super::cluster::Cluster;
use super::dial::Dialer;
use super::sentinel::Sentinels;
use super::servers::Kind;
use super::tls::Tls;
use crate::limit::{ConfigError, Key};
use crate::store::StoreError;

/// After so long without traffic the system sends a probe: sooner than NATs and load balancers forget a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(super) enum Transport {
    /// One server, at one address.
    Server(Arc<(ConnectionInfo, Dialer)>),
    /// One server at a time, at the address that its sentinels tell.
    Sentinel(Arc<Sentinels>),
    /// Many masters.
    Cluster(Arc<Cluster>),
}

/// A server that has a part of the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Node(u32);

impl Node {
    /// No server at all: what is put there waits for a node.
    pub(super) const NOWHERE: Self = Self(u32::MAX);

    pub(super) fn new(number: u32) -> Self {
        Self(number)
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A new connection.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) inner: MultiplexedConnection,
    pub(super) epoch: Option<Epoch>,
}

/// The time for which a server is the one to ask, though it would answer for longer.
#[derive(Debug, Clone)]
pub(super) struct Epoch {
    /// The number of the present one.
    pub(super) current: Arc<AtomicU64>,
    pub(super) number: u64,
}

impl Epoch {
    pub(super) fn is_over(&self) -> bool {
        self.current.load(Ordering::Acquire) != self.number
    }
}

impl Transport {
    pub(super) fn new(
        mut servers: Kind,
        prefix: &str,
        partitions: usize,
        timeout: Duration,
        tls: &Tls,
    ) -> Result<Self, ConfigError> {
        for server in servers.all() {
            *server = kept_alive(server.clone());
        }
        tls.apply(servers.all())?;
        let dialer = || Dialer::new(timeout, tls.server_name());
        Ok(match servers {
            Kind::Server(server) => Self::Server(Arc::new((*server, dialer()))),
            Kind::Sentinel { master, sentinels } => {
                Self::Sentinel(Arc::new(Sentinels::new(*master, dialer(), sentinels, dialer(), timeout)))
            }
            Kind::Cluster(seeds) => Self::Cluster(Arc::new(Cluster::new(seeds, dialer(), prefix, partitions))),
        })
    }

    pub(super) fn cluster(&self) -> Option<&Arc<Cluster>> {
        match self {
            Self::Server(_) | Self::Sentinel(_) => None,
            Self::Cluster(cluster) => Some(cluster),
        }
    }

    /// Which of the partitions a caller is in: only those of one partition share a script call.
    pub(super) fn partition(&self, key: &Key) -> u16 {
        match self {
            Self::Server(_) | Self::Sentinel(_) => 0,
            Self::Cluster(cluster) => cluster.partition(key),
        }
    }

    pub(super) fn partitions(&self) -> usize {
        match self {
            Self::Server(_) | Self::Sentinel(_) => 1,
            Self::Cluster(cluster) => cluster.partitions(),
        }
    }

    /// The node that has the keys of this partition.
    pub(super) fn node(&self, partition: u16) -> Node {
        match self {
            Self::Server(_) | Self::Sentinel(_) => Node(0),
            Self::Cluster(cluster) => cluster.node(partition),
        }
    }

    /// A new connection to a node.
    pub(super) async fn connect(&self, node: Node) -> Result<Link, StoreError> {
        let inner = match self {
            Self::Server(server) => server.1.dial(&server.0).await?,
            Self::Sentinel(sentinels) => return sentinels.connect().await,
            Self::Cluster(cluster) => cluster.connect(node).await?,
        };
        Ok(Link { inner, epoch: None })
    }
}

/// How to reach a server as another one, but at this address.
pub(super) fn with_address(other: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
    let host = host.to_owned();
    let addr = match other.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    other.clone().set_addr(addr)
}

/// The same server, over connections that have our settings.
fn kept_alive(server: ConnectionInfo) -> ConnectionInfo {
    let tcp = tcp_settings(server.tcp_settings());
    server.set_tcp_settings(tcp)
}

/// What we set on connections, with what the application has set.
fn tcp_settings(given: &TcpSettings) -> TcpSettings {
    // A batch is written whole. Without this, the end of a long one waits until the server has acknowledged its beginning.
    let settings = given.clone().set_nodelay(true);
    if settings.keepalive().is_some() {
        return settings;
    }
    settings.set_keepalive(TcpKeepalive::new().with_time(KEEP_ALIVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_sent_at_once_and_connections_kept_alive() {
        let ours = tcp_settings(&TcpSettings::default());
        assert!(ours.nodelay());
        let default = TcpKeepalive::new().with_time(KEEP_ALIVE);
        assert_eq!(format!("{:?}", ours.keepalive()), format!("{:?}", Some(default)));
    }

    #[test]
    fn what_the_application_has_set_stays() {
        let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(7));
        let ours = tcp_settings(&TcpSettings::default().set_keepalive(keepalive.clone()));
        assert_eq!(format!("{:?}", ours.keepalive()), format!("{:?}", Some(keepalive)));
    }
}
