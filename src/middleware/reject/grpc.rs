//! Feature `tonic`: rejections over gRPC.
//!
//! `Reason::sentence` is here because only gRPC needs the reason as a `String`.

use std::time::Duration;

use http::Response;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::{AFTER_FAILURE, Reason, Reject, Rejection, is_grpc};
use crate::limit::Source;

/// Rejects over gRPC: HTTP 200 with headers only ("trailers-only"), and a status that clients in
/// all languages understand. Feature `tonic`.
///
/// | request | status | details | `grpc-retry-pushback-ms` |
/// |---|---|---|---|
/// | denied for now | `RESOURCE_EXHAUSTED` | `RetryInfo`, `QuotaFailure` | the wait |
/// | blocked, in a layer with [`forbid_blocked`](crate::RateLimitLayer::forbid_blocked) | `PERMISSION_DENIED` | | -1 |
/// | denied for ever: it costs too much | `RESOURCE_EXHAUSTED` | `QuotaFailure` | -1 |
/// | no store could decide | `UNAVAILABLE` | `RetryInfo`: 1 s | 1000 |
/// | no key | `INVALID_ARGUMENT`; the message names the missing key | | -1 |
/// | no key, and [unauthenticated](crate::extract::MissingKey::unauthenticated) | `UNAUTHENTICATED`; the message names the missing key | | -1 |
/// | the server is [misconfigured](crate::extract::MissingKey::misconfigured) | `INTERNAL`; the message gives the reason in debug builds only | | -1 |
///
/// - `RetryInfo` has the wait to the microsecond, the pushback in milliseconds, rounded up. -1
///   tells clients not to retry: if no wait helps, or if the wait exceeds 24 days, the maximum that
///   clients accept.
/// - `QuotaFailure` has a violation for each policy that denied: the policy's name as `subject`, and as `description`
///   its quota and wait. It never contains the caller's key.
/// - The message is a sentence, such as "The quota of 50 per second is used up. Try again in 1 s."
///
/// A client with a [retry
/// policy](https://github.com/grpc/proposal/blob/master/A6-client-retries.md) that names the status
/// waits for the pushback. tonic's clients have no retry policy: see [the
/// recipes](crate::guide::recipes).
///
/// The layer also adds `RateLimit`, `RateLimit-Policy` and, to a denial, `Retry-After`. gRPC
/// clients find them in the metadata, and those of admitted calls too.
/// [`Headers::NONE`](crate::headers::Headers::NONE) omits the first two.
///
/// Each call counts once, even if it has streams. To limit the messages of a stream, use a
/// [`Limiter`](crate::Limiter) in the method: see [the recipes](crate::guide::recipes).
///
/// It creates every body type whose `Default` is empty, such as tonic's, axum's and hyper's. It
/// works for servers and for clients:
///
/// ```
/// use tonic::transport::Server;
/// use tower_redis_ratelimit::extract::PeerIp;
/// use tower_redis_ratelimit::reject::GrpcReject;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("rpc", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy).reject(GrpcReject::new());
/// let server = Server::builder().layer(layer);
/// # let _ = server;
/// # Ok(())
/// # }
/// ```
///
/// A request that is not gRPC gets the HTTP status of the rejection, without a body. A service for both gRPC and HTTP
/// responds to each client in its protocol:
///
/// ```
/// use axum::Router;
/// use tower_redis_ratelimit::extract::Global;
/// use tower_redis_ratelimit::reject::{GrpcReject, HttpReject};
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), Global, policy)
///     .reject(GrpcReject::new().or(HttpReject::new()));
/// let app: Router = Router::new().layer(layer);
/// # Ok(())
/// # }
/// ```
///
/// The type of such a layer is `RateLimitLayer<LocalStore, Global, GrpcOr<HttpReject>>`, and without HTTP
/// `RateLimitLayer<LocalStore, Global, GrpcReject>`.
///
/// In a method of a service, or in a closure for [`reject_with`](crate::RateLimitLayer::reject_with), a [`Reason`]
/// becomes the same status:
///
/// ```
/// use tonic::Status;
/// use tower_redis_ratelimit::reject::Reason;
/// use tower_redis_ratelimit::{Key, Limiter, LocalStore};
///
/// async fn charge(limiter: &Limiter<LocalStore>, user: Key, bytes: u32) -> Result<(), Status> {
///     let decision = limiter.take(user, bytes).await.map_err(|error| Status::from(Reason::Unavailable(&error)))?;
///     if decision.is_allowed() { Ok(()) } else { Err(Reason::Denied(&decision).into()) }
/// }
/// # let _ = charge;
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct GrpcReject(());

impl GrpcReject {
    /// Rejects as [above](Self).
    pub const fn new() -> Self {
        Self(())
    }

    /// Rejects gRPC requests over gRPC, and the others with another [`Reject`], such as
    /// [`HttpReject`](crate::reject::HttpReject).
    ///
    /// A gRPC request is a `POST` with the content type `application/grpc`, or
    /// `application/grpc+proto` and the like. `application/grpc-web` is another protocol: put the
    /// layer inside tonic-web's, which converts requests to gRPC and responses back. In a layer
    /// outside of it, the other `Reject` responds.
    pub const fn or<R>(self, other: R) -> GrpcOr<R> {
        GrpcOr { other }
    }
}

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for GrpcReject {
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        let mut response = Status::from(rejection.reason()).into_http();
        if !is_grpc(rejection.request()) {
            // A status of 200 would tell an HTTP client that it was served.
            *response.status_mut() = rejection.status();
        }
        response
    }
}

