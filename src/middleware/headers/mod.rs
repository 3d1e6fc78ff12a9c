//! The header fields of a decision.

mod draft;
#[cfg(feature = "serde")]
mod formats;
mod legacy;

use http::header::RETRY_AFTER;
use http::{HeaderMap, Response};

pub(super) use draft::{retry_after, write_quota};
pub use legacy::LegacyHeaders;

use crate::limit::Decision;

/// Which header fields report a decision to clients: the `RateLimit` fields of the IETF's draft, a [`LegacyHeaders`]
/// for old clients, both or none.
///
/// | setting | fields |
/// |---|---|
/// | `Headers::DRAFT_11`, the default | `RateLimit` and `RateLimit-Policy` |
/// | `Headers::DRAFT_11.and(LegacyHeaders::GitHub)` | these, and `X-RateLimit-Limit`, `-Remaining` and `-Reset` |
/// | `Headers::NONE.and(LegacyHeaders::GitHub)` | only those three |
/// | `Headers::NONE` | none |
///
/// A denial that may be retried has `Retry-After` with any setting. The fields are explained in
/// [the guide](crate::guide::answers).
///
/// With the feature `serde` it is a list of `draft-11` and at most one [`LegacyHeaders`], such as
/// `["draft-11", "github"]`. In an environment variable it is one text: `draft-11, github`. An empty
/// list is `Headers::NONE`.
///
/// A [layer](crate::RateLimitLayer::headers) adds the fields to every response. For a response that
/// did not pass through a layer, use [`append`](Self::append).
#[doc(alias("Retry-After", "RateLimit"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headers {
    draft: bool,
    legacy: Option<LegacyHeaders>,
}

impl Headers {
    /// `RateLimit` and `RateLimit-Policy`, as in draft-ietf-httpapi-ratelimit-headers-11. A later
    /// draft gets another constant.
    pub const DRAFT_11: Self = Self {
        draft: true,
        legacy: None,
    };

    /// No fields.
    pub const NONE: Self = Self {
        draft: false,
        legacy: None,
    };

    /// Adds three legacy fields. A response has one legacy style: a later call replaces an earlier
    /// one.
    #[must_use]
    pub const fn and(self, legacy: LegacyHeaders) -> Self {
        Self {
            legacy: Some(legacy),
            ..self
        }
    }

    /// Adds the fields of a decision to a response, and `Retry-After` if the request may be retried
    /// later.
    ///
    /// For a response that did not pass through a layer, such as that of a handler with a
    /// [`Limiter`](crate::Limiter):
    ///
    /// ```
    /// use axum::http::StatusCode;
    /// use axum::response::{IntoResponse, Response};
    /// use tower_redis_ratelimit::headers::{Headers, LegacyHeaders};
    /// use tower_redis_ratelimit::store::StoreError;
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore};
    ///
    /// async fn search(limiter: &Limiter<LocalStore>, user: Key, words: u32) -> Result<Response, StoreError> {
    ///     let decision = limiter.take(user, words).await?;
    ///     let mut response = match decision.is_allowed() {
    ///         true => "found it".into_response(),
    ///         false => (StatusCode::TOO_MANY_REQUESTS, "not so fast").into_response(),
    ///     };
    ///     Headers::DRAFT_11.and(LegacyHeaders::GitHub).append(&decision, response.headers_mut());
    ///     Ok(response)
    /// }
    /// ```
    ///
    /// `RateLimit` and `RateLimit-Policy` are lists, to which the decision is appended. If the
    /// response has legacy fields already, the [tighter](LegacyHeaders) ones are kept. An existing
    /// `Retry-After` is kept.
    pub fn append(self, decision: &Decision, headers: &mut HeaderMap) {
        self.append_around(decision, headers, false);
    }

    /// Like [`append`](Self::append), but adds no legacy fields if an inner layer denied the
    /// request: they would describe another policy.
    #[inline]
    fn append_around(self, decision: &Decision, headers: &mut HeaderMap, denied_within: bool) {
        if self.draft {
            draft::append(headers, decision);
        }
        if let Some(legacy) = self.legacy
            && !denied_within
        {
            legacy.set(headers, decision);
        }
        if !decision.is_allowed()
            && let Some(wait) = decision.retry_after()
        {
            headers
                .entry(RETRY_AFTER)
                .or_insert_with(|| draft::retry_after_field(wait));
        }
    }

    /// Adds the header fields of a decision to its response. If `shows`, adds the decision to the
    /// extensions, unless an inner layer or a handler has added one.
    pub(super) fn annotate<B>(self, decision: Decision, response: &mut Response<B>, shows: bool) {
        let inner = response.extensions().get::<Decision>();
        let within = inner.map(Decision::is_allowed);
        // Add no second `RateLimit` entry if a handler denied the request under this layer's
        // policies: its response has their fields already.
        let is_own =
            |inner: &Decision| decision.policies().without_in_flight() == Some(inner.policies());
        let is_there = within == Some(false) && inner.is_some_and(is_own);
        let fields = Self {
            draft: self.draft && !is_there,
            ..self
        };
        fields.append_around(&decision, response.headers_mut(), within == Some(false));
        // Nested layers keep the innermost decision, which explains the response.
        if shows && within.is_none() {
            response.extensions_mut().insert(decision);
        }
    }
}

/// [`DRAFT_11`](Self::DRAFT_11).
impl Default for Headers {
    fn default() -> Self {
        Self::DRAFT_11
    }
}
