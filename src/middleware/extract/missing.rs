use std::fmt;

/// A request has nothing that it could be counted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingKey {
    problem: &'static str,
    cause: Cause,
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
    pub const fn new(problem: &'static str) -> Self {
        Self { problem, cause: Cause::Absent }
    }

    /// The client sent something that must not become a key, such as a header twice: over HTTP a 400, whatever
    /// [`OnMissingKey`](crate::OnMissingKey) says, or a client could pass uncounted by it. `problem` is shown to it.
    pub const fn malformed(problem: &'static str) -> Self {
        Self { problem, cause: Cause::Malformed }
    }

    /// The server is set up so that no request can have it: over HTTP a 500, whatever
    /// [`OnMissingKey`](crate::OnMissingKey) says. `problem` is in the response too, and says how to set it up.
    pub const fn misconfigured(problem: &'static str) -> Self {
        Self { problem, cause: Cause::Misconfigured }
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

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.problem)
    }
}

impl std::error::Error for MissingKey {}
