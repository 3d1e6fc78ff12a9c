//! The other end of the connection, as the server has recorded it in the request's extensions.

use std::net::{IpAddr, SocketAddr};
use std::slice;

use http::HeaderName;
use http::header::FORWARDED;
use http::request::Parts;

use crate::gate::{KeyExtractor, MissingKey, Notifier};
use crate::limit::{Key, KeyForms};
use crate::observe::misses::Misses;
use crate::observe::mistakes::{NO_PEER_ADDRESS, PROXY_HEADER, UNKNOWN_PROXY};

/// Counts by the address of the connection's peer; IPv6 by its /64 network.
///
/// The address is that of the nearest peer: behind a load balancer it is the balancer's, and all
/// clients are counted together. No header is read: use [`ClientIp`](crate::extract::ClientIp) for
/// the header that your proxies write. Its [`peer()`](crate::extract::ClientIp::peer) counts the
/// same way, with a configurable IPv6 prefix. If one of a layer's first 1,000 requests has `X-Forwarded-For` or `Forwarded` and
/// comes from a private, link-local or shared address, that is reported as
/// [misconfigured](crate::observe::Event::Misconfigured).
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

/// The other end of the connection, or the client behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Address(IpAddr),
    /// A process on this machine, which has no address.
    Unix,
    /// The server recorded no address in a supported form.
    Unknown,
}

impl PeerIp {
    /// The key of requests from this address, for [a single caller's policies](crate::select::Tiers::caller) and for a
    /// [`Limiter`](crate::Limiter).
    pub fn key_of(&self, address: IpAddr) -> Key {
        Key::ip(address)
    }
}

impl KeyExtractor for PeerIp {
    #[inline]
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        Peer::of(request, |peer| peer).key(64)
    }

    fn examine(&self, request: &Parts, layer: &Notifier) {
        Peer::of(request, |peer| {
            notice_proxy(layer, peer, request, None);
            peer
        });
    }

    fn forms(&self) -> KeyForms {
        KeyForms::ADDRESS
    }
}

/// Returns `true` for an address of 169.254.0.0/16 or fe80::/10.
pub(super) fn is_link_local(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Returns `true` for an address of 100.64.0.0/10 (RFC 6598).
pub(super) fn is_shared(address: IpAddr) -> bool {
    let IpAddr::V4(v4) = address.to_canonical() else {
        return false;
    };
    matches!(v4.octets(), [100, second, ..] if second & 0xc0 == 64)
}

/// Returns the argument of `trust` for a proxy. The proxies of a platform have many addresses of a network that is not
/// routed.
pub(super) fn trusting(proxy: IpAddr) -> String {
    if is_link_local(proxy) {
        return "link-local".to_owned();
    }
    if is_shared(proxy) {
        return "shared".to_owned();
    }
    proxy.to_string()
}

/// Returns `true` for an address of this machine or of a private network.
pub(super) fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_private() || v4.is_loopback(),
        IpAddr::V6(v6) => v6.is_unique_local() || v6.is_loopback(),
    }
}

impl Peer {
    /// Returns the caller: the address that the application has inserted, or else the result of
    /// `client` for the peer of the connection.
    #[inline]
    pub(super) fn of(request: &Parts, client: impl FnOnce(Self) -> Self) -> Self {
        match request.extensions.get() {
            Some(&address) => Self::Address(address),
            None => client(Self::connected(request)),
        }
    }

    /// Returns the peer of the connection.
    fn connected(request: &Parts) -> Self {
        if let Some(address) = request.extensions.get::<SocketAddr>() {
            return Self::Address(address.ip());
        }
        // The features' types come last: enabling a feature may add an address, but changes none.
        if let Some(address) = axum(request) {
            return Self::Address(address);
        }
        if let Some(address) = tonic(request) {
            return Self::Address(address);
        }
        if is_unix(request) {
            return Self::Unix;
        }
        Self::Unknown
    }

    /// Returns `true` for a peer that is probably in the service's own network.
    pub(super) fn is_near(self) -> bool {
        match self {
            Self::Address(address) => {
                is_private(address) || is_link_local(address) || is_shared(address)
            }
            Self::Unix => true,
            Self::Unknown => false,
        }
    }

    /// Returns the key, with an IPv6 prefix of this many bits.
    pub(super) fn key(self, ipv6_prefix: u8) -> Result<Key, MissingKey> {
        match self {
            Self::Address(address) => Ok(Key::network(address, ipv6_prefix)),
            Self::Unix => Ok(Key::UNIX),
            Self::Unknown => Err(unknown()),
        }
    }
}

