//! How Redis is reached. What is above asks two things only: which node has a caller's keys, and for a connection to that
//! node.
//!
//! Each node has a queue, lanes and a pool of its own. A single server is one node, and a cluster has one for each master.

use std::sync::Arc;

use bb8::ManageConnection;
use bb8_redis::RedisConnectionManager;
use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, RedisError};

use super::cluster::Cluster;
use super::servers::{Kind, url_error};
use crate::limit::{ConfigError, Key};

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
                Self::Server { server: Arc::new(RedisConnectionManager::new(*server).map_err(url_error)?), tls }
            }
            Kind::Cluster(seeds) => Self::Cluster(Arc::new(Cluster::new(seeds, prefix, buckets))),
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
