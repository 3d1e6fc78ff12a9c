mod builder;
#[cfg(feature = "serde")]
mod formats;
mod forwarded;
mod node;
mod trust;

use std::net::IpAddr;

use http::request::Parts;
use http::{HeaderName, HeaderValue};

pub use builder::ClientIpBuilder;
use forwarded::elements;
use trust::{Trust, Trusted, covers};

use super::peer::{Peer, notice_no_address, notice_other_header, notice_proxy};
use crate::error::ConfigError;
use crate::gate::{KeyExtractor, MissingKey, Notifier};
use crate::limit::{Key, KeyForms};
use crate::observe::mistakes::PROXY_HEADER;

/// Counts by the address of the client, for services behind proxies; IPv6 by its /64 network.
///
/// Proxies write the client's address into a header, but a client may send that header too. So
/// choose one header, and name the proxies that you trust to write it: by their networks or by
/// their number.
///
/// ```
/// use tower_redis_ratelimit::extract::ClientIp;
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// // nginx or a load balancer in the same private network
/// let client = ClientIp::x_forwarded_for().trust(["private"])?;
/// // and a CDN in front of that
/// let client = ClientIp::x_forwarded_for().trust(["private", "203.0.113.0/24", "2001:db8:cd::/48"])?;
/// // two proxies, wherever they are, that write `Forwarded` (RFC 7239)
/// let client = ClientIp::forwarded().hops(2)?;
/// // a CDN that sets a separate header
/// let client = ClientIp::header("cf-connecting-ip").trust(["173.245.48.0/20", "2400:cb00::/32"])?;
/// // customers who get a /56 each
/// let client = ClientIp::x_forwarded_for().trust(["private"])?.ipv6_prefix(56)?;
/// # let _ = client;
/// # Ok(())
/// # }
/// ```
///
/// # How the client is found
///
/// Every proxy appends the address from which it was called. The walk starts at the peer, which is
/// the address of the connection. While the current hop is trusted, the walk continues with the
/// entry that this hop has written: the next one from the right, over all lines of the header, from
/// the last line to the first. The first untrusted hop is the client. Entries to the left of the
/// client's are not read, except to [suspect](crate::observe::Event::Suspected) another proxy.
///
/// The walk ends earlier, at **the nearest trusted hop** with an address, if it reaches
/// - the end of the header: a trusted proxy is itself the client, for example for its health
///   checks,
/// - an entry without an address: `unknown`, `_hidden`, an empty entry, or a malformed one,
/// - 255 entries of trusted hops.
///
/// With a [number of hops](ClientIpBuilder::hops), the walk counts entries instead, with or without
/// an address.
///
/// So if a proxy hides the addresses of its clients, all of them are counted together, under the
/// proxy's address.
///
/// | entry | is |
/// |---|---|
/// | `192.0.2.7`, `192.0.2.7:4711` | 192.0.2.7: a port of digits, or an obfuscated one (`:_web`), is left out |
/// | `2001:db8::7`, `[2001:db8::7]`, `[2001:db8::7]:4711` | 2001:db8::7. Without brackets there is no port: `2001:db8::7:4711` is another address |
/// | `fe80::7%eth0`, `[fe80::7%eth0]:4711` | fe80::7, since a zone is meaningful only on the host that wrote it |
/// | `::ffff:192.0.2.7` (IPv4-mapped) | 192.0.2.7, also where networks are trusted |
/// | `64:ff9b::192.0.2.7` (NAT64), `2002:c000:207::` (6to4) | counted as 192.0.2.7, but trusted only if their own network is |
/// | `0.0.0.0`, `::` | no address: malformed |
/// | `unix:` | a hop on a unix socket, as nginx writes it. It has no address, so it is never the client |
/// | `for="[2001:db8::7]:4711";proto=https` in `Forwarded` | the address in `for`: in any case, quoted or not, at any position. An element without `for`, with two of them or with an open string is malformed |
///
/// In `X-Forwarded-For`, quotes have no meaning: a comma always ends an entry.
///
/// # Who the peer is
///
/// `ClientIp` reads the address of the connection from the same place as
/// [`PeerIp`](crate::extract::PeerIp). An [`IpAddr`] that your application has inserted into the
/// request's extensions takes precedence here too: then the header is ignored. Headers are also
/// ignored unless the peer is trusted, as are all headers except the chosen one. If an untrusted peer with a private
/// address sends the chosen header, the first such request is reported as
/// [misconfigured](crate::observe::Event::Misconfigured).
///
/// Peers on unix sockets have no address. They are counted together, unless the header has an address.
///
/// # From a file
///
/// With the feature `serde` it is a table: a `header`, and its trusted writers by `trust` or `hops`. Without a header
/// it is [the peer](Self::peer), which may also be written as `"peer"`. `ipv6_prefix` defaults to 64.
///
/// ```
/// # #[cfg(feature = "serde")] {
/// use std::collections::HashMap;
/// use tower_redis_ratelimit::extract::ClientIp;
///
/// let clients: HashMap<String, ClientIp> = toml::from_str(
///     r#"
///     cloud = { header = "x-forwarded-for", trust = ["private", "203.0.113.0/24"] }
///     hosted = { header = "forwarded", hops = 2, ipv6_prefix = 56 }
///     laptop = "peer"
///     "#,
/// )?;
/// assert_eq!(clients["hosted"], ClientIp::forwarded().hops(2)?.ipv6_prefix(56)?);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// In an environment variable, `trust` is one text: `private, 203.0.113.0/24`.
#[doc(alias("X-Forwarded-For", "proxy"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIp {
    forwarding: Option<Forwarding>,
    ipv6_prefix: u8,
}

