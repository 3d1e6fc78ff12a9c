use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::annotation::Annotation;
use super::asked::Asked;
use super::config::{Admission, Config};
use super::shadow::Shadows;
use super::wait::QueuedRequest;
use super::{AsIs, Ending, KeyExtractor, Reject};
use crate::store::{Store, polled_after_completion};
use crate::wait_queues::WaitRequest;

pin_project! {
    /// Resolves to the response of a [`RateLimit`](crate::RateLimit).
    pub struct ResponseFuture<T, S, K, R, ReqBody, E = AsIs>
    where
        T: Service<Request<ReqBody>>,
        S: Store,
        E: Ending,
    {
        #[pin]
        state: State<T::Future, T::Response, S::Future, Call<T, S, K, R, ReqBody, E>, E::Account>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, Res, D, C, A> {
        Deciding {
            #[pin]
            decision: D,
            // None once the decision is there.
            call: Option<C>,
        },
        Waiting {
            place: Box<QueuedRequest>,
            // With a service that is not ready. None once the turn has come.
            call: Option<C>,
        },
        Calling {
            #[pin]
            response: F,
            // None for a request that nobody counted.
            annotation: Option<Annotation>,
            account: A,
            // None if there are none, as with most layers.
            shadows: Option<Box<Shadows<D>>>,
        },
        // The inner future is gone: it may hold a permit, such as `ConcurrencyLimit`'s.
        Answered {
            // None once it has been given.
            response: Option<Res>,
            account: A,
            // None if the response waits for none.
            shadows: Option<Box<Shadows<D>>>,
        },
    }
}

/// What waits for the decision: the ready service, and the request.
pub(super) struct Call<T, S, K, R, ReqBody, E: Ending> {
    pub(super) config: Arc<Config<S, K, R, E>>,
    pub(super) inner: T,
    pub(super) parts: Parts,
    pub(super) body: ReqBody,
    /// If there is an observer.
    pub(super) asked: Option<Asked>,
    /// What it waits for if it is denied and may wait.
    pub(super) wanted: Option<Box<WaitRequest>>,
    /// What it holds while it runs, if it passes.
    pub(super) lease: E::Lease,
}

impl<T, S, K, R, ReqBody, E> ResponseFuture<T, S, K, R, ReqBody, E>
where
    T: Service<Request<ReqBody>>,
    S: Store,
    E: Ending,
{
    pub(super) fn deciding(decision: S::Future, call: Call<T, S, K, R, ReqBody, E>) -> Self {
        Self { state: State::Deciding { decision, call: Some(call) } }
    }

    pub(super) fn waiting(place: Box<QueuedRequest>, call: Call<T, S, K, R, ReqBody, E>) -> Self {
        Self { state: State::Waiting { place, call: Some(call) } }
    }

    pub(super) fn calling(
        config: &Config<S, K, R, E>,
        inner: &mut T,
        parts: Parts,
        body: ReqBody,
        annotation: Option<Annotation>,
        account: E::Account,
        shadows: Option<Box<Shadows<S::Future>>>,
    ) -> Self {
        let response = call(config, inner, parts, body, annotation.as_ref());
        Self { state: State::Calling { response, annotation, account, shadows } }
    }

    pub(super) fn rejected(response: T::Response) -> Self {
        Self { state: State::Answered { response: Some(response), account: E::Account::default(), shadows: None } }
    }
}

impl<T, S, K, R, E, ReqBody, ResBody> Call<T, S, K, R, ReqBody, E>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    K: KeyExtractor,
    E: Ending,
{
    /// What follows from what becomes of the request.
    fn go_on(
        mut self,
        admission: Admission<ResBody, E::By>,
    ) -> State<T::Future, T::Response, S::Future, Self, E::Account> {
        match admission {
            Admission::Pass(annotation, by) => {
                let account = self.config.ending.open(&mut self.parts, annotation.as_ref(), by);
                let shadows = self.config.shadows(&self.parts, &account);
                let response = call(&self.config, &mut self.inner, self.parts, self.body, annotation.as_ref());
                State::Calling { response, annotation, account, shadows }
            }
            Admission::Wait(place, asked) => {
                // The ready one may hold a permit that others wait for.
                let inner = self.inner.clone();
                State::Waiting { place, call: Some(Self { inner, asked, ..self }) }
            }
            Admission::Reject(response) => {
                State::Answered { response: Some(response), account: E::Account::default(), shadows: None }
            }
        }
    }
}

/// Calls the service, which finds the decision in the request's extensions.
fn call<T, S, K, R, E, B>(
    config: &Config<S, K, R, E>,
    inner: &mut T,
    mut parts: Parts,
    body: B,
    annotation: Option<&Annotation>,
) -> T::Future
where
    T: Service<Request<B>>,
{
    if let Some(annotation) = annotation
        && let Some(outer) = annotation.annotate_request(&mut parts)
    {
        config.misconfiguration.tell_twice(&outer, &annotation.decision, config.observer.as_deref());
    }
    inner.call(Request::from_parts(parts, body))
}

impl<T, S, K, R, E, ReqBody, ResBody> Future for ResponseFuture<T, S, K, R, ReqBody, E>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    K: KeyExtractor,
    R: Reject<ResBody>,
    E: Ending,
{
    type Output = Result<Response<E::Body<ResBody>>, T::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Deciding { decision, call: waiting } => {
                    let answer = ready!(decision.poll(cx));
                    // It is there: only this arm takes it, and leaves this state at once.
                    let Some(mut call) = waiting.take() else {
                        polled_after_completion("ResponseFuture");
                    };
                    let (asked, wanted, lease) = (call.asked.take(), call.wanted.take(), mem::take(&mut call.lease));
                    let admission = call.config.admit(&call.parts, answer, asked, wanted, lease);
                    call.go_on(admission)
                }
                StateProj::Waiting { place, call: waiting } => {
                    let answer = match waiting {
                        Some(call) => ready!(place.poll(cx, |cx| call.inner.poll_ready(cx)))?,
                        None => polled_after_completion("ResponseFuture"),
                    };
                    // It is there: only this arm takes it, and leaves this state at once.
                    let Some(mut call) = waiting.take() else {
                        polled_after_completion("ResponseFuture");
                    };
                    let asked = place.charged(call.asked.take());
                    let admission = call.config.conclude_turn(&call.parts, answer, asked, place.lease());
                    call.go_on(admission)
                }
                StateProj::Calling { response, annotation, account, shadows } => {
                    if let Some(shadows) = shadows {
                        let _ = shadows.poll(cx);
                    }
                    let response = ready!(response.poll(cx))?;
                    let account = mem::take(account);
                    let (mut response, cost) = E::settle(&account, response);
                    if let Some(annotation) = annotation.take() {
                        annotation.settled(cost).annotate_response(&mut response);
                    }
                    match shadows.take() {
                        None => return Poll::Ready(Ok(E::wrap(response, account))),
                        shadows => State::Answered { response: Some(response), account, shadows },
                    }
                }
                StateProj::Answered { response, account, shadows } => {
                    if let Some(shadows) = shadows {
                        ready!(shadows.poll(cx));
                    }
                    let mut response = response.take().unwrap_or_else(|| polled_after_completion("ResponseFuture"));
                    if let Some(shadows) = shadows.take() {
                        shadows.annotate(&mut response);
                    }
                    return Poll::Ready(Ok(E::wrap(response, mem::take(account))));
                }
            };
            state.set(next);
        }
    }
}

impl<T, S, K, R, ReqBody, E> fmt::Debug for ResponseFuture<T, S, K, R, ReqBody, E>
where
    T: Service<Request<ReqBody>>,
    S: Store,
    E: Ending,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
