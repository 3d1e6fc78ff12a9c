use std::borrow::Cow;
use std::fmt;

use http::HeaderName;

/// A request has nothing that it could be counted by.
///
/// ```
/// use tower_redis_ratelimit::MissingKey;
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
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
    pub fn new(problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: Problem::Text(problem.into()), cause: Cause::Absent }
    }

    /// The client sent something that must not become a key, such as a header twice: over HTTP a 400, whatever
    /// [`OnMissingKey`](crate::OnMissingKey) says, or a client could pass uncounted by it. `problem` is shown to it.
    pub fn malformed(problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: Problem::Text(problem.into()), cause: Cause::Malformed }
    }

    /// The server is set up so that no request can have it: over HTTP a 500, whatever
    /// [`OnMissingKey`](crate::OnMissingKey) says.
    ///
    /// `problem` says how to set it up. It is not for clients: the layer's
    /// [observer](crate::Observer::misconfigured) is told.
    pub fn misconfigured(problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: Problem::Text(problem.into()), cause: Cause::Misconfigured }
    }

    pub(super) fn header(name: &HeaderName) -> Self {
        Self { problem: Problem::NoHeader(name.clone()), cause: Cause::Absent }
    }

    /// Whether the server is at fault, not the client.
    pub const fn is_misconfigured(&self) -> bool {
        matches!(self.cause, Cause::Misconfigured)
    }

    /// Whether the request has nothing that could be one, so that [`OnMissingKey`](crate::OnMissingKey) says what becomes of
    /// it.
    pub const fn is_absent(&self) -> bool {
        matches!(self.cause, Cause::Absent)
    }
}

/// The problem. Of a server that is [misconfigured](MissingKey::is_misconfigured) it is for the log, not for the client.
impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            Problem::Text(text) => f.write_str(text),
            Problem::NoHeader(name) => write!(f, "the header {name} is missing"),
        }
    }
}

impl std::error::Error for MissingKey {}
