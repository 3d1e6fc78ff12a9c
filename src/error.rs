//! The errors of settings and of stores. It imports no other room, so that every room can use it.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// A setting that cannot work: a quota, a policy, a Redis URL.
///
/// Its text names the value that was refused, and says what to write instead. It shows no password, and no key after
/// `secret:`.
///
/// ```
/// use tower_redis_ratelimit::Quota;
///
/// let error = "10/60".parse::<Quota>().unwrap_err();
/// assert!(error.to_string().starts_with("\"10/60\" is not a valid quota: the duration has no unit; write it like"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(Box<str>);

impl ConfigError {
    /// What is wrong, a colon, and what to write instead.
    pub(crate) fn new(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// Of a text that is not a valid `what`.
    pub(crate) fn invalid(what: &str, text: &str, fix: impl fmt::Display) -> Self {
        let text: String = redacted(text).chars().take(80).collect();
        Self::new(format!("{text:?} is not a valid {what}: {fix}"))
    }

    /// Of a text that is none of these choices.
    pub(crate) fn choice(what: &str, text: &str, choices: &str) -> Self {
        Self::invalid(what, text, format_args!("write {choices}"))
    }
}

/// Without what follows `secret:`, which is the text form of a key. In any case, and also where blanks or a prefix keep it
/// from being one.
fn redacted(text: &str) -> Cow<'_, str> {
    let lower = text.to_ascii_lowercase();
    let colon = lower
        .find("secret")
        .and_then(|secret| Some(secret + lower[secret..].find(':')?));
    match colon {
        Some(colon) if colon + 1 < text.len() => format!("{}\u{2026}", &text[..=colon]).into(),
        _ => text.into(),
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// A store could not decide.
///
/// It is not a verdict on the caller: a [`Fallback`](crate::Fallback) answers it locally, and the middleware by
/// [`OnError`](crate::reject::OnError). Its text names the server, if it is of one, and says how to fix it; its
/// [`source`](std::error::Error::source) says why it happened, if that is known. Errors of this crate contain no
/// caller's key and no password.
///
/// ```
/// use std::io;
/// use tower_redis_ratelimit::store::{ErrorKind, StoreError};
///
/// // The error of your own store when it could not connect.
/// let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
/// let error = StoreError::with_source(ErrorKind::Unreachable, refused).at("10.0.0.1:6379").unsent();
/// assert!(error.kind() == ErrorKind::Unreachable && error.is_unsent());
/// assert!(error.to_string().starts_with("the server 10.0.0.1:6379 cannot be reached: "));
/// assert_eq!(error.kind().as_str(), "unreachable");
/// ```
#[derive(Clone)]
pub struct StoreError {
    kind: ErrorKind,
    /// The address of the server that it is of.
    server: Option<Arc<str>>,
    cause: Option<Arc<dyn std::error::Error + Send + Sync>>,
    /// Whether it concerns one check only.
    of_check: bool,
    /// Whether the check is known not to have been sent, and so not to have been charged.
    unsent: bool,
}

/// Maximum length in bytes of a text of a server in an error: a server may send any amount.
const MAX_TEXT: usize = 300;

/// The text, or its beginning if it is longer than [`MAX_TEXT`].
fn shortened(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT)
            .rev()
            .find(|end| text.is_char_boundary(*end))
            .unwrap_or(0);
        text.truncate(end);
        text.push('\u{2026}');
    }
    text
}

