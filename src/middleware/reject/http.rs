use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

use super::{Reject, Rejection};
use crate::limit::{Decision, Outcome};
use crate::middleware::headers::seconds;

/// Rejects over HTTP, with a problem body (RFC 9457, `application/problem+json`).
///
/// - Denied: 429 with `Retry-After` in whole seconds, rounded up, and the type `quota-exceeded` of the `RateLimit`
///   draft with its `violated-policies`; without `Retry-After` if no wait helps.
/// - No key: 400, or 500 if the server is set up so that there can be none.
/// - Nothing could decide: 503 with the draft's type `temporary-reduced-capacity` and `Retry-After: 1`. What was the
///   matter is not told.
///
/// It fits every body that can be made from a `String`, as axum's and hyper's can.
#[derive(Debug, Clone, Copy, Default)]
pub struct HttpReject;

impl<B: From<String>> Reject<B> for HttpReject {
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        let (status, retry_after, body) = match rejection {
            Rejection::Denied(decision) => (
                StatusCode::TOO_MANY_REQUESTS,
                decision.retry_after().map(|wait| HeaderValue::from(seconds(wait))),
                denied(decision),
            ),
            Rejection::MissingKey(missing) => {
                let (status, title) = match missing.is_of_server() {
                    true => (StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error"),
                    false => (StatusCode::BAD_REQUEST, "Bad Request"),
                };
                (status, None, problem("about:blank", title, &escape(&missing.to_string()), ""))
            }
            Rejection::Unavailable(_) => (
                StatusCode::SERVICE_UNAVAILABLE,
                Some(HeaderValue::from_static("1")),
                problem(
                    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                    "Service Unavailable",
                    "The request could not be counted.",
                    "",
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

fn denied(decision: &Decision) -> String {
    let detail = match decision.outcome() {
        Outcome::NeverFits => format!("The request costs more than the {} that ever pass at once.", decision.limit()),
        _ => format!(
            "The quota of {} is used up. Try again in {} s.",
            decision.policy().quota(),
            decision.retry_after().map_or(1, seconds),
        ),
    };
    let violated: Vec<String> = decision
        .each()
        .filter(|each| !each.is_allowed())
        // Names have no character that JSON would escape.
        .map(|each| format!("\"{}\"", each.policy().name()))
        .collect();
    problem(
        "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "Too Many Requests",
        &detail,
        &format!(",\"violated-policies\":[{}]", violated.join(",")),
    )
}

/// Text as it stands in a JSON string.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\\' => escaped.extend(['\\', c]),
            c if c.is_control() => escaped.push_str(&format!("\\u{:04x}", c as u32)),
            c => escaped.push(c),
        }
    }
    escaped
}

fn problem(kind: &str, title: &str, detail: &str, more: &str) -> String {
    format!("{{\"type\":\"{kind}\",\"title\":\"{title}\",\"detail\":\"{detail}\"{more}}}\n")
}
