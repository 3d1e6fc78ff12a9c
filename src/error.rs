//! Configuration errors and store errors. Imports no other module of the crate, so that every
//! module can use it.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

/// An invalid setting, such as a quota, a policy or a Redis URL.
///
/// The message names the rejected value and the fix. It contains no password, no private key, and
/// nothing after `secret:`.
///
/// ```
/// use tower_redis_ratelimit::Quota;
///
/// let error = "10/60".parse::<Quota>().unwrap_err();
/// assert!(error.to_string().starts_with("\"10/60\" is not a valid quota: the duration has no unit; use the form"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(Box<str>);

impl ConfigError {
    /// Creates an error from a message of the form `<what is wrong>: <imperative>`.
    pub(crate) fn new(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// Creates an error about a text that is not a valid `what`.
    pub(crate) fn invalid(what: &str, text: &str, fix: impl fmt::Display) -> Self {
        let text: String = redacted(text).chars().take(80).collect();
        Self::new(format!("{text:?} is not a valid {what}: {fix}"))
    }

    /// Creates an error about a text that is none of `choices`.
    pub(crate) fn choice(what: &str, text: &str, choices: &str) -> Self {
        Self::invalid(what, text, format_args!("use {choices}"))
    }
}

/// Replaces a secret in a rejected value with an ellipsis: everything after `secret:` (the text form
/// of a secret key), `://` or the `user:` before an `@` (a password), or `-----BEGIN` (a private
/// key). Ignores case, and also matches inside a text that is not a valid key, URL or PEM.
pub(crate) fn redacted(text: &str) -> Cow<'_, str> {
    // Only ASCII letters differ, so a place in one text is the same place in the other.
    let lower = text.to_ascii_lowercase();
    let starts = [
        after(&lower, "://"),
        after(&lower, "-----begin"),
        after_named_secret(&lower),
        after_user(&lower),
    ];
    match starts.into_iter().flatten().min() {
        Some(start) if start < text.len() => format!("{}\u{2026}", &text[..start]).into(),
        _ => text.into(),
    }
}

fn after(text: &str, mark: &str) -> Option<usize> {
    Some(text.find(mark)? + mark.len())
}

/// The place after `secret`, other text, and a colon.
fn after_named_secret(text: &str) -> Option<usize> {
    let name_end = after(text, "secret")?;
    Some(name_end + after(&text[name_end..], ":")?)
}

/// The place after the first colon before the last `@`: a password may contain both.
fn after_user(text: &str) -> Option<usize> {
    let host = text.rfind('@')?;
    after(&text[..host], ":")
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// An error of a store that could not decide a check.
///
/// It is not a verdict on the caller: a [`Fallback`](crate::Fallback) decides the check locally
/// instead, and the middleware applies [`OnError`](crate::reject::OnError). The message names the
/// server, if one is involved, and the fix. The [`source`](std::error::Error::source) is the cause,
/// if there is one. Errors of this crate contain no caller's key and no password.
///
/// ```
/// use std::io;
/// use tower_redis_ratelimit::store::{ErrorKind, StoreError};
///
/// // The error of your own store if it cannot connect.
/// let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
/// let error = StoreError::with_source(ErrorKind::Unreachable, refused).with_server("10.0.0.1:6379").not_sent();
/// assert!(error.kind() == ErrorKind::Unreachable && error.is_not_sent());
/// assert!(error.to_string().starts_with("the server 10.0.0.1:6379 cannot be reached: "));
/// assert_eq!(error.kind().as_str(), "unreachable");
/// ```
#[derive(Clone)]
pub struct StoreError {
    kind: ErrorKind,
    /// The address of the server involved.
    server: Option<Arc<str>>,
    cause: Option<Arc<dyn std::error::Error + Send + Sync>>,
    /// The message, if it is not that of the kind.
    message: Option<Cow<'static, str>>,
    /// Whether the error concerns a single check, and not the store.
    check_only: bool,
    /// Whether the check was certainly not sent, and therefore not charged.
    not_sent: bool,
}

/// Maximum length in bytes of a text in an error: a server may send text of any length.
const MAX_TEXT: usize = 300;

/// Escapes control characters, which might change a terminal or forge a line of a log. Returns at most `most` bytes, and an
/// ellipsis if there are more.
pub(crate) fn printable(text: &str, most: usize) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        let length = shown.len();
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
        if shown.len() > most {
            shown.truncate(length);
            shown.push('\u{2026}');
            break;
        }
    }
    shown
}