/// Why a store could not decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store was set up wrongly; the text is that of a [`ConfigError`].
    Configuration,
    /// The server could not be reached, or the connection broke.
    Unreachable,
    /// No TLS connection could be made, for another reason than those below: mostly, the server does not speak TLS.
    Tls,
    /// The server speaks TLS only, and the URL does not ask for it.
    TlsWanted,
    /// The authority that has signed the server's certificate is not trusted.
    CertificateUntrusted,
    /// The server's certificate has expired, or is not valid yet.
    CertificateExpired,
    /// The server's certificate is for another host.
    CertificateName,
    /// The server requires a client certificate, or refuses the one that it got.
    ClientCertificate,
    /// There was no answer in time. Whether the check was charged is not known.
    Timeout,
    /// The server refused the password, or requires one.
    Authentication,
    /// The Redis user lacks a permission that the limiter needs.
    Permission,
    /// The server is not a Redis, or a proxy changed its replies.
    Protocol,
    /// Redis is a replica, which cannot count.
    ReadOnly,
    /// Redis has reached `maxmemory` and may evict nothing.
    OutOfMemory,
    /// The server is loading its data, or is waiting for its master; no node of a cluster decides a check just now; or
    /// the server that the sentinels report is not a master yet.
    NotReady,
    /// Redis is a node of a Redis Cluster, which decides only a part of the checks, and the store is set up for a
    /// single Redis.
    Cluster,
    /// The server refused for another reason.
    Refused,
    /// As many checks as the store may hold are waiting already.
    QueueFull,
    /// The store was used outside of a tokio runtime, or that runtime has ended.
    NoRuntime,
}

impl StoreError {
    /// An error of this kind, for your own [`Store`](crate::store::Store).
    pub fn new(kind: ErrorKind) -> Self {
        Self {
            kind,
            server: None,
            cause: None,
            of_check: false,
            unsent: false,
        }
    }

    /// An error of this kind with its cause.
    pub fn with_source(
        kind: ErrorKind,
        cause: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self {
            cause: Some(Arc::new(cause)),
            ..Self::new(kind)
        }
    }

    /// An error of this kind, for this reason, [cut](MAX_TEXT) at 300 bytes.
    pub(crate) fn explained(kind: ErrorKind, reason: impl Into<String>) -> Self {
        let cause = Box::<dyn std::error::Error + Send + Sync>::from(shortened(reason.into()));
        Self {
            cause: Some(cause.into()),
            ..Self::new(kind)
        }
    }

    /// The same error, of the server at this address, which its text then names. It keeps the address that it has.
    /// Leave out user and password.
    #[must_use]
    pub fn at(self, server: impl fmt::Display) -> Self {
        let server = self
            .server
            .unwrap_or_else(|| shortened(server.to_string()).into());
        Self {
            server: Some(server),
            ..self
        }
    }

    /// The same error, of this check only. A [`Fallback`](crate::Fallback) answers the check, and its breaker does not
    /// count it as a failure.
    #[must_use]
    pub fn of_check(self) -> Self {
        Self {
            of_check: true,
            ..self
        }
    }

    /// The same error, of a check that was not sent, and so certainly not charged. A [`Fallback`](crate::Fallback)
    /// later charges what it granted instead. Without this mark it must not, since the store may have charged it.
    #[must_use]
    pub fn unsent(self) -> Self {
        Self {
            unsent: true,
            ..self
        }
    }

    /// Whether it concerns [this check only](Self::of_check).
    pub fn is_of_check(&self) -> bool {
        self.of_check
    }

