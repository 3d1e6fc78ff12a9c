//! Which hops are trusted proxies.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU8;
use std::str::FromStr;

use ipnet::IpNet;

use super::super::peer::{Peer, is_link_local, is_private, is_shared, trusting};
use crate::error::{ConfigError, redacted};
use crate::middleware::unmapped;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trust {
    /// Proxies in these networks.
    Networks(Vec<Trusted>),
    /// This number of hops, starting with the peer, at any address.
    Hops(NonZeroU8),
}

impl Trust {
    pub(super) fn covers_peer(&self, peer: Peer) -> bool {
        match self {
            Self::Networks(trusted) => covers(trusted, peer),
            Self::Hops(_) => true,
        }
    }

    /// Returns `true` if a peer without a recorded address counts as one on a unix socket.
    pub(super) fn takes_unknown_for_unix(&self) -> bool {
        match self {
            Self::Networks(trusted) => trusted.contains(&Trusted::Unix),
            Self::Hops(_) => true,
        }
    }

    /// How to trust another proxy too.
    pub(super) fn to_include(&self, proxy: IpAddr) -> String {
        match self {
            Self::Networks(_) => format!("trust it too, as in `.trust([{:?}])`", trusting(proxy)),
            Self::Hops(hops) => format!("trust one more, by `.hops({})`", hops.saturating_add(1)),
        }
    }
}

pub(super) fn covers(trusted: &[Trusted], hop: Peer) -> bool {
    trusted.iter().any(|trusted| trusted.covers(hop))
}

/// Returns `true` if these networks together cover all IPv4 addresses, or all IPv6 addresses.
pub(super) fn cover_all(trusted: &[Trusted]) -> bool {
    let networks = trusted.iter().filter_map(|trusted| match trusted {
        Trusted::Network(network) => Some(*network),
        _ => None,
    });
    IpNet::aggregate(&networks.collect())
        .iter()
        .any(|network| network.prefix_len() == 0)
}

/// One entry of a setting of trusted proxies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trusted {
    Private,
    Loopback,
    LinkLocal,
    Shared,
    Unix,
    Network(IpNet),
}

impl Trusted {
    fn covers(self, hop: Peer) -> bool {
        let Peer::Address(address) = hop else {
            return self == Self::Unix && hop == Peer::Unix;
        };
        // Only IPv4-mapped addresses are converted. A tunnelled or translated address is not:
        // whether 2002:0a00:0001:: is 10.0.0.1 depends on the router.
        let address = address.to_canonical();
        match self {
            Self::Private => is_private(address),
            Self::Loopback => address.is_loopback(),
            Self::LinkLocal => is_link_local(address),
            Self::Shared => is_shared(address),
            Self::Unix => false,
            Self::Network(network) => network.contains(&address),
        }
    }
}

pub(super) fn untrusted(text: &str, problem: &str) -> ConfigError {
    ConfigError::new(format!(
        "{:?} cannot be trusted: {problem}; write the proxies' network like `203.0.113.0/24`, an address, `private`, \
         `loopback`, `link-local`, `shared` or `unix`, or trust a number of hops",
        redacted(text)
    ))
}

impl FromStr for Trusted {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let written = match text {
            "private" => return Ok(Self::Private),
            "loopback" => return Ok(Self::Loopback),
            "link-local" => return Ok(Self::LinkLocal),
            "shared" => return Ok(Self::Shared),
            "unix" => return Ok(Self::Unix),
            _ => parsed(text),
        };
        let Some(written) = written else {
            let problem = "it is not one of the words, a network or an address";
            return Err(untrusted(text, problem));
        };
        let network = unmapped(written);
        if network.prefix_len() == 0 {
            let problem = "it covers every address, so any client could forge the header";
            return Err(untrusted(text, problem));
        }
        // Rejected, since one of the two was meant, and the network trusts more.
        let whole = written.trunc();
        if written != whole {
            let address = written.addr();
            return Err(ConfigError::new(format!(
                "{text:?} cannot be trusted: it is an address within a network: use `{address}` or `{whole}`"
            )));
        }
        Ok(Self::Network(network))
    }
}

/// Parses a network, or an address as a network of one.
fn parsed(text: &str) -> Option<IpNet> {
    if let Ok(network) = text.parse() {
        return Some(network);
    }
    let address: IpAddr = text.parse().ok()?;
    Some(address.into())
}

impl fmt::Display for Trusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Private => f.write_str("private"),
            Self::Loopback => f.write_str("loopback"),
            Self::LinkLocal => f.write_str("link-local"),
            Self::Shared => f.write_str("shared"),
            Self::Unix => f.write_str("unix"),
            Self::Network(network) if network.prefix_len() == network.max_prefix_len() => {
                network.addr().fmt(f)
            }
            Self::Network(network) => network.fmt(f),
        }
    }
}
