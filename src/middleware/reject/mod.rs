//! Responses to rejected requests.

#[cfg(feature = "tonic")]
mod grpc;
mod http;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use ::http::request::Parts;
use ::http::{Method, Response, StatusCode};

#[cfg(feature = "tonic")]
pub use self::grpc::{GrpcOr, GrpcReject};
pub use self::http::HttpReject;
pub use crate::gate::{OnError, OnMissingKey};
pub use crate::limit::BlockAfter;

use super::headers::{Headers, retry_after, write_quota};
use crate::error::StoreError;
use crate::gate::MissingKey;
use crate::limit::{Decision, RateLimited, Source};
use crate::settle::ReserveError;

/// A rejected request, and the reason.
///
/// Its text is a sentence for the client, such as "The quota of 50 per second is used up. Try again in 1 s."
/// It does not reveal errors of the server, except in debug builds the reason why it is
/// [misconfigured](MissingKey::is_misconfigured).
///
/// ```
/// use axum::Json;
/// use axum::response::IntoResponse;
/// use serde_json::json;
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy).reject_with(|rejection| {
///     (rejection.status(), Json(json!({ "error": rejection.to_string() }))).into_response()
/// });
/// # let _: axum::Router = axum::Router::new().layer(layer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
pub struct Rejection<'a> {
    reason: Reason<'a>,
    request: &'a Parts,
}

/// The reason for a rejection.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Reason<'a> {
    /// It was denied, temporarily or permanently.
    Denied(&'a Decision),
    /// No rate-limit key was found. The text of a [misconfigured](MissingKey::is_misconfigured)
    /// server is meant for the log, not for clients.
    MissingKey(&'a MissingKey),
    /// No store could decide. The error is meant for the log, not for clients.
    Unavailable(&'a StoreError),
}

impl<'a> Rejection<'a> {
    /// Rejects a request that the layer has let through, for example in a handler whose
    /// [`RequestCost::reserve`](crate::settle::RequestCost::reserve) was denied.
    ///
    /// ```
    /// use axum::response::{IntoResponse, Response};
    /// use http::request::Parts;
    /// use tower_redis_ratelimit::reject::Rejection;
    /// use tower_redis_ratelimit::settle::RequestCost;
    ///
    /// /// For the layer too: `.reject_with(rejected)`.
    /// fn rejected(rejection: Rejection<'_>) -> Response {
    ///     (rejection.status(), rejection.to_string()).into_response()
    /// }
    ///
    /// async fn chat(cost: RequestCost, request: Parts) -> Result<String, Response> {
    ///     let reserved = cost.reserve(500).await;
    ///     reserved.map_err(|error| Rejection::new(&error, &request).response(&rejected))?;
    ///     Ok("an answer".to_owned())
    /// }
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(chat));
    /// ```
    pub fn new(reason: impl Into<Reason<'a>>, request: &'a Parts) -> Self {
        Self {
            reason: reason.into(),
            request,
        }
    }

    /// Creates the response of a handler: that of `reject`, for a denial with the decision as an extension,
    /// `Retry-After` and the header fields of [`Headers::DRAFT_11`](crate::headers::Headers::DRAFT_11), to which an outer layer under the same policies
    /// applies its setting of [`headers`](crate::RateLimitLayer::headers).
    pub fn response<B>(self, reject: &impl Reject<B>) -> Response<B> {
        let mut response = reject.reject(self);
        self.reason.annotate(&mut response);
        response
    }

    /// The reason for the rejection. A denial has the decision:
    ///
    /// ```
    /// use tower_redis_ratelimit::reject::{Reason, Rejection};
    ///
    /// /// Whole seconds, as in `Retry-After`.
    /// fn wait(rejection: Rejection<'_>) -> Option<u64> {
    ///     let Reason::Denied(decision) = rejection.reason() else { return None };
    ///     Some(decision.retry_after()?.as_secs_f64().ceil() as u64)
    /// }
    /// # let _ = wait;
    /// ```
    pub fn reason(&self) -> Reason<'a> {
        self.reason
    }

    /// The request, without its body.
    pub fn request(&self) -> &'a Parts {
        self.request
    }

    /// The reason as an HTTP status: 429 for a denial, 403 for a [forbidden](Source::Forbidden) one, 503 if no store could decide, 400 for a request without a key,
    /// 401 if it is [unauthenticated](MissingKey::unauthenticated), or 500 if it is the [server's
    /// fault](MissingKey::is_misconfigured).
    pub fn status(&self) -> StatusCode {
        self.reason.status()
    }
}

