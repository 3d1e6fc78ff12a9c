//! The client's address behind proxies: a corpus of headers that clients and proxies send,
//! including forged ones.

use std::net::{IpAddr, SocketAddr};

use http::request::Parts;
use http::{HeaderValue, Request};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tower::{Layer, service_fn};
use tower_redis_ratelimit::extract::{ClientIp, ClientIpBuilder, KeyExtractor, PeerIp};
use tower_redis_ratelimit::{ConfigError, Key, LocalStore, RateLimitLayer};

use crate::mocks::*;

/// The trusted proxies, the peer, the lines of `X-Forwarded-For`, and the expected client. In most
/// cases the client is 198.51.100.7, the proxies are in 10.0.0.0/8 and the CDN in 203.0.113.0/24.
/// Forged entries are 6.6.6.6.
type Case = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
);

/// Each case also applies to `Forwarded`, with one element per entry.
const LISTS: &[Case] = &[
    // Headers are read only if the peer is a trusted proxy.
    ("private", "10.0.0.1", &[], "10.0.0.1"),
    ("private", "10.0.0.1", &["198.51.100.7"], "198.51.100.7"),
    ("private", "127.0.0.1", &["198.51.100.7"], "198.51.100.7"),
    (
        "private",
        "172.31.255.254",
        &["198.51.100.7"],
        "198.51.100.7",
    ),
    ("private", "192.168.3.4", &["198.51.100.7"], "198.51.100.7"),
    ("private", "::1", &["198.51.100.7"], "198.51.100.7"),
    ("private", "fd12::1", &["198.51.100.7"], "198.51.100.7"),
    (
        "private",
        "::ffff:10.0.0.1",
        &["198.51.100.7"],
        "198.51.100.7",
    ),
    ("private", "198.51.100.7", &["6.6.6.6"], "198.51.100.7"),
    (
        "private",
        "198.51.100.7",
        &["6.6.6.6, 10.0.0.1"],
        "198.51.100.7",
    ),
    (
        "private",
        "198.51.100.7",
        &["6.6.6.6", "10.0.0.1", "127.0.0.1"],
        "198.51.100.7",
    ),
    ("private", "172.32.0.1", &["6.6.6.6"], "172.32.0.1"),
    ("private", "192.169.0.1", &["6.6.6.6"], "192.169.0.1"),
    ("private", "100.64.0.1", &["6.6.6.6"], "100.64.0.1"),
    ("private", "169.254.0.1", &["6.6.6.6"], "169.254.0.1"),
    ("private", "fe80::1", &["6.6.6.6"], "fe80::1"),
    ("private", "2001:db8::1", &["6.6.6.6"], "2001:db8::1"),
    ("loopback", "127.9.9.9", &["198.51.100.7"], "198.51.100.7"),
    ("loopback", "10.0.0.1", &["6.6.6.6"], "10.0.0.1"),
    // An address that embeds a private one, by translation or tunnel, is not private.
    (
        "private",
        "64:ff9b::10.0.0.1",
        &["6.6.6.6"],
        "64:ff9b::10.0.0.1",
    ),
    ("private", "2002:a00:1::1", &["6.6.6.6"], "2002:a00:1::1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 64:ff9b::10.0.0.2"],
        "64:ff9b::10.0.0.2",
    ),
    (
        "64:ff9b::/96",
        "64:ff9b::203.0.113.1",
        &["198.51.100.7"],
        "198.51.100.7",
    ),
    // Entries are read from right to left.
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6,198.51.100.7,10.0.0.2"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 10.9.9.9, 198.51.100.7, 10.0.0.3, 10.0.0.2"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["10.9.9.9, 198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["198.51.100.7, 6.6.6.6, 198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[" \t198.51.100.7\t , \t10.0.0.2 "],
        "198.51.100.7",
    ),
    (
        "private 203.0.113.0/24",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, 203.0.113.9"],
        "198.51.100.7",
    ),
    (
        "203.0.113.0/24",
        "203.0.113.9",
        &["6.6.6.6, 198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "203.0.113.0/24",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7"],
        "10.0.0.1",
    ),
    (
        "203.0.113.9",
        "203.0.113.9",
        &["6.6.6.6, 203.0.113.8"],
        "203.0.113.8",
    ),
    (
        "203.0.113.0/25",
        "203.0.113.9",
        &["6.6.6.6, 198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "2001:db8:cd::/48",
        "2001:db8:cd:1::1",
        &["6.6.6.6, 2001:db8:cc::7"],
        "2001:db8:cc::7",
    ),
    (
        "2001:db8:cd::1",
        "2001:db8:cd::1",
        &["6.6.6.6, 2001:db8:cd::2"],
        "2001:db8:cd::2",
    ),
    (
        "::ffff:203.0.113.0/120",
        "203.0.113.9",
        &["6.6.6.6, 203.0.114.1"],
        "203.0.114.1",
    ),
    (
        "203.0.113.0/24",
        "::ffff:203.0.113.9",
        &["6.6.6.6, ::ffff:c633:6407, ::ffff:203.0.113.8"],
        "198.51.100.7",
    ),
    // All lines are read, from the last one.
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6", "198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6", "198.51.100.7", "10.0.0.2"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7", "10.0.0.3, 10.0.0.2"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["10.9.9.9", "6.6.6.6", "198.51.100.7, 10.0.0.2"],
        "198.51.100.7",
    ),
    // At the end of the header, a trusted hop is the client.
    ("private", "10.0.0.1", &["10.0.0.5"], "10.0.0.5"),
    (
        "private",
        "10.0.0.1",
        &["10.0.0.5, 10.0.0.2", "10.0.0.3"],
        "10.0.0.5",
    ),
    // An entry without an address ends the walk at the nearest trusted hop.
    ("private", "10.0.0.1", &["unknown"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, unknown, 10.0.0.2"],
        "10.0.0.2",
    ),
    ("private", "10.0.0.1", &["6.6.6.6, _hidden"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, _hidden, 10.0.0.2"],
        "10.0.0.2",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, nonsense, 10.0.0.2"],
        "10.0.0.2",
    ),
    ("private", "10.0.0.1", &["6.6.6.6,"], "10.0.0.1"),
    ("private", "10.0.0.1", &["6.6.6.6, , 10.0.0.2"], "10.0.0.2"),
    ("private", "10.0.0.1", &["6.6.6.6, , , "], "10.0.0.1"),
    ("private", "10.0.0.1", &[""], "10.0.0.1"),
    ("private", "10.0.0.1", &["6.6.6.6", ""], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6", "", "10.0.0.2"],
        "10.0.0.2",
    ),
    ("private", "10.0.0.1", &[",198.51.100.7"], "198.51.100.7"),
    ("private", "10.0.0.1", &["6.6.6.6, 0.0.0.0"], "10.0.0.1"),
    ("private", "10.0.0.1", &["6.6.6.6, ::"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, ::ffff:0.0.0.0"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.256"],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &["6.6.6.6, 198.51.100"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.051.100.7"],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &["6.6.6.6, 0xc6336407"], "10.0.0.1"),
    ("private", "10.0.0.1", &["6.6.6.6, 3325256711"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7/32"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, http://198.51.100.7"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7 10.0.0.2"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 2001:db8::1::2"],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &["6.6.6.6, unix:"], "10.0.0.1"),
    ("private", "10.0.0.1", &["6.6.6.6, caf\u{e9}"], "10.0.0.1"),
    // Ports, brackets, zones.
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7:4711, 10.0.0.2:80"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7:_web"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7:"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7:123456"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7:80:80"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7:_"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [198.51.100.7]"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 2001:db8::7"],
        "2001:db8::7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 2001:db8::7:4711"],
        "2001:db8::7:4711",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [2001:db8::7]"],
        "2001:db8::7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [2001:DB8::7]:4711, [fd00::1]:443"],
        "2001:db8::7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [2001:db8::7]:x"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [2001:db8::7]4711"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [2001:db8::7"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 2001:db8::7]"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [[2001:db8::7]]"],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &["6.6.6.6, []:80"], "10.0.0.1"),
    ("private", "10.0.0.1", &["6.6.6.6, fe80::7%eth0"], "fe80::7"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [fe80::7%eth0]:4711"],
        "fe80::7",
    ),
    ("private", "10.0.0.1", &["6.6.6.6, fe80::7%"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, fe80::7%eth 0"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7%eth0"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, ::ffff:198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, [::ffff:c633:6407]:4711"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, ::ffff:10.0.0.2"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, fd00::2%eth0"],
        "198.51.100.7",
    ),
    // Hops: the entry at this distance from the right, with any content.
    (
        "hops 1",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "hops 1",
        "203.0.113.9",
        &["6.6.6.6, 198.51.100.7"],
        "198.51.100.7",
    ),
    ("hops 1", "203.0.113.9", &["6.6.6.6, 10.0.0.5"], "10.0.0.5"),
    (
        "hops 1",
        "203.0.113.9",
        &["6.6.6.6", "198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "hops 2",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, 203.0.113.9"],
        "198.51.100.7",
    ),
    (
        "hops 2",
        "10.0.0.1",
        &["6.6.6.6", "198.51.100.7", "203.0.113.9"],
        "198.51.100.7",
    ),
    (
        "hops 3",
        "10.0.0.1",
        &["10.0.0.4,10.0.0.3,10.0.0.2,10.0.0.1"],
        "10.0.0.3",
    ),
    (
        "hops 2",
        "10.0.0.1",
        &["6.6.6.6, unknown, 203.0.113.9"],
        "203.0.113.9",
    ),
    (
        "hops 2",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, unknown"],
        "198.51.100.7",
    ),
    (
        "hops 2",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, "],
        "198.51.100.7",
    ),
    (
        "hops 3",
        "10.0.0.1",
        &["198.51.100.7, nope, 203.0.113.9"],
        "198.51.100.7",
    ),
    (
        "hops 3",
        "10.0.0.1",
        &["6.6.6.6, nope, 198.51.100.7, 203.0.113.9"],
        "198.51.100.7",
    ),
    (
        "hops 3",
        "10.0.0.1",
        &["nope, 198.51.100.7, 203.0.113.9"],
        "198.51.100.7",
    ),
    ("hops 2", "10.0.0.1", &["nope, nope"], "10.0.0.1"),
    // nginx writes `unix:` for a peer on a unix socket.
    (
        "hops 2",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, unix:"],
        "198.51.100.7",
    ),
    ("hops 1", "10.0.0.1", &["6.6.6.6, unix:"], "10.0.0.1"),
    (
        "10.0.0.1 unix",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7, unix:"],
        "198.51.100.7",
    ),
    (
        "10.0.0.1 unix",
        "10.0.0.1",
        &["6.6.6.6, unix:, 198.51.100.7"],
        "198.51.100.7",
    ),
    ("10.0.0.1 unix", "10.0.0.1", &["unix:"], "10.0.0.1"),
    ("10.0.0.1", "10.0.0.1", &["6.6.6.6, unix:"], "10.0.0.1"),
    ("10.0.0.1 unix", "10.0.0.1", &["6.6.6.6, unix"], "10.0.0.1"),
    ("10.0.0.1 unix", "10.0.0.1", &["6.6.6.6, UNIX:"], "10.0.0.1"),
    (
        "10.0.0.1 unix",
        "10.0.0.1",
        &["6.6.6.6, unix:x"],
        "10.0.0.1",
    ),
    // The peers of some platforms.
    (
        "link-local",
        "169.254.130.1",
        &["198.51.100.7"],
        "198.51.100.7",
    ),
    ("link-local", "fe80::1", &["198.51.100.7"], "198.51.100.7"),
    ("link-local", "169.253.0.1", &["6.6.6.6"], "169.253.0.1"),
    ("shared", "100.64.0.3", &["198.51.100.7"], "198.51.100.7"),
    (
        "shared",
        "100.127.255.255",
        &["198.51.100.7"],
        "198.51.100.7",
    ),
    ("shared", "100.128.0.1", &["6.6.6.6"], "100.128.0.1"),
    ("hops 2", "10.0.0.1", &["203.0.113.9"], "203.0.113.9"),
    ("hops 2", "10.0.0.1", &[], "10.0.0.1"),
    (
        "hops 255",
        "10.0.0.1",
        &["198.51.100.7, 203.0.113.9"],
        "198.51.100.7",
    ),
];

