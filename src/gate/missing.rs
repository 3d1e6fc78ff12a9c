use std::borrow::Cow;
use std::fmt;

use http::{HeaderName, HeaderValue};

use crate::limit::words;
use crate::observe::UncountedReason;
use crate::observe::mistakes::NO_EXTENSION;

/// No rate-limit key was found for a request.
///
/// ```
/// use tower_redis_ratelimit::extract::MissingKey;
///
/// let missing = MissingKey::new("no API key");
/// assert_eq!(missing.to_string(), "no API key");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingKey {
    problem: Problem,
    cause: Cause,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Problem {
    Text(Cow<'static, str>),
    /// The request lacks this header. Formatted only when displayed, since such requests may pass.
    NoHeader(HeaderName),
    /// The request has no extension of this type.
    NoExtension(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Cause {
    /// The client sent no key.
    Absent,
    /// The client sent no credentials. The 401 has this challenge.
    Unauthenticated(HeaderValue),
    /// The client sent something that must not be a key.
    Malformed,
    /// The server is misconfigured, so no request has a key.
    Misconfigured,
}

/// Whether to reject a request without a key. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Reject the request: over HTTP with 400, or with 401 if the extractor has a
    /// [challenge](crate::extract::MissingKey::unauthenticated).
    #[default]
    Reject,
    /// Admit the request, uncounted. The observer is [notified](crate::observe::Event::Uncounted) of it.
    Allow,
}

words!(OnMissingKey, "answer to a missing key": Reject = "reject", Allow = "allow");

impl MissingKey {
    /// The client left the key out: over HTTP a 400, over gRPC `INVALID_ARGUMENT`. `problem` is shown to the client,
    /// and names the missing key, such as "no API key".
    pub fn new(problem: impl Into<Cow<'static, str>>) -> Self {
        Self {
            problem: Problem::Text(problem.into()),
            cause: Cause::Absent,
        }
    }

    /// The client left out its credentials, such as an API key: over HTTP a 401, over gRPC
    /// `UNAUTHENTICATED`. `problem` is shown to the client. As with [`new`](Self::new),
    /// [`OnMissingKey`](crate::reject::OnMissingKey) may let the request pass.
    ///
    /// `challenge` tells the client how to authenticate, such as `Bearer` or `Basic realm="books"`. A 401 must have one
    /// (RFC 9110), so the layer adds it as `WWW-Authenticate` to every 401 without one.
    ///
    /// ```
    /// use http::HeaderValue;
    /// use tower_redis_ratelimit::extract::MissingKey;
    ///
    /// let missing = MissingKey::unauthenticated("no access token", HeaderValue::from_static("Bearer"));
    /// assert_eq!(missing.challenge().unwrap(), "Bearer");
    /// ```
    pub fn unauthenticated(problem: impl Into<Cow<'static, str>>, challenge: HeaderValue) -> Self {
        Self {
            problem: Problem::Text(problem.into()),
            cause: Cause::Unauthenticated(challenge),
        }
    }

    /// The client sent a value that must not become a key, such as a repeated header: over HTTP a
    /// 400, over gRPC `INVALID_ARGUMENT`. [`OnMissingKey`](crate::reject::OnMissingKey) does not
    /// apply: otherwise a client could avoid being counted by sending such a value. `problem` is
    /// shown to the client.
    pub fn malformed(problem: impl Into<Cow<'static, str>>) -> Self {
        Self {
            problem: Problem::Text(problem.into()),
            cause: Cause::Malformed,
        }
    }

    /// The server is misconfigured, so that no request can have a key: over HTTP a 500, over gRPC
    /// `INTERNAL`. [`OnMissingKey`](crate::reject::OnMissingKey) does not apply.
    ///
    /// `problem` names the fix. It is reported to the layer's [observer](crate::observe::Event::Misconfigured),
    /// and shown to clients in debug builds only.
    pub fn misconfigured(problem: impl Into<Cow<'static, str>>) -> Self {
        Self {
            problem: Problem::Text(problem.into()),
            cause: Cause::Misconfigured,
        }
    }

    /// The client left out this header. With a challenge, it is [unauthenticated](Self::unauthenticated).
    pub(crate) fn header(name: &HeaderName, challenge: Option<&HeaderValue>) -> Self {
        let cause = match challenge {
            Some(challenge) => Cause::Unauthenticated(challenge.clone()),
            None => Cause::Absent,
        };
        Self {
            problem: Problem::NoHeader(name.clone()),
            cause,
        }
    }

    /// The request lacks an extension of this type. This is a misconfiguration, unless another
    /// extractor finds a key.
    pub(crate) const fn extension(of_type: &'static str) -> Self {
        Self {
            problem: Problem::NoExtension(of_type),
            cause: Cause::Misconfigured,
        }
    }

    /// Returns `true` if another extractor may provide the key.
    pub(super) const fn may_have_another(&self) -> bool {
        self.is_absent() || self.no_extension().is_some()
    }

    /// The type of the extension that the request lacks.
    pub(super) const fn no_extension(&self) -> Option<&'static str> {
        match self.problem {
            Problem::NoExtension(of_type) => Some(of_type),
            _ => None,
        }
    }

    /// Returns `true` if the server is at fault, not the client.
    pub const fn is_misconfigured(&self) -> bool {
        matches!(self.cause, Cause::Misconfigured)
    }

    /// Returns `true` if the key is absent, so that [`OnMissingKey`](crate::reject::OnMissingKey)
    /// applies.
    pub const fn is_absent(&self) -> bool {
        matches!(self.cause, Cause::Absent | Cause::Unauthenticated(_))
    }

    /// The reason why the request is not counted.
    pub(super) fn reason(&self) -> UncountedReason<'_> {
        match self.cause {
            Cause::Misconfigured => UncountedReason::Misconfigured,
            Cause::Absent | Cause::Unauthenticated(_) | Cause::Malformed => {
                UncountedReason::NoKey(self)
            }
        }
    }

    /// The challenge to authenticate, if the client is [unauthenticated](Self::unauthenticated).
    pub const fn challenge(&self) -> Option<&HeaderValue> {
        match &self.cause {
            Cause::Unauthenticated(challenge) => Some(challenge),
            Cause::Absent | Cause::Malformed | Cause::Misconfigured => None,
        }
    }
}

/// Writes the problem. For a [misconfigured](MissingKey::is_misconfigured) server it is meant for
/// the log, not for the client.
impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            Problem::Text(text) => f.write_str(text),
            Problem::NoHeader(name) => write!(f, "the header {name} is missing"),
            // Names each likely cause: the wrong order of layers and `Arc<T>` compile, and look right.
            Problem::NoExtension(of_type) => write!(
                f,
                "a request has no `{of_type}` in its extensions: put the layer inside the authentication that inserts it \
                 (of axum's layers, the last one is the outermost), name the type that it inserts (an `Arc<T>` in the \
                 extensions is another type than `T`), or count requests without it by another key: `.or(PeerIp)`{NO_EXTENSION}"
            ),
        }
    }
}

impl std::error::Error for MissingKey {}