/// A header, and the proxies that are trusted to write it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Forwarding {
    header: HeaderName,
    form: HeaderForm,
    trust: Trust,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeaderForm {
    XForwardedFor,
    Forwarded,
    /// One address.
    Single,
    /// One address and a port.
    SingleWithPort,
}

impl ClientIp {
    /// Maximum number of trusted hops in a walk. It bounds the work if a client is trusted by
    /// mistake.
    const MAX_HOPS: usize = u8::MAX as usize;

    /// Reads `X-Forwarded-For`: comma-separated addresses. Each proxy appends the address of its
    /// client.
    #[doc(alias = "X-Forwarded-For")]
    pub fn x_forwarded_for() -> ClientIpBuilder {
        ClientIpBuilder::new("x-forwarded-for")
    }

    /// Reads `Forwarded` (RFC 7239): the `for` of its elements.
    pub fn forwarded() -> ClientIpBuilder {
        ClientIpBuilder::new("forwarded")
    }

    /// Reads a header that holds one address, such as `CF-Connecting-IP`, `True-Client-IP` or
    /// `X-Real-IP`. Its address is the client, even if it is a trusted address. A header with other
    /// content, or one that is repeated, is malformed: then the peer is counted.
    ///
    /// Use a header that the trusted peer sets on every request, overwriting the client's value.
    ///
    /// `X-Forwarded-For` and `Forwarded`, in any case, are read as lists, as by the functions of
    /// the same names. In `CloudFront-Viewer-Address`, a port always follows the address, also that
    /// of IPv6 without brackets; a value without a port is malformed.
    ///
    /// [`trust`](ClientIpBuilder::trust) and [`hops`](ClientIpBuilder::hops) return an error if this is not a valid
    /// header name.
    pub fn header(name: &str) -> ClientIpBuilder {
        ClientIpBuilder::new(name)
    }

    /// Reads no header, like [`PeerIp`](crate::extract::PeerIp), but with a configurable prefix.
    /// For services that have a proxy only in some deployments.
    pub fn peer() -> Self {
        Self {
            forwarding: None,
            ipv6_prefix: 64,
        }
    }