/// The error if the server recorded no address in a form that the enabled features read.
fn unknown() -> MissingKey {
    MissingKey::misconfigured(format!(
        "the server did not record the peer's address: {}; on a unix socket, count by a `ClientIp` with `.trust([\"unix\"])`\
         {NO_PEER_ADDRESS}",
        record()
    ))
}

/// How a server records the peer's address.
fn record() -> String {
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
    format!(
        "with axum 0.8, {axum}{SERVE}{tonic}; with another server, insert a `SocketAddr` into the extensions of each request"
    )
}

/// The address that axum's own extractor would find.
#[cfg(feature = "axum")]
fn axum(request: &Parts) -> Option<IpAddr> {
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

    let extensions = &request.extensions;
    if let Some(ConnectInfo(address)) = extensions.get::<ConnectInfo<SocketAddr>>() {
        return Some(address.ip());
    }
    let MockConnectInfo(address) = extensions.get::<MockConnectInfo<SocketAddr>>()?;
    Some(address.ip())
}

#[cfg(not(feature = "axum"))]
fn axum(_: &Parts) -> Option<IpAddr> {
    None
}

/// The address that tonic's server records, with or without TLS.
#[cfg(feature = "tonic")]
fn tonic(request: &Parts) -> Option<IpAddr> {
    let info = request
        .extensions
        .get::<tonic::transport::server::TcpConnectInfo>()?;
    Some(info.remote_addr()?.ip())
}

#[cfg(not(feature = "tonic"))]
fn tonic(_: &Parts) -> Option<IpAddr> {
    None
}

/// Returns `true` for a peer on a unix socket.
#[cfg(unix)]
fn is_unix(request: &Parts) -> bool {
    use tokio::net::unix::SocketAddr;

    let extensions = &request.extensions;
    #[cfg(feature = "axum")]
    if extensions
        .get::<axum::extract::ConnectInfo<SocketAddr>>()
        .is_some()
    {
        return true;
    }
    #[cfg(feature = "tonic")]
    if extensions
        .get::<tonic::transport::server::UdsConnectInfo>()
        .is_some()
    {
        return true;
    }
    extensions.get::<SocketAddr>().is_some()
}

#[cfg(not(unix))]
fn is_unix(_: &Parts) -> bool {
    false
}

/// The headers that a proxy sends.
static HEADERS: [HeaderName; 2] = [HeaderName::from_static("x-forwarded-for"), FORWARDED];

/// Reports the first request of a proxy that the extractor does not trust: all of its clients share one count. Checks a
/// request that is counted by its peer. `header` is the header that the extractor reads, or `None` for no header. A
/// peer with a public address may be a client that forges the header, so 1,000 of them are only suspected.
pub(super) fn notice_proxy(
    layer: &Notifier,
    peer: Peer,
    request: &Parts,
    header: Option<&HeaderName>,
) {
    let sent = sent(request, header);
    if peer.is_near() {
        if let Some(sent) = sent {
            layer.unknown_proxy(|| unknown_proxy(peer, sent, header));
        }
    } else if peer != Peer::Unknown {
        match sent {
            Some(sent) => layer.forwarded(|| public_proxies(sent, header)),
            None => layer.not_forwarded(),
        }
    }
}

/// Returns the header of a proxy that the request has.
fn sent<'a>(request: &Parts, header: Option<&'a HeaderName>) -> Option<&'a HeaderName> {
    let headers = match header {
        Some(header) => slice::from_ref(header),
        None => &HEADERS,
    };
    headers
        .iter()
        .find(|name| request.headers.contains_key(*name))
}

fn public_proxies(sent: &HeaderName, header: Option<&HeaderName>) -> String {
    let fix = match header {
        Some(_) => {
            "trust the networks of these proxies, or use `.hops(..)` if no client can bypass them"
                .to_owned()
        }
        None => {
            let of_header = of_header(sent);
            format!(
                "count by `ClientIp::{of_header}()`, and trust the networks of these proxies, or their number by `.hops(..)`"
            )
        }
    };
    format!(
        "all of the first {} requests came from public addresses with `{sent}`, so these are probably proxies, and all clients of one \
         share one count: {fix}, or ignore this if one client has sent them{UNKNOWN_PROXY}",
        Misses::REPORT_AT
    )
}

/// The constructor of a `ClientIp` that reads this header.
fn of_header(sent: &HeaderName) -> &'static str {
    if *sent == FORWARDED {
        "forwarded"
    } else {
        "x_forwarded_for"
    }
}

