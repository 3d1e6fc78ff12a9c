use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

/// Identifies a caller; the caller's part of a Redis key.
///
/// Up to 39 bytes of printable ASCII are kept in clear, so that an operator can read them in Redis.
/// Everything else is hashed (SHA-256, truncated to 128 bits): longer keys, unprintable bytes, the
/// characters `{ } : , ~` that separate the parts of a Redis key, and every
/// [`secret`](Self::secret). So no caller can forge another's key or create a long key. In a
/// cluster, callers who choose their own keys can aim at one of the store's
/// [partitions](crate::store::RedisStoreBuilder::partitions), whose hash is the same in all stores,
/// and so overload one master. They cannot aim at any other of the 16,384 slots.
///
/// A number is the same key as its digits: `Key::from(42)` is `Key::new("42")`.
///
/// Keys of different kinds are different: a user named `192.0.2.7` is not counted with that [address](Self::ip), nor
/// with a [`secret`](Self::secret) or a [`tuple`](Self::tuple) of the same bytes.
///
/// With the feature `serde` it is read from text, as a caller in [`Tiers`](crate::select::Tiers): a
/// plain name, `ip:192.0.2.7`, `*`, parts separated by commas, `secret:` followed by an API key, or
/// a hash as shown in Redis.
///
/// A key owns its bytes inline and never allocates. `Debug` shows no more than a few bytes of its hash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key {
    len: u8,
    /// Zeros after the end, so that keys can be compared as whole arrays.
    bytes: [u8; Key::MAX],
}

/// The argument of [`Key::new`]: a text or bytes. Implemented for every `AsRef<[u8]>`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the text or the bytes of a key",
    label = "not an `AsRef<[u8]>`",
    note = "a number or an address: `Key::from(42)`, `Key::ip(address)`",
    note = "several parts: `Key::tuple(&[Key::new(team), Key::from(user)])`",
    note = "another type: the bytes that identify it, such as `Key::new(user.to_string())`"
)]
pub trait IsBytes: AsRef<[u8]> {}

#[diagnostic::do_not_recommend]
impl<T: AsRef<[u8]> + ?Sized> IsBytes for T {}

/// The result of the closure of [`by_extension`](crate::extract::by_extension): a key, a text, a number or an address.
/// Implemented for every `Into<Key>`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key: return a number, or `Key::new(..)` of a text or of bytes",
    label = "not an `Into<Key>`",
    note = "several parts: `Key::tuple(&[Key::new(&user.team), Key::from(user.id)])`",
    note = "another type: the bytes that identify it, such as `Key::new(user.id.to_string())`"
)]
pub trait IsKey: Into<Key> {}

#[diagnostic::do_not_recommend]
impl<T: Into<Key>> IsKey for T {}

/// By their bytes in Redis.
impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// First byte of a hashed key. A readable key cannot contain it.
const HASHED: u8 = b'~';
/// Separates the parts of a tuple. A part cannot contain it.
const SEPARATOR: u8 = b',';

/// Prefix of an address key. A readable key cannot contain its colon.
const ADDRESS: &[u8] = b"ip:";

/// The decimal text of each octet, followed by a point. Building an address from these takes half
/// the time of `itoa`, and happens on every request.
const OCTETS: [[u8; 4]; 256] = {
    let mut octets = [[0; 4]; 256];
    let mut octet = 0;
    while octet < 256 {
        let digits = [
            b'0' + (octet / 100) as u8,
            b'0' + (octet / 10 % 10) as u8,
            b'0' + (octet % 10) as u8,
        ];
        octets[octet] = match octet {
            0..10 => [digits[2], b'.', 0, 0],
            10..100 => [digits[1], digits[2], b'.', 0],
            _ => [digits[0], digits[1], digits[2], b'.'],
        };
        octet += 1;
    }
    octets
};

/// The number of decimal digits of each octet.
const DIGITS: [u8; 256] = {
    let mut digits = [3; 256];
    let mut octet = 0;
    while octet < 100 {
        digits[octet] = if octet < 10 { 1 } else { 2 };
        octet += 1;
    }
    digits
};

impl Key {
    const MAX: usize = 39;

    /// A single key for all callers, for a limit on the whole service.
    pub const GLOBAL: Self = Self::reserved(b"*");

    /// The key of all peers on unix sockets: they have no address.
    pub(crate) const UNIX: Self = Self::reserved(b"ip:unix");

    /// The key of all requests that match no route.
    #[cfg(any(feature = "axum", feature = "serde"))]
    pub(crate) const NO_ROUTE: Self = Self::reserved(b"route:none");