    /// Whether a call over another connection would likely fail too.
    pub(crate) fn is_of_connection(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::Unreachable
                | ErrorKind::Tls
                | ErrorKind::TlsWanted
                | ErrorKind::CertificateUntrusted
                | ErrorKind::CertificateExpired
                | ErrorKind::CertificateName
                | ErrorKind::ClientCertificate
                | ErrorKind::Timeout
                | ErrorKind::Authentication
                | ErrorKind::NotReady
        )
    }

    /// The more useful of two failures: a mistake that can be fixed, rather than an unreachable server.
    #[must_use]
    pub(crate) fn or_telling(self, other: Self) -> Self {
        if matches!(self.kind, ErrorKind::Unreachable | ErrorKind::Timeout) {
            other
        } else {
            self
        }
    }

    /// Whether the check is known [not to have been sent](Self::unsent).
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }

    /// Why the store could not decide.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl ErrorKind {
    /// Its name in lower case, as a label of a metric: `out_of_memory`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::Unreachable => "unreachable",
            Self::Tls => "tls",
            Self::TlsWanted => "tls_wanted",
            Self::CertificateUntrusted => "certificate_untrusted",
            Self::CertificateExpired => "certificate_expired",
            Self::CertificateName => "certificate_name",
            Self::ClientCertificate => "client_certificate",
            Self::Timeout => "timeout",
            Self::Authentication => "authentication",
            Self::Permission => "permission",
            Self::Protocol => "protocol",
            Self::ReadOnly => "read_only",
            Self::OutOfMemory => "out_of_memory",
            Self::NotReady => "not_ready",
            Self::Cluster => "cluster",
            Self::Refused => "refused",
            Self::QueueFull => "queue_full",
            Self::NoRuntime => "no_runtime",
        }
    }

    /// What to do about it.
    const fn advice(self) -> &'static str {
        match self {
            Self::Configuration => "the store is set up wrongly: correct what it is built with",
            Self::Unreachable => {
                "the server cannot be reached: check the URL, and that the server runs"
            }
            Self::Tls => {
                "no TLS connection to the server can be made: check that the URL's port speaks TLS"
            }
            Self::TlsWanted => {
                "the server speaks TLS only: write `rediss://` instead of `redis://`, and turn on the feature `tls`"
            }
            Self::CertificateUntrusted => {
                "the server's certificate is not trusted: give the certificate of the authority that has signed it to \
                 `RedisStoreBuilder::root_certificates`, or install it on this machine"
            }
            Self::CertificateExpired => {
                "the server's certificate has expired, or is not valid yet: renew it, and check the clocks"
            }
            Self::CertificateName => {
                "the server's certificate is for another host: write that host in the URL, or give its name to \
                 `RedisStoreBuilder::server_name`"
            }
            Self::ClientCertificate => {
                "the server wants a certificate that it trusts: give one to `RedisStoreBuilder::client_certificate`, or let \
                 the server do without (`tls-auth-clients no` in a Redis)"
            }
            Self::Timeout => {
                "the server did not answer in time: check its load and the network, or allow more time"
            }
            Self::Authentication => {
                "the server refused to let us in: check the user and password in the URL (`redis://user:password@host/`)"
            }
            Self::Permission => {
                "the server denies the Redis user a permission: allow `~PREFIX:* +evalsha +eval +time +mget +set \
                 +setrange +del` and, for SlidingLog, `+lrange +rpush +lset +ltrim +lrem +pexpireat`; for requests in flight \
                 and a Fallback with a share, `+zrange +zremrangebyscore +zcard +zadd +zscore +zrem +pexpireat`; for \
                 RedisStore::announce, `+zremrangebyscore +zadd +zcard +pexpire`; for RedisStore::scan, `+scan`; in a Redis Cluster, `+asking \
                 +cluster|slots` (`+cluster` before 7.0); a user of sentinels, `+sentinel|master` (`+sentinel` before 7.0)"
            }
            Self::Protocol => {
                "the server sent an unexpected reply: check that the URL's host and port are those of a Redis"
            }
            Self::ReadOnly => {
                "the server is a read-only replica: point the URL at its master, or at its sentinels (`redis+sentinel://`)"
            }
            Self::OutOfMemory => {
                "the server has no memory left: raise `maxmemory`, or choose an eviction policy such as `volatile-ttl`"
            }
            Self::NotReady => {
                "the server is loading its data, a part of the cluster is down, or no master is elected yet: wait until it is ready"
            }
            Self::Cluster => {
                "the server is a node of a Redis Cluster, and the store is for a single Redis: write `redis+cluster://` \
                 instead of `redis://`, or connect with `RedisStore::cluster`"
            }
            Self::Refused => "the server refused: see its log for the reason",
            Self::QueueFull => {
                "too many checks are waiting to be sent: allow a longer queue, or limit the requests in flight"
            }
            Self::NoRuntime => "no tokio runtime is running: call this from a task of one",
        }
    }
}

