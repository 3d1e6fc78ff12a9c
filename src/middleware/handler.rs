//! Feature `axum`: extractors for handlers, and errors as responses.

use std::convert::Infallible;
use std::sync::LazyLock;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;

use super::reject::{HttpReject, Reason};
use crate::error::StoreError;
use crate::gate::{MissingKey, Notifier};
use crate::limit::{Decision, RateLimited};
use crate::observe::mistakes::NO_CHARGE;
use crate::settle::{RequestCost, ReserveError};

/// The cost of this request. Rejects with a 500 if no outer layer settles charges; the log, and
/// in debug builds the body, names the fix.
impl<S: Sync> FromRequestParts<S> for RequestCost {
    type Rejection = Response;

    async fn from_request_parts(request: &mut Parts, _: &S) -> Result<Self, Response> {
        // One for the process, since nothing of the application gets here: an extractor has no value, the layer that would have an
        // observer is missing, and the state `S` is any type. So two applications of a process share its minute.
        static NOTIFIER: LazyLock<Notifier> = LazyLock::new(Notifier::default);
        if let Some(cost) = request.extensions.get::<Self>() {
            return Ok(cost.clone());
        }
        let fix = "add `.settle(..)` or `.until_body_end()`";
        let problem = format!(
            "the handler extracts a `RequestCost`, but no outer layer settles charges: {fix}{NO_CHARGE}"
        );
        let missing = MissingKey::misconfigured(problem);
        NOTIFIER.missing(&missing);
        Err(HttpReject::new().response(Reason::MissingKey(&missing)))
    }
}

/// `None` if no outer layer settles charges.
impl<S: Sync> OptionalFromRequestParts<S> for RequestCost {
    type Rejection = Infallible;

    async fn from_request_parts(request: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(request.extensions.get().cloned())
    }
}

/// `None` for an uncounted request.
impl<S: Sync> OptionalFromRequestParts<S> for Decision {
    type Rejection = Infallible;

    async fn from_request_parts(request: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(request.extensions.get().cloned())
    }
}

macro_rules! responses {
    ($($error:ty)+) => {$(
        /// The response that [`HttpReject`] makes of this error.
        impl IntoResponse for $error {
            fn into_response(self) -> Response {
                HttpReject::new().response(Reason::from(&self))
            }
        }
    )+};
}

responses! { MissingKey RateLimited ReserveError StoreError }
