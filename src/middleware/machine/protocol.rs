use tower_service::Service;

use crate::gate::{Grant, Notifier, Refusal};

/// A kind of requests `Req`: HTTP or other calls.
pub(in crate::middleware) trait Protocol<Req> {
    /// The part of a request that yields its key, policies and cost: the
    /// [`Parts`](http::request::Parts) over HTTP, and the whole request of other calls.
    type Head: 'static;
    /// The rest of a request.
    type Body;
    /// Data that [`note`](Self::note) keeps for [`settle`](Serve::settle).
    type Noted;
    /// The error of the public service around an inner service with the error `E`.
    type Error<E>;

    fn split(request: Req) -> (Self::Head, Self::Body);

    /// Prepares an admitted request for the inner service.
    fn note<D>(
        &self,
        notifier: &Notifier,
        head: &mut Self::Head,
        grant: &mut Grant<D>,
    ) -> Self::Noted;

    fn join(head: Self::Head, body: Self::Body) -> Req;
}

/// A [`Protocol`] with a service that it can call.
pub(in crate::middleware) trait Serve<T: Service<Req>, Req>:
    Protocol<Req>
{
    fn error(error: T::Error) -> Self::Error<T::Error>;

    /// Answers a refused request.
    fn refuse(
        &self,
        notifier: &Notifier,
        head: &Self::Head,
        refusal: Refusal,
    ) -> Result<T::Response, Self::Error<T::Error>>;

    /// Settles the grant by the inner service's result, unless its cost depends on the response's
    /// body. Annotates an HTTP response.
    fn settle<D>(
        noted: &mut Self::Noted,
        result: &mut Result<T::Response, Self::Error<T::Error>>,
        grant: &mut Grant<D>,
    );

    /// Completes the response after the checks of dry runs are decided.
    fn finish<D>(result: &mut Result<T::Response, Self::Error<T::Error>>, grant: &mut Grant<D>);
}
