//! How Redis is reached. What is above asks two things only: which node has a key, and for a connection to that node.
//!
//! Each node has a queue, lanes and a pool of its own. So to ask a Sentinel for the master is another way to connect, and
//! a cluster is one with more nodes.

use bb8::ManageConnection;
use bb8_redis::RedisConnectionManager;
use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, ConnectionInfo, RedisError};

#[derive(Debug, Clone)]
pub(super) enum Transport {
    /// One server, at one address.
    Server { server: RedisConnectionManager, tls: bool },
}

/// A server that has a part of the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node(u16);

impl Transport {
    pub(super) fn new(url: ConnectionInfo) -> Result<Self, RedisError> {
        let tls = matches!(url.addr(), ConnectionAddr::TcpTls { .. });
        Ok(Self::Server { server: RedisConnectionManager::new(url)?, tls })
    }

    pub(super) fn is_tls(&self) -> bool {
        match self {
            Self::Server { tls, .. } => *tls,
        }
    }

    /// The node that has the keys of this hash tag.
    pub(super) fn node(&self, _tag: &[u8]) -> Node {
        match self {
            Self::Server { .. } => Node(0),
        }
    }

    /// A new connection to a node.
    pub(super) async fn connect(&self, _node: Node) -> Result<MultiplexedConnection, RedisError> {
        match self {
            Self::Server { server, .. } => server.connect().await,
        }
    }
}
