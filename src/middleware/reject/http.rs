use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response};

use super::{Reason, Reject, Rejection};
use crate::limit::{Decision, Outcome};
use crate::middleware::headers::{quota, retry_after};

/// Rejects over HTTP, with a problem body (RFC 9457, `application/problem+json`).
///
/// - Denied: 429 with the type `quota-exceeded` of the `RateLimit` draft and its `violated-policies`. The layer adds
///   `Retry-After` in whole seconds, rounded up, if a wait helps.
/// - No key: 400, or 500 if the server is set up so that there can be none.
/// - Nothing could decide: 503 with the draft's type `temporary-reduced-capacity` and `Retry-After: 1`. What was the
///   matter is not told.
///
/// It makes every body that is `From<String>`, as axum's and hyper's are. For any other, make the body from the text:
///
/// ```
/// use http_body_util::BodyExt;
/// use tower_redis_ratelimit::{Global, HttpReject, LocalStore, Policy, Quota, RateLimitLayer, Reject, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// // With tonic: `.map(|text: String| tonic::body::Body::new(text))`. Empty: `.map(|_: String| Default::default())`.
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
///     .reject_with(|rejection| HttpReject.reject(rejection).map(|text: String| text.boxed()));
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct HttpReject;

#[diagnostic::do_not_recommend]
impl<B: From<String>> Reject<B> for HttpReject {
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        let status = rejection.status();
        let title = status.canonical_reason().unwrap_or_default();
        let (retry_after, body) = match rejection.reason() {
            // The layer tells when to retry.
            Reason::Denied(decision) => (None, denied(decision)),
            Reason::MissingKey(missing) => (None, problem("about:blank", title, &missing.to_string())),
            Reason::Unavailable(_) => (
                Some(HeaderValue::from_static("1")),
                problem(
                    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                    title,
                    "The request could not be counted.",
                ),
            ),
        };
        let mut response = Response::new(B::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        // RFC 6585: a 429 is not to be stored by a cache.
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(retry_after) = retry_after {
            headers.insert(RETRY_AFTER, retry_after);
        }
        response
    }
}

/// Without formatting macros, which would take longer than the decision: a flood of denials is when time is short.
fn denied(decision: &Decision) -> String {
    let mut body = open_problem("https://iana.org/assignments/http-problem-types#quota-exceeded", "Too Many Requests");
    match decision.outcome() {
        Outcome::NeverFits => {
            body.push_str("The request costs more than the ");
            body.push_str(itoa::Buffer::new().format(decision.capacity()));
            body.push_str(" that ever pass at once.");
        }
        _ => {
            body.push_str("The quota of ");
            body.push_str(quota(decision));
            body.push_str(" is used up. Try again in ");
            body.push_str(itoa::Buffer::new().format(decision.retry_after().map_or(1, retry_after)));
            body.push_str(" s.");
        }
    }
    body.push_str("\",\"violated-policies\":[");
    let violated = decision.verdicts().filter(|(_, verdict)| !verdict.is_allowed());
    for (i, (policy, _)) in violated.enumerate() {
        // Names have no character that JSON would escape.
        body.push_str(if i > 0 { ",\"" } else { "\"" });
        body.push_str(policy.name());
        body.push('"');
    }
    body.push_str("]}\n");
    body
}

fn problem(kind: &str, title: &str, detail: &str) -> String {
    let mut body = open_problem(kind, title);
    for c in detail.chars() {
        match c {
            '"' | '\\' => body.extend(['\\', c]),
            c if c.is_control() => body.push_str(&format!("\\u{:04x}", c as u32)),
            c => body.push(c),
        }
    }
    body.push_str("\"}\n");
    body
}

/// A problem up to its detail.
fn open_problem(kind: &str, title: &str) -> String {
    let mut body = String::with_capacity(256);
    for text in ["{\"type\":\"", kind, "\",\"title\":\"", title, "\",\"detail\":\""] {
        body.push_str(text);
    }
    body
}
