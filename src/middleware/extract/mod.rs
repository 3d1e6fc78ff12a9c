//! From a request to the key that it is counted by.

mod ip;

use std::fmt;
use std::sync::Arc;

use http::HeaderName;
use http::request::Parts;

pub use ip::PeerIp;

use crate::limit::Key;

/// Finds who a request is from.
///
/// [`PeerIp`], [`HeaderKey`] and [`Global`] do, and closures given to [`key_fn`]. A tuple of extractors counts each
/// combination by itself: `(PeerIp, HeaderKey::new(name))` every pair of an address and a header's value.
///
/// ```
/// use http::request::Parts;
/// use tower_redis_ratelimit::{Key, KeyExtractor, MissingKey};
///
/// struct ByHost;
///
/// impl KeyExtractor for ByHost {
///     fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
///         request.uri.host().map(Key::new).ok_or(MissingKey::new("the request names no host"))
///     }
/// }
/// # fn is_extractor(_: impl KeyExtractor) {}
/// # is_extractor(ByHost);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` finds no key in a request",
    label = "not a `KeyExtractor`",
    note = "extractors are `PeerIp`, `HeaderKey`, `Global`, and tuples of extractors",
    note = "a closure: `key_fn(|request| ..)`, which is given `&http::request::Parts` and returns an `Option<Key>`"
)]
pub trait KeyExtractor {
    /// The key that this request is counted by.
    ///
    /// # Errors
    ///
    /// [`MissingKey`] for a request that has none; the layer's [`OnMissingKey`](crate::OnMissingKey) says what becomes
    /// of it.
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey>;
}

/// A request has nothing that it could be counted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingKey {
    problem: &'static str,
    reason: Reason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// The client left it out.
    Absent,
    /// The client sent what must not be one.
    Malformed,
    /// The server is set up so that there can be none.
    Misconfigured,
}

impl MissingKey {
    /// The client left it out: over HTTP a 400. `problem` is shown to it, and says what is missing, such as "no API
    /// key".
    pub const fn new(problem: &'static str) -> Self {
        Self { problem, reason: Reason::Absent }
    }

    /// The client sent something that must not become a key, such as a header twice: over HTTP a 400, whatever
    /// [`OnMissingKey`](crate::OnMissingKey) says, or a client could pass uncounted by it. `problem` is shown to it.
    pub const fn malformed(problem: &'static str) -> Self {
        Self { problem, reason: Reason::Malformed }
    }

    /// The server is set up so that no request can have it: over HTTP a 500, whatever
    /// [`OnMissingKey`](crate::OnMissingKey) says. `problem` is in the response too, and says how to set it up.
    pub const fn misconfigured(problem: &'static str) -> Self {
        Self { problem, reason: Reason::Misconfigured }
    }

    /// Whether the server is at fault, not the client.
    pub const fn is_misconfigured(&self) -> bool {
        matches!(self.reason, Reason::Misconfigured)
    }

    /// Whether the request has nothing that could be one, so that [`OnMissingKey`](crate::OnMissingKey) says what becomes of
    /// it.
    pub const fn is_absent(&self) -> bool {
        matches!(self.reason, Reason::Absent)
    }
}

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.problem)
    }
}

impl std::error::Error for MissingKey {}

/// Counts by the key that a closure finds. A request for which it finds none is one
/// [without a key](crate::OnMissingKey).
///
/// It gives the closure back: `key_fn` is there so that the compiler knows the type of its argument.
///
/// ```
/// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, RateLimitLayer, Strategy, key_fn};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let by_path = key_fn(|request| Some(Key::new(request.uri.path())));
/// let layer = RateLimitLayer::new(LocalStore::default(), by_path, policy);
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
pub fn key_fn<F>(find: F) -> F
where
    F: Fn(&Parts) -> Option<Key>,
{
    find
}

#[diagnostic::do_not_recommend]
impl<F> KeyExtractor for F
where
    F: Fn(&Parts) -> Option<Key>,
{
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        self(request).ok_or(MissingKey::new("the request has nothing that it could be counted by"))
    }
}

/// For an extractor that is not `Clone`.
impl<K: KeyExtractor + ?Sized> KeyExtractor for Arc<K> {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        (**self).extract(request)
    }
}

/// Counts all requests together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Global;

impl KeyExtractor for Global {
    fn extract(&self, _: &Parts) -> Result<Key, MissingKey> {
        Ok(Key::GLOBAL)
    }
}