    /// Combined in a tuple with the caller's key, the key of a shadow: policies that are tried on
    /// the caller. Short enough that the tuple with a hashed key is not hashed again.
    pub(crate) const SHADOW: Self = Self::reserved(b"~try");

    /// Combined in a tuple with the caller's key, the key of the caller's strikes.
    pub(crate) const STRIKES: Self = Self::reserved(b"~hit");

    /// Combined in a tuple with the keys of a joint check, the key of all of them together.
    pub(crate) const JOINT: Self = Self::reserved(b"~all");

    /// Creates a key from the caller's own bytes, such as the name of a user. A number is `Key::from(42)`.
    pub fn new(bytes: impl IsBytes) -> Self {
        let bytes = bytes.as_ref();
        let fits = (1..=Self::MAX).contains(&bytes.len());
        // No caller may have the key of all callers.
        if fits && bytes != b"*" && bytes.iter().all(is_readable) {
            Self::reserved(bytes)
        } else {
            Self::hashed(Sha256::new().chain_update(b"key\0").chain_update(bytes))
        }
    }

    /// Creates a key that must not be readable in Redis, from an API key, a token or a cookie.
    pub fn secret(bytes: impl IsBytes) -> Self {
        Self::hashed(Sha256::new().chain_update(b"secret\0").chain_update(bytes))
    }

    /// Creates a key from an address: the whole address for IPv4, the /64 network for IPv6, since
    /// one host owns all of it.
    ///
    /// An IPv6 address that embeds an IPv4 address becomes the key of that IPv4 address:
    /// IPv4-mapped (`::ffff:0:0/96`), NAT64 (`64:ff9b::/96`, RFC 6052) and 6to4 (`2002::/16`, RFC
    /// 3056). In Redis the keys are `ip:192.0.2.7` and `ip:2001:0db8:0001:0002::/64`.
    pub fn ip(address: IpAddr) -> Self {
        Self::network(address, 64)
    }

    /// Like [`ip`](Self::ip), with an IPv6 prefix of `ipv6_prefix` bits, at most 128. Different
    /// lengths are different keys.
    ///
    /// Creates the same key as a [`ClientIp`](crate::extract::ClientIp) with that
    /// [`ipv6_prefix`](crate::extract::ClientIp::ipv6_prefix), for [policies of single
    /// callers](crate::select::Tiers::caller) and for a [`Limiter`](crate::Limiter).
    ///
    /// In Redis, a network of more than 64 bits is `ip:20010db8000100020000000000000001/128`: with
    /// colons it would not fit.
    pub fn network(address: IpAddr, ipv6_prefix: u8) -> Self {
        match unwrapped(address) {
            IpAddr::V4(v4) => Self::v4(v4),
            IpAddr::V6(v6) => Self::v6(v6, ipv6_prefix.min(128)),
        }
    }

    fn v4(address: Ipv4Addr) -> Self {
        let mut key = Self::reserved(ADDRESS);
        // Each octet with its point and padding overwrites the padding of the previous one.
        let mut end = ADDRESS.len();
        for octet in address.octets() {
            key.bytes[end..end + 4].copy_from_slice(&OCTETS[usize::from(octet)]);
            end += digits_of(octet) + 1;
        }
        key.bytes[end - 1] = 0;
        key.len = end as u8 - 1;
        key
    }

    fn v6(address: Ipv6Addr, prefix: u8) -> Self {
        let mut key = Self::reserved(ADDRESS);
        let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
        let octets = (address.to_bits() & mask).to_be_bytes();
        if prefix <= 64 {
            for group in octets[..8].chunks_exact(2) {
                key.push_hex(group);
                key.push(b":");
            }
            key.push(b":");
        } else {
            key.push_hex(&octets);
        }
        // Skip the final point of each entry of `OCTETS`.
        key.push(b"/");
        key.push(&OCTETS[usize::from(prefix)][..digits_of(prefix)]);
        key
    }

    /// Returns the network of an address key. `None` for other keys.
    pub(crate) fn to_network(self) -> Option<IpNet> {
        let text = str::from_utf8(self.as_bytes().strip_prefix(ADDRESS)?).ok()?;
        match text.split_once('/') {
            None => {
                let address = IpAddr::V4(text.parse().ok()?);
                Some(address.into())
            }
            // A network of more than 64 bits has no colons.
            Some((digits, prefix)) if digits.len() == 32 => {
                let bits = u128::from_str_radix(digits, 16).ok()?;
                IpNet::new(IpAddr::V6(bits.into()), prefix.parse().ok()?).ok()
            }
            Some(_) => text.parse().ok(),
        }
    }

