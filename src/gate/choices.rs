//! Settings for requests that the store or the extractor cannot handle.

use crate::limit::words;

/// Whether to reject a request that the store could not decide. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnError {
    /// Reject the request: over HTTP with 503.
    #[default]
    Reject,
    /// Admit the request, uncounted.
    Allow,
}

/// Whether to reject a request without a key. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Reject the request: over HTTP with 400, or with 401 if the extractor has a
    /// [challenge](crate::extract::MissingKey::unauthenticated).
    #[default]
    Reject,
    /// Admit the request, uncounted.
    Allow,
}

words!(OnError, "answer to an error", "`reject` or `allow`": Reject = "reject", Allow = "allow");
words!(OnMissingKey, "answer to a missing key", "`reject` or `allow`": Reject = "reject", Allow = "allow");