/// Creates [`ErrorKind`] from a table of its variants, each with its name and its message: the problem
/// and its fix.
macro_rules! error_kinds {
    ($($(#[$doc:meta])* $kind:ident: $name:literal, $advice:literal;)*) => {
        /// The reason why a store could not decide.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $($(#[$doc])* $kind,)*
        }

        impl ErrorKind {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Returns the kind's name in lower case, such as `out_of_memory`, for a metric label.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }

            /// Returns the message for this kind: the problem and its fix.
            const fn advice(self) -> &'static str {
                match self {
                    $(Self::$kind => $advice,)*
                }
            }
        }
    };
}

error_kinds! {
    /// The store is misconfigured; the text is that of a [`ConfigError`].
    Configuration: "configuration",
        "invalid store configuration: check the arguments it was built with";
    /// The server is unreachable, or the connection broke.
    Unreachable: "unreachable",
        "the server cannot be reached: check the URL, and that the server is running";
    /// The TLS handshake failed for another reason than those below, usually because the server
    /// does not serve TLS.
    Tls: "tls",
        "TLS handshake with the server failed: check that the URL's port serves TLS";
    /// The server requires TLS, but the URL does not use it.
    TlsRequired: "tls_required",
        "the server requires TLS: use `rediss://` instead of `redis://`, and enable the feature `tls`";
    /// The server's certificate was issued by an untrusted CA.
    CertificateUntrusted: "certificate_untrusted",
        "the server's certificate was issued by an untrusted CA: pass the CA certificate to \
        `RedisStoreBuilder::root_certificates`, or add it to this machine's trust store. A \
        self-signed certificate of the server must have `CA:FALSE`";
    /// The server's certificate has expired, or is not valid yet.
    CertificateExpired: "certificate_expired",
        "the server's certificate has expired, or is not valid yet: renew it, and check the clocks";
    /// The server's certificate does not match the host in the URL.
    CertificateMismatch: "certificate_mismatch",
        "the server's certificate does not match the host in the URL: use the certificate's host, or set \
        `RedisStoreBuilder::server_name`";
    /// The server requires a client certificate, or rejected it.
    ClientCertificate: "client_certificate",
        "the server requires a client certificate from a CA that it trusts: set \
        `RedisStoreBuilder::client_certificate`, or set `tls-auth-clients no` in a Redis";
    /// No reply arrived in time. The check may or may not have been charged.
    Timeout: "timeout",
        "the server did not reply in time: check its load and the network, or raise the store's `timeout`";
    /// The server rejected the credentials, or requires some.
    Authentication: "authentication",
        "the server rejected the credentials: check the user and password in the URL (`redis://user:password@host/`)";
    /// The Redis user lacks a permission that the limiter needs.
    Permission: "permission",
        "the server denied the Redis user a permission: grant `~PREFIX:* +evalsha +eval +time +mget +set \
        +setrange +del +get` and, for SlidingLog, `+lrange +rpush +lset +ltrim +lrem +pexpireat`; for requests in flight \
        and a Fallback with a share, `+zrange +zremrangebyscore +zcard +zadd +zscore +zrem +pexpireat`; for \
        RedisStore::announce, `+zremrangebyscore +zadd +zcard +pexpire`; for blocks, `+zadd +zrem +zcard +zscore +zpopmin \
        +zrangebyscore +zrevrange +pexpireat`; for RedisStore::scan, `+scan`; in a Redis Cluster, `+asking \
        +cluster|slots` (`+cluster` before 7.0); a user of sentinels, `+sentinel|master` (`+sentinel` before 7.0)";
    /// The server is not a Redis, or a proxy changed its replies.
    Protocol: "protocol",
        "the server sent an unexpected reply: check that the URL's host and port are those of a Redis";
    /// Redis is a replica, which rejects writes.
    ReadOnly: "read_only",
        "the server is a read-only replica: point the URL at its master, or at its sentinels (`redis+sentinel://`)";
    /// Redis has reached `maxmemory` and its eviction policy finds nothing to evict.
    OutOfMemory: "out_of_memory",
        "the server has reached `maxmemory`: raise it, or use an eviction policy such as `volatile-ttl`";
    /// The server is loading its data or waiting for its master, no node of the cluster serves the
    /// check's slot at the moment, or the server reported by the sentinels is not a master yet.
    NotReady: "not_ready",
        "the server is loading its data, part of the cluster is down, or no master has been elected: wait until it is ready";
    /// Redis is a node of a Redis Cluster, which serves only some of the slots, but the store was
    /// configured for a single Redis.
    ClusterNode: "cluster_node",
        "the server is a node of a Redis Cluster, but the store expects a single Redis: use `redis+cluster://` \
        instead of `redis://`, or connect with `RedisStore::cluster`";
    /// The server rejected the command for another reason.
    Refused: "refused",
        "the server rejected the command: see its log";
    /// The store's queue of unsent checks is full.
    QueueFull: "queue_full",
        "the queue of unsent checks is full: raise `queue`, or lower the concurrency";
    /// The store was used outside of a Tokio runtime, or that runtime has shut down.
    NoRuntime: "no_runtime",
        "no Tokio runtime: call it inside of one, as in `runtime.block_on(async { limiter.take(key, 1).await })`";
}

