//! Callers by their network.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

use ipnet::IpNet;

use crate::error::ConfigError;
use crate::limit::{Key, Policies};
use crate::middleware::unmapped;

/// The policies of networks.
#[derive(Clone, Default)]
pub(super) struct Networks {
    /// `None` means exempt.
    policies: BTreeMap<IpNet, Option<Policies>>,
    /// The prefix lengths in use.
    v4_lengths: BTreeSet<u8>,
    v6_lengths: BTreeSet<u8>,
}

impl Networks {
    pub(super) fn is_empty(&self) -> bool {
        self.policies.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.policies.len()
    }

    /// Sets the policies of a network, and returns `true` if it is new.
    pub(super) fn insert(&mut self, network: IpNet, policies: Option<Policies>) -> bool {
        let lengths = match network {
            IpNet::V4(_) => &mut self.v4_lengths,
            IpNet::V6(_) => &mut self.v6_lengths,
        };
        lengths.insert(network.prefix_len());
        self.policies.insert(network, policies).is_none()
    }

    /// Returns the policies of the longest network that contains all addresses of `caller`, with one
    /// lookup per prefix length.
    pub(super) fn find(&self, caller: IpNet) -> Option<&Option<Policies>> {
        let lengths = match caller {
            IpNet::V4(_) => &self.v4_lengths,
            IpNet::V6(_) => &self.v6_lengths,
        };
        lengths
            .range(..=caller.prefix_len())
            .rev()
            .find_map(|length| {
                let network = IpNet::new(caller.network(), *length).ok()?;
                self.policies.get(&network.trunc())
            })
    }

    /// Returns a network that has only a part of the addresses of `caller`.
    pub(super) fn narrower(&self, caller: IpNet) -> Option<IpNet> {
        // Networks are in the order of their first addresses, and then of their lengths: a part of the caller follows it.
        let mut after = self.policies.range((Excluded(caller), Unbounded));
        let (network, _) = after.next()?;
        if !caller.contains(network) {
            return None;
        }
        Some(*network)
    }

    #[cfg(feature = "serde")]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&IpNet, &Option<Policies>)> {
        self.policies.iter()
    }
}

fn no_callers(network: IpNet, problem: &str) -> ConfigError {
    ConfigError::new(format!(
        "no callers are in the network \"{network}\": {problem}"
    ))
}

/// Returns the network as keys have it.
pub(super) fn valid(network: IpNet) -> Result<IpNet, ConfigError> {
    let address = network.addr();
    let whole = network.trunc();
    if whole.addr() != address {
        let problem = format!("it is an address within a network: use `{address}` or `{whole}`");
        return Err(no_callers(network, &problem));
    }
    match unmapped(network) {
        all if all.prefix_len() == 0 => {
            let problem = "it covers every address: set the default policies instead";
            Err(no_callers(network, problem))
        }
        // The key of an embedded IPv4 address is that address.
        single if single.prefix_len() == single.max_prefix_len() => {
            Ok(Key::network(address, 128).to_network().unwrap_or(single))
        }
        network => Ok(network),
    }
}
