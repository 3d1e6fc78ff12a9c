use tower_service::Service;

use crate::gate::{Grant, Notifier, Refusal};

/// The kind of requests that a [`LimitLayer`](super::LimitLayer) limits:
/// [`Http`](crate::rate_limit::Http) or [`Calls`](crate::call_limit::Calls).
pub trait Protocol: sealed::Protocol {
    /// The part of a request that yields its key, policies and cost: the
    /// [`Parts`](http::request::Parts) over HTTP, and the whole request of other calls.
    type Head: 'static;
}

/// A [`Protocol`] with a service that it can call.
pub trait Serve<T: Service<Req>, Req>: Protocol {
    /// The rest of a request.
    type Body;
    /// The response of the layer's service.
    type Response;
    /// The error of the layer's service.
    type Error;
    /// Data that [`note`](Self::note) keeps for [`settle`](Self::settle).
    #[doc(hidden)]
    type Noted;

    #[doc(hidden)]
    fn error(error: T::Error) -> Self::Error;

    #[doc(hidden)]
    fn split(request: Req) -> (Self::Head, Self::Body);

    /// Prepares an admitted request for the inner service.
    #[doc(hidden)]
    fn note<D>(
        &self,
        notifier: &Notifier,
        head: &mut Self::Head,
        grant: &mut Grant<D>,
    ) -> Self::Noted;

    #[doc(hidden)]
    fn join(head: Self::Head, body: Self::Body) -> Req;

    /// Answers a refused request.
    #[doc(hidden)]
    fn refuse(
        &self,
        notifier: &Notifier,
        head: &Self::Head,
        refusal: Refusal,
    ) -> Result<T::Response, Self::Error>;

    /// Settles the grant by the inner service's result, unless its cost depends on the response's
    /// body. Annotates an HTTP response.
    #[doc(hidden)]
    fn settle<D>(
        noted: &mut Self::Noted,
        result: Result<T::Response, T::Error>,
        grant: &mut Grant<D>,
    ) -> Result<T::Response, Self::Error>;

    /// Makes the layer's response, after the checks of dry runs are decided.
    #[doc(hidden)]
    fn finish<D>(
        result: Result<T::Response, Self::Error>,
        grant: &mut Grant<D>,
    ) -> Result<Self::Response, Self::Error>;
}

pub(in crate::middleware) mod sealed {
    pub trait Protocol {
        /// The names of the layer, the service and the future in their `Debug` output.
        const LAYER: &str;
        const SERVICE: &str;
        const FUTURE: &str;
    }
}

/// Settles nothing: charges are final, and the response is the inner service's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AsIs;