/// Counts by the value of a header, such as an API key.
///
/// Values are hashed, since headers carry secrets; [`readable`](Self::readable) keeps those that are none.
///
/// A request that has the header more than once is rejected, whatever [`OnMissingKey`](crate::OnMissingKey) says. One of
/// the values may be of the client's choice, beside one that a proxy has added: to count by it, or by all of them, would
/// give the client a new key whenever it likes.
///
/// The header must be one that something in front has verified: a client that may send any value has a new count for each.
///
/// What a client can spell in many ways is no good key, for each spelling is counted by itself:
/// - `Authorization`: `Bearer x`, `bearer x` and `Bearer  x` are one credential and three values. Count by the user whom
///   your authentication has found.
/// - `X-Forwarded-For`, `Forwarded` and the like: whoever sends the request writes the first part of it.
/// - `Cookie`: clients may send it in several lines, and it holds more than the session.
///
/// ```
/// use http::HeaderName;
/// use tower_redis_ratelimit::HeaderKey;
///
/// let by_api_key = HeaderKey::new(HeaderName::from_static("x-api-key"));
/// let by_tenant = HeaderKey::new(HeaderName::from_static("x-tenant")).readable();
/// ```
#[derive(Debug, Clone)]
pub struct HeaderKey {
    name: HeaderName,
    secret: bool,
}

impl HeaderKey {
    /// The header of this name.
    pub const fn new(name: HeaderName) -> Self {
        Self { name, secret: true }
    }

    /// Keeps values readable in Redis, where [`Key::new`] does. Not for secrets.
    #[must_use]
    pub fn readable(mut self) -> Self {
        self.secret = false;
        self
    }
}

impl KeyExtractor for HeaderKey {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        let mut values = request.headers.get_all(&self.name).iter();
        let first = values.next().map(|value| value.as_bytes());
        if values.next().is_some() {
            return Err(MissingKey::malformed("the request has the header that it is counted by more than once"));
        }
        match first {
            None | Some([]) => Err(MissingKey::new("the request lacks the header that it is counted by")),
            Some(value) if self.secret => Ok(Key::secret(value)),
            Some(value) => Ok(Key::new(value)),
        }
    }
}

macro_rules! tuples {
    ($(($($extractor:ident $part:ident),+);)+) => {$(
        impl<$($extractor: KeyExtractor),+> KeyExtractor for ($($extractor,)+) {
            fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
                let ($($part,)+) = self;
                Ok(Key::tuple(&[$($part.extract(request)?),+]))
            }
        }
    )+};
}

tuples! {
    (A a, B b);
    (A a, B b, C c);
    (A a, B b, C c, D d);
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn request(header: &[u8]) -> Parts {
        Request::builder().uri("/books").header("x-user", header).body(()).unwrap().into_parts().0
    }

    const USER: HeaderName = HeaderName::from_static("x-user");

    #[test]
    fn headers_are_hashed_unless_readable() {
        let parts = request(b"alice");
        assert_eq!(HeaderKey::new(USER).extract(&parts), Ok(Key::secret("alice")));
        assert_eq!(HeaderKey::new(USER).readable().extract(&parts), Ok(Key::new("alice")));
        assert!(HeaderKey::new(http::header::AUTHORIZATION).extract(&parts).is_err());
        assert!(HeaderKey::new(USER).extract(&request(b"")).is_err(), "an empty value tells nobody apart");
    }

    #[test]
    fn a_header_that_comes_twice_is_no_key() {
        for (first, second) in [("alice", "bob"), ("alice", "alice"), ("", "alice"), ("alice", "")] {
            let request = Request::builder().header("x-user", first).header("x-user", second);
            let parts = request.body(()).unwrap().into_parts().0;
            for extractor in [HeaderKey::new(USER), HeaderKey::new(USER).readable()] {
                let problem = extractor.extract(&parts).unwrap_err();
                assert!(problem.to_string().contains("more than once"), "{first:?}, {second:?}: {problem}");
                assert!(!problem.is_absent() && !problem.is_misconfigured());
            }
        }
    }

    #[test]
    fn any_header_value_makes_a_short_key() {
        for value in [&[b'x'; 10_240][..], b"\xff\xfe", b"{}:"] {
            for extractor in [HeaderKey::new(USER), HeaderKey::new(USER).readable()] {
                let key = extractor.extract(&request(value)).unwrap();
                assert_eq!(key.as_bytes().len(), 33);
            }
        }
    }

    #[test]
    fn closures_and_tuples_are_extractors() {
        let by_path = key_fn(|request| Some(Key::new(request.uri.path())));
        let parts = request(b"alice");
        assert_eq!(by_path.extract(&parts), Ok(Key::new("/books")));
        let both = (by_path, HeaderKey::new(USER).readable());
        assert_eq!(both.extract(&parts), Ok(Key::tuple(&[Key::new("/books"), Key::new("alice")])));
        let nobody = |_: &Parts| None;
        assert!((Global, nobody).extract(&parts).is_err());
        assert_eq!(Global.extract(&parts), Ok(Key::GLOBAL));
    }
}