    fn behind(header: HeaderName, trust: Trust) -> Self {
        let form = match header.as_str() {
            "x-forwarded-for" => HeaderForm::XForwardedFor,
            "forwarded" => HeaderForm::Forwarded,
            "cloudfront-viewer-address" => HeaderForm::SingleWithPort,
            _ => HeaderForm::Single,
        };
        Self {
            forwarding: Some(Forwarding {
                header,
                form,
                trust,
            }),
            ..Self::peer()
        }
    }

    /// Sets the number of bits of an IPv6 address that identify a caller. Defaults to 64, since one
    /// host owns all addresses of a /64.
    ///
    /// # Errors
    ///
    /// If `bits` is not in 1..=128.
    pub fn ipv6_prefix(self, bits: u8) -> Result<Self, ConfigError> {
        match bits {
            1..=128 => Ok(Self {
                ipv6_prefix: bits,
                ..self
            }),
            _ => Err(ConfigError::new(format!(
                "an IPv6 prefix of {bits} bits: use 1 to 128, such as 64, the network of one host"
            ))),
        }
    }

    /// The key of requests from this address, for [a single caller's policies](crate::select::Tiers::caller) and for a
    /// [`Limiter`](crate::Limiter).
    pub fn key_of(&self, address: IpAddr) -> Key {
        Key::network(address, self.ipv6_prefix)
    }

    /// The client's address, for your own use. `None` for a process on a unix socket, or if the server recorded no
    /// address.
    pub fn address(&self, request: &Parts) -> Option<IpAddr> {
        match self.client(request, None) {
            Peer::Address(address) => Some(address.to_canonical()),
            Peer::Unix | Peer::Unknown => None,
        }
    }

    /// `layer` is notified of mistakes.
    fn client(&self, request: &Parts, layer: Option<&Notifier>) -> Peer {
        Peer::of(request, |peer| {
            if let Some(forwarding) = &self.forwarding {
                return forwarding.client(request, peer, layer);
            }
            if let Some(layer) = layer {
                notice_proxy(layer, peer, request, None);
            }
            peer
        })
    }
}

impl KeyExtractor for ClientIp {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        self.client(request, None).key(self.ipv6_prefix)
    }

    fn examine(&self, request: &Parts, layer: &Notifier) {
        self.client(request, Some(layer));
    }

    fn forms(&self) -> KeyForms {
        KeyForms::ADDRESS
    }
}

impl Forwarding {
    fn client(&self, request: &Parts, peer: Peer, layer: Option<&Notifier>) -> Peer {
        // axum records no address of a peer on a unix socket.
        let is_unknown = peer == Peer::Unknown && self.trust.takes_unknown_for_unix();
        let peer = if is_unknown { Peer::Unix } else { peer };
        if !self.trust.covers_peer(peer) {
            if let Some(layer) = layer {
                notice_proxy(layer, peer, request, Some(&self.header));
            }
            return peer;
        }
        if let Some(layer) = layer {
            layer.not_forwarded();
        }
        if let Some(layer) = layer
            && !request.headers.contains_key(&self.header)
        {
            notice_other_header(layer, request, &self.header);
        }
        let values = request.headers.get_all(&self.header).iter();
        let lines = values.map(HeaderValue::as_bytes);
        // Lists are read from the end, where the trusted proxies append: a client may write anything before that.
        let client = match self.form {
            HeaderForm::Single => one_address(lines, node::address).unwrap_or(peer),
            HeaderForm::SingleWithPort => {
                one_address(lines, node::address_with_port).unwrap_or(peer)
            }
            HeaderForm::XForwardedFor => self.walk(peer, lines.rev().flat_map(hops), layer),
            HeaderForm::Forwarded => self.walk(peer, lines.rev().flat_map(elements), layer),
        };
        // A trusted `unix` is the application's word for this. A number of hops is not: it may listen on TCP.
        if let Some(layer) = layer
            && is_unknown
            && client == Peer::Unix
            && matches!(self.trust, Trust::Hops(_))
        {
            notice_no_address(layer);
        }
        client
    }

