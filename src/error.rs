use std::fmt;
use std::sync::Arc;

use crate::limit::ConfigError;

/// A store could not decide.
///
/// It is no verdict on the caller: a [`Fallback`](crate::Fallback) answers it locally, and the middleware by
/// [`OnError`](crate::reject::OnError). Its text tells what to do about it, and its
/// [`source`](std::error::Error::source) why, if that is known. What a store of this crate tells has no caller's key
/// and no password.
///
/// ```
/// use std::io;
/// use tower_redis_ratelimit::store::{ErrorKind, StoreError};
///
/// // What a store of one's own says when it could not connect.
/// let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
/// let error = StoreError::with_source(ErrorKind::Unreachable, refused).unsent();
/// assert!(error.kind() == ErrorKind::Unreachable && error.is_unsent());
/// assert_eq!(error.kind().as_str(), "unreachable");
/// ```
#[derive(Clone)]
pub struct StoreError {
    kind: ErrorKind,
    cause: Option<Arc<dyn std::error::Error + Send + Sync>>,
    /// Whether it is of one check alone, and says nothing of the others.
    of_check: bool,
    /// Whether the check is known not to have been sent, and so not to have been charged.
    unsent: bool,
}

/// What kept a store from deciding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store was set up wrongly; the text is that of a [`ConfigError`].
    Configuration,
    /// The server could not be reached, or the connection broke.
    Unreachable,
    /// No TLS connection could be made, for none of the reasons below: mostly, the server does not speak TLS.
    Tls,
    /// The server speaks TLS only, and the URL does not ask for it.
    TlsWanted,
    /// The authority that has signed the server's certificate is not trusted.
    CertificateUntrusted,
    /// The server's certificate has expired, or is not valid yet.
    CertificateExpired,
    /// The server's certificate is for another host.
    CertificateName,
    /// The server wants a certificate of ours, or refuses the one that it was given.
    ClientCertificate,
    /// There was no answer in time. Whether the check was charged is not known.
    Timeout,
    /// The server refused the password, or wants one.
    Authentication,
    /// The Redis user may not do what the limiter needs.
    Permission,
    /// What answered is no Redis, or something between changed its replies.
    Protocol,
    /// Redis is a replica, which cannot count.
    ReadOnly,
    /// Redis has reached `maxmemory` and may evict nothing.
    OutOfMemory,
    /// The server is loading its data, or is waiting for its master; no node of a cluster decides a check just now; or
    /// what the sentinels tell of is not a master yet.
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
    /// An error of this kind, for a [`Store`](crate::store::Store) of one's own.
    pub fn new(kind: ErrorKind) -> Self {
        Self { kind, cause: None, of_check: false, unsent: false }
    }

    /// An error of this kind with its cause.
    pub fn with_source(kind: ErrorKind, cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { cause: Some(Arc::new(cause)), ..Self::new(kind) }
    }

    /// The same error, of this check alone: it says nothing of other checks. A [`Fallback`](crate::Fallback) answers
    /// the check, and its breaker does not count it as a failure.
    #[must_use]
    pub fn of_check(self) -> Self {
        Self { of_check: true, ..self }
    }

    /// The same error, of a check that was not sent, and so was surely not charged. A [`Fallback`](crate::Fallback)
    /// later charges what it granted instead. Without this mark it must not, since the store may have charged it.
    #[must_use]
    pub fn unsent(self) -> Self {
        Self { unsent: true, ..self }
    }

    /// Whether it is [of one check alone](Self::of_check).
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

    /// Of two failures the one that says more: a mistake that can be put right, rather than that a server is away.
    #[must_use]
    pub(crate) fn or_telling(self, other: Self) -> Self {
        if matches!(self.kind, ErrorKind::Unreachable | ErrorKind::Timeout) { other } else { self }
    }

    /// Whether the check is known [not to have been sent](Self::unsent).
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }

    /// What kept the store from deciding.
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
            Self::Unreachable => "the server cannot be reached: check the URL, and that the server runs",
            Self::Tls => "no TLS connection to the server can be made: check that the URL's port speaks TLS",
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
            Self::Timeout => "the server did not answer in time: check its load and the network, or allow more time",
            Self::Authentication => {
                "the server refused to let us in: check the user and password in the URL (`redis://user:password@host/`)"
            }
            Self::Permission => {
                "the Redis user lacks a permission: allow `~PREFIX:* +evalsha +eval +time +mget +set +del` \
                 and, for SlidingLog, `+lrange +rpush +lset +ltrim +lrem +pexpireat`; for RedisStore::announce, \
                 `+zremrangebyscore +zadd +zcard +pexpire`; in a Redis Cluster, `+asking +cluster|slots` (`+cluster` before 7.0); a user of sentinels, \
                 `+sentinel|master` (`+sentinel` before 7.0)"
            }
            Self::Protocol => {
                "the server's reply is none that Redis gives to our script: check that the URL's host and port are \
                 those of a Redis"
            }
            Self::ReadOnly => {
                "Redis is a read-only replica: point the URL at its master, or at its sentinels (`redis+sentinel://`)"
            }
            Self::OutOfMemory => {
                "Redis has no memory left: raise `maxmemory`, or choose an eviction policy such as `volatile-ttl`"
            }
            Self::NotReady => {
                "the server is loading its data, a part of the cluster is down, or no master is elected yet: wait until it is ready"
            }
            Self::Cluster => {
                "the server is a node of a Redis Cluster, and the store is for a single Redis: write `redis+cluster://` instead \
                 of `redis://`"
            }
            Self::Refused => "the server refused: see the cause, or the server's log if there is none",
            Self::QueueFull => {
                "too many checks are waiting to be sent: allow a longer queue, or limit the requests in flight"
            }
            Self::NoRuntime => "there is no tokio runtime to run on: call this from a task of a running one",
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.kind, &self.cause) {
            // It is the cause that says what to do.
            (ErrorKind::Configuration, Some(cause)) => write!(f, "the store is set up wrongly: {cause}"),
            (kind, _) => f.write_str(kind.advice()),
        }
    }
}

