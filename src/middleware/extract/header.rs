use http::request::Parts;
use http::{HeaderName, HeaderValue};

use crate::error::ConfigError;
use crate::gate::{KeyExtractor, MissingKey};
use crate::limit::{Key, KeyForms};

/// Counts by the value of a header, such as an API key.
///
/// Values are hashed, since headers carry secrets; [`readable`](Self::readable) keeps values that are not secret.
///
/// Blanks around a value are ignored. A request with a missing or blank header has [no
/// key](crate::reject::OnMissingKey), and the response names the header: "the header x-api-key is
/// missing". With a [`challenge`](Self::challenge), the response is a 401 with that challenge. A
/// request that repeats the header is always rejected, regardless of
/// [`OnMissingKey`](crate::reject::OnMissingKey): one of the values may be the client's own, and a
/// client that chooses its key could get a new count at any time.
///
/// Use a header that is verified before the layer: a client that may send any value gets a new
/// count for each.
///
/// A header with several spellings of the same value is rejected, since each spelling would be counted separately:
/// - `Authorization` and `Proxy-Authorization`: `Bearer x`, `bearer x` and `Bearer  x` are one credential and three
///   values. Count by the authenticated user.
/// - `Cookie`: clients choose the order of cookies, and may add others. Count by the session.
/// - gRPC metadata with a name that ends with `-bin`: base64 with and without padding is the same value. Count by the
///   decoded value, with [`key_fn`](crate::extract::key_fn).
/// - `X-Forwarded-For` and `Forwarded`: proxies append to the value that the client has sent, so the client could get a
///   new key for every request. [`ClientIp`](crate::extract::ClientIp) reads the part that your proxies wrote.
/// - `X-Real-IP`, `X-Client-IP`, `CF-Connecting-IP`, `True-Client-IP`, `Fastly-Client-IP` and other headers with an
///   address: a client that bypasses the proxy would choose its key, and each address of an IPv6 network would have a
///   separate count. [`ClientIp`](crate::extract::ClientIp) reads them too.
/// - `Host`: the client writes it, `example.org`, `Example.org` and `example.org:443` are the same host, and over HTTP/2
///   it is not a header. Count by the tenant that your service has found for the host.
///
/// ```
/// use tower_redis_ratelimit::extract::HeaderKey;
///
/// let by_api_key = HeaderKey::new("x-api-key")?;
/// let by_tenant = HeaderKey::new("x-tenant")?.readable();
/// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
pub struct HeaderKey {
    name: HeaderName,
    secret: bool,
    challenge: Option<HeaderValue>,
}

impl HeaderKey {
    /// Counts by the header `name`: a text in any case, or a [`HeaderName`].
    ///
    /// # Errors
    ///
    /// If `name` is not a valid header name, such as `"api key"`, or if its values have several spellings:
    /// `Authorization`, `Proxy-Authorization`, `Cookie`, `Host`, names that end with `-bin`, and the headers with a
    /// client's address.
    pub fn new(name: impl AsRef<str>) -> Result<Self, ConfigError> {
        let name = header_name(name.as_ref())?;
        if let Some(fix) = several_spellings(name.as_str()) {
            return Err(ConfigError::invalid(
                "header to count by",
                name.as_str(),
                fix,
            ));
        }
        Ok(Self {
            name,
            secret: true,
            challenge: None,
        })
    }

    /// Keeps values readable in Redis, if [`Key::new`] does. Do not use it for secrets.
    #[must_use]
    pub fn readable(mut self) -> Self {
        self.secret = false;
        self
    }

    /// Sets the challenge for a client that sends no value: over HTTP a 401 with this
    /// `WWW-Authenticate` instead of a 400, over gRPC `UNAUTHENTICATED` instead of
    /// `INVALID_ARGUMENT`. Defaults to none.
    ///
    /// It is a scheme, with parameters if that has any: `Bearer` for tokens. There is no registered scheme for API keys
    /// in their own header; many services write `ApiKey`.
    ///
    /// ```
    /// use http::HeaderValue;
    /// use tower_redis_ratelimit::extract::HeaderKey;
    ///
    /// let by_api_key = HeaderKey::new("x-api-key")?.challenge(HeaderValue::from_static("ApiKey"));
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    #[must_use]
    pub fn challenge(mut self, challenge: HeaderValue) -> Self {
        self.challenge = Some(challenge);
        self
    }

    /// The key of requests with this value, for [a single caller's policies](crate::select::Tiers::caller) and for a
    /// [`Limiter`](crate::Limiter).
    pub fn key_of(&self, value: impl AsRef<[u8]>) -> Key {
        // As in a request: see `extract`.
        let value = value.as_ref().trim_ascii();
        if self.secret {
            Key::secret(value)
        } else {
            Key::new(value)
        }
    }
}

