//! One entry of a header.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::super::peer::Peer;

/// Parses the hop that a proxy has written: an address, or `unix:`, which nginx writes for a peer on
/// a unix socket.
pub(super) fn hop(node: &[u8]) -> Option<Peer> {
    match node.trim_ascii() {
        b"unix:" => Some(Peer::Unix),
        node => address(node).map(Peer::Address),
    }
}

/// Parses an address that a port always follows, without brackets around IPv6.
pub(super) fn address_with_port(node: &[u8]) -> Option<IpAddr> {
    let node = str::from_utf8(node.trim_ascii()).ok()?;
    let (address, port) = node.rsplit_once(':')?;
    // A parsed number may have a sign.
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    if !is_port {
        return None;
    }
    let address: IpAddr = address.parse().ok()?;
    of_a_host(address.to_canonical())
}

/// Returns the address, or `None` for the unspecified one, which no host has.
fn of_a_host(address: IpAddr) -> Option<IpAddr> {
    if address.is_unspecified() {
        return None;
    }
    Some(address)
}

/// Parses an address in the forms that proxies write: bare, with a port, with a zone, or an IPv6
/// address in brackets. `None` for other text, such as `unknown`, and for addresses that no host
/// has, such as `0.0.0.0`.
///
/// An IPv4-mapped address is returned as IPv4.
pub(super) fn address(node: &[u8]) -> Option<IpAddr> {
    let node = str::from_utf8(node.trim_ascii()).ok()?;
    let address = match node.strip_prefix('[') {
        Some(bracketed) => {
            let (address, port) = bracketed.split_once(']')?;
            if !port.is_empty() && !is_port(port.strip_prefix(':')?) {
                return None;
            }
            v6(address)?.to_canonical()
        }
        // Without brackets, an IPv6 address has no port: its apparent port is the last group.
        None => match v6(node) {
            Some(address) => address.to_canonical(),
            None => v4(node)?.into(),
        },
    };
    of_a_host(address)
}

fn v4(text: &str) -> Option<Ipv4Addr> {
    match text.split_once(':') {
        Some((address, port)) if is_port(port) => address.parse().ok(),
        Some(_) => None,
        None => text.parse().ok(),
    }
}

/// Parses an IPv6 address, and drops its zone, which is meaningful only on the machine that wrote
/// it.
fn v6(text: &str) -> Option<Ipv6Addr> {
    match text.split_once('%') {
        Some((_, zone)) if zone.is_empty() || !zone.bytes().all(|b| b.is_ascii_graphic()) => None,
        Some((address, _)) => address.parse().ok(),
        None => text.parse().ok(),
    }
}

/// A port of RFC 7239: up to five digits, or an obfuscated one such as `_web`.
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => {
            !name.is_empty()
                && name
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        }
        None => (1..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit()),
    }
}
