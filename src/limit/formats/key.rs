//! Keys as text.
//!
//! The `impl`s of [`Key`] here need the feature `serde`.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;

use super::{Setting, deserialize};
use crate::error::ConfigError;
use crate::limit::Key;

/// Parsed from a key in clear, as shown in Redis, or from the value that the key is made of.
impl Setting for Key {
    const EXPECTED: &'static str = "a caller's key in clear, `ip:192.0.2.7`, `secret:` followed by an API key, \
                                    or `~` followed by 32 digits as in Redis";

    fn read(text: &str) -> Result<Self, ConfigError> {
        match read(text) {
            Some(key) => Ok(key),
            None => Err(ConfigError::choice("caller", text, Self::EXPECTED)),
        }
    }
}

deserialize!(Key);

impl Key {
    /// Returns the text that parses as this key.
    ///
    /// # Errors
    ///
    /// If the text would parse as another kind of key, such as an address passed to [`Key::new`].
    pub(crate) fn written(&self) -> Result<&str, ConfigError> {
        Self::read(self.reveal())?;
        Ok(self.reveal())
    }
}

fn read(text: &str) -> Option<Key> {
    // First, since a secret may contain any character.
    match text.strip_prefix("secret:") {
        Some("") => return None,
        Some(secret) => return Some(Key::secret(secret)),
        None => {}
    }
    if text.contains(',') {
        let mut parts = vec![];
        for part in text.split(',') {
            if part != part.trim() {
                return None;
            }
            parts.push(read(part)?);
        }
        return Some(Key::tuple(&parts));
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

/// Returns `true` if a name looks like another kind of key.
fn is_of_another_kind(name: &str) -> bool {
    let name = name.trim().to_ascii_lowercase();
    let marked = ["ip:", "secret:", "route:", "~"]
        .iter()
        .any(|mark| name.starts_with(mark));
    marked || name == "*" || name.parse::<IpAddr>().is_ok() || name.parse::<IpNet>().is_ok()
}

/// Creates the key of an address, or of an IPv6 network: `2001:db8::/64`, or
/// `20010db8000000000000000000000001/128` as in Redis.
fn network(text: &str) -> Option<Key> {
    let Some((address, prefix)) = text.split_once('/') else {
        return Some(Key::ip(text.parse().ok()?));
    };
    let address = match address.parse::<Ipv6Addr>() {
        Ok(address) => address,
        Err(_) if address.len() == 32 => u128::from_str_radix(address, 16).ok()?.into(),
        Err(_) => return None,
    };
    let prefix = prefix.parse().ok()?;
    if !(1..=128).contains(&prefix) {
        return None;
    }
    Some(Key::network(IpAddr::V6(address), prefix))
}