/// Says what to do too: it is what a `main` that returns an error prints.
impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("StoreError");
        debug.field("kind", &self.kind).field("text", &format_args!("{self}"));
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
            ErrorKind::Configuration => cause.source(),
            _ => Some(cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

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

    /// A store outside of this crate may be of another server.
    #[test]
    fn general_errors_do_not_mention_redis() {
        let of_redis = KINDS.into_iter().filter(|kind| StoreError::new(*kind).to_string().contains("Redis"));
        let known = [
            ErrorKind::CertificateUntrusted,
            ErrorKind::CertificateName,
            ErrorKind::ClientCertificate,
            ErrorKind::Permission,
            ErrorKind::Protocol,
            ErrorKind::ReadOnly,
            ErrorKind::OutOfMemory,
            ErrorKind::Cluster,
        ];
        assert_eq!(of_redis.collect::<Vec<_>>(), known);
    }

    /// What is wrong, a colon, and then what to do.
    #[test]
    fn messages_name_the_fix_and_cause_once() {
        for kind in KINDS {
            let alone = StoreError::new(kind);
            let (what, advice) =
                alone.to_string().split_once(": ").map(|(a, b)| (a.len(), b.len())).unwrap_or_default();
            assert!(what > 10 && advice > 10, "{alone}");
            assert!(format!("{alone:?}").contains(&alone.to_string()), "{alone:?}");

            let caused = StoreError::with_source(kind, std::io::Error::other("a leaf on the line"));
            let mut text = caused.to_string();
            let mut source = caused.source();
            while let Some(cause) = source {
                text += &cause.to_string();
                source = cause.source();
            }
            assert_eq!(text.matches("a leaf on the line").count(), 1, "{text}");
            assert_eq!(format!("{caused:?}").matches("a leaf on the line").count(), 1, "{caused:?}");
        }
    }
}