    /// Combines keys. `("a", "bc")` and `("ab", "c")` differ, and a tuple of one key differs from
    /// that key.
    pub fn tuple(parts: &[Key]) -> Self {
        let mut len = 0;
        let mut is_nested = false;
        for part in parts {
            len += part.as_bytes().len() + 1;
            is_nested |= part.as_bytes().contains(&SEPARATOR);
        }
        // As text, a tuple of one key would equal that key, and a tuple in a tuple would equal its parts.
        if parts.len() < 2 || is_nested || len > Self::MAX + 1 {
            let mut hash = Sha256::new().chain_update(b"tuple\0");
            for part in parts {
                // With the lengths: the same bytes may be divided otherwise.
                hash.update([part.len]);
                hash.update(part.as_bytes());
            }
            return Self::hashed(hash);
        }
        let mut key = Self::reserved(b"");
        for (i, part) in parts.iter().enumerate() {
            if i > 0 {
                key.push(&[SEPARATOR]);
            }
            key.push(part.as_bytes());
        }
        key
    }

    /// Returns the key in clear, for a log that may name callers; `Debug` redacts it.
    ///
    /// The text is the same as in Redis: `user-42`, `ip:192.0.2.7`, the parts of a tuple separated
    /// by commas. A hashed key, such as every [`secret`](Self::secret), is a `~` followed by 32
    /// hexadecimal digits. The hash cannot be reversed, but anyone with the secret can compute the
    /// same digits.
    ///
    /// ```
    /// use tower_redis_ratelimit::Key;
    ///
    /// let key = Key::new("user-42");
    /// assert_eq!(key.reveal(), "user-42");
    /// assert!(!format!("{key:?}").contains("user"));
    /// assert_eq!(Key::secret("sk-live-1").reveal().len(), 33);
    /// ```
    pub fn reveal(&self) -> &str {
        // Always ASCII.
        str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    /// Returns the key's bytes, as they appear in a Redis key.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Creates a key from reserved bytes: no caller's bytes produce the same key if `bytes`
    /// contains a character that readable keys cannot contain.
    pub(crate) const fn reserved(bytes: &[u8]) -> Self {
        let mut key = Self {
            len: 0,
            bytes: [0; Self::MAX],
        };
        while (key.len as usize) < bytes.len() && (key.len as usize) < Self::MAX {
            key.bytes[key.len as usize] = bytes[key.len as usize];
            key.len += 1;
        }
        key
    }

    /// Parses the caller's part of a Redis key. `None` for text that is no caller's, for example if
    /// a `~` begins it and no hash follows, as in the key of a probe.
    pub(crate) fn of_redis(text: &str) -> Option<Self> {
        let is_caller = match text.as_bytes() {
            [HASHED, rest @ ..] => match rest.first_chunk::<32>() {
                Some(digits) => digits.iter().all(u8::is_ascii_hexdigit),
                None => false,
            },
            bytes => !bytes.is_empty(),
        };
        if !is_caller || text.len() > Self::MAX || !text.bytes().all(is_in_redis) {
            return None;
        }
        Some(Self::reserved(text.as_bytes()))
    }

    /// Creates a hashed key from its hexadecimal digits.
    #[cfg(feature = "serde")]
    pub(super) fn of_digits(digits: &str) -> Option<Self> {
        if digits.len() != 32 || !digits.bytes().all(is_lower_hex) {
            return None;
        }
        let mut key = Self::reserved(&[HASHED]);
        key.push(digits.as_bytes());
        Some(key)
    }

    fn hashed(hash: Sha256) -> Self {
        let mut key = Self::reserved(&[HASHED]);
        key.push_hex(&hash.finalize()[..16]);
        key
    }

    fn push_hex(&mut self, bytes: &[u8]) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let start = usize::from(self.len);
        for (digits, byte) in self.bytes[start..].chunks_exact_mut(2).zip(bytes) {
            digits[0] = DIGITS[usize::from(byte >> 4)];
            digits[1] = DIGITS[usize::from(byte & 15)];
            self.len += 2;
        }
    }

    /// Appends `bytes`, truncated to the free space.
    fn push(&mut self, bytes: &[u8]) {
        let start = usize::from(self.len);
        let end = (start + bytes.len()).min(Self::MAX);
        self.bytes[start..end].copy_from_slice(&bytes[..end - start]);
        self.len = end as u8;
    }
}

/// Returns `true` if a readable key may contain the byte: it is printable and separates nothing.
fn is_readable(byte: &u8) -> bool {
    byte.is_ascii_graphic() && !b"{}:,~".contains(byte)
}

