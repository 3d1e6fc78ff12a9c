use std::sync::Arc;

use tower_service::Service;

use super::BoxError;
use crate::gate::{Grant, Notifier, Refusal};
use crate::middleware::machine::{Protocol, Serve};
use crate::settle::Settlement;

/// Requests of any type, whose refusals are errors. `A` is the argument of the rule of `settle`, or `()` without a rule.
pub(in crate::middleware) struct Calls<A> {
    pub(super) rule: Option<Arc<AnswerRule<A>>>,
}

type AnswerRule<A> = dyn Fn(&A) -> Settlement + Send + Sync;

/// The argument of the rule of a service with the response `Res`.
pub(super) trait CallAnswer<Res>: Sized {
    fn settlement(rule: &AnswerRule<Self>, result: &Result<Res, BoxError>) -> Settlement;
}

impl<Res> CallAnswer<Res> for Result<Res, BoxError> {
    fn settlement(rule: &AnswerRule<Self>, result: &Self) -> Settlement {
        rule(result)
    }
}

impl<Res> CallAnswer<Res> for () {
    fn settlement(rule: &AnswerRule<()>, _: &Result<Res, BoxError>) -> Settlement {
        rule(&())
    }
}

impl<Req: 'static, A> Protocol<Req> for Calls<A> {
    type Head = Req;
    type Body = ();
    type Noted = Option<Arc<AnswerRule<A>>>;
    type Error<E> = BoxError;

    #[inline]
    fn split(request: Req) -> (Req, ()) {
        (request, ())
    }

    #[inline]
    fn note<D>(&self, _: &Notifier, _: &mut Req, _: &mut Grant<D>) -> Self::Noted {
        // A request of any type has no place for the decision, nor has its response.
        self.rule.clone()
    }

    #[inline]
    fn join(request: Req, (): ()) -> Req {
        request
    }
}

impl<T, Req, A> Serve<T, Req> for Calls<A>
where
    T: Service<Req, Error: Into<BoxError>>,
    Req: 'static,
    A: CallAnswer<T::Response>,
{
    fn error(error: T::Error) -> BoxError {
        error.into()
    }

    fn refuse(&self, _: &Notifier, _: &Req, refusal: Refusal) -> Result<T::Response, BoxError> {
        Err(refusal.into())
    }

    fn settle<D>(
        rule: &mut Self::Noted,
        result: &mut Result<T::Response, BoxError>,
        grant: &mut Grant<D>,
    ) {
        if let Some(rule) = rule {
            grant.settle(A::settlement(&**rule, result));
        }
        // Now, since the caller may keep the completed future.
        grant.end();
    }

    fn finish<D>(_: &mut Result<T::Response, BoxError>, _: &mut Grant<D>) {}
}

/// By hand, since deriving it requires that `A` is `Clone`.
impl<A> Clone for Calls<A> {
    fn clone(&self) -> Self {
        Self {
            rule: self.rule.clone(),
        }
    }
}
