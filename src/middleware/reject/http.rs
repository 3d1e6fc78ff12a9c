use std::fmt::{self, Write as _};

use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

use super::{AFTER_FAILURE, Reason, Reject, Rejection};
use crate::limit::{Decision, Source};

/// Rejects over HTTP, with a problem body (RFC 9457, `application/problem+json`).
///
/// - Denied: 429 with the type `quota-exceeded` of the `RateLimit` draft and its `violated-policies`. The layer adds
///   `Retry-After` in whole seconds, rounded up, if a wait helps.
/// - Blocked, in a layer with [`forbid_blocked`](crate::RateLimitLayer::forbid_blocked): 403 without `Retry-After`.
/// - No key: 400, whose `detail` names the missing key, or 401 with `WWW-Authenticate` if the
///   client is [unauthenticated](crate::extract::MissingKey::unauthenticated). 500 if the server is
///   misconfigured; the reason is [for the log](crate::observe::Event::Misconfigured), and in
///   the `detail` in debug builds only.
/// - No store could decide: 503 with the draft's type `temporary-reduced-capacity` and `Retry-After: 1`, without the
///   cause.
///
/// The body of a denial can be set:
///
/// ```
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::reject::HttpReject;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
///     .reject(HttpReject::new().json(r#"{"error":"rate_limited"}"#));
/// # let _: axum::Router = axum::Router::new().layer(layer);
/// # Ok(())
/// # }
/// ```
///
/// For a body that depends on the request or on the decision, give a closure from a [`Rejection`]
/// to [`reject_with`](crate::RateLimitLayer::reject_with).
///
/// It creates every body type that is `From<String>`, such as axum's and hyper's. A tonic server
/// needs a `GrpcReject` (feature `tonic`): gRPC clients treat a plain 429 as an unavailable server,
/// and may retry immediately. For any other body type, convert the text:
///
/// ```
/// use http_body_util::BodyExt;
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::reject::{HttpReject, Reject};
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// // An empty body: `.map(|_: String| Default::default())`.
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
///     .reject_with(|rejection| HttpReject::new().reject(rejection).map(|text: String| text.boxed()));
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[doc(alias("429", "Retry-After"))]
#[derive(Debug, Clone, Default)]
pub struct HttpReject {
    denied: DeniedBody,
}

/// The body of a denial.
#[derive(Debug, Clone, Default)]
enum DeniedBody {
    /// A problem whose `detail` reports the quota and the wait.
    #[default]
    Problem,
    /// A problem with this `detail`, already escaped for JSON.
    Detail(String),
    /// This content type and text.
    Body(HeaderValue, String),
}

impl HttpReject {
    /// Rejects as [above](Self).
    pub const fn new() -> Self {
        Self {
            denied: DeniedBody::Problem,
        }
    }

    /// Sets the `detail` of a denial's problem body. Defaults to the quota and the wait, such as
    /// "The quota of 50 per second is used up. Try again in 1 s."
    #[must_use]
    pub fn detail(self, detail: &str) -> Self {
        let mut escaped = String::new();
        // Writing to a `String` never fails.
        let _ = Escaped(&mut escaped).write_str(detail);
        Self {
            denied: DeniedBody::Detail(escaped),
        }
    }

    /// Sets the whole body of a denial to a JSON text, with `Content-Type: application/json`. The
    /// text is sent unchanged. Replaces [`detail`](Self::detail).
    #[must_use]
    pub fn json(self, json: impl Into<String>) -> Self {
        self.body(HeaderValue::from_static("application/json"), json)
    }

    /// Sets the whole body of a denial, and its type, such as `text/html`. The body is sent
    /// unchanged. Replaces [`detail`](Self::detail).
    #[must_use]
    pub fn body(self, content_type: HeaderValue, body: impl Into<String>) -> Self {
        Self {
            denied: DeniedBody::Body(content_type, body.into()),
        }
    }

