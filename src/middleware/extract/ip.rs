use std::net::{IpAddr, SocketAddr};

use http::request::Parts;

use super::{KeyExtractor, MissingKey};
use crate::limit::Key;

/// Counts by the address that the connection came from; IPv6 by its /64 network.
///
/// The address is that of the nearest peer: behind a load balancer it is the balancer's, and everybody is counted
/// together. No header is trusted.
///
/// It is read from the request's extensions, from the first of these that is there:
/// 1. an [`IpAddr`], which your application puts there if it knows better,
/// 2. a [`SocketAddr`],
/// 3. with the feature `axum`, axum's `ConnectInfo<SocketAddr>`, which
///    `into_make_service_with_connect_info::<SocketAddr>()` puts there, or its `MockConnectInfo`.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerIp;

impl KeyExtractor for PeerIp {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        let extensions = &request.extensions;
        let address = extensions.get::<IpAddr>().copied();
        let address = address.or_else(|| extensions.get().map(SocketAddr::ip));
        // Last, so that the feature adds an address where there was none, and changes none.
        address.or_else(|| connect_info(request)).map(Key::ip).ok_or(MissingKey::misconfigured(
            "the server did not note the address of the peer; \
             with axum, serve `app.into_make_service_with_connect_info::<SocketAddr>()` and enable the feature `axum`",
        ))
    }
}

/// The address as axum's own extractor finds it.
#[cfg(feature = "axum")]
fn connect_info(request: &Parts) -> Option<IpAddr> {
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

    let real = request.extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(address)| address);
    let mock = || request.extensions.get::<MockConnectInfo<SocketAddr>>().map(|MockConnectInfo(address)| address);
    real.or_else(mock).map(SocketAddr::ip)
}

#[cfg(not(feature = "axum"))]
fn connect_info(_: &Parts) -> Option<IpAddr> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn with<T: Clone + Send + Sync + 'static>(extension: T) -> Parts {
        Request::builder().extension(extension).body(()).unwrap().into_parts().0
    }

    #[test]
    fn the_peer_is_found_wherever_the_server_put_it() {
        let socket: SocketAddr = "192.0.2.7:1234".parse().unwrap();
        let expected = Ok(Key::ip(socket.ip()));
        assert_eq!(PeerIp.extract(&with(socket)), expected);
        assert_eq!(PeerIp.extract(&with(socket.ip())), expected);
        #[cfg(feature = "axum")]
        assert_eq!(PeerIp.extract(&with(axum::extract::ConnectInfo(socket))), expected);
        #[cfg(feature = "axum")]
        assert_eq!(PeerIp.extract(&with(axum::extract::connect_info::MockConnectInfo(socket))), expected);
        let missing = PeerIp.extract(&with(())).unwrap_err();
        assert!(missing.to_string().contains("into_make_service_with_connect_info"));
    }

    #[test]
    fn what_the_application_put_there_wins_with_every_set_of_features() {
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
