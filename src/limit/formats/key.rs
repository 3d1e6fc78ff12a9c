use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;

use super::{Setting, deserialize};
use crate::error::ConfigError;
use crate::limit::Key;

/// As in Redis, or as the value it is made of.
impl Setting for Key {
    const EXPECTED: &'static str = "a caller's key as it is, `ip:192.0.2.7`, `secret:` and an API key, \
                                    or `~` and 32 digits as in Redis";

    fn read(text: &str) -> Result<Self, ConfigError> {
        read(text).ok_or_else(|| ConfigError::choice("caller", text, Self::EXPECTED))
    }
}

deserialize!(Key);

impl Key {
    /// The text that reads back as this key.
    ///
    /// # Errors
    ///
    /// For a key that looks like one of another kind, such as an address that code has made with [`Key::new`].
    pub(crate) fn written(&self) -> Result<&str, ConfigError> {
        Self::read(self.reveal()).map(|_| self.reveal())
    }
}

fn read(text: &str) -> Option<Key> {
    // First, since a secret may have any character.
    if let Some(secret) = text.strip_prefix("secret:") {
        return (!secret.is_empty()).then(|| Key::secret(secret));
    }
    if text.contains(',') {
        let part = |part: &str| {
            if part == part.trim() {
                read(part)
            } else {
                None
            }
        };
        let parts: Option<Vec<Key>> = text.split(',').map(part).collect();
        return parts.map(|parts| Key::tuple(&parts));
    }
    if let Some(address) = text.strip_prefix("ip:") {
        return if address == "unix" {
            Some(Key::UNIX)
        } else {
            network(address)
        };
    }
    if let Some(digits) = text.strip_prefix('~') {
        return Key::of_digits(digits);
    }
    match text {
        "" => None,
        "*" => Some(Key::GLOBAL),
        "route:none" => Some(Key::NO_ROUTE),
        _ if is_of_another_kind(text) => None,
        _ => Some(Key::new(text)),
    }
}

/// Whether a name is meant as another kind of key.
fn is_of_another_kind(name: &str) -> bool {
    let name = name.trim().to_ascii_lowercase();
    let marked = ["ip:", "secret:", "route:", "~"]
        .iter()
        .any(|mark| name.starts_with(mark));
    marked || name == "*" || name.parse::<IpAddr>().is_ok() || name.parse::<IpNet>().is_ok()
}

/// The key of an address, or of an IPv6 network: `2001:db8::/64`, and `20010db8000000000000000000000001/128` as in Redis.
fn network(text: &str) -> Option<Key> {
    let Some((address, prefix)) = text.split_once('/') else {
        return text.parse().ok().map(Key::ip);
    };
    let address = match address.parse::<Ipv6Addr>() {
        Ok(address) => address,
        Err(_) if address.len() == 32 => u128::from_str_radix(address, 16).ok()?.into(),
        Err(_) => return None,
    };
    let prefix = prefix
        .parse()
        .ok()
        .filter(|prefix| (1..=128).contains(prefix))?;
    Some(Key::network(IpAddr::V6(address), prefix))
}
