mod builder;
#[cfg(feature = "serde")]
mod formats;
mod forwarded;
mod node;
mod trust;

use std::net::IpAddr;

use http::HeaderName;
use http::request::Parts;

pub use builder::ClientIpBuilder;
use forwarded::elements;
use trust::Trust;

use super::peer::{self, Peer};
use crate::error::ConfigError;
use crate::gate::{KeyExtractor, MissingKey};
use crate::limit::Key;

/// Counts by the address of the client, for services behind proxies; IPv6 by its /64 network.
///
/// Proxies write the client's address into a header, to which a client may write too. So choose one header, and name
/// the proxies that you trust to write it: by their networks or by their number.
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
/// // a CDN that sets a header of its own
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
/// Every proxy appends the address that it was called from. So the walk starts at the peer, at the address of the
/// connection. As long as the current hop is trusted, the walk continues with what that hop has written: the next entry
/// from the right, over all lines of the header, from the last line to the first. The first hop that is not trusted is
/// the client. Nothing to the left of the client's entry is read.
///
/// The walk ends before that, at **the nearest trusted hop**, if it meets
/// - the header's end: a trusted proxy is itself the client, such as for its health checks,
/// - an entry without an address: `unknown`, `_hidden`, nothing between two commas, or what is malformed,
/// - 255 entries of trusted hops.
///
/// All clients of a proxy that hides their addresses are thus counted together, by the address of the proxy.
///
/// | entry | is |
/// |---|---|
/// | `192.0.2.7`, `192.0.2.7:4711` | 192.0.2.7: a port of digits, or an obfuscated one (`:_web`), is left out |
/// | `2001:db8::7`, `[2001:db8::7]`, `[2001:db8::7]:4711` | 2001:db8::7. Without brackets there is no port: `2001:db8::7:4711` is another address |
/// | `fe80::7%eth0`, `[fe80::7%eth0]:4711` | fe80::7, for a zone means something only to who wrote it |
/// | `::ffff:192.0.2.7` (IPv4-mapped) | 192.0.2.7, also where networks are trusted |
/// | `64:ff9b::192.0.2.7` (NAT64), `2002:c000:207::` (6to4) | counted as 192.0.2.7, but trusted only if their own network is |
/// | `0.0.0.0`, `::` | no address: malformed |
/// | `for="[2001:db8::7]:4711";proto=https` in `Forwarded` | the address in `for`, in any case, quoted or not, in whatever place. An element without `for`, with two of them or with an open string is malformed |
///
/// `X-Forwarded-For` knows no quotes, and a comma always ends an entry there.
///
/// # Who the peer is
///
/// The address of the connection is read where [`PeerIp`](crate::extract::PeerIp) reads it. An [`IpAddr`] that your
/// application has put into the request's extensions wins here too: then the header is ignored. Headers are also
/// ignored unless the peer is trusted, and all but the one that you chose.
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIp {
    forwarding: Option<Forwarding>,
    ipv6_prefix: u8,
}

/// A header, and the proxies that are trusted to write it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Forwarding {
    header: HeaderName,
    form: Form,
    trust: Trust,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    XForwardedFor,
    Forwarded,
    /// One address.
    Single,
}

impl ClientIp {
    /// How many trusted hops are passed at most: so that a client that is trusted by mistake cannot cause endless
    /// reading.
    const MAX_HOPS: usize = u8::MAX as usize;

    /// Reads `X-Forwarded-For`: addresses with commas between them, each written by the hop behind it.
    pub fn x_forwarded_for() -> ClientIpBuilder {
        ClientIpBuilder::new("x-forwarded-for")
    }

    /// Reads `Forwarded` (RFC 7239): the `for` of its elements.
    pub fn forwarded() -> ClientIpBuilder {
        ClientIpBuilder::new("forwarded")
    }