impl StoreError {
    /// Creates an error of this kind, for your own [`Store`](crate::store::Store).
    pub fn new(kind: ErrorKind) -> Self {
        Self {
            kind,
            server: None,
            cause: None,
            message: None,
            check_only: false,
            not_sent: false,
        }
    }

    /// Creates an error of this kind with its cause.
    pub fn with_source(
        kind: ErrorKind,
        cause: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self {
            cause: Some(Arc::new(cause)),
            ..Self::new(kind)
        }
    }

    /// Creates an error of this kind with a cause of any type.
    pub(crate) fn with_boxed_source(
        kind: ErrorKind,
        cause: Box<dyn std::error::Error + Send + Sync>,
    ) -> Self {
        Self {
            cause: Some(cause.into()),
            ..Self::new(kind)
        }
    }

    /// Creates an error of this kind with this reason: printable, and truncated to [`MAX_TEXT`] bytes.
    pub(crate) fn explained(kind: ErrorKind, reason: impl AsRef<str>) -> Self {
        let cause =
            Box::<dyn std::error::Error + Send + Sync>::from(printable(reason.as_ref(), MAX_TEXT));
        Self {
            cause: Some(cause.into()),
            ..Self::new(kind)
        }
    }

    /// Replaces the message of the kind.
    #[must_use]
    pub(crate) fn with_message(self, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            message: Some(message.into()),
            ..self
        }
    }

    /// Returns `true` if the message contains the cause: it ends with a colon then.
    fn shows_cause(&self) -> bool {
        match self.kind {
            ErrorKind::Configuration | ErrorKind::Refused => true,
            _ => self
                .message
                .as_deref()
                .is_some_and(|message| message.ends_with(": ")),
        }
    }

    /// Creates the error of a check that waited for a connection that is still being opened.
    pub(crate) fn still_connecting() -> Self {
        Self::new(ErrorKind::Timeout).with_message(
            "the store is still connecting to the server: check its load and the network, or, if it does not decide once \
             connected, raise the `deadline` of a `Fallback` above twice the round trip, or else the store's `timeout`",
        )
    }

    /// Adds the server's address, which the message then names. An address that is already set is
    /// kept. Leave out user and password.
    #[must_use]
    pub fn with_server(self, server: impl fmt::Display) -> Self {
        // The first one is the nearest to the error.
        if self.server.is_some() {
            return self;
        }
        Self {
            server: Some(printable(&server.to_string(), MAX_TEXT).into()),
            ..self
        }
    }

    /// Marks the error as concerning this check only. A [`Fallback`](crate::Fallback) decides the
    /// check, and its circuit breaker does not count a failure.
    #[must_use]
    pub fn check_only(self) -> Self {
        Self {
            check_only: true,
            ..self
        }
    }

    /// Marks the check as not sent, so certainly not charged. A [`Fallback`](crate::Fallback) then
    /// charges its own grant to this store later. Without this mark it does not, since the store
    /// may already have charged the check.
    #[must_use]
    pub fn not_sent(self) -> Self {
        Self {
            not_sent: true,
            ..self
        }
    }

    /// Removes the mark of a check that was [not sent](Self::not_sent).
    pub(crate) fn maybe_sent(self) -> Self {
        Self {
            not_sent: false,
            ..self
        }
    }

    /// Returns `true` if the error concerns [this check only](Self::check_only).
    pub fn is_check_only(&self) -> bool {
        self.check_only
    }

    /// Returns `true` if a call over another connection would probably fail too.
    pub(crate) fn is_of_connection(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::Unreachable
                | ErrorKind::Tls
                | ErrorKind::TlsRequired
                | ErrorKind::CertificateUntrusted
                | ErrorKind::CertificateExpired
                | ErrorKind::CertificateMismatch
                | ErrorKind::ClientCertificate
                | ErrorKind::Timeout
                | ErrorKind::Authentication
                | ErrorKind::NotReady
        )
    }

    /// Returns the more useful of two errors: `other` if this one is an unreachable server or a
    /// timeout, since `other` may be a mistake that the user can fix.
    #[must_use]
    pub(crate) fn or_telling(self, other: Self) -> Self {
        if matches!(self.kind, ErrorKind::Unreachable | ErrorKind::Timeout) {
            other
        } else {
            self
        }
    }

    /// Returns `true` if the check was certainly [not sent](Self::not_sent).
    pub fn is_not_sent(&self) -> bool {
        self.not_sent
    }

    /// Returns the reason why the store could not decide.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

