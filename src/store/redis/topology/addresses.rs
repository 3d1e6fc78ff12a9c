//! Where to reach servers that announce addresses of another network: behind a NAT, in Docker, by forwarded ports.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::error::{ConfigError, printable};
use crate::util::contain;

type Reachable = dyn Fn(&str, u16) -> Option<(String, u16)> + Send + Sync;

/// Maps the addresses that servers announce to those at which this process reaches them.
#[derive(Clone, Default)]
pub(in crate::store::redis) struct AddressMap(Option<Arc<Reachable>>);

/// Returns an announced host for an error.
fn shown(host: &str) -> String {
    printable(host, 255)
}

impl AddressMap {
    pub(in crate::store::redis) fn new(
        reachable: impl Fn(&str, u16) -> Option<(String, u16)> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(reachable)))
    }

    /// Returns the reachable address, or `None` if it is the announced one.
    ///
    /// # Errors
    ///
    /// If the application's closure panics or returns an address that cannot be reached.
    pub(super) fn reach(
        &self,
        host: &str,
        port: u16,
    ) -> Result<Option<(String, u16)>, ConfigError> {
        let Some(reachable) = &self.0 else {
            return Ok(None);
        };
        let Some(reached) = contain(|| reachable(host, port)) else {
            return Err(ConfigError::new(format!(
                "the address map panicked for {}:{port}: return `None` for addresses that it does not know",
                shown(host)
            )));
        };
        match reached {
            Some((to, to_port)) if to.is_empty() || to_port == 0 => Err(ConfigError::new(format!(
                "the address map leads from {}:{port} to \"{to}:{to_port}\", which is no address: map it to a host and a \
                 port, or to none to keep it",
                shown(host)
            ))),
            reached => Ok(reached),
        }
    }

    /// Verifies that different announced addresses lead to different reachable ones.
    ///
    /// # Errors
    ///
    /// Names two that do not, or returns the error of [`reach`](Self::reach).
    pub(super) fn check<'a>(
        &self,
        announced: impl Iterator<Item = (&'a str, u16)>,
    ) -> Result<(), ConfigError> {
        if self.0.is_none() {
            return Ok(());
        }
        let announced: HashSet<_> = announced.collect();
        let mut reached = HashMap::new();
        for (host, port) in announced {
            let to = self.reach(host, port)?;
            let to = to.unwrap_or_else(|| (host.to_owned(), port));
            let reached_at = format!("{}:{}", to.0, to.1);
            if let Some((other, other_port)) = reached.insert(to, (host, port)) {
                let mut both = [
                    format!("{}:{other_port}", shown(other)),
                    format!("{}:{port}", shown(host)),
                ];
                both.sort();
                return Err(two_to_one(&both[0], &both[1], &reached_at));
            }
        }
        Ok(())
    }
}

/// Splits `host:port`; an IPv6 address may have brackets.
pub(in crate::store) fn host_and_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Some((host, port.parse().ok()?))
}

/// The error of a map that leads from two announced addresses to one reachable address.
pub(in crate::store) fn two_to_one(one: &str, other: &str, reachable: &str) -> ConfigError {
    ConfigError::new(format!(
        "the address map leads from {one} and {other} to {reachable}: map each announced address to a different one"
    ))
}

impl fmt::Debug for AddressMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AddressMap")
            .field(&self.0.is_some())
            .finish()
    }
}
