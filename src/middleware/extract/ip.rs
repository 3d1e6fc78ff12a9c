use std::net::IpAddr;

use http::request::Parts;

use super::ClientIp;
use crate::gate::{KeyExtractor, MissingKey};
use crate::limit::Key;

/// Counts by the address of the connection's peer; IPv6 by its /64 network.
///
/// The address is that of the nearest peer: behind a load balancer it is the balancer's, and all
/// clients are counted together. No header is read: use [`ClientIp`](crate::extract::ClientIp) for
/// the header that your proxies write. Its [`peer()`](crate::extract::ClientIp::peer) counts the
/// same way, with a configurable IPv6 prefix.
///
/// The address is read from the request's extensions. The first of these that is present is used:
/// 1. an [`IpAddr`], which your application may insert to override the server,
/// 2. a [`SocketAddr`](std::net::SocketAddr),
/// 3. with the feature `axum`, axum's `ConnectInfo<SocketAddr>`, which
///    `into_make_service_with_connect_info::<SocketAddr>()` inserts, or its `MockConnectInfo`,
/// 4. with the feature `tonic`, tonic's `TcpConnectInfo`, which its server inserts, for TLS
///    connections too.
///
/// Peers on unix sockets have no address, and are counted together. They are recognized by a
/// `tokio::net::unix::SocketAddr`, alone or in axum's `ConnectInfo`, and by tonic's `UdsConnectInfo`.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerIp;

impl PeerIp {
    /// The key of requests from this address, for [a single caller's policies](crate::select::Tiers::caller) and for a
    /// [`Limiter`](crate::Limiter).
    pub fn key_of(&self, address: IpAddr) -> Key {
        Key::ip(address)
    }
}

impl KeyExtractor for PeerIp {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        ClientIp::peer().extract(request)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use http::Request;

    fn with<T: Clone + Send + Sync + 'static>(extension: T) -> Parts {
        Request::builder()
            .extension(extension)
            .body(())
            .unwrap()
            .into_parts()
            .0
    }

    #[test]
    fn finds_the_peer_of_every_server() {
        let socket: SocketAddr = "192.0.2.7:1234".parse().unwrap();
        let expected = Ok(Key::ip(socket.ip()));
        assert_eq!(PeerIp.extract(&with(socket)), expected);
        assert_eq!(PeerIp.extract(&with(socket.ip())), expected);
        #[cfg(feature = "axum")]
        assert_eq!(
            PeerIp.extract(&with(axum::extract::ConnectInfo(socket))),
            expected
        );
        #[cfg(feature = "axum")]
        assert_eq!(
            PeerIp.extract(&with(axum::extract::connect_info::MockConnectInfo(socket))),
            expected
        );
        #[cfg(feature = "tonic")]
        {
            let tcp = |remote_addr| tonic::transport::server::TcpConnectInfo {
                local_addr: None,
                remote_addr,
            };
            assert_eq!(PeerIp.extract(&with(tcp(Some(socket)))), expected);
            assert!(
                PeerIp
                    .extract(&with(tcp(None)))
                    .unwrap_err()
                    .is_misconfigured()
            );
        }
        let missing = PeerIp.extract(&with(())).unwrap_err();
        assert!(
            missing
                .to_string()
                .contains("into_make_service_with_connect_info")
        );
        assert!(
            missing
                .to_string()
                .ends_with("guide/pitfalls/index.html#no-peer-address)"),
            "{missing}"
        );
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn peers_on_unix_sockets_are_counted_together() {
        let (socket, _other) = tokio::net::UnixStream::pair().unwrap();
        let address = socket.peer_addr().unwrap();
        assert_eq!(PeerIp.extract(&with(address.clone())), Ok(Key::UNIX));
        #[cfg(feature = "axum")]
        assert_eq!(
            PeerIp.extract(&with(axum::extract::ConnectInfo(address.clone()))),
            Ok(Key::UNIX)
        );
        #[cfg(feature = "tonic")]
        {
            let noted = tonic::transport::server::Connected::connect_info(&socket);
            assert_eq!(PeerIp.extract(&with(noted)), Ok(Key::UNIX));
        }
        let mut request = with(address);
        let known: SocketAddr = "192.0.2.7:1".parse().unwrap();
        request.extensions.insert(known);
        assert_eq!(
            PeerIp.extract(&request),
            Ok(Key::ip(known.ip())),
            "an address is more specific than a unix socket"
        );
    }

    #[test]
    fn the_address_of_the_application_wins() {
        let [client, peer, proxy] =
            ["192.0.2.7:1", "192.0.2.8:2", "192.0.2.9:3"].map(|s| s.parse::<SocketAddr>().unwrap());
        let mut request = with(());
        #[cfg(feature = "axum")]
        request.extensions.insert(axum::extract::ConnectInfo(proxy));
        #[cfg(not(feature = "axum"))]
        let _ = proxy;
        request.extensions.insert(peer);
        assert_eq!(PeerIp.extract(&request), Ok(Key::ip(peer.ip())));
        request.extensions.insert(client.ip());
        assert_eq!(PeerIp.extract(&request), Ok(Key::ip(client.ip())));
    }
}