impl KeyExtractor for HeaderKey {
    fn extract(&self, request: &Parts) -> Result<Key, MissingKey> {
        let name = &self.name;
        let mut values = request.headers.get_all(name).iter();
        // HTTP/2 does not strip blanks around a value.
        let first = values.next().map(|value| value.as_bytes().trim_ascii());
        // Proxies and frameworks disagree which of several values counts, so a client could choose its key.
        if values.next().is_some() {
            return Err(MissingKey::malformed(format!(
                "the header {name} appears more than once"
            )));
        }
        match first {
            None => Err(MissingKey::header(name, self.challenge.as_ref())),
            Some([]) => {
                let problem = format!("the header {name} is empty");
                Err(match &self.challenge {
                    Some(challenge) => MissingKey::unauthenticated(problem, challenge.clone()),
                    None => MissingKey::new(problem),
                })
            }
            Some(value) => Ok(self.key_of(value)),
        }
    }

    fn forms(&self) -> KeyForms {
        // A readable value that is long, or has other characters, is hashed too.
        if self.secret {
            KeyForms::HASH
        } else {
            KeyForms::CLEAR.and(KeyForms::HASH)
        }
    }
}

/// Returns the problem and the fix if the values of the header have several spellings.
fn several_spellings(name: &str) -> Option<&'static str> {
    match name {
        "forwarded"
        | "forwarded-for"
        | "x-forwarded"
        | "x-forwarded-for"
        | "x-original-forwarded-for"
        | "x-vercel-forwarded-for" => Some(
            "clients control this header and could choose their key; use `ClientIp::x_forwarded_for()` with your trusted proxies",
        ),
        "x-real-ip"
        | "x-client-ip"
        | "client-ip"
        | "true-client-ip"
        | "x-cluster-client-ip"
        | "x-remote-addr"
        | "x-remote-ip"
        | "x-envoy-external-address"
        | "cf-connecting-ip"
        | "cf-connecting-ipv6"
        | "cf-pseudo-ipv4"
        | "do-connecting-ip"
        | "fastly-client-ip"
        | "fly-client-ip"
        | "x-appengine-user-ip"
        | "x-azure-clientip"
        | "x-azure-socketip"
        | "ali-cdn-real-ip"
        | "cloudfront-viewer-address"
        | "eo-connecting-ip"
        | "proxy-client-ip"
        | "wl-proxy-client-ip"
        | "x-appengine-remote-addr"
        | "x-forwarded-client-ip"
        | "x-nf-client-connection-ip"
        | "x-originating-ip"
        | "x-real-client-ip" => Some(
            "clients that bypass the proxy control this header, and an IPv6 client has many addresses: use `ClientIp::header(..)` with \
             your trusted proxies",
        ),
        "host" => Some(
            "clients control this header, and one host has several spellings; count by the tenant of the host, with `by_extension`",
        ),
        "authorization" | "proxy-authorization" => Some(
            "`Bearer x` and `bearer x` are one credential, but would be two keys; count by the authenticated user, with `by_extension`",
        ),
        "cookie" => Some(
            "clients can add cookies and could choose their key; count by the session, with `by_extension`",
        ),
        binary if binary.ends_with("-bin") => Some(
            "base64 with and without padding is one value, but would be two keys; count by the decoded value, with `key_fn`",
        ),
        _ => None,
    }
}

