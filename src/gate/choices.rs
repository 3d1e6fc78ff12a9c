//! What a layer does when it cannot count.

use crate::limit::words;

/// What happens to a request that the store could not decide. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnError {
    /// It is rejected: over HTTP with 503.
    #[default]
    Reject,
    /// It passes, uncounted.
    Allow,
}

/// What happens to a request without a key. As text: `reject` or `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// It is rejected: over HTTP with 400, or 401 if the extractor has a
    /// [challenge](crate::extract::MissingKey::unauthenticated).
    #[default]
    Reject,
    /// It passes, uncounted.
    Allow,
}

words!(OnError, "answer to an error", "`reject` or `allow`": Reject = "reject", Allow = "allow");
words!(OnMissingKey, "answer to a missing key", "`reject` or `allow`": Reject = "reject", Allow = "allow");