/// Only for `X-Forwarded-For`, which has no quotes.
const X_FORWARDED_FOR: &[Case] = &[
    (
        "private",
        "10.0.0.1",
        &[r#"6.6.6.6, "198.51.100.7""#],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#""6.6.6.6, 198.51.100.7"#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#""6.6.6.6, 198.51.100.7, 10.0.0.2""#],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &["for=6.6.6.6"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6; 198.51.100.7"],
        "10.0.0.1",
    ),
];

/// Cases for `Forwarded` only, with its raw lines.
const FORWARDED: &[Case] = &[
    // The examples of RFC 7239, and the variations that it allows.
    (
        "private",
        "10.0.0.1",
        &[r#"for=6.6.6.6, for="_gazonk""#],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"For="[2001:db8:cafe::17]:4711""#],
        "2001:db8:cafe::17",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=198.51.100.7;proto=http;by=203.0.113.43"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=6.6.6.6, for=198.51.100.7"],
        "198.51.100.7",
    ),
    ("private", "10.0.0.1", &["FOR=198.51.100.7"], "198.51.100.7"),
    (
        "private",
        "10.0.0.1",
        &["proto=https;host=example.org;for=198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=198.51.100.7;"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[";;for=198.51.100.7;;proto=https"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=198.51.100.7 ; proto=https"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=[2001:db8::7]:80"],
        "2001:db8::7",
    ),
    ("private", "10.0.0.1", &["for=2001:db8::7"], "2001:db8::7"),
    (
        "private",
        "10.0.0.1",
        &[r#"for="198.51.100.7""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for="19\8.51.100.\7""#],
        "198.51.100.7",
    ),
    // Elements without a client.
    (
        "private",
        "10.0.0.1",
        &["for=6.6.6.6, proto=https"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=6.6.6.6, by=198.51.100.7"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=6.6.6.6, 198.51.100.7"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=6.6.6.6;for=198.51.100.7"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=198.51.100.7;For=198.51.100.7"],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &["xfor=6.6.6.6"], "10.0.0.1"),
    ("private", "10.0.0.1", &["for =6.6.6.6"], "10.0.0.1"),
    ("private", "10.0.0.1", &["for==6.6.6.6"], "10.0.0.1"),
    ("private", "10.0.0.1", &[r#"for="""#], "10.0.0.1"),
    ("private", "10.0.0.1", &["for="], "10.0.0.1"),
    ("private", "10.0.0.1", &["for"], "10.0.0.1"),
    ("private", "10.0.0.1", &["=6.6.6.6"], "10.0.0.1"),
    ("private", "10.0.0.1", &[r#"for="6.6.6.6""""#], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &[r#"for="6.6.6.6"proto=https"#],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["for=6.6.6.6 proto=https"],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &[r#"for=\6.6.6.6"#], "10.0.0.1"),
    ("private", "10.0.0.1", &[r#"for="6.6.6.6"#], "10.0.0.1"),
    ("private", "10.0.0.1", &[r#"for=6.6.6.6""#], "10.0.0.1"),
    ("private", "10.0.0.1", &[r#"for="6.6.6.6\""#], "10.0.0.1"),
    // Commas, semicolons and quotes inside strings are not separators.
    (
        "private",
        "10.0.0.1",
        &[r#"for=198.51.100.7;host="a, for=6.6.6.6""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=198.51.100.7;host="a\", for=6.6.6.6""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=198.51.100.7;host="a\\""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=6.6.6.6;host="a\\", for=198.51.100.7"#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=198.51.100.7;host="\"""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=198.51.100.7;host=";for=6.6.6.6""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"host=";for=6.6.6.6";for=198.51.100.7"#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"host="x\";for=6.6.6.6;\"";for=198.51.100.7"#],
        "198.51.100.7",
    ),
    // A string that the client opens must neither swallow what a proxy appends nor be closed by it.
    (
        "private",
        "10.0.0.1",
        &[r#"for="6.6.6.6, for=198.51.100.7"#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=6.6.6.6;x=", for=198.51.100.7"#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=6.6.6.6;x=", for="198.51.100.7""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=6.6.6.6;x="\, for="198.51.100.7""#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for=6.6.6.6;x="\, for=198.51.100.7, for="10.0.0.2";proto=http"#],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for="6.6.6.6"#, "for=198.51.100.7"],
        "198.51.100.7",
    ),
    (
        "private",
        "10.0.0.1",
        &[r#"for="10.9.9.9, for=198.51.100.7", for=10.0.0.2"#],
        "10.0.0.2",
    ),
];

/// Cases for `X-Real-IP`.
const SINGLE: &[Case] = &[
    ("private", "10.0.0.1", &["198.51.100.7"], "198.51.100.7"),
    (
        "private",
        "10.0.0.1",
        &["[2001:db8::7]:4711"],
        "2001:db8::7",
    ),
    ("private", "10.0.0.1", &["10.0.0.5"], "10.0.0.5"),
    ("private", "198.51.100.7", &["6.6.6.6"], "198.51.100.7"),
    ("private", "10.0.0.1", &[], "10.0.0.1"),
    ("private", "10.0.0.1", &[""], "10.0.0.1"),
    ("private", "10.0.0.1", &["unknown"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6, 198.51.100.7"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["6.6.6.6", "198.51.100.7"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["198.51.100.7", "198.51.100.7"],
        "10.0.0.1",
    ),
    ("hops 1", "203.0.113.9", &["198.51.100.7"], "198.51.100.7"),
    ("hops 3", "203.0.113.9", &["198.51.100.7"], "198.51.100.7"),
];

/// Cases for `CloudFront-Viewer-Address`, whose values always end with a port.
const WITH_PORT: &[Case] = &[
    (
        "private",
        "10.0.0.1",
        &["2001:db8:1:1:1319:8a2e:370:7348:46532"],
        "2001:db8:1:1:1319:8a2e:370:7348",
    ),
    (
        "private",
        "10.0.0.1",
        &["2001:db8:4:4::9:49985"],
        "2001:db8:4:4::9",
    ),
    (
        "private",
        "10.0.0.1",
        &["2001:db8:4:4::9:9985"],
        "2001:db8:4:4::9",
    ),
    (
        "private",
        "10.0.0.1",
        &["198.51.100.7:46532"],
        "198.51.100.7",
    ),
    ("hops 1", "203.0.113.9", &["198.51.100.7:1"], "198.51.100.7"),
    ("private", "198.51.100.7", &["6.6.6.6:1"], "198.51.100.7"),
    ("private", "10.0.0.1", &["198.51.100.7"], "10.0.0.1"),
    ("private", "10.0.0.1", &["198.51.100.7:65536"], "10.0.0.1"),
    ("private", "10.0.0.1", &["198.51.100.7:+1"], "10.0.0.1"),
    ("private", "10.0.0.1", &["198.51.100.7:"], "10.0.0.1"),
    (
        "private",
        "10.0.0.1",
        &["2001:db8:4:4::9:65536"],
        "10.0.0.1",
    ),
    (
        "private",
        "10.0.0.1",
        &["2001:db8:1:1:1319:8a2e:370:7348"],
        "10.0.0.1",
    ),
    ("private", "10.0.0.1", &["0.0.0.0:1"], "10.0.0.1"),
    ("private", "10.0.0.1", &[""], "10.0.0.1"),
];

fn trusting(header: ClientIpBuilder, trust: &str) -> ClientIp {
    match trust.strip_prefix("hops ") {
        Some(hops) => header.hops(hops.parse().unwrap()).unwrap(),
        None => header.trust(trust.split(' ')).unwrap(),
    }
}

fn request<L: AsRef<[u8]>>(peer: &str, header: &str, lines: &[L]) -> Parts {
    let peer = SocketAddr::new(peer.parse().unwrap(), 4711);
    let mut request = Request::builder().extension(peer);
    for line in lines {
        request = request.header(header, HeaderValue::from_bytes(line.as_ref()).unwrap());
    }
    request.body(()).unwrap().into_parts().0
}

/// Returns one line per case with an unexpected client.
fn escapes(header: &str, cases: &[Case], rewrite: impl Fn(&str) -> String) -> Vec<String> {
    let escape = |(trust, peer, lines, expected): &Case| {
        let lines: Vec<_> = lines.iter().map(|line| rewrite(line)).collect();
        let (client, request) = (
            trusting(ClientIp::header(header), trust),
            request(peer, header, &lines),
        );
        let (expected, found) = (
            expected.parse::<IpAddr>().unwrap(),
            client.address(&request),
        );
        let key = client.extract(&request).unwrap();
        let holds = found == Some(expected) && key == Key::ip(expected);
        (!holds).then(|| {
            format!("{trust}, {peer}, {header}: {lines:?}: expected {expected}, found {found:?}")
        })
    };
    cases.iter().filter_map(escape).collect()
}

/// Converts a list to the syntax of `Forwarded`.
fn elements(list: &str, element: impl Fn(&str) -> String) -> String {
    let element = |entry: &str| {
        if entry.trim().is_empty() {
            String::new()
        } else {
            element(entry.trim())
        }
    };
    list.split(',').map(element).collect::<Vec<_>>().join(", ")
}

#[test]
fn forged_headers_never_choose_the_key() {
    let mut escaped = escapes("x-forwarded-for", LISTS, str::to_owned);
    escaped.extend(escapes("x-forwarded-for", X_FORWARDED_FOR, str::to_owned));
    let quoted = |entry: &str| format!("for=\"{entry}\"");
    escaped.extend(escapes("forwarded", LISTS, |line| elements(line, quoted)));
    let bare = |entry: &str| format!("For={entry}");
    escaped.extend(escapes("forwarded", LISTS, |line| elements(line, bare)));
    let adorned = |entry: &str| {
        format!("host=\"x\\\", for=6.6.6.6;for=10.0.0.1\";for=\"{entry}\" ;proto=https;by=_me")
    };
    escaped.extend(escapes("forwarded", LISTS, |line| elements(line, adorned)));
    escaped.extend(escapes("forwarded", FORWARDED, str::to_owned));
    escaped.extend(escapes("x-real-ip", SINGLE, str::to_owned));
    escaped.extend(escapes(
        "CloudFront-Viewer-Address",
        WITH_PORT,
        str::to_owned,
    ));
    assert!(
        escaped.is_empty(),
        "{} escapes:\n{}",
        escaped.len(),
        escaped.join("\n")
    );
}

#[test]
fn only_the_chosen_header_counts() {
    let mut request = request("10.0.0.1", "x-forwarded-for", &["198.51.100.7"]);
    for other in [
        "forwarded",
        "x-real-ip",
        "cf-connecting-ip",
        "true-client-ip",
        "x-client-ip",
    ] {
        request
            .headers
            .insert(other, HeaderValue::from_static("for=6.6.6.6"));
    }
    let client = ClientIp::x_forwarded_for().trust(["private"]).unwrap();
    assert_eq!(client.address(&request), Some([198, 51, 100, 7].into()));
    assert_eq!(
        ClientIp::peer().address(&request),
        Some([10, 0, 0, 1].into())
    );
    assert_eq!(ClientIp::peer().extract(&request), PeerIp.extract(&request));
}

#[test]
fn list_headers_by_name_are_lists() {
    for (name, expected) in [
        ("X-Forwarded-For", ClientIp::x_forwarded_for()),
        ("FORWARDED", ClientIp::forwarded()),
    ] {
        assert_eq!(ClientIp::header(name).hops(1), expected.hops(1));
    }
}

#[test]
fn at_most_255_trusted_hops_are_skipped() {
    let client = ClientIp::x_forwarded_for().trust(["private"]).unwrap();
    // The first entries name the client, the last ones trusted proxies.
    for (proxies, expected) in [
        (254, [198, 51, 100, 7]),
        (255, [10, 1, 0, 255]),
        (10_000, [10, 1, 0, 255]),
    ] {
        let entry = |i: u16| IpAddr::from([10, 1, (i >> 8) as u8, i as u8]).to_string();
        let list = ["198.51.100.7".to_owned()]
            .into_iter()
            .chain((1..=proxies).rev().map(entry));
        let line = list.collect::<Vec<_>>().join(",");
        assert_eq!(
            client.address(&request("10.0.0.1", "x-forwarded-for", &[line])),
            Some(expected.into()),
            "{proxies}"
        );
    }
    let attack = ["6.6.6.6,".repeat(10_000) + "198.51.100.7"];
    let expected = Some([198, 51, 100, 7].into());
    assert_eq!(
        client.address(&request("10.0.0.1", "x-forwarded-for", &attack)),
        expected
    );
}

#[test]
fn escaped_text_of_any_length_is_parsed() {
    let client = ClientIp::forwarded().trust(["private"]).unwrap();
    for (address, expected) in [
        ("\\1".repeat(10_000), [10, 0, 0, 1]),
        (r"\1\.\2\.\3\.\4".to_owned(), [1, 2, 3, 4]),
    ] {
        let line = format!("for=\"{address}\"");
        assert_eq!(
            client.address(&request("10.0.0.1", "forwarded", &[line])),
            Some(expected.into())
        );
    }
}

#[test]
fn the_address_of_the_application_wins() {
    let mut request = request("10.0.0.1", "x-forwarded-for", &["6.6.6.6"]);
    let known: IpAddr = [192, 0, 2, 7].into();
    request.extensions.insert(known);
    for header in [
        ClientIp::x_forwarded_for(),
        ClientIp::forwarded(),
        ClientIp::header("x-real-ip"),
    ] {
        assert_eq!(
            header.clone().hops(1).unwrap().address(&request),
            Some(known)
        );
        assert_eq!(
            header.trust(["private"]).unwrap().extract(&request),
            Ok(Key::ip(known))
        );
    }
}

#[test]
fn ipv6_addresses_count_by_configured_prefix() {
    let request = |address: &str| request("10.0.0.1", "x-forwarded-for", &[address]);
    let client = ClientIp::x_forwarded_for().trust(["private"]).unwrap();
    let [home, sibling, neighbor] = [
        "2001:db8:1:200::7",
        "2001:db8:1:200::8",
        "2001:db8:1:2ff::7",
    ]
    .map(request);
    let key = |bits: u8, request: &Parts| {
        client
            .clone()
            .ipv6_prefix(bits)
            .unwrap()
            .extract(request)
            .unwrap()
    };
    assert_eq!(client.extract(&home), Ok(key(64, &home)), "the default");
    assert_eq!(key(64, &home), key(64, &sibling));
    assert_ne!(key(64, &home), key(64, &neighbor));
    assert_eq!(key(56, &home), key(56, &neighbor));
    assert_ne!(key(128, &home), key(128, &sibling));
    let same = [1, 128].map(|bits| key(bits, &request("64:ff9b::198.51.100.7")));
    assert_eq!(
        same,
        [Key::ip([198, 51, 100, 7].into()); 2],
        "NAT64 counts as the IPv4 address"
    );
}

#[test]
fn mistakes_are_reported_at_construction() {
    let header = ClientIp::x_forwarded_for;
    let refused = |text: &str| {
        let error = header().trust([text]).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{text:?} cannot be trusted: ")),
            "{text}: {error}"
        );
        error
    };
    for text in [
        "",
        "privat",
        "10.0.0.0/33",
        "10.0.0",
        "10.0.0.0/8, 10.0.0.1",
        "fe80::1%eth0",
        "example.org",
        " ::1",
    ] {
        assert!(refused(text).contains("like `203.0.113.0/24`"));
    }
    for text in ["0.0.0.0/0", "::/0", "::ffff:0:0/96"] {
        assert!(refused(text).contains("every address"));
    }
    for (text, fix) in [
        ("10.0.0.5/8", "use `10.0.0.5` or `10.0.0.0/8`"),
        ("203.0.113.7/1", "use `203.0.113.7` or `128.0.0.0/1`"),
        (
            "203.0.113.128/24",
            "use `203.0.113.128` or `203.0.113.0/24`",
        ),
        ("2001:db8::1/32", "use `2001:db8::1` or `2001:db8::/32`"),
        (
            "::ffff:203.0.113.7/120",
            "use `::ffff:203.0.113.7` or `::ffff:203.0.113.0/120`",
        ),
        ("10.0.0.5/0", "every address"),
    ] {
        let error = refused(text);
        assert!(error.contains(fix), "{error}");
    }
    for text in ["10.0.0.5/32", "2001:db8::1/128", "203.0.113.128/25"] {
        assert!(header().trust([text]).is_ok(), "{text}");
    }
    for all in [
        &["0.0.0.0/1", "128.0.0.0/1"][..],
        &["::/1", "8000::/1"],
        &[
            "private",
            "128.0.0.0/1",
            "203.0.113.7",
            "64.0.0.0/2",
            "0.0.0.0/2",
        ],
        &["0.0.0.0/1", "::ffff:128.0.0.0/97"],
    ] {
        let error = header().trust(all).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("together they cover every address"),
            "{error}"
        );
    }
    assert!(
        header()
            .trust(["0.0.0.0/1", "128.0.0.0/2", "8000::/1"])
            .is_ok()
    );
    let none: [&str; 0] = [];
    let refused = |client: Result<ClientIp, ConfigError>, problem: &str| {
        let error = client.unwrap_err().to_string();
        assert!(error.starts_with(problem), "{error}");
    };
    refused(header().trust(none), "no proxy is trusted: ");
    refused(header().hops(0), "no hop is trusted: ");
    let name = "\"x real ip\" is not a valid header name: ";
    refused(ClientIp::header("x real ip").trust(["private"]), name);
    refused(ClientIp::header("x real ip").hops(1), name);
    for bits in [0, 129, 255] {
        refused(
            ClientIp::peer().ipv6_prefix(bits),
            &format!("an IPv6 prefix of {bits} bits: "),
        );
    }
}

#[test]
fn a_missing_peer_is_reported() {
    let mut request = request("10.0.0.1", "x-forwarded-for", &["198.51.100.7"]);
    request.extensions.clear();
    let networks = ClientIp::x_forwarded_for().trust(["private"]).unwrap();
    assert!(networks.extract(&request).unwrap_err().is_misconfigured());
    assert_eq!(networks.address(&request), None);
    let hops = ClientIp::x_forwarded_for().hops(1).unwrap();
    assert_eq!(
        hops.address(&request),
        Some([198, 51, 100, 7].into()),
        "any peer is a proxy"
    );
    let problem = PeerIp.extract(&request).unwrap_err().to_string();
    assert!(problem.contains("`.trust([\"unix\"])`"), "{problem}");
    let unix = ClientIp::x_forwarded_for().trust(["unix"]).unwrap();
    assert!(
        unix.extract(&request).is_ok(),
        "such a peer counts as a unix socket"
    );
}

/// Over TCP, the server has not recorded the address, so that is reported.
#[tokio::test]
async fn hops_without_an_address_are_the_socket() {
    let problems = Problems::default();
    let hops = ClientIp::x_forwarded_for().hops(1).unwrap();
    let service = RateLimitLayer::new(LocalStore::default(), hops.clone(), gcra("api", "9/min"))
        .observer(problems.clone())
        .layer(service_fn(hello));
    for lines in [&[][..], &["unknown"], &[""]] {
        let mut request = request("10.0.0.1", "x-forwarded-for", lines);
        request.extensions.clear();
        assert_eq!(hops.extract(&request).unwrap().as_bytes(), b"ip:unix");
        assert_eq!(hops.address(&request), None);
        let request = Request::from_parts(request, String::new());
        let response: http::Response<String> = send(&service, request).await;
        assert_eq!(response.status(), 200);
    }
    let reports = problems.0.lock().unwrap();
    let [report] = &reports[..] else {
        panic!("one report is expected: {reports:?}");
    };
    assert!(
        report.contains("into_make_service_with_connect_info")
            && report.ends_with("#no-peer-address)"),
        "{report}"
    );
}

/// Two nginx on one machine, the inner one on a unix socket.
#[tokio::test]
async fn clients_behind_a_socket_count_separately() {
    let by_client = ClientIp::x_forwarded_for().trust(["unix"]).unwrap();
    let service = RateLimitLayer::new(LocalStore::default(), by_client, gcra("api", "2/min"))
        .layer(service_fn(hello));
    for client in 1..=4 {
        let request = Request::builder()
            .header("x-forwarded-for", format!("203.0.113.{client}, unix:"))
            .body(String::new())
            .unwrap();
        let response: http::Response<String> = send(&service, request).await;
        assert_eq!(response.status(), 200, "{client}");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn unix_socket_peers_can_be_trusted() {
    let (socket, _other) = tokio::net::UnixStream::pair().unwrap();
    let local = |header: &str| {
        let mut request = request("10.0.0.1", "x-forwarded-for", &[header]);
        request.extensions.clear();
        request.extensions.insert(socket.peer_addr().unwrap());
        request
    };
    let networks = ClientIp::x_forwarded_for()
        .trust(["203.0.113.0/24", "unix"])
        .unwrap();
    let hops = ClientIp::x_forwarded_for().hops(1).unwrap();
    let others = ClientIp::x_forwarded_for()
        .trust(["private", "loopback"])
        .unwrap();

    let through_a_cdn = local("6.6.6.6, 198.51.100.7, 203.0.113.9");
    assert_eq!(
        networks.address(&through_a_cdn),
        Some([198, 51, 100, 7].into())
    );
    assert_eq!(hops.address(&through_a_cdn), Some([203, 0, 113, 9].into()));
    for (client, request) in [
        (&others, &through_a_cdn),
        (&networks, &local("6.6.6.6, unknown")),
        (&hops, &local("6.6.6.6, unknown")),
    ] {
        assert_eq!(client.address(request), None);
        assert_eq!(
            client.extract(request).unwrap().as_bytes(),
            b"ip:unix",
            "all of them together"
        );
    }
}

#[tokio::test]
async fn clients_behind_two_proxies_count_separately() {
    let by_client = ClientIp::x_forwarded_for()
        .trust(["private", "203.0.113.0/24"])
        .unwrap();
    let service = RateLimitLayer::new(LocalStore::default(), by_client, gcra("api", "1/h"))
        .layer(service_fn(hello));
    for (forwarded, status) in [
        ("198.51.100.7, 203.0.113.9", 200),
        ("6.6.6.6, 198.51.100.7, 203.0.113.10", 429),
        ("198.51.100.8, 203.0.113.9", 200),
        ("2001:db8:1:2::1, 203.0.113.9", 200),
        ("2001:db8:1:2:ffff::1, 203.0.113.9", 429),
        ("2001:db8:1:3::1, 203.0.113.9", 200),
    ] {
        let mut request = Request::builder()
            .header("x-forwarded-for", forwarded)
            .body(String::new())
            .unwrap();
        request
            .extensions_mut()
            .insert("10.0.0.1:4711".parse::<SocketAddr>().unwrap());
        let response: http::Response<String> = send(&service, request).await;
        assert_eq!(response.status(), status, "{forwarded}");
    }
}

/// Generates client input from words that are likely to confuse a parser.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    const WORDS: &[&str] = &[
        "\"",
        "\\",
        ",",
        ";",
        "=",
        " ",
        "\t",
        "[",
        "]",
        ":",
        "%",
        "for=",
        "For=\"",
        "host=\"",
        "\\\"",
        "\\\\",
        "10.0.0.9",
        "198.51.100.9",
        "[fd00::9]:80",
        "2001:db8:bad::1",
        "unknown",
        "_hidden",
        ", ",
        "\", for=10.0.0.9",
    ];
    let word = select(WORDS).prop_map(|word| word.as_bytes().to_vec());
    // All bytes that a header value may contain.
    let byte = (32..=254_u8).prop_map(|byte| vec![if byte < 127 { byte } else { byte + 1 }]);
    vec(prop_oneof![3 => word, 1 => byte], 0..12).prop_map(|words| words.concat())
}

/// Quotes a text as a conforming proxy does.
fn quoted(text: &[u8]) -> Vec<u8> {
    let escaped = text.iter().flat_map(|byte| {
        if b"\"\\".contains(byte) {
            vec![b'\\', *byte]
        } else {
            vec![*byte]
        }
    });
    [b"\""[..].to_vec(), escaped.collect(), b"\"".to_vec()].concat()
}

fn client_address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u8>().prop_map(|host| IpAddr::from([198, 51, 100, host])),
        any::<[u16; 2]>()
            .prop_map(|[net, host]| IpAddr::from([0x2001, 0xdb8, 0, net, 0, 0, 0, host])),
    ]
}

proptest! {
    #![proptest_config(cases(4096))]

    /// Proxies append to the client's last line or add lines, in several spellings, with the
    /// client's address.
    #[test]
    fn forged_leading_entries_do_not_change_keys(
        forwarded: bool,
        before in vec(noise(), 0..4),
        client in client_address(),
        proxies in vec((any::<u8>(), any::<bool>(), 0..5_u8), 0..3),
        own_line: bool,
        host in noise(),
        spelling in 0..5_u8,
        by_hops: bool,
    ) {
        let entry = |address: IpAddr, spelling: u8| -> Vec<u8> {
            let with_port = SocketAddr::new(address, 4711).to_string();
            let (plain, bracketed) = (address.to_string(), with_port.trim_end_matches(":4711").to_owned());
            let node = [plain, bracketed, with_port.clone()][usize::from(spelling % 3)].clone();
            if !forwarded {
                return node.into_bytes();
            }
            let node = format!("for=\"{node}\"").into_bytes();
            let host = [b"host=", &quoted(&host)[..]].concat();
            match spelling {
                0 => node,
                1 => [&node, &b";proto=https;"[..], &host].concat(),
                2 => [&host, &b";"[..], &node].concat(),
                3 => [b"proto=http ; ", &node[..], b" ; ", &host].concat(),
                _ => format!("For=\"{with_port}\"").into_bytes(),
            }
        };
        let mut lines = before;
        let mut append = |entry: Vec<u8>, own_line: bool| match lines.last_mut() {
            Some(last) if !own_line => last.extend([b", ", &entry[..]].concat()),
            _ => lines.push(entry),
        };
        append(entry(client, spelling), own_line);
        for (host, own_line, spelling) in &proxies {
            append(entry([10, 0, 0, *host].into(), *spelling), *own_line);
        }
        let header = if forwarded { "forwarded" } else { "x-forwarded-for" };
        let trust = if by_hops { format!("hops {}", proxies.len() + 1) } else { "private".to_owned() };
        let request = request("10.0.0.1", header, &lines);
        let found = trusting(ClientIp::header(header), &trust).extract(&request);
        let shown: Vec<_> = lines.iter().map(|line| String::from_utf8_lossy(line)).collect();
        prop_assert_eq!(found, Ok(Key::ip(client)), "{}: {:?}", trust, shown);
    }

    /// A request from an untrusted peer is counted under the peer's address.
    #[test]
    fn headers_of_untrusted_peers_are_ignored(lines in vec(noise(), 0..4), peer in client_address()) {
        for header in ["x-forwarded-for", "forwarded", "x-real-ip"] {
            let request = request(&peer.to_string(), header, &lines);
            prop_assert_eq!(trusting(ClientIp::header(header), "private").extract(&request), Ok(Key::ip(peer)));
        }
    }
}