pub(super) fn header_name(name: &str) -> Result<HeaderName, ConfigError> {
    let fix = "use letters, digits and `-`, such as `x-api-key`";
    name.parse()
        .map_err(|_| ConfigError::invalid("header name", name, fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn request(header: &[u8]) -> Parts {
        Request::builder()
            .uri("/books")
            .header("x-user", header)
            .body(())
            .unwrap()
            .into_parts()
            .0
    }

    const USER: HeaderName = HeaderName::from_static("x-user");

    fn by(name: impl AsRef<str>) -> HeaderKey {
        HeaderKey::new(name).unwrap()
    }

    #[test]
    fn headers_are_hashed_unless_readable() {
        let parts = request(b"alice");
        assert_eq!(by(USER).extract(&parts), Ok(Key::secret("alice")));
        assert_eq!(by(USER).readable().extract(&parts), Ok(Key::new("alice")));
    }

    #[test]
    fn a_missing_header_is_named() {
        let parts = request(b"");
        for (name, expected) in [
            ("X-API-Key", "the header x-api-key is missing"),
            ("x-session", "the header x-session is missing"),
            // All clients with an empty value would share a count.
            ("x-user", "the header x-user is empty"),
        ] {
            let problem = by(name).extract(&parts).unwrap_err();
            assert_eq!(problem.to_string(), expected);
            assert!(problem.is_absent() && problem.challenge().is_none());

            let challenged = by(name)
                .challenge(HeaderValue::from_static("ApiKey"))
                .extract(&parts);
            let challenged = challenged.unwrap_err();
            assert_eq!(challenged.to_string(), expected);
            assert_eq!(challenged.challenge().unwrap(), "ApiKey");
            assert!(challenged.is_absent(), "`OnMissingKey` decides");
        }
    }

    #[test]
    fn a_repeated_header_is_rejected() {
        for (first, second) in [
            ("alice", "bob"),
            ("alice", "alice"),
            ("", "alice"),
            ("alice", ""),
        ] {
            let request = Request::builder()
                .header("x-user", first)
                .header("x-user", second);
            let parts = request.body(()).unwrap().into_parts().0;
            for extractor in [by(USER), by(USER).readable()] {
                let problem = extractor.extract(&parts).unwrap_err();
                assert_eq!(
                    problem.to_string(),
                    "the header x-user appears more than once",
                    "{first:?}, {second:?}"
                );
                assert!(!problem.is_absent() && !problem.is_misconfigured());
            }
        }
    }

    #[test]
    fn any_header_value_makes_a_short_key() {
        for value in [&[b'x'; 10_240][..], b"\xff\xfe", b"{}:"] {
            for extractor in [by(USER), by(USER).readable()] {
                let key = extractor.extract(&request(value)).unwrap();
                assert_eq!(key.as_bytes().len(), 33);
            }
        }
    }

    #[test]
    fn accepts_header_names_in_any_case() {
        let parts = request(b"alice");
        for extractor in [by("x-user"), by("X-User"), by(&USER)] {
            assert_eq!(extractor.extract(&parts), Ok(Key::secret("alice")));
        }
        for (name, fix) in [
            (
                "X-Forwarded-For",
                "use `ClientIp::x_forwarded_for()` with your trusted proxies",
            ),
            (
                "forwarded",
                "use `ClientIp::x_forwarded_for()` with your trusted proxies",
            ),
            (
                "X-Real-IP",
                "use `ClientIp::header(..)` with your trusted proxies",
            ),
            (
                "Fastly-Client-IP",
                "use `ClientIp::header(..)` with your trusted proxies",
            ),
            (
                "Host",
                "count by the tenant of the host, with `by_extension`",
            ),
            (
                "Authorization",
                "count by the authenticated user, with `by_extension`",
            ),
            (
                "proxy-authorization",
                "count by the authenticated user, with `by_extension`",
            ),
            ("Cookie", "count by the session, with `by_extension`"),
            ("X-Token-Bin", "count by the decoded value, with `key_fn`"),
        ] {
            let error = HeaderKey::new(name).unwrap_err().to_string();
            let name = name.to_lowercase();
            assert!(
                error.starts_with(&format!("{name:?} is not a valid header to count by: "))
                    && error.ends_with(fix),
                "{error}"
            );
        }
        for name in ["", "x user", "x-user:", "x-us\u{e9}r", &"x".repeat(1 << 17)] {
            let error = HeaderKey::new(name).unwrap_err().to_string();
            let name: String = name.chars().take(80).collect();
            assert!(
                error.starts_with(&format!("{name:?} is not a valid header name: use")),
                "{error}"
            );
        }
    }

    #[test]
    fn headers_with_addresses_are_refused() {
        for name in [
            "x-forwarded-for",
            "x-original-forwarded-for",
            "x-envoy-external-address",
            "x-real-ip",
            "x-client-ip",
            "client-ip",
            "x-cluster-client-ip",
            "cf-connecting-ip",
            "cf-connecting-ipv6",
            "cf-pseudo-ipv4",
            "true-client-ip",
            "fastly-client-ip",
            "fly-client-ip",
            "x-azure-clientip",
            "x-azure-socketip",
            "x-appengine-user-ip",
            "do-connecting-ip",
            "x-remote-addr",
            "cloudfront-viewer-address",
            "x-vercel-forwarded-for",
            "x-nf-client-connection-ip",
            "x-forwarded",
            "forwarded-for",
            "x-originating-ip",
            "eo-connecting-ip",
            "ali-cdn-real-ip",
            "wl-proxy-client-ip",
            "proxy-client-ip",
            "x-appengine-remote-addr",
            "x-real-client-ip",
            "x-forwarded-client-ip",
        ] {
            let error = HeaderKey::new(name).unwrap_err().to_string();
            assert!(error.contains("use `ClientIp::"), "{error}");
        }
        for name in ["x-forwarded-user", "x-client-id", "x-api-key", "user-agent"] {
            assert!(HeaderKey::new(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn surrounding_blanks_do_not_change_the_key() {
        for value in [
            &b"alice "[..],
            b" alice",
            b"\talice",
            b"alice\t",
            b" \t alice \t ",
        ] {
            assert_eq!(
                by(USER).extract(&request(value)),
                Ok(Key::secret("alice")),
                "{value:?}"
            );
        }
        for value in [&b" "[..], b"\t", b"  \t "] {
            let problem = by(USER).extract(&request(value)).unwrap_err();
            assert!(
                problem.is_absent() && problem.to_string() == "the header x-user is empty",
                "{value:?}: {problem}"
            );
        }
        assert_eq!(by(USER).extract(&request(b"a b")), Ok(Key::secret("a b")));
    }
}