fn unknown_proxy(peer: Peer, sent: &HeaderName, header: Option<&HeaderName>) -> String {
    let (peer, trusted) = match peer {
        Peer::Address(address) => (format!("the peer {address}"), trusting(address)),
        Peer::Unix | Peer::Unknown => ("the peer on a unix socket".to_owned(), "unix".to_owned()),
    };
    let fix = match header {
        Some(_) => format!("trust it, as in `.trust([{trusted:?}])`"),
        None => {
            let of_header = of_header(sent);
            format!("count by `ClientIp::{of_header}().trust([{trusted:?}])?`")
        }
    };
    format!(
        "{peer} sends `{sent}`, so it is probably a proxy, and all of its clients share one count: {fix}, or ignore this if the \
         peer is to be counted{UNKNOWN_PROXY}"
    )
}

/// Checks a request of a trusted proxy that lacks the header that the extractor reads.
pub(super) fn notice_other_header(layer: &Notifier, request: &Parts, header: &HeaderName) {
    let other = HEADERS
        .iter()
        .find(|other| *other != header && request.headers.contains_key(*other));
    if let Some(other) = other {
        layer.proxy_header(|| {
            format!(
                "a trusted proxy sends `{other}` instead of `{header}`, so it is counted itself, with all of its clients: read \
                 `{other}`, or let the proxy send `{header}`{PROXY_HEADER}"
            )
        });
    }
}

/// Reports the first request without an address that is counted as a peer on a unix socket, since a number of hops is
/// trusted.
pub(super) fn notice_no_address(layer: &Notifier) {
    layer.no_address(|| {
        format!(
            "a request has neither a recorded address nor one in the header of its proxies, and is counted as a peer on a unix \
             socket: over TCP, {}, or ignore this on a unix socket{NO_PEER_ADDRESS}",
            record()
        )
    });
}

#[cfg(test)]
mod tests {
    use http::Request;

    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::observe::{Event, Observer};

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

    #[derive(Default)]
    struct Problems(Mutex<Vec<String>>);

    impl Observer for Problems {
        fn notify(&self, event: &Event<'_>) {
            match *event {
                Event::Misconfigured { problem } => {
                    self.0.lock().unwrap().push(problem.to_owned());
                }
                Event::Suspected { problem } => {
                    let suspicion = format!("suspected: {problem}");
                    self.0.lock().unwrap().push(suspicion);
                }
                _ => {}
            }
        }
    }

    fn address(text: &str) -> Peer {
        Peer::Address(text.parse().unwrap())
    }

    /// Returns the reports of two equal requests.
    fn reports(peer: Peer, sent: &str, read: Option<&HeaderName>) -> Vec<String> {
        let problems = Arc::new(Problems::default());
        let layer = Notifier::new(problems.clone());
        let request = Request::builder().header(sent, "203.0.113.7");
        let request = request.body(()).unwrap().into_parts().0;
        for _ in 0..2 {
            notice_proxy(&layer, peer, &request, read);
        }
        problems.0.lock().unwrap().clone()
    }

    #[test]
    fn an_untrusted_proxy_is_reported_once() {
        let real_ip = HeaderName::from_static("x-real-ip");
        let cases = [
            (
                address("10.0.0.9"),
                "X-Forwarded-For",
                None,
                "the peer 10.0.0.9 sends `x-forwarded-for`, so it is probably a proxy, and all of its clients share one count: count by \
                 `ClientIp::x_forwarded_for().trust([\"10.0.0.9\"])?`, or",
            ),
            (
                address("::1"),
                "forwarded",
                None,
                "the peer ::1 sends `forwarded`, so it is probably a proxy, and all of its clients share one count: count by \
                 `ClientIp::forwarded().trust([\"::1\"])?`, or",
            ),
            (
                Peer::Unix,
                "x-real-ip",
                Some(&real_ip),
                "the peer on a unix socket sends `x-real-ip`, so it is probably a proxy, and all of its clients share one count: trust it, \
                 as in `.trust([\"unix\"])`, or",
            ),
            (
                address("169.254.130.1"),
                "x-forwarded-for",
                Some(&HEADERS[0]),
                "the peer 169.254.130.1 sends `x-forwarded-for`, so it is probably a proxy, and all of its clients share one count: trust \
                 it, as in `.trust([\"link-local\"])`, or",
            ),
            (
                address("fe80::1"),
                "x-forwarded-for",
                None,
                "the peer fe80::1 sends `x-forwarded-for`, so it is probably a proxy, and all of its clients share one count: count by \
                 `ClientIp::x_forwarded_for().trust([\"link-local\"])?`, or",
            ),
            (
                address("100.64.0.3"),
                "x-forwarded-for",
                Some(&HEADERS[0]),
                "the peer 100.64.0.3 sends `x-forwarded-for`, so it is probably a proxy, and all of its clients share one count: trust it, \
                 as in `.trust([\"shared\"])`, or",
            ),
        ];
        for (peer, sent, read, expected) in cases {
            let reports = reports(peer, sent, read);
            let [report] = &reports[..] else {
                panic!("one report is expected: {reports:?}");
            };
            assert!(report.starts_with(expected), "{report}");
            assert!(report.ends_with("#unknown-proxy)"), "{report}");
        }
    }