    /// Follows the entries that trusted hops have written, starting at the peer. Entries beyond the
    /// client's are never parsed, except to report a proxy.
    fn walk(
        &self,
        peer: Peer,
        mut entries: impl Iterator<Item = Option<Peer>>,
        layer: Option<&Notifier>,
    ) -> Peer {
        let (client, is_trusted) = match &self.trust {
            Trust::Hops(hops) => {
                let client = self.count(peer, hops.get(), &mut entries, layer);
                (client, client == peer)
            }
            Trust::Networks(trusted) => {
                let client = follow(peer, trusted, &mut entries);
                (client, covers(trusted, client))
            }
        };
        // In the service's own network, and with an entry before it: probably another proxy.
        if let Some(layer) = layer
            && client.is_near()
            && !is_trusted
            && let Peer::Address(address) = client
            && matches!(entries.next(), Some(Some(Peer::Address(_))))
        {
            let (header, fix) = (&self.header, self.trust.to_include(address));
            layer.proxy_header(|| {
                format!(
                    "the client {address} in `{header}` has an entry before it, so it is probably a proxy, and all of its clients \
                     share one count: {fix}, or ignore this if it is a client{PROXY_HEADER}"
                )
            });
        }
        client
    }

    /// Returns the last address in this number of entries.
    fn count(
        &self,
        peer: Peer,
        hops: u8,
        entries: &mut impl Iterator<Item = Option<Peer>>,
        layer: Option<&Notifier>,
    ) -> Peer {
        let mut client = peer;
        let mut read = 0;
        for hop in entries.take(hops.into()) {
            read += 1;
            // A hop without an address takes its place in the count, or a client could move the entry that counts.
            if let Some(hop) = hop
                && hop != Peer::Unix
            {
                client = hop;
            }
        }
        // Without any entry, the request is the proxy's own, such as a health check.
        if let Some(layer) = layer
            && (1..hops).contains(&read)
        {
            let header = &self.header;
            layer.proxy_header(|| {
                format!(
                    "a request has only {read} of {hops} entries in `{header}`, so it has bypassed a proxy, or there are fewer \
                     proxies, and clients can choose the address that counts: let no client bypass the proxies, or use \
                     `.hops({read})`{PROXY_HEADER}"
                )
            });
        }
        client
    }
}

/// Returns the first untrusted hop, or the last one before an entry without an address.
fn follow(
    peer: Peer,
    trusted: &[Trusted],
    entries: &mut impl Iterator<Item = Option<Peer>>,
) -> Peer {
    let mut client = peer;
    let mut hop = peer;
    for _ in 0..ClientIp::MAX_HOPS {
        if !covers(trusted, hop) {
            break;
        }
        // Without an address, the entry may hide an untrusted hop: do not read beyond it.
        let Some(Some(next)) = entries.next() else {
            break;
        };
        hop = next;
        // All processes on sockets would share one count, so the last address counts instead.
        if hop != Peer::Unix {
            client = hop;
        }
    }
    client
}

/// Returns the hops of a line of `X-Forwarded-For` from right to left.
fn hops(line: &[u8]) -> impl Iterator<Item = Option<Peer>> {
    line.rsplit(|byte| *byte == b',').map(node::hop)
}

/// Returns the address in a header of one value. `None` if the header is repeated: it is unknown which value the trusted
/// proxy has written.
fn one_address<'a>(
    mut lines: impl Iterator<Item = &'a [u8]>,
    read: fn(&[u8]) -> Option<IpAddr>,
) -> Option<Peer> {
    let value = lines.next()?;
    if lines.next().is_some() {
        return None;
    }
    Some(Peer::Address(read(value)?))
}