    /// Reads a header that holds one address, such as `CF-Connecting-IP`, `True-Client-IP` or `X-Real-IP`. Its address
    /// is the client, be it trusted or not. A header with anything else, or that appears twice, is malformed: the peer
    /// is counted.
    ///
    /// The header has to be one that the trusted peer sets on every request, and never takes over from the client.
    ///
    /// `X-Forwarded-For` and `Forwarded`, in any case, are read as lists, as they are by the functions of their names.
    ///
    /// [`trust`](ClientIpBuilder::trust) and [`hops`](ClientIpBuilder::hops) return an error if this is not a valid
    /// header name.
    pub fn header(name: &str) -> ClientIpBuilder {
        ClientIpBuilder::new(name)
    }

    /// Reads no header: as [`PeerIp`](crate::extract::PeerIp), for services that have a proxy only in some deployments,
    /// and with a configurable prefix.
    pub fn peer() -> Self {
        Self {
            forwarding: None,
            ipv6_prefix: 64,
        }
    }

    fn behind(header: HeaderName, trust: Trust) -> Self {
        let form = match header.as_str() {
            "x-forwarded-for" => Form::XForwardedFor,
            "forwarded" => Form::Forwarded,
            _ => Form::Single,
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

    /// Sets how many bits of an IPv6 address are counted by. Defaults to 64, since one host owns all addresses of a
    /// /64.
    ///
    /// # Errors
    ///
    /// Unless it is from 1 to 128.
    pub fn ipv6_prefix(self, bits: u8) -> Result<Self, ConfigError> {
        match bits {
            1..=128 => Ok(Self {
                ipv6_prefix: bits,
                ..self
            }),
            _ => Err(ConfigError::new(format!(
                "an IPv6 prefix of {bits} bits: write 1 to 128, such as 64, which one host owns"
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
        match self.client(request) {
            Peer::Address(address) => Some(address.to_canonical()),
            Peer::Unix | Peer::Unknown => None,
        }
    }

    fn client(&self, request: &Parts) -> Peer {
        if let Some(address) = peer::explicit(request) {
            return Peer::Address(address);
        }
        let peer = Peer::of(request);
        self.forwarding
            .as_ref()
            .map_or(peer, |forwarding| forwarding.client(request, peer))
    }
}

impl KeyExtractor for ClientIp {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        match self.client(request) {
            Peer::Address(address) => Ok(self.key_of(address)),
            Peer::Unix => Ok(Key::UNIX),
            Peer::Unknown => Err(peer::unknown()),
        }
    }
}

impl Forwarding {
    fn client(&self, request: &Parts, peer: Peer) -> Peer {
        let peer = if peer == Peer::Unknown && self.trust.names_unix() {
            Peer::Unix
        } else {
            peer
        };
        let lines = request
            .headers
            .get_all(&self.header)
            .iter()
            .map(|line| line.as_bytes());
        match self.form {
            Form::XForwardedFor => self.walk(
                peer,
                lines
                    .rev()
                    .flat_map(|line| line.rsplit(|byte| *byte == b',').map(node::address)),
            ),
            Form::Forwarded => self.walk(peer, lines.rev().flat_map(elements)),
            Form::Single => {
                let mut values = lines;
                match (values.next(), values.next()) {
                    (Some(value), None) if self.trust.covers(peer, 0) => {
                        node::address(value).map_or(peer, Peer::Address)
                    }
                    _ => peer,
                }
            }
        }
    }

    /// Walks from the peer along what trusted hops have written, and returns the first hop that is not trusted, or the
    /// last one before an entry without an address.
    fn walk(&self, peer: Peer, mut entries: impl Iterator<Item = Option<IpAddr>>) -> Peer {
        let mut hop = peer;
        for hops in 0..ClientIp::MAX_HOPS {
            if !self.trust.covers(hop, hops) {
                break;
            }
            // Read only now: an entry that somebody else wrote is not even looked at.
            let Some(Some(address)) = entries.next() else {
                break;
            };
            hop = Peer::Address(address);
        }
        hop
    }
}
