//! How Redis is reached. What is above asks two things only: which node has a caller's keys, and for a connection to that
//! node.
//!
//! Each node has a queue, lanes and a pool of its own. A single server is one node, and a cluster has one for each master.

use std::sync::Arc;
use std::time::Duration;

use bb8::ManageConnection;
use bb8_redis::RedisConnectionManager;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{ConnectionAddr, ConnectionInfo, RedisError};

use super::cluster::Cluster;
use super::servers::{Kind, url_error};
use crate::limit::{ConfigError, Key};

/// After so long without traffic the system sends a probe: sooner than NATs and load balancers forget a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(super) enum Transport {
    /// One server, at one address.
    Server { server: Arc<RedisConnectionManager>, tls: bool },
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

impl Transport {
    pub(super) fn new(servers: Kind, prefix: &str, buckets: usize) -> Result<Self, ConfigError> {
        Ok(match servers {
            Kind::Server(server) => {
                let tls = matches!(server.addr(), ConnectionAddr::TcpTls { .. });
                let server = RedisConnectionManager::new(kept_alive(*server)).map_err(url_error)?;
                Self::Server { server: Arc::new(server), tls }
            }
            Kind::Cluster(seeds) => {
                let seeds = seeds.into_iter().map(kept_alive).collect();
                Self::Cluster(Arc::new(Cluster::new(seeds, prefix, buckets)))
            }
        })
    }

    pub(super) fn is_tls(&self) -> bool {
        match self {
            Self::Server { tls, .. } => *tls,
            Self::Cluster(cluster) => cluster.is_tls(),
        }
    }

    pub(super) fn cluster(&self) -> Option<&Arc<Cluster>> {
        match self {
            Self::Server { .. } => None,
            Self::Cluster(cluster) => Some(cluster),
        }
    }

    /// Which of the buckets a caller is in: only those of one bucket share a script call.
    pub(super) fn bucket(&self, key: &Key) -> u16 {
        match self {
            Self::Server { .. } => 0,
            Self::Cluster(cluster) => cluster.bucket(key),
        }
    }

    pub(super) fn buckets(&self) -> usize {
        match self {
            Self::Server { .. } => 1,
            Self::Cluster(cluster) => cluster.buckets(),
        }
    }

    /// The node that has the keys of this bucket.
    pub(super) fn node(&self, bucket: u16) -> Node {
        match self {
            Self::Server { .. } => Node(0),
            Self::Cluster(cluster) => cluster.node(bucket),
        }
    }

    /// A new connection to a node.
    pub(super) async fn connect(&self, node: Node) -> Result<MultiplexedConnection, RedisError> {
        match self {
            Self::Server { server, .. } => server.connect().await,
            Self::Cluster(cluster) => cluster.connect(node).await,
        }
    }
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
