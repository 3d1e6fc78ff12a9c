//! Until when a layer holds what a request has taken.

mod body;
mod layer;
mod rule;

use http::Response;

pub use body::TrackedBody;
pub(super) use rule::Rule;

use crate::settle::Charge;

/// Until when a [`RateLimitLayer`](crate::RateLimitLayer) holds what a request has taken, and what follows for the body
/// of the response: [`AsIs`] or [`UntilBodyEnd`].
pub trait Ending: sealed::Ending {
    /// The body of the layer's responses, where `B` is that of the inner service's.
    type Body<B>;

    /// Holds what a request has taken until the body ends.
    #[doc(hidden)]
    fn wrap<B>(response: Response<B>, charge: Option<Charge>) -> Response<Self::Body<B>>;
}

mod sealed {
    pub trait Ending: 'static {}
}

/// What a request has taken is charged, and nothing is settled: the response is the inner service's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AsIs;

/// What a request has taken is held until the body of the response has ended, and no [`Charge`] of it is left. Then it
/// is settled. The response is a `Response<TrackedBody<B>>`.
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