/// How the messages refer to the server. `Display` inserts its address after this.
const SERVER: &str = "the server";

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // These causes contain their own advice, which replaces the general one.
        let cause = match &self.cause {
            Some(cause) if self.shows_cause() => Some(cause),
            _ => None,
        };
        let text = match (self.kind, cause) {
            (ErrorKind::Configuration, Some(_)) => "invalid store configuration: ",
            (ErrorKind::Refused, Some(_)) => "the server rejected the command: ",
            (kind, _) => self.message.as_deref().unwrap_or(kind.advice()),
        };
        match (&self.server, text.split_once(SERVER)) {
            (Some(server), Some((before, after))) => write!(f, "{before}{SERVER} {server}{after}")?,
            _ => f.write_str(text)?,
        }
        match cause {
            Some(cause) => write!(f, "{cause}"),
            None => Ok(()),
        }
    }
}

/// Includes the message with its fix, since a `main` that returns an error prints the `Debug` form.
impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("StoreError");
        debug
            .field("kind", &self.kind)
            .field("text", &format_args!("{self}"));
        if let Some(cause) = std::error::Error::source(self) {
            debug.field("cause", &format_args!("{cause}"));
        }
        debug.finish()
    }
}

/// For values that need no conversion, such as the quota of a policy.
impl From<Infallible> for ConfigError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl From<ConfigError> for StoreError {
    fn from(error: ConfigError) -> Self {
        Self::with_source(ErrorKind::Configuration, error)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        let cause = self.cause.as_deref()?;
        if self.shows_cause() {
            return cause.source();
        }
        Some(cause)
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_runbook_covers_every_kind() {
        let page = include_str!("../docs/runbook.md");
        let missing = ErrorKind::ALL
            .iter()
            .copied()
            .filter(|kind| !page.contains(&format!("`{}`", kind.as_str())));
        assert_eq!(missing.collect::<Vec<_>>(), []);
    }

    /// Stores of other crates use these kinds too, and may have another server than Redis.
    #[test]
    fn general_errors_do_not_mention_redis() {
        let of_redis = ErrorKind::ALL
            .iter()
            .copied()
            .filter(|kind| StoreError::new(*kind).to_string().contains("Redis"));
        let known = [
            ErrorKind::CertificateUntrusted,
            ErrorKind::CertificateMismatch,
            ErrorKind::ClientCertificate,
            ErrorKind::Permission,
            ErrorKind::Protocol,
            ErrorKind::ClusterNode,
        ];
        assert_eq!(of_redis.collect::<Vec<_>>(), known);
    }

    /// Every message names the server, except those of kinds that involve none.
    #[test]
    fn errors_name_their_server_once() {
        let of_none = [
            ErrorKind::Configuration,
            ErrorKind::QueueFull,
            ErrorKind::NoRuntime,
        ];
        for &kind in ErrorKind::ALL {
            for error in [
                StoreError::new(kind),
                StoreError::explained(kind, "a leaf on the line"),
            ] {
                let text = error
                    .with_server("10.0.0.1:6379")
                    .with_server("10.0.0.2:6379")
                    .to_string();
                let names = !of_none.contains(&kind);
                assert_eq!(
                    text.matches("the server 10.0.0.1:6379").count(),
                    usize::from(names),
                    "{text}"
                );
                assert!(!text.contains("10.0.0.2"), "{text}");
            }
        }
    }

    /// A user or a password may contain an `@` or a colon that should be escaped.
    #[test]
    fn a_password_is_replaced() {
        for (text, shown) in [
            ("user:hunter2@host", "user:\u{2026}"),
            ("us@er:hunter2@host", "us@er:\u{2026}"),
            ("user:hun@ter2@host", "user:\u{2026}"),
            ("user:hun:ter2@host:6379", "user:\u{2026}"),
            ("redis://us@er:hunter2@host", "redis:\u{2026}"),
            ("redis://host/0", "redis://\u{2026}"),
            ("10.0.0.1:6379", "10.0.0.1:6379"),
            ("ann@example.com", "ann@example.com"),
        ] {
            assert_eq!(redacted(text), shown);
        }
    }

    /// Asserts the form `<what is wrong>: <imperative>`.
    #[track_caller]
    fn assert_names_fix(error: impl fmt::Display) {
        let text = error.to_string();
        // A problem of a URL names its own fix.
        let problem = text.strip_prefix("the Redis URL cannot be used: ");
        let (what, fix) = problem
            .and_then(|problem| problem.split_once("; "))
            .or_else(|| problem.unwrap_or(&text).split_once(": "))
            .unwrap_or_default();
        assert!(what.len() > 10 && fix.len() > 10, "{text}");
    }

    #[test]
    fn every_mistake_is_named_with_its_fix() {
        use crate::extract::{ClientIp, HeaderKey};
        use crate::select::Routes;
        use crate::store::{AnyStore, Servers, ShareConfig, StoreConfig, StoreKind};
        use crate::{Policies, Policy, Quota, RedisStore, Strategy};

        for text in [
            "",
            "10",
            "ten/s",
            "10/60",
            "10/M",
            "10/s burst",
            "0/s",
            "1/s burst 0",
            "1/0s",
            "1/d burst 4000000",
        ] {
            assert_names_fix(text.parse::<Quota>().unwrap_err());
        }
        for text in [
            "",
            "gcar",
            "gcra(2)",
            "gcra(",
            "sliding-window(60)",
            "sliding-window(0 cells)",
            "fixed-window(60)",
        ] {
            assert_names_fix(text.parse::<Strategy>().unwrap_err());
        }
        assert_names_fix("memory".parse::<StoreKind>().unwrap_err());
        assert_names_fix("all".parse::<ShareConfig>().unwrap_err());

        let (window, quota) = (
            Strategy::FixedWindow(Default::default()),
            Quota::per_second(5),
        );
        for policy in [
            Policy::new("a b", Strategy::Gcra, quota),
            Policy::new("p", window, quota.burst(6)),
            Policy::new("p", Strategy::SlidingLog, Quota::per_hour(100_001)),
            Policy::in_flight("p", 1_000_001),
            Policy::in_flight("p", 1).and_then(|policy| policy.slot_ttl(Duration::ZERO)),
            Policy::in_flight("p", 1).and_then(|policy| policy.slot_ttl(Duration::from_millis(1))),
        ] {
            assert_names_fix(policy.unwrap_err());
        }
        let policy = Policy::new("p", Strategy::Gcra, quota).unwrap();
        assert_names_fix(Policies::new([]).unwrap_err());
        assert_names_fix(Policies::new([policy.clone(), policy.clone()]).unwrap_err());
        let many = (0..17).map(|i| Policy::new(&i.to_string(), Strategy::Gcra, quota).unwrap());
        assert_names_fix(Policies::new(many).unwrap_err());

        assert_names_fix(HeaderKey::new("api key").unwrap_err());
        assert_names_fix(ClientIp::header("real ip").hops(1).unwrap_err());
        assert_names_fix(ClientIp::x_forwarded_for().hops(0).unwrap_err());
        assert_names_fix(ClientIp::peer().ipv6_prefix(129).unwrap_err());
        for trusted in [&[][..], &["privat"], &["::/0"], &["::/1", "8000::/1"]] {
            assert_names_fix(ClientIp::x_forwarded_for().trust(trusted).unwrap_err());
        }
        for pattern in ["users", "/a b", "/users/:id", "/{}", &"/{a}".repeat(26)] {
            assert_names_fix(
                Routes::new(policy.clone())
                    .route(pattern, policy.clone())
                    .unwrap_err(),
            );
        }
        assert_names_fix(Routes::new(policy).exempt("/%20/{id}").unwrap_err());

        let url = "redis://127.0.0.1/";
        let partitions = NonZeroUsize::new(1_025).unwrap();
        for builder in [
            RedisStore::builder("http://127.0.0.1/"),
            RedisStore::builder("redis://127.0.0.1/-1"),
            RedisStore::builder("redis://127.0.0.1/?db=1"),
            RedisStore::builder("redis+cluster://a,,b"),
            RedisStore::builder("redis+sentinel://a"),
            RedisStore::builder(Servers::cluster([""; 0])),
            RedisStore::builder(Servers::cluster(["redis+unix:///a"])),
            RedisStore::builder(Servers::cluster(["redis://a/1"])),
            RedisStore::builder(Servers::sentinel("a b", ["redis://a"])),
            RedisStore::builder(Servers::sentinel("a", [""; 0])),
            RedisStore::builder(Servers::sentinel("a", ["redis+unix:///a"])),
            RedisStore::builder(Servers::sentinel("a", ["redis://a/1"])),
            RedisStore::builder(url).prefix("a b"),
            RedisStore::builder(url).timeout(Duration::ZERO),
            RedisStore::builder(url).partitions(partitions),
            RedisStore::builder("redis://:a@b").password_file("c"),
            RedisStore::builder("redis://a/?password_file=b").password_file("c"),
            RedisStore::builder(url).sentinel_password_file("c"),
        ] {
            assert_names_fix(builder.connect_lazy().unwrap_err());
        }
        #[cfg(feature = "tls")]
        for builder in [
            RedisStore::builder(url).server_name("redis.example"),
            RedisStore::builder("rediss://127.0.0.1/").server_name("a b"),
            RedisStore::builder("rediss://127.0.0.1/").root_certificates("no PEM"),
            RedisStore::builder("rediss://127.0.0.1/").client_certificate("no PEM", "no PEM"),
        ] {
            assert_names_fix(builder.connect_lazy().unwrap_err());
        }
        #[cfg(not(feature = "tls"))]
        assert_names_fix(RedisStore::connect_lazy("rediss://127.0.0.1/").unwrap_err());
        let config = || StoreConfig {
            url: Some(url.to_owned()),
            ..StoreConfig::default()
        };
        for config in [
            StoreConfig {
                kind: StoreKind::Redis,
                ..StoreConfig::default()
            },
            StoreConfig {
                deadline: Some(Duration::ZERO),
                ..config()
            },
            StoreConfig {
                deadline: Some(Duration::from_secs(1)),
                ..config()
            },
            StoreConfig {
                root_certificates: Some("missing.pem".into()),
                ..config()
            },
            StoreConfig {
                client_certificate: Some("missing.pem".into()),
                ..config()
            },
        ] {
            let error = AnyStore::from_config(&config).unwrap_err();
            assert_names_fix(
                error
                    .to_string()
                    .strip_prefix("invalid store configuration: ")
                    .unwrap(),
            );
        }
    }

    #[test]
    fn long_texts_and_secrets_are_cut() {
        for length in [298, 300, 301, 1_000_000] {
            let error = StoreError::explained(ErrorKind::Refused, "\u{e9}".repeat(length / 2))
                .with_server("h".repeat(length));
            let text = format!("{error}");
            assert!(text.len() < 650, "{} bytes", text.len());
            assert_eq!(
                text.matches('\u{2026}').count(),
                if length > 301 {
                    2
                } else {
                    usize::from(length > 300)
                }
            );
        }
        assert_eq!(
            ConfigError::invalid("quota", &"x".repeat(1_000), "use this")
                .to_string()
                .len(),
            113
        );
        for text in [
            "secret:hunter2",
            " Secret:hunter2",
            "ip:secret:hunter2",
            "redis://user:hunter2@host/",
            "unix:///redis.sock?pass=hunter2",
            "user:hunter2@host",
            "-----Begin PRIVATE KEY-----\nhunter2",
        ] {
            let error = ConfigError::choice("caller", text, "another");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn messages_name_the_fix_and_cause_once() {
        for &kind in ErrorKind::ALL {
            let alone = StoreError::new(kind);
            assert_names_fix(&alone);
            assert!(
                format!("{alone:?}").contains(&alone.to_string()),
                "{alone:?}"
            );

            let caused = StoreError::with_source(kind, std::io::Error::other("a leaf on the line"));
            let mut text = caused.to_string();
            let mut source = caused.source();
            while let Some(cause) = source {
                text += &cause.to_string();
                source = cause.source();
            }
            assert_eq!(text.matches("a leaf on the line").count(), 1, "{text}");
            assert_eq!(
                format!("{caused:?}").matches("a leaf on the line").count(),
                1,
                "{caused:?}"
            );
        }
    }
}
