//! How Redis is reached. What is above asks two things only: which node has a key, and for a connection to that node.
//!
//! Each node has a queue, lanes and a pool of its own. So to ask a Sentinel for the master is another way to connect, and
//! a cluster is one with more nodes.

use std::time::Duration;

use bb8::ManageConnection;
use bb8_redis::RedisConnectionManager;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{ConnectionAddr, ConnectionInfo, RedisError};

/// After so long without traffic the system sends a probe: sooner than NATs and load balancers forget a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

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
        let tcp = tcp_settings(url.tcp_settings());
        let url = url.set_tcp_settings(tcp);
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