/// Time after which a client may retry if no store could decide.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

impl Reason<'_> {
    fn status(&self) -> StatusCode {
        match self {
            Reason::Denied(decision) if decision.source() == Source::Forbidden => {
                StatusCode::FORBIDDEN
            }
            Reason::Denied(_) => StatusCode::TOO_MANY_REQUESTS,
            // A status of 4xx would blame the client.
            Reason::MissingKey(missing) if missing.is_misconfigured() => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            Reason::MissingKey(missing) if missing.challenge().is_some() => {
                StatusCode::UNAUTHORIZED
            }
            Reason::MissingKey(_) => StatusCode::BAD_REQUEST,
            Reason::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Completes the response of a handler.
    fn annotate<B>(self, response: &mut Response<B>) {
        match self {
            // Here is no layer whose own style of fields would be added.
            Reason::Denied(denied) => Headers::DRAFT_11.annotate(denied.clone(), response, true),
            Reason::MissingKey(missing) => challenge(missing, response),
            Reason::Unavailable(_) => {}
        }
    }

    /// Writes the sentence for the client. Avoids formatting macros, which would take longer than
    /// the decision: this must be fast during a flood of denials.
    fn write_to(&self, to: &mut impl fmt::Write) -> fmt::Result {
        match self {
            Reason::Denied(decision) if decision.is_final() => {
                to.write_str("Requests are blocked.")
            }
            Reason::Denied(decision) => match decision.retry_after() {
                Some(wait) => {
                    if decision.policy().is_pause() {
                        to.write_str("Calls are paused")?;
                    } else if decision.source() == Source::Blocked {
                        to.write_str("Requests are blocked")?;
                    } else {
                        // Without formatting macros, which are slow: a flood of requests is denied with this text.
                        to.write_str("The quota of ")?;
                        write_quota(decision, to)?;
                        let left = decision.remaining() > 0;
                        to.write_str(if left {
                            " cannot cover this request"
                        } else {
                            " is used up"
                        })?;
                    }
                    to.write_str(". Try again in ")?;
                    to.write_str(itoa::Buffer::new().format(retry_after(wait)))?;
                    to.write_str(" s.")
                }
                None => {
                    to.write_str("The request's cost exceeds the maximum burst of ")?;
                    to.write_str(itoa::Buffer::new().format(decision.capacity()))?;
                    to.write_str(".")
                }
            },
            Reason::MissingKey(missing) if missing.is_misconfigured() => {
                to.write_str("Rate limiting is misconfigured")?;
                // The fix is for the operator. In production, a client must not read about the server.
                if cfg!(debug_assertions) {
                    write!(to, ": {missing}")?;
                }
                to.write_str(".")
            }
            Reason::MissingKey(missing) => write!(to, "{missing}"),
            Reason::Unavailable(_) => to.write_str("Rate limiting is temporarily unavailable."),
        }
    }
}

/// `denied` must be a denial.
impl<'a> From<&'a Decision> for Reason<'a> {
    fn from(denied: &'a Decision) -> Self {
        Self::Denied(denied)
    }
}

impl<'a> From<&'a RateLimited> for Reason<'a> {
    fn from(denied: &'a RateLimited) -> Self {
        Self::Denied(denied.decision())
    }
}

impl<'a> From<&'a MissingKey> for Reason<'a> {
    fn from(missing: &'a MissingKey) -> Self {
        Self::MissingKey(missing)
    }
}

impl<'a> From<&'a StoreError> for Reason<'a> {
    fn from(error: &'a StoreError) -> Self {
        Self::Unavailable(error)
    }
}

impl<'a> From<&'a ReserveError> for Reason<'a> {
    fn from(error: &'a ReserveError) -> Self {
        match error {
            ReserveError::Denied(denied) => denied.into(),
            ReserveError::Failed(error) => error.into(),
        }
    }
}