    /// Creates the response of a handler that rejects a request because of its
    /// [`Limiter`](crate::Limiter): for a denial, with the header fields of
    /// [`Headers::DRAFT_11`](crate::headers::Headers::DRAFT_11) and `Retry-After`, for an error of the store, or for a
    /// missing key.
    ///
    /// With the feature `axum`, the errors [`RateLimited`](crate::check::RateLimited),
    /// [`ReserveError`](crate::settle::ReserveError), [`StoreError`](crate::store::StoreError) and
    /// [`MissingKey`](crate::extract::MissingKey) convert into these responses, so that a handler may return them with `?`.
    ///
    /// ```
    /// use http::Response;
    /// use tower_redis_ratelimit::reject::HttpReject;
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore};
    ///
    /// async fn search(limiter: &Limiter<LocalStore>, user: Key, words: u32) -> Response<String> {
    ///     match limiter.take(user, words).await {
    ///         Ok(decision) if decision.is_allowed() => Response::new("found it".to_owned()),
    ///         Ok(denied) => HttpReject::new().detail("Not so fast.").response(&denied),
    ///         Err(error) => HttpReject::new().response(&error),
    ///     }
    /// }
    /// ```
    pub fn response<'a, B: From<String>>(&self, reason: impl Into<Reason<'a>>) -> Response<B> {
        let reason = reason.into();
        let mut response = self.respond(reason);
        reason.annotate(&mut response);
        response
    }

    /// Creates the response without the fields that `annotate` adds to a denial.
    fn respond<B: From<String>>(&self, reason: Reason<'_>) -> Response<B> {
        let (content_type, body) = match reason {
            Reason::Denied(decision)
                if decision.source() == Source::Forbidden && !self.has_body() =>
            {
                (PROBLEM, problem("about:blank", reason))
            }
            Reason::Denied(decision) => self.denied(decision, reason),
            Reason::MissingKey(_) => (PROBLEM, problem("about:blank", reason)),
            Reason::Unavailable(_) => {
                let kind =
                    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
                (PROBLEM, problem(kind, reason))
            }
        };
        let mut response = Response::new(B::from(body));
        *response.status_mut() = reason.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, content_type);
        // RFC 6585: caches must not store a 429.
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // `annotate` adds the `Retry-After` of a denial.
        if let Reason::Unavailable(_) = reason {
            headers.insert(RETRY_AFTER, AFTER_FAILURE.as_secs().into());
        }
        response
    }

    /// Returns `true` if the body of a denial is set.
    fn has_body(&self) -> bool {
        matches!(self.denied, DeniedBody::Body(..))
    }

    fn denied(&self, decision: &Decision, reason: Reason<'_>) -> (HeaderValue, String) {
        let mut body = match &self.denied {
            DeniedBody::Body(content_type, body) => return (content_type.clone(), body.clone()),
            DeniedBody::Detail(_) | DeniedBody::Problem => open_problem(
                "https://iana.org/assignments/http-problem-types#quota-exceeded",
                reason.status(),
            ),
        };
        match &self.denied {
            DeniedBody::Detail(detail) => body.push_str(detail),
            // The sentence has no character that JSON would escape.
            _ => drop(reason.write_to(&mut body)),
        }
        body.push_str("\",\"violated-policies\":[");
        // Policies that allow the request are left out, so a client does not wait for them.
        let each = decision.policies().iter().zip(&decision.verdicts().each);
        let violated = each.filter(|(_, verdict)| !verdict.is_allowed());
        for (i, (policy, _)) in violated.enumerate() {
            // Names have no character that JSON would escape.
            body.push_str(if i > 0 { ",\"" } else { "\"" });
            body.push_str(policy.name());
            body.push('"');
        }
        body.push_str("]}\n");
        (PROBLEM, body)
    }
}

const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");

#[diagnostic::do_not_recommend]
impl<B: From<String>> Reject<B> for HttpReject {
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        self.respond(rejection.reason())
    }
}

fn problem(kind: &str, reason: Reason<'_>) -> String {
    let mut body = open_problem(kind, reason.status());
    // Writing to a `String` never fails.
    let _ = reason.write_to(&mut Escaped(&mut body));
    body.push_str("\"}\n");
    body
}

/// Creates a problem body up to the value of its `detail`.
fn open_problem(kind: &str, status: StatusCode) -> String {
    let mut body = String::with_capacity(256);
    for text in [
        "{\"type\":\"",
        kind,
        "\",\"title\":\"",
        status.canonical_reason().unwrap_or_default(),
        "\",\"status\":",
        status.as_str(),
        ",\"detail\":\"",
    ] {
        body.push_str(text);
    }
    body
}

/// Writes text escaped for a JSON string.
struct Escaped<'a>(&'a mut String);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '"' | '\\' => self.0.extend(['\\', c]),
                c if c.is_control() => write!(self.0, "\\u{:04x}", c as u32)?,
                c => self.0.push(c),
            }
        }
        Ok(())
    }
}
