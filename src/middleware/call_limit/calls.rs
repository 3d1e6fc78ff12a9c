use std::fmt;
use std::marker::PhantomData;

use tower_service::Service;

use super::{BoxError, CallEnding};
use crate::gate::{Grant, Notifier, Refusal};
use crate::middleware::machine::{AsIs, Protocol, Serve, sealed};

/// Requests `R` of any type, whose refusals are errors.
pub struct Calls<R, E = AsIs> {
    pub(super) ending: E,
    request: PhantomData<fn(R)>,
}

impl<R, E> sealed::Protocol for Calls<R, E> {
    const LAYER: &str = "CallLimitLayer";
    const SERVICE: &str = "CallLimit";
    const FUTURE: &str = "CallFuture";
}

impl<R: 'static, E> Protocol for Calls<R, E> {
    type Head = R;
}

impl<T, R, E> Serve<T, R> for Calls<R, E>
where
    T: Service<R, Error: Into<BoxError>>,
    R: 'static,
    E: CallEnding<T::Response>,
{
    type Body = ();
    type Response = T::Response;
    type Error = BoxError;
    type Noted = E;

    fn error(error: T::Error) -> BoxError {
        error.into()
    }

    #[inline]
    fn split(request: R) -> (R, ()) {
        (request, ())
    }

    #[inline]
    fn note<D>(&self, _: &Notifier, _: &mut R, grant: &mut Grant<D>) -> E {
        // A request of any type has no place for it, nor has its response.
        drop(grant.take_decision());
        self.ending.clone()
    }

    #[inline]
    fn join(request: R, (): ()) -> R {
        request
    }

    fn refuse(&self, _: &Notifier, _: &R, refusal: Refusal) -> Result<T::Response, BoxError> {
        Err(refusal.into())
    }

    fn settle<D>(
        ending: &mut E,
        result: Result<T::Response, T::Error>,
        grant: &mut Grant<D>,
    ) -> Result<T::Response, BoxError> {
        let result = result.map_err(Into::into);
        if let Some(settlement) = ending.settlement(&result) {
            grant.settle(settlement);
        }
        // Now, since the caller may keep the completed future.
        grant.end();
        result
    }

    fn finish<D>(
        result: Result<T::Response, BoxError>,
        _: &mut Grant<D>,
    ) -> Result<T::Response, BoxError> {
        result
    }
}

impl<R, E> Calls<R, E> {
    pub(super) const fn new(ending: E) -> Self {
        Self {
            ending,
            request: PhantomData,
        }
    }
}

impl<R, E: Clone> Clone for Calls<R, E> {
    fn clone(&self) -> Self {
        Self::new(self.ending.clone())
    }
}

impl<R, E> fmt::Debug for Calls<R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").finish_non_exhaustive()
    }
}
