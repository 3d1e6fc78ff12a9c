use std::net::{IpAddr, SocketAddr};

use http::request::Parts;

use super::{KeyExtractor, MissingKey};
use crate::limit::Key;

/// Counts by the address that the connection came from; IPv6 by its /64 network.
///
/// The address is that of the nearest peer: behind a load balancer it is the balancer's, and everybody is counted
/// together. No header is trusted.
///
/// It is read from the request's extensions: a [`SocketAddr`] or an [`IpAddr`], and with the feature `axum` also axum's
/// `ConnectInfo<SocketAddr>`, which `into_make_service_with_connect_info::<SocketAddr>()` puts there.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerIp;

impl KeyExtractor for PeerIp {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        #[cfg(feature = "axum")]
        if let Some(address) = axum_address(request) {
            return Ok(Key::ip(address.ip()));
        }
        if let Some(address) = request.extensions.get::<SocketAddr>() {
            return Ok(Key::ip(address.ip()));
        }
        if let Some(address) = request.extensions.get::<IpAddr>() {
            return Ok(Key::ip(*address));
        }
        Err(MissingKey::misconfigured(
            "the server did not note the address of the peer; \
             with axum, serve `app.into_make_service_with_connect_info::<SocketAddr>()` and enable the feature `axum`",
        ))
    }
}

/// The address as axum's own extractor finds it.
#[cfg(feature = "axum")]
fn axum_address(request: &Parts) -> Option<SocketAddr> {
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

    let real = request.extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(address)| *address);
    real.or_else(|| request.extensions.get::<MockConnectInfo<SocketAddr>>().map(|MockConnectInfo(address)| *address))
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
}
