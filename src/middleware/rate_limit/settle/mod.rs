//! How long a layer holds what a request has taken.

mod body;
mod layer;

use std::sync::Arc;

use http::Response;
use http::response::Parts;

pub use body::TrackedBody;

use crate::middleware::limit::AsIs;
use crate::settle::{Charge, Settlement};

/// Settles a request by the head of its response.
pub(super) type Rule = Arc<dyn Fn(&Parts) -> Settlement + Send + Sync>;

/// How long a [`RateLimitLayer`](crate::RateLimitLayer) holds what a request has taken, and so the type of the response
/// body: [`AsIs`] or [`UntilBodyEnd`].
pub trait Ending: sealed::Ending {
    /// The body of the layer's responses; `B` is that of the inner service.
    type Body<B>;

    /// Holds what a request has taken until the body ends.
    #[doc(hidden)]
    fn wrap<B>(response: Response<B>, charge: Option<Charge>) -> Response<Self::Body<B>>;
}

mod sealed {
    pub trait Ending: 'static {}
}

/// Settles what a request has taken when the body of the response has ended, and no [`Charge`] of it is left. The
/// response is a `Response<TrackedBody<B>>`.
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
    fn wrap<B>(response: Response<B>, _: Option<Charge>) -> Response<B> {
        response
    }
}

impl Ending for UntilBodyEnd {
    type Body<B> = TrackedBody<B>;

    fn wrap<B>(response: Response<B>, charge: Option<Charge>) -> Response<TrackedBody<B>> {
        response.map(|body| TrackedBody::new(body, charge))
    }
}
