//! When a layer settles the charge of a request.

mod body;
mod layer;

use std::sync::Arc;

use http::response::Parts;
use http::{Response, StatusCode};

pub use body::TrackedBody;

use crate::middleware::machine::AsIs;
use crate::settle::{RequestCost, Settlement};

/// Returns the settlement of a request from the head of its response.
pub(super) type HeadRule = Arc<dyn Fn(&Parts) -> Settlement + Send + Sync>;

/// When a [`RateLimitLayer`](crate::RateLimitLayer) settles the charge of a request, which
/// determines the type of the response body: [`AsIs`] or [`UntilBodyEnd`]. A later version may add a
/// type, which changes no layer that names one of these.
pub trait Ending: sealed::Ending {
    /// The body of the layer's responses; `B` is that of the inner service.
    type Body<B>;

    /// Keeps the charge until the body ends.
    #[doc(hidden)]
    fn wrap<B>(response: Response<B>, charge: Option<RequestCost>) -> Response<Self::Body<B>>;
}

mod sealed {
    pub trait Ending: 'static {}
}

/// Settles a request's charge when the response body has ended and every clone of its [`RequestCost`] is
/// dropped. The response is a `Response<TrackedBody<B>>`.
///
/// [`RateLimitLayer::settle`](crate::RateLimitLayer::settle) and
/// [`RateLimitLayer::until_body_end`](crate::RateLimitLayer::until_body_end) make such layers.
#[derive(Debug, Clone, Copy)]
pub struct UntilBodyEnd(());

impl sealed::Ending for AsIs {}

impl sealed::Ending for UntilBodyEnd {}

impl Ending for AsIs {
    type Body<B> = B;

    #[inline]
    fn wrap<B>(response: Response<B>, _: Option<RequestCost>) -> Response<B> {
        response
    }
}

impl Ending for UntilBodyEnd {
    type Body<B> = TrackedBody<B>;

    fn wrap<B>(response: Response<B>, charge: Option<RequestCost>) -> Response<TrackedBody<B>> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS
            && let Some(charge) = &charge
        {
            charge.upgraded();
        }
        response.map(|body| TrackedBody::new(body, charge))
    }
}