/// Rejects gRPC requests with a [`GrpcReject`], and the others with `R`. Created by
/// [`GrpcReject::or`]. Feature `tonic`.
#[derive(Debug, Clone, Copy, Default)]
pub struct GrpcOr<R> {
    other: R,
}

#[diagnostic::do_not_recommend]
impl<B: Default, R: Reject<B>> Reject<B> for GrpcOr<R> {
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        if is_grpc(rejection.request()) {
            GrpcReject::new().reject(rejection)
        } else {
            self.other.reject(rejection)
        }
    }
}

/// The status of a [`GrpcReject`]. Feature `tonic`.
impl From<Reason<'_>> for Status {
    fn from(reason: Reason<'_>) -> Self {
        let mut details = ErrorDetails::new();
        let (code, wait) = match reason {
            Reason::Denied(decision) if decision.source() == Source::Forbidden => {
                (Code::PermissionDenied, None)
            }
            Reason::Denied(decision) => {
                for violated in decision.each().filter(|verdict| !verdict.is_allowed()) {
                    details.add_quota_failure_violation(
                        violated.policy().name(),
                        Reason::Denied(&violated).sentence(),
                    );
                }
                (Code::ResourceExhausted, decision.retry_after())
            }
            Reason::MissingKey(missing) if missing.is_misconfigured() => (Code::Internal, None),
            Reason::MissingKey(missing) if missing.challenge().is_some() => {
                (Code::Unauthenticated, None)
            }
            Reason::MissingKey(_) => (Code::InvalidArgument, None),
            Reason::Unavailable(_) => (Code::Unavailable, Some(AFTER_FAILURE)),
        };
        if wait.is_some() {
            details.set_retry_info(wait);
        }
        let mut metadata = MetadataMap::new();
        metadata.insert(
            "grpc-retry-pushback-ms",
            MetadataValue::from(pushback(wait)),
        );
        Self::with_error_details_and_metadata(code, reason.sentence(), details, metadata)
    }
}

impl Reason<'_> {
    fn sentence(&self) -> String {
        let mut sentence = String::new();
        // Writing to a `String` never fails.
        let _ = self.write_to(&mut sentence);
        sentence
    }
}

/// Converts the wait to milliseconds, rounded up. -1 for no wait, and for a wait above `i32::MAX`
/// milliseconds, the maximum that clients accept.
fn pushback(wait: Option<Duration>) -> i32 {
    let Some(wait) = wait else {
        return -1;
    };
    // A retry that far off is none.
    i32::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ErrorKind, StoreError};
    use http::{Method, Request};

    #[test]
    fn grpc_is_recognized_by_content_type() {
        let by = |method: Method, kind: &str| {
            is_grpc(
                &Request::builder()
                    .method(method)
                    .header("content-type", kind)
                    .body(())
                    .unwrap()
                    .into_parts()
                    .0,
            )
        };
        let of = |kind: &str| by(Method::POST, kind);
        for kind in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc+json",
            "Application/GRPC",
            "APPLICATION/GRPC+PROTO",
            "application/grpc;charset=utf-8",
            "application/grpc ; charset=utf-8",
            "application/grpc+proto; a=b",
        ] {
            assert!(of(kind), "{kind}");
        }
        for kind in [
            "",
            "application/grp",
            "application/grpc-web",
            "application/grpc-web+proto",
            "application/grpc-web-text",
            "application/grpcx",
            "application/json",
            "text/plain; a=application/grpc",
        ] {
            assert!(!of(kind), "{kind}");
        }
        assert!(!is_grpc(&Request::new(()).into_parts().0));
        // A cache might store the 200 of a GET.
        assert!(!by(Method::GET, "application/grpc"));
    }

    #[test]
    fn other_requests_get_the_http_status() {
        let error = StoreError::new(ErrorKind::Unreachable);
        let grpc = Request::post("/").header("content-type", "application/grpc");
        let cases = [
            (grpc, 200),
            (Request::post("/"), 503),
            (Request::get("/"), 503),
        ];
        for (request, expected) in cases {
            let request = request.body(()).unwrap().into_parts().0;
            let rejection = Rejection::new(Reason::Unavailable(&error), &request);
            let response: Response<()> = GrpcReject::new().reject(rejection);
            assert_eq!(response.status(), expected, "{request:?}");
            assert_eq!(response.headers()["grpc-status"], "14");
        }
    }

    #[test]
    fn grpc_pushback_covers_the_wait() {
        let days = Duration::from_secs(24 * 86_400);
        for (wait, expected) in [
            (Duration::from_micros(1), 1),
            (Duration::from_micros(999), 1),
            (Duration::from_millis(1), 1),
            (Duration::from_micros(1_001), 2),
            (Duration::from_secs(1), 1_000),
            (days, 2_073_600_000),
            (Duration::from_millis(i32::MAX as u64), i32::MAX),
            (
                Duration::from_millis(i32::MAX as u64) + Duration::from_micros(1),
                -1,
            ),
            (Duration::MAX, -1),
        ] {
            assert_eq!(pushback(Some(wait)), expected, "{wait:?}");
        }
        assert_eq!(pushback(None), -1);
    }
}