/// What the advice calls the server that it is about. Its address is put behind.
const SERVER: &str = "the server";

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of these it is the cause that says what to do.
        let (text, cause) = match (self.kind, &self.cause) {
            (ErrorKind::Configuration, Some(cause)) => {
                ("the store is set up wrongly: ", Some(cause))
            }
            (ErrorKind::Refused, Some(cause)) => ("the server refused: ", Some(cause)),
            (kind, _) => (kind.advice(), None),
        };
        match (&self.server, text.split_once(SERVER)) {
            (Some(server), Some((before, after))) => write!(f, "{before}{SERVER} {server}{after}")?,
            _ => f.write_str(text)?,
        }
        cause.map_or(Ok(()), |cause| write!(f, "{cause}"))
    }
}

/// Includes what to do, since a `main` that returns an error prints this.
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

impl From<ConfigError> for StoreError {
    fn from(error: ConfigError) -> Self {
        Self::with_source(ErrorKind::Configuration, error)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        let cause = self.cause.as_deref()?;
        match self.kind {
            // Its own text is in ours.
            ErrorKind::Configuration | ErrorKind::Refused => cause.source(),
            _ => Some(cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use super::*;

    const KINDS: [ErrorKind; 19] = {
        use ErrorKind::*;
        [
            Configuration,
            Unreachable,
            Tls,
            TlsWanted,
            CertificateUntrusted,
            CertificateExpired,
            CertificateName,
            ClientCertificate,
            Timeout,
            Authentication,
            Permission,
            Protocol,
            ReadOnly,
            OutOfMemory,
            NotReady,
            Cluster,
            Refused,
            QueueFull,
            NoRuntime,
        ]
    };

    #[test]
    fn every_kind_is_known() {
        for (i, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, i, "{kind:?}");
        }
        // The last one, so that a kind beyond it is missed.
        assert!(matches!(KINDS[KINDS.len() - 1], ErrorKind::NoRuntime));
    }

    #[test]
    fn the_runbook_says_what_to_do() {
        let page = include_str!("../docs/runbook.md");
        let missing = KINDS
            .into_iter()
            .filter(|kind| !page.contains(&format!("`{}`", kind.as_str())));
        assert_eq!(missing.collect::<Vec<_>>(), []);
    }

    /// A store outside of this crate may be of another server.
    #[test]
    fn general_errors_do_not_mention_redis() {
        let of_redis = KINDS
            .into_iter()
            .filter(|kind| StoreError::new(*kind).to_string().contains("Redis"));
        let known = [
            ErrorKind::CertificateUntrusted,
            ErrorKind::CertificateName,
            ErrorKind::ClientCertificate,
            ErrorKind::Permission,
            ErrorKind::Protocol,
            ErrorKind::Cluster,
        ];
        assert_eq!(of_redis.collect::<Vec<_>>(), known);
    }

    /// All but those that are of no server.
    #[test]
    fn errors_name_their_server_once() {
        let of_none = [
            ErrorKind::Configuration,
            ErrorKind::QueueFull,
            ErrorKind::NoRuntime,
        ];
        for kind in KINDS {
            for error in [
                StoreError::new(kind),
                StoreError::explained(kind, "a leaf on the line"),
            ] {
                let text = error.at("10.0.0.1:6379").at("10.0.0.2:6379").to_string();
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

    /// What is wrong, a colon, and then what to do.
    #[track_caller]
    fn assert_says_what_to_do(error: impl fmt::Display) {
        let text = error.to_string();
        let (what, fix) = text.split_once(": ").unwrap_or_default();
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
            assert_says_what_to_do(text.parse::<Quota>().unwrap_err());
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
            assert_says_what_to_do(text.parse::<Strategy>().unwrap_err());
        }
        assert_says_what_to_do("memory".parse::<StoreKind>().unwrap_err());
        assert_says_what_to_do("all".parse::<ShareConfig>().unwrap_err());

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
            assert_says_what_to_do(policy.unwrap_err());
        }
        let policy = Policy::new("p", Strategy::Gcra, quota).unwrap();
        assert_says_what_to_do(Policies::new([]).unwrap_err());
        assert_says_what_to_do(Policies::new([policy.clone(), policy.clone()]).unwrap_err());
        let many = (0..17).map(|i| Policy::new(&i.to_string(), Strategy::Gcra, quota).unwrap());
        assert_says_what_to_do(Policies::new(many).unwrap_err());

        assert_says_what_to_do(HeaderKey::new("api key").unwrap_err());
        assert_says_what_to_do(ClientIp::header("real ip").hops(1).unwrap_err());
        assert_says_what_to_do(ClientIp::x_forwarded_for().hops(0).unwrap_err());
        assert_says_what_to_do(ClientIp::peer().ipv6_prefix(129).unwrap_err());
        for trusted in [&[][..], &["privat"], &["::/0"], &["::/1", "8000::/1"]] {
            assert_says_what_to_do(ClientIp::x_forwarded_for().trust(trusted).unwrap_err());
        }
        for pattern in ["users", "/a b", "/users/:id", "/{}", &"/{a}".repeat(26)] {
            assert_says_what_to_do(
                Routes::new(policy.clone())
                    .route(pattern, policy.clone())
                    .unwrap_err(),
            );
        }
        assert_says_what_to_do(Routes::new(policy).exempt("/%20/{id}").unwrap_err());

        let url = "redis://127.0.0.1/";
        let partitions = NonZeroUsize::new(1_025).unwrap();
        for builder in [
            RedisStore::builder("http://127.0.0.1/"),
            RedisStore::builder("redis://127.0.0.1/-1"),
            RedisStore::builder("redis://127.0.0.1/?db=1"),
            RedisStore::builder("redis+cluster://a,,b"),
            RedisStore::builder("redis+sentinel://a"),
            RedisStore::builder(Servers::cluster([""; 0])),
            RedisStore::builder(Servers::sentinel("a b", ["redis://a"])),
            RedisStore::builder(url).prefix("a b"),
            RedisStore::builder(url).timeout(Duration::ZERO),
            RedisStore::builder(url).partitions(partitions),
        ] {
            assert_says_what_to_do(builder.connect_lazy().unwrap_err());
        }
        #[cfg(feature = "tls")]
        for builder in [
            RedisStore::builder(url).server_name("redis.example"),
            RedisStore::builder("rediss://127.0.0.1/").server_name("a b"),
            RedisStore::builder("rediss://127.0.0.1/").root_certificates("no PEM"),
            RedisStore::builder("rediss://127.0.0.1/").client_certificate("no PEM", "no PEM"),
        ] {
            assert_says_what_to_do(builder.connect_lazy().unwrap_err());
        }
        #[cfg(not(feature = "tls"))]
        assert_says_what_to_do(RedisStore::connect_lazy("rediss://127.0.0.1/").unwrap_err());
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
                deadline: Duration::ZERO,
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
            assert_says_what_to_do(
                error
                    .to_string()
                    .strip_prefix("the store is set up wrongly: ")
                    .unwrap(),
            );
        }
    }

    #[test]
    fn long_texts_and_secrets_are_cut() {
        for length in [298, 300, 301, 1_000_000] {
            let error = StoreError::explained(ErrorKind::Refused, "\u{e9}".repeat(length / 2))
                .at("h".repeat(length));
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
            ConfigError::invalid("quota", &"x".repeat(1_000), "write one")
                .to_string()
                .len(),
            114
        );
        for text in ["secret:hunter2", " Secret:hunter2", "ip:secret:hunter2"] {
            let error = ConfigError::choice("caller", text, "another");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn messages_name_the_fix_and_cause_once() {
        for kind in KINDS {
            let alone = StoreError::new(kind);
            assert_says_what_to_do(&alone);
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
