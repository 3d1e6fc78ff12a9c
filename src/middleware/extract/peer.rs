//! The other end of the connection, as the server has recorded it in the request's extensions.

use std::net::{IpAddr, SocketAddr};

use http::request::Parts;

use crate::gate::MissingKey;
use crate::observe::mistakes::NO_PEER_ADDRESS;

/// The other end of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Address(IpAddr),
    /// A process on this machine, which has no address.
    Unix,
    /// The server recorded no address in a supported form.
    Unknown,
}

impl Peer {
    /// Returns the peer of the connection, ignoring an address that the application has inserted.
    pub(super) fn of(request: &Parts) -> Self {
        let recorded = request
            .extensions
            .get()
            .map(|address: &SocketAddr| Self::Address(address.ip()));
        // The features' types come last: enabling a feature may add an address, but changes none.
        recorded
            .or_else(|| axum(request))
            .or_else(|| tonic(request))
            .or_else(|| unix(request))
            .unwrap_or(Self::Unknown)
    }
}

/// The address that the application has inserted, which takes precedence over all others.
pub(super) fn explicit(request: &Parts) -> Option<IpAddr> {
    request.extensions.get().copied()
}

/// The error if the server recorded no address in a form that the enabled features read.
pub(super) fn unknown() -> MissingKey {
    const SERVE: &str = "serve `app.into_make_service_with_connect_info::<SocketAddr>()`";
    let axum = if cfg!(feature = "axum") {
        ""
    } else {
        "enable the feature `axum` of `tower-redis-ratelimit`, and "
    };
    let tonic = if cfg!(feature = "tonic") {
        ""
    } else {
        "; with tonic, enable its feature `tonic`"
    };
    MissingKey::misconfigured(format!(
        "the server did not record the peer's address: with axum 0.8, {axum}{SERVE}{tonic}; with another server, insert a \
         `SocketAddr` into the extensions of each request{NO_PEER_ADDRESS}"
    ))
}

/// The address that axum's own extractor would find.
#[cfg(feature = "axum")]
fn axum(request: &Parts) -> Option<Peer> {
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

    let extensions = &request.extensions;
    let real = extensions
        .get::<ConnectInfo<SocketAddr>>()
        .map(|ConnectInfo(address)| address);
    let mock = || {
        extensions
            .get::<MockConnectInfo<SocketAddr>>()
            .map(|MockConnectInfo(address)| address)
    };
    real.or_else(mock)
        .map(|address| Peer::Address(address.ip()))
}

#[cfg(not(feature = "axum"))]
fn axum(_: &Parts) -> Option<Peer> {
    None
}

/// The address that tonic's server records, with or without TLS.
#[cfg(feature = "tonic")]
fn tonic(request: &Parts) -> Option<Peer> {
    let info = request
        .extensions
        .get::<tonic::transport::server::TcpConnectInfo>()?;
    info.remote_addr()
        .map(|address| Peer::Address(address.ip()))
}

#[cfg(not(feature = "tonic"))]
fn tonic(_: &Parts) -> Option<Peer> {
    None
}

/// A peer on a unix socket.
#[cfg(unix)]
fn unix(request: &Parts) -> Option<Peer> {
    use tokio::net::unix::SocketAddr;

    let extensions = &request.extensions;
    let is_unix = extensions.get::<SocketAddr>().is_some();
    #[cfg(feature = "axum")]
    let is_unix = is_unix
        || extensions
            .get::<axum::extract::ConnectInfo<SocketAddr>>()
            .is_some();
    #[cfg(feature = "tonic")]
    let is_unix = is_unix
        || extensions
            .get::<tonic::transport::server::UdsConnectInfo>()
            .is_some();
    is_unix.then_some(Peer::Unix)
}

#[cfg(not(unix))]
fn unix(_: &Parts) -> Option<Peer> {
    None
}
