//! `Forwarded` (RFC 7239): a list of elements such as `for="[2001:db8::7]:4711";proto=https`.

use std::iter;
use std::net::IpAddr;

use super::node;

/// The addresses of a line's elements from the right, `None` for an element without one.
///
/// An element is found by its own bytes, whatever is to the left of it: a client that opens a quoted string there cannot
/// pull into it what a proxy has appended.
pub(super) fn elements(line: &[u8]) -> impl Iterator<Item = Option<IpAddr>> {
    let mut left = Some(line);
    iter::from_fn(move || {
        let line = left.take()?;
        let mut quoted = false;
        for (at, byte) in line.iter().enumerate().rev() {
            match byte {
                // The one that closes a string comes first here, the one that opens it last.
                b'"' => quoted = !quoted || is_escaped(line, at),
                b',' if !quoted => {
                    left = Some(&line[..at]);
                    return Some(client(&line[at + 1..]));
                }
                _ => {}
            }
        }
        Some(client(line))
    })
}

/// Whether this byte of a quoted string stands behind an odd number of backslashes.
fn is_escaped(line: &[u8], at: usize) -> bool {
    line[..at]
        .iter()
        .rev()
        .take_while(|byte| **byte == b'\\')
        .count()
        % 2
        == 1
}

/// The address in an element's `for`, if the element is well-formed and has one `for`.
fn client(element: &[u8]) -> Option<IpAddr> {
    let mut client = None;
    let mut rest = element.trim_ascii();
    while !rest.is_empty() {
        // RFC 7239 lets a pair be empty.
        if let Some(next) = rest.strip_prefix(b";") {
            rest = next.trim_ascii_start();
            continue;
        }
        let (name, value) = rest.split_at(rest.iter().position(|byte| *byte == b'=')?);
        let (value, next) = Value::split(&value[1..])?;
        rest = next.trim_ascii_start();
        if !is_token(name) || !(rest.is_empty() || rest.starts_with(b";")) {
            return None;
        }
        if name.eq_ignore_ascii_case(b"for") && client.replace(value.address()?).is_some() {
            return None;
        }
    }
    client
}

enum Value<'a> {
    Token(&'a [u8]),
    /// What stands between the quotes.
    Quoted(&'a [u8]),
}

impl<'a> Value<'a> {
    /// The value at the start of a text, and what follows.
    fn split(text: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let Some(string) = text.strip_prefix(b"\"") else {
            let (token, next) = text.split_at(
                text.iter()
                    .position(|byte| *byte == b';')
                    .unwrap_or(text.len()),
            );
            return Some((Self::Token(token), next));
        };
        let (string, next) = string.split_at(end_of_string(string)?);
        Some((Self::Quoted(string), &next[1..]))
    }

    fn address(&self) -> Option<IpAddr> {
        match *self {
            Self::Token(text) => node::address(text),
            Self::Quoted(text) if text.contains(&b'\\') => unescaped(text),
            Self::Quoted(text) => node::address(text),
        }
    }
}

/// Where the string, of which this is what stands behind its opening quote, is closed.
fn end_of_string(string: &[u8]) -> Option<usize> {
    let mut escaped = false;
    string.iter().position(|byte| {
        let closes = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        closes
    })
}

/// The address in a string with escaped characters. It needs none, but may have them.
fn unescaped(text: &[u8]) -> Option<IpAddr> {
    // Long enough for every address.
    let (mut buffer, mut len) = ([0; 64], 0);
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        let byte = if *byte == b'\\' { bytes.next()? } else { byte };
        *buffer.get_mut(len)? = *byte;
        len += 1;
    }
    node::address(&buffer[..len])
}

fn is_token(name: &[u8]) -> bool {
    !name.is_empty()
        && name
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}
