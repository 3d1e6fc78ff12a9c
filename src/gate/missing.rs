use std::borrow::Cow;
use std::fmt;

use http::{HeaderName, HeaderValue};

/// A request has nothing that it could be counted by.
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
    /// The request lacks this header. As text only when it is shown: such requests may pass, and then nobody reads it.
    NoHeader(HeaderName),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Cause {
    /// The client left it out.
    Absent,
    /// The client left it out, and is told by this challenge how to say who it is.
    Unauthenticated(HeaderValue),
    /// The client sent what must not be one.
    Malformed,
    /// The server is set up so that there can be none.
    Misconfigured,
}

impl MissingKey {
    /// The client left it out: over HTTP a 400, over gRPC `INVALID_ARGUMENT`. `problem` is shown to it, and says what
    /// is missing, such as "no API key".
    pub fn new(problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: Problem::Text(problem.into()), cause: Cause::Absent }
    }

    /// The client left out what says who it is, such as an API key: over HTTP a 401, over gRPC
    /// `UNAUTHENTICATED`. `problem` is shown to it. Else it is as [`new`](Self::new):
    /// [`OnMissingKey`](crate::reject::OnMissingKey) may let the request pass.
    ///
    /// `challenge` tells the client how to authenticate, such as `Bearer` or `Basic realm="books"`. A 401 must have one
    /// (RFC 9110), so the layer adds it as `WWW-Authenticate` to each that has none.
    ///
    /// ```
    /// use http::HeaderValue;
    /// use tower_redis_ratelimit::extract::MissingKey;
    ///
    /// let missing = MissingKey::unauthenticated("no access token", HeaderValue::from_static("Bearer"));
    /// assert_eq!(missing.challenge().unwrap(), "Bearer");
    /// ```
    pub fn unauthenticated(problem: impl Into<Cow<'static, str>>, challenge: HeaderValue) -> Self {
        Self { problem: Problem::Text(problem.into()), cause: Cause::Unauthenticated(challenge) }
    }

    /// The client sent something that must not become a key, such as a header twice: over HTTP a 400, over gRPC
    /// `INVALID_ARGUMENT`, whatever [`OnMissingKey`](crate::reject::OnMissingKey) says, or a client could pass
    /// uncounted by it. `problem` is shown to it.
    pub fn malformed(problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: Problem::Text(problem.into()), cause: Cause::Malformed }
    }

    /// The server is set up so that no request can have it: over HTTP a 500, over gRPC `INTERNAL`, whatever
    /// [`OnMissingKey`](crate::reject::OnMissingKey) says.
    ///
    /// `problem` says how to set it up. It is not for clients: the layer's
    /// [observer](crate::observe::Observer::misconfigured) is told.
    pub fn misconfigured(problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: Problem::Text(problem.into()), cause: Cause::Misconfigured }
    }

    /// The client left out this header. With a challenge, it is [unauthenticated](Self::unauthenticated).
    pub(crate) fn header(name: &HeaderName, challenge: Option<&HeaderValue>) -> Self {
        let cause = challenge.cloned().map_or(Cause::Absent, Cause::Unauthenticated);
        Self { problem: Problem::NoHeader(name.clone()), cause }
    }

    /// Whether the server is at fault, not the client.
    pub const fn is_misconfigured(&self) -> bool {
        matches!(self.cause, Cause::Misconfigured)
    }

    /// Whether the request has nothing that could be one, so that [`OnMissingKey`](crate::reject::OnMissingKey) says
    /// what becomes of it.
    pub const fn is_absent(&self) -> bool {
        matches!(self.cause, Cause::Absent | Cause::Unauthenticated(_))
    }

    /// What tells the client how to authenticate, if it is [unauthenticated](Self::unauthenticated).
    pub const fn challenge(&self) -> Option<&HeaderValue> {
        match &self.cause {
            Cause::Unauthenticated(challenge) => Some(challenge),
            Cause::Absent | Cause::Malformed | Cause::Misconfigured => None,
        }
    }
}

/// The problem. Of a server that is [misconfigured](MissingKey::is_misconfigured) it is for the log, not for the
/// client.
impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            Problem::Text(text) => f.write_str(text),
            Problem::NoHeader(name) => write!(f, "the header {name} is missing"),
        }
    }
}

impl std::error::Error for MissingKey {}
