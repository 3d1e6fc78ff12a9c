//! From a verdict to the response that tells it.

mod http;

use ::http::Response;

pub use self::http::HttpReject;

use super::MissingKey;
use crate::limit::Decision;
use crate::store::Error;

/// Why a request is rejected.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Rejection<'a> {
    /// It was denied, for now or for ever.
    Denied(&'a Decision),
    /// It has nothing that it could be counted by.
    MissingKey(&'a MissingKey),
    /// No store could decide.
    Unavailable(&'a Error),
}

/// Makes the response to a rejected request, of a service whose responses have the body `B`.
///
/// Closures from a [`Rejection`] to a response are one. The layer adds its header fields, and `Retry-After` to a denial
/// that has none, and leaves the decision in the response's extensions, whatever the response is.
///
/// ```
/// use http::{Response, StatusCode};
/// use tower_redis_ratelimit::Rejection;
///
/// fn plain(rejection: Rejection<'_>) -> Response<String> {
///     let mut response = Response::new(format!("{rejection:?}"));
///     *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
///     response
/// }
/// # fn is_reject(_: impl tower_redis_ratelimit::Reject<String>) {}
/// # is_reject(plain);
/// ```
pub trait Reject<B> {
    /// The response.
    fn reject(&self, rejection: Rejection<'_>) -> Response<B>;
}

impl<F, B> Reject<B> for F
where
    F: Fn(Rejection<'_>) -> Response<B>,
{
    fn reject(&self, rejection: Rejection<'_>) -> Response<B> {
        self(rejection)
    }
}
