//! Which hops are trusted proxies.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU8;
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net};

use super::super::peer::{Peer, is_private};
use crate::error::{ConfigError, redacted};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trust {
    /// Proxies in these networks.
    Networks(Vec<Trusted>),
    /// This number of hops, starting with the peer, at any address.
    Hops(NonZeroU8),
}

impl Trust {
    /// Returns `true` if `hop` is trusted; `hops` is its distance from the peer.
    pub(super) fn covers(&self, hop: Peer, hops: usize) -> bool {
        match self {
            Self::Networks(trusted) => trusted.iter().any(|trusted| trusted.covers(hop)),
            Self::Hops(trusted) => hops < usize::from(trusted.get()),
        }
    }

    /// Returns `true` if the setting names peers on unix sockets.
    pub(super) fn names_unix(&self) -> bool {
        matches!(self, Self::Networks(trusted) if trusted.contains(&Trusted::Unix))
    }
}

/// Returns `true` if these networks together cover all IPv4 addresses, or all IPv6 addresses.
pub(super) fn cover_all(trusted: &[Trusted]) -> bool {
    let networks = trusted.iter().filter_map(|trusted| match trusted {
        Trusted::Network(network) => Some(*network),
        Trusted::Private | Trusted::Loopback | Trusted::Unix => None,
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
            Self::Unix => false,
            Self::Network(network) => network.contains(&address),
        }
    }
}

pub(super) fn untrusted(text: &str, problem: &str) -> ConfigError {
    ConfigError::new(format!(
        "{:?} cannot be trusted: {problem}; write the proxies' network like `203.0.113.0/24`, an address, `private`, \
         `loopback` or `unix`, or trust a number of hops",
        redacted(text)
    ))
}

impl FromStr for Trusted {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let network = match text {
            "private" => return Ok(Self::Private),
            "loopback" => return Ok(Self::Loopback),
            "unix" => return Ok(Self::Unix),
            _ => text
                .parse()
                .or_else(|_| text.parse().map(|address: IpAddr| address.into())),
        };
        let unknown = |_| untrusted(text, "it is not one of the words, a network or an address");
        let written: IpNet = network.map_err(unknown)?;
        let network = unmapped(written);
        if network.prefix_len() == 0 {
            return Err(untrusted(
                text,
                "it covers every address, so any client could forge the header",
            ));
        }
        if written != written.trunc() {
            let (address, network) = (written.addr(), written.trunc());
            return Err(ConfigError::new(format!(
                "{text:?} cannot be trusted: it is an address within a network: use `{address}` or `{network}`"
            )));
        }
        Ok(Self::Network(network))
    }
}

impl fmt::Display for Trusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Private => f.write_str("private"),
            Self::Loopback => f.write_str("loopback"),
            Self::Unix => f.write_str("unix"),
            Self::Network(network) if network.prefix_len() == network.max_prefix_len() => {
                network.addr().fmt(f)
            }
            Self::Network(network) => network.fmt(f),
        }
    }
}

/// Converts a network of IPv4-mapped addresses to IPv4, since addresses are compared as IPv4.
fn unmapped(network: IpNet) -> IpNet {
    let IpNet::V6(v6) = network else {
        return network.trunc();
    };
    let v4 = v6
        .network()
        .to_ipv4_mapped()
        .zip(v6.prefix_len().checked_sub(96));
    v4.and_then(|(address, prefix)| Ipv4Net::new(address, prefix).ok())
        .map_or(network.trunc(), IpNet::V4)
}