    /// Clients can forge the header, so the report says only that a proxy is likely.
    #[test]
    fn only_public_proxies_of_all_requests_are_suspected() {
        let header = HeaderName::from_static("x-forwarded-for");
        let request = |has_header: bool| {
            let mut request = Request::new(()).into_parts().0;
            if has_header {
                let value = http::HeaderValue::from_static("198.51.100.7");
                request.headers.insert(&header, value);
            }
            request
        };
        let reports = |direct: Option<u32>, read: Option<&HeaderName>| {
            let problems = Arc::new(Problems::default());
            let layer = Notifier::new(problems.clone());
            for number in 0..1_100 {
                let request = request(direct != Some(number));
                notice_proxy(&layer, address("203.0.113.9"), &request, read);
            }
            problems.0.lock().unwrap().clone()
        };
        for (read, fix) in [
            (
                None,
                "count by `ClientIp::x_forwarded_for()`, and trust the networks of these proxies, or",
            ),
            (
                Some(&header),
                "trust the networks of these proxies, or use `.hops(..)` if",
            ),
        ] {
            let seen = reports(None, read);
            let [report] = &seen[..] else {
                panic!("one report is expected: {seen:?}");
            };
            let start = format!(
                "suspected: all of the first 1000 requests came from public addresses with `x-forwarded-for`, so these are probably \
                 proxies, and all clients of one share one count: {fix}"
            );
            assert!(report.starts_with(&start), "{report}");
            assert!(report.ends_with("#unknown-proxy)"), "{report}");
            assert_eq!(reports(Some(999), read), [""; 0], "a client");
        }
    }

    /// Health checks from the own network are of no proxy.
    #[test]
    fn health_checks_hide_no_public_proxies() {
        use tower::{Layer, ServiceExt, service_fn};

        let problems = Arc::new(Problems::default());
        let policy = crate::Policy::new("api", crate::Strategy::Gcra, "100000/h").unwrap();
        let layer = crate::RateLimitLayer::new(crate::LocalStore::default(), PeerIp, policy)
            .observer(problems.clone());
        let service = layer.layer(service_fn(async |_: Request<String>| {
            Ok::<_, std::convert::Infallible>(http::Response::new(String::new()))
        }));
        let send = |peer: &str, header: Option<&str>| {
            let mut request =
                Request::builder().extension(SocketAddr::new(peer.parse().unwrap(), 1));
            if let Some(value) = header {
                request = request.header("x-forwarded-for", value);
            }
            let request = request.body(String::new()).unwrap();
            let response = service.clone().oneshot(request);
            futures_util::FutureExt::now_or_never(response)
                .unwrap()
                .unwrap();
        };
        for number in 0..1_000 {
            if number % 2 == 1 {
                send("10.0.0.9", None);
            }
            send("203.0.113.9", Some("198.51.100.7"));
        }
        let reports = problems.0.lock().unwrap();
        assert!(
            reports.len() == 1 && reports[0].starts_with("suspected: all of"),
            "{reports:?}"
        );
    }

    /// Two apps in one process share no report.
    #[test]
    fn each_layer_reports_its_proxy() {
        let request = Request::builder().header("forwarded", "for=203.0.113.7");
        let request = request.body(()).unwrap().into_parts().0;
        for _ in 0..2 {
            let problems = Arc::new(Problems::default());
            let layer = Notifier::new(problems.clone());
            for _ in 0..2 {
                notice_proxy(&layer, Peer::Unix, &request, None);
            }
            assert_eq!(problems.0.lock().unwrap().len(), 1);
        }
    }

    #[test]
    fn possible_clients_are_not_reported() {
        let real_ip = HeaderName::from_static("x-real-ip");
        let cases = [
            (address("203.0.113.7"), "x-forwarded-for", None),
            (address("100.128.0.1"), "x-forwarded-for", None),
            (address("10.0.0.9"), "x-real-ip", None),
            (address("10.0.0.9"), "x-forwarded-for", Some(&real_ip)),
            (Peer::Unknown, "x-forwarded-for", None),
        ];
        for (peer, sent, read) in cases {
            assert_eq!(reports(peer, sent, read), [""; 0], "{peer:?} {sent}");
        }
    }
}