/// Returns `true` if the caller's part of a Redis key may contain the byte.
fn is_in_redis(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"{}".contains(&byte)
}

#[cfg(feature = "serde")]
fn is_lower_hex(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

/// Returns the number of decimal digits.
fn digits_of(number: u8) -> usize {
    usize::from(DIGITS[usize::from(number)])
}

/// Returns the embedded IPv4 address of an IPv6 address, if there is one.
fn unwrapped(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else {
        return address;
    };
    // NAT64 and 6to4 contain the address of an IPv4 host, which would have a key for each of them.
    match v6.octets() {
        [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d] => [a, b, c, d].into(),
        [0x20, 0x02, a, b, c, d, ..] => [a, b, c, d].into(),
        _ => address.to_canonical(),
    }
}

impl From<IpAddr> for Key {
    fn from(address: IpAddr) -> Self {
        Self::ip(address)
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl From<String> for Key {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

macro_rules! numbers {
    ($($number:ty)+) => {$(
        /// A number is the same key as its decimal digits: `42` is `"42"`, as in a file or a log.
        impl From<$number> for Key {
            fn from(number: $number) -> Self {
                Self::new(itoa::Buffer::new().format(number))
            }
        }
    )+};
}

numbers! { u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize }

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

/// Redacted: a key may be an address or a user name, and debug output ends up in logs.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hash = Sha256::digest(self.as_bytes());
        write!(f, "Key(#{:02x}{:02x}{:02x})", hash[0], hash[1], hash[2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(key: Key) -> String {
        String::from_utf8(key.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn keys_sort_by_their_text() {
        let mut keys = ["b", "a10", "a", "ab"].map(Key::new);
        keys.sort();
        assert_eq!(keys.map(text), ["a", "a10", "ab", "b"]);
    }

    #[test]
    fn readable_keys_stay_readable() {
        assert_eq!(text(Key::new("user-42@example.org")), "user-42@example.org");
        assert_eq!(
            text(Key::new("8a6e0804-2bd0-4672-b79d-d97027f9071a")),
            "8a6e0804-2bd0-4672-b79d-d97027f9071a"
        );
        assert_eq!(text(Key::ip("192.0.2.7".parse().unwrap())), "ip:192.0.2.7");
    }

    #[test]
    fn addresses_keep_their_text() {
        const OCTETS: [u8; 6] = [0, 9, 10, 99, 100, 255];
        for a in OCTETS {
            for b in OCTETS {
                for c in OCTETS {
                    for d in OCTETS {
                        let address = IpAddr::from([a, b, c, d]);
                        assert_eq!(
                            Key::ip(address),
                            Key::reserved(format!("ip:{address}").as_bytes())
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn one_network_of_ipv6_is_one_key() {
        let key = |address: &str| Key::ip(address.parse().unwrap());
        assert_eq!(text(key("2001:db8:1:2::1")), "ip:2001:0db8:0001:0002::/64");
        assert_eq!(
            key("2001:db8:1:2::1"),
            key("2001:db8:1:2:ffff:ffff:ffff:ffff")
        );
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
    }

    #[test]
    fn ipv6_networks_have_any_prefix_length() {
        let key = |prefix| {
            text(Key::network(
                "2001:db8:1234:5678:9abc:def0:1234:5678".parse().unwrap(),
                prefix,
            ))
        };
        assert_eq!(key(1), "ip:0000:0000:0000:0000::/1");
        assert_eq!(key(10), "ip:2000:0000:0000:0000::/10");
        assert_eq!(key(48), "ip:2001:0db8:1234:0000::/48");
        assert_eq!(key(56), "ip:2001:0db8:1234:5600::/56");
        assert_eq!(key(64), "ip:2001:0db8:1234:5678::/64");
        assert_eq!(key(65), "ip:20010db8123456788000000000000000/65");
        assert_eq!(key(100), "ip:20010db8123456789abcdef010000000/100");
        assert_eq!(key(128), "ip:20010db8123456789abcdef012345678/128");
        assert_eq!(
            (key(0), key(255)),
            ("ip:0000:0000:0000:0000::/0".to_owned(), key(128))
        );
        let v4 = |prefix| Key::network("192.0.2.7".parse().unwrap(), prefix);
        assert_eq!(v4(1), v4(128), "the prefix is of IPv6");
    }

    #[test]
    fn mapped_ipv4_addresses_count_as_ipv4() {
        let key = |address: &str| Key::ip(address.parse().unwrap());
        let expected = key("192.0.2.7");
        for address in [
            "::ffff:192.0.2.7",
            "64:ff9b::192.0.2.7",
            "2002:c000:207::1",
            "2002:c000:207:1:2:3:4:5",
        ] {
            assert_eq!(key(address), expected, "{address}");
        }
        for address in [
            "64:ff9b:1::192.0.2.7",
            "64:ff9b::1:c000:207",
            "::192.0.2.7",
            "2003:c000:207::1",
        ] {
            assert!(text(key(address)).ends_with("::/64"), "{address}");
        }
    }

    #[test]
    fn kinds_of_keys_stay_apart() {
        let long = "x".repeat(100);
        for bytes in [
            "192.0.2.7",
            "ip:192.0.2.7",
            "20010db800010002/64",
            "ip:2001:0db8:0001:0002::/64",
            "a",
            "a,b",
            &long,
        ] {
            let mut keys = vec![
                Key::new(bytes),
                Key::secret(bytes),
                Key::tuple(&[Key::new(bytes)]),
            ];
            keys.push(Key::tuple(&[Key::new("a"), Key::new("b")]));
            keys.extend(
                ["192.0.2.7", "2001:db8:1:2::"].map(|address| Key::ip(address.parse().unwrap())),
            );
            keys.push(Key::GLOBAL);
            for (i, key) in keys.iter().enumerate() {
                assert!(!keys[..i].contains(key), "{bytes:?}: {} twice", text(*key));
            }
        }
    }

    #[test]
    fn a_number_is_its_digits() {
        assert_eq!(Key::from(42_u64), Key::new("42"));
        assert_eq!(Key::from(-7_i32), Key::new("-7"));
        assert_eq!(text(Key::from(u128::MAX)), u128::MAX.to_string());
        assert_eq!(Key::from(i128::MIN), Key::new(i128::MIN.to_string()));
    }

    #[test]
    fn separators_within_keys_are_hashed() {
        let long = "x".repeat(10_240);
        for bytes in [
            "",
            "*",
            "a b",
            "{a}",
            "a:b",
            "a,b",
            "~0",
            "caf\u{e9}",
            "\0",
            "a\nb",
            "forty-bytes-forty-bytes-forty-bytes-123!",
            &long,
        ] {
            let key = text(Key::new(bytes));
            assert_eq!(key.len(), 33, "{bytes:?} became {key:?}");
            assert!(key.starts_with('~') && key[1..].bytes().all(|b| b.is_ascii_hexdigit()));
        }
        assert_eq!(Key::new([0xff, 0xfe]).as_bytes().len(), 33);
        assert_eq!(text(Key::secret("sk-1"))[..1], *"~");
    }

    #[test]
    fn tuples_keep_their_parts_apart() {
        let tuple = |parts: &[&str]| Key::tuple(&parts.iter().map(Key::new).collect::<Vec<_>>());
        assert_eq!(text(tuple(&["a", "bc"])), "a,bc");
        assert_ne!(tuple(&["a", "bc"]), tuple(&["ab", "c"]));
        let long = "x".repeat(30);
        assert_ne!(tuple(&[&long, "a", "bc"]), tuple(&[&long, "ab", "c"]));
        assert_eq!(
            text(tuple(&[&long, "12345678"])),
            format!("{long},12345678")
        );
        assert_eq!(text(tuple(&[&long, "123456789"])).len(), 33, "one too long");
        let (a, b, c) = (Key::new("a"), Key::new("b"), Key::new("c"));
        assert_ne!(
            Key::tuple(&[Key::tuple(&[a, b]), c]),
            Key::tuple(&[a, Key::tuple(&[b, c])])
        );
        assert_eq!(text(Key::tuple(&[])).len(), 33, "never empty");
        let secret = Key::secret("k");
        assert_eq!(
            text(Key::tuple(&[secret, Key::SHADOW])),
            format!("{},~try", text(secret))
        );
    }

    #[test]
    fn debug_shows_no_key() {
        let shown = format!("{:?}", Key::new("alice"));
        assert!(!shown.contains("alice") && shown.len() < 16, "{shown}");
    }

    proptest! {
        #[test]
        fn different_bytes_make_different_keys(a: Vec<u8>, b: Vec<u8>) {
            prop_assert_eq!(a == b, Key::new(&a) == Key::new(&b));
        }

        #[test]
        fn no_key_can_leave_its_hash_tag(bytes: Vec<u8>) {
            let key = Key::new(&bytes);
            let safe = key.as_bytes().iter().all(|b| b.is_ascii_graphic() && !b"{}:,".contains(b));
            prop_assert!(safe);
            prop_assert!(!key.as_bytes().is_empty());
            prop_assert!(key != Key::GLOBAL);
            prop_assert_eq!(key.reveal().as_bytes(), key.as_bytes());
        }
    }
}
