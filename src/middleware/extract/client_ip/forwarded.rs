//! `Forwarded` (RFC 7239): a list of elements such as `for="[2001:db8::7]:4711";proto=https`.

use std::iter;

use super::super::peer::Peer;
use super::node;

/// Returns the hops of a line's elements from right to left, `None` for an element without an
/// address.
///
/// An element is parsed from the right, independently of the bytes to its left: a client cannot
/// open a quoted string there that swallows the element that a proxy has appended.
pub(super) fn elements(line: &[u8]) -> impl Iterator<Item = Option<Peer>> {
    let mut left = Some(line);
    iter::from_fn(move || {
        let line = left.take()?;
        let mut quoted = false;
        for (at, byte) in line.iter().enumerate().rev() {
            match byte {
                // Read backwards: the closing quote of a string comes before its opening one.
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

/// Returns `true` if an odd number of backslashes precedes this byte of a quoted string.
fn is_escaped(line: &[u8], at: usize) -> bool {
    let before = line[..at].iter().rev();
    let backslashes = before.take_while(|byte| **byte == b'\\').count();
    backslashes % 2 == 1
}

/// Returns the hop of an element's `for`, if the element is well-formed and has exactly one
/// `for`.
fn client(element: &[u8]) -> Option<Peer> {
    let mut client = None;
    let mut rest = element.trim_ascii();
    while !rest.is_empty() {
        // RFC 7239 allows empty pairs.
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
        if !name.eq_ignore_ascii_case(b"for") {
            continue;
        }
        // With two, it is unknown which one the proxy has written.
        if client.is_some() {
            return None;
        }
        client = Some(value.hop()?);
    }
    client
}

enum Value<'a> {
    Token(&'a [u8]),
    /// The text between the quotes.
    Quoted(&'a [u8]),
}

impl<'a> Value<'a> {
    /// Splits a text after its leading value.
    fn split(text: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let Some(string) = text.strip_prefix(b"\"") else {
            let end = text.iter().position(|byte| *byte == b';');
            let (token, next) = text.split_at(end.unwrap_or(text.len()));
            return Some((Self::Token(token), next));
        };
        let (string, next) = string.split_at(end_of_string(string)?);
        Some((Self::Quoted(string), &next[1..]))
    }

    fn hop(&self) -> Option<Peer> {
        match *self {
            Self::Token(text) => node::hop(text),
            Self::Quoted(text) if text.contains(&b'\\') => unescaped(text),
            Self::Quoted(text) => node::hop(text),
        }
    }
}

/// Returns the index of the closing quote in the text after the opening quote.
fn end_of_string(string: &[u8]) -> Option<usize> {
    let mut is_escaped = false;
    for (at, byte) in string.iter().enumerate() {
        if *byte == b'"' && !is_escaped {
            return Some(at);
        }
        is_escaped = *byte == b'\\' && !is_escaped;
    }
    None
}

/// Parses the hop in a string with escaped characters, which are unnecessary but allowed.
fn unescaped(text: &[u8]) -> Option<Peer> {
    // Longer than any address.
    let mut buffer = [0; 64];
    let mut len = 0;
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        let byte = if *byte == b'\\' { bytes.next()? } else { byte };
        *buffer.get_mut(len)? = *byte;
        len += 1;
    }
    node::hop(&buffer[..len])
}

fn is_token(name: &[u8]) -> bool {
    !name.is_empty()
        && name
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}