/// Adds the challenge for an unauthenticated client to a 401 without one.
pub(super) fn challenge<B>(missing: &MissingKey, response: &mut Response<B>) {
    // The user's rejection may have another status, or its own challenge.
    if let (Some(challenge), StatusCode::UNAUTHORIZED) = (missing.challenge(), response.status()) {
        response
            .headers_mut()
            .entry(WWW_AUTHENTICATE)
            .or_insert_with(|| challenge.clone());
    }
}

/// The sentence for the client.
impl fmt::Display for Rejection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.write_to(f)
    }
}

/// Omits the request, whose headers carry secrets.
impl fmt::Debug for Rejection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rejection")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

/// Makes the response to a rejected request, of a service whose responses have the body `B`.
///
/// [`HttpReject`] is the default. With the feature `tonic`, `GrpcReject` responds over gRPC, and
/// `GrpcReject::new().or(HttpReject::new())` to every client in its protocol. Closures from a
/// [`Rejection`] to a response also implement `Reject`; pass them to
/// [`reject_with`](crate::RateLimitLayer::reject_with).
///
/// The layer adds its header fields to any denial, a `Retry-After` if that is missing, and the
/// decision as an extension. It adds the [challenge](MissingKey::unauthenticated) to a 401 without
/// one.
///
/// An implementation can read the request:
///
/// ```
/// use http::{HeaderValue, Response, header::ACCEPT};
/// use tower_redis_ratelimit::reject::{HttpReject, Reject, Rejection};
///
/// /// Shows browsers a page, and tells other clients what they need to know.
/// struct ByAccept;
///
/// impl<B: From<String>> Reject<B> for ByAccept {
///     fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
///         let page = HeaderValue::from_static("text/html");
///         match rejection.request().headers.get(ACCEPT) {
///             Some(accept) if accept.as_bytes().starts_with(b"text/html") => {
///                 HttpReject::new().body(page, "<h1>Not so fast</h1>").reject(rejection)
///             }
///             _ => HttpReject::new().reject(rejection),
///         }
///     }
/// }
/// # fn is_reject(_: impl Reject<String>) {}
/// # is_reject(ByAccept);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot answer a rejected request with the body `{B}`",
    label = "not a `Reject<{B}>`",
    note = "`HttpReject`, the default, makes bodies that are `From<String>`",
    note = "gRPC, as of a tonic server: `.reject(GrpcReject::new())`, or `.reject(GrpcReject::new().or(HttpReject::new()))` \
            for gRPC beside HTTP; with the feature `tonic`, and for bodies that are `Default`",
    note = "any other body: `.reject_with(|rejection| HttpReject::new().reject(rejection).map(|text: String| ..))`",
    note = "a response of your own: `.reject_with(|rejection| ..)`, where the closure returns an `http::Response<{B}>`"
)]
pub trait Reject<B> {
    /// Creates the response.
    fn reject(&self, rejection: Rejection<'_>) -> Response<B>;
}

#[diagnostic::do_not_recommend]
impl<F, B> Reject<B> for F
where
    F: Fn(Rejection<'_>) -> Response<B>,
{
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        self(rejection)
    }
}

impl<B, R: Reject<B> + ?Sized> Reject<B> for Arc<R> {
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        (**self).reject(rejection)
    }
}

impl<B> Reject<B> for Box<dyn Reject<B> + Send + Sync> {
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        (**self).reject(rejection)
    }
}

/// Returns `true` for a `POST` of the content type `application/grpc`, with any suffix or
/// parameters. Another method must not get a gRPC response: its status is 200, which a cache might
/// store for all clients.
pub(super) fn is_grpc(request: &Parts) -> bool {
    const GRPC: &str = "application/grpc";
    if request.method != Method::POST {
        return false;
    }
    let Some(kind) = request.headers.get(CONTENT_TYPE) else {
        return false;
    };
    let Some((start, rest)) = kind.as_bytes().split_at_checked(GRPC.len()) else {
        return false;
    };
    // Not gRPC-Web: its trailers are in the body.
    let is_end = matches!(rest.first(), None | Some(b'+' | b';' | b' ' | b'\t'));
    start.eq_ignore_ascii_case(GRPC.as_bytes()) && is_end
}
