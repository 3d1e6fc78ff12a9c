use std::fmt;
use std::future::Future;
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
use super::wait::InLine;
use super::{KeyExtractor, Reject};
use crate::store::{Store, polled_after_completion};
use crate::turns::Wanted;

pin_project! {
    /// Resolves to the response of a [`RateLimit`](crate::RateLimit).
    pub struct ResponseFuture<T, S, K, R, ReqBody>
    where
        T: Service<Request<ReqBody>>,
        S: Store,
    {
        #[pin]
        state: State<T::Future, T::Response, S::Future, Call<T, S, K, R, ReqBody>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, Res, D, C> {
        Deciding {
            #[pin]
            decision: D,
            // None once the decision is there.
            call: Option<C>,
        },
        Waiting {
            place: Box<InLine>,
            // With a service that is not ready. None once the turn has come.
            call: Option<C>,
        },
        Calling {
            #[pin]
            response: F,
            // None for a request that nobody counted.
            annotation: Option<Annotation>,
            // None if there are none, as with most layers.
            shadows: Option<Box<Shadows<D>>>,
        },
        // The inner future is gone: it may hold a permit, such as `ConcurrencyLimit`'s.
        Answered {
            // None once it has been given.
            response: Option<Res>,
            // None if the response waits for none.
            shadows: Option<Box<Shadows<D>>>,
        },
    }
}

/// What waits for the decision: the ready service, and the request.
pub(super) struct Call<T, S, K, R, ReqBody> {
    pub(super) config: Arc<Config<S, K, R>>,
    pub(super) inner: T,
    pub(super) parts: Parts,
    pub(super) body: ReqBody,
    /// If there is an observer.
    pub(super) asked: Option<Asked>,
    /// What it waits for if it is denied and may wait.
    pub(super) wanted: Option<Box<Wanted>>,
}

impl<T, S, K, R, ReqBody> ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    pub(super) fn deciding(decision: S::Future, call: Call<T, S, K, R, ReqBody>) -> Self {
        Self { state: State::Deciding { decision, call: Some(call) } }
    }

    pub(super) fn waiting(place: Box<InLine>, call: Call<T, S, K, R, ReqBody>) -> Self {
        Self { state: State::Waiting { place, call: Some(call) } }
    }

    pub(super) fn calling(
        inner: &mut T,
        parts: Parts,
        body: ReqBody,
        annotation: Option<Annotation>,
        shadows: Option<Box<Shadows<S::Future>>>,
    ) -> Self {
        Self { state: State::Calling { response: call(inner, parts, body, annotation.as_ref()), annotation, shadows } }
    }

    pub(super) fn rejected(response: T::Response) -> Self {
        Self { state: State::Answered { response: Some(response), shadows: None } }
    }
}

impl<T, S, K, R, ReqBody, ResBody> Call<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    K: KeyExtractor,
{
    /// What follows from what becomes of the request.
    fn go_on(mut self, admission: Admission<ResBody>) -> State<T::Future, T::Response, S::Future, Self> {
        match admission {
            Admission::Pass(annotation) => {
                let shadows = self.config.shadows(&self.parts);
                let response = call(&mut self.inner, self.parts, self.body, annotation.as_ref());
                State::Calling { response, annotation, shadows }
            }
            Admission::Wait(place, asked) => {
                // The ready one may hold a permit that others wait for.
                let inner = self.inner.clone();
                State::Waiting { place, call: Some(Self { inner, asked, ..self }) }
            }
            Admission::Reject(response) => State::Answered { response: Some(response), shadows: None },
        }
    }
}

/// Calls the service, which finds the decision in the request's extensions.
fn call<T, B>(inner: &mut T, mut parts: Parts, body: B, annotation: Option<&Annotation>) -> T::Future
where
    T: Service<Request<B>>,
{
    if let Some(annotation) = annotation {
        annotation.annotate_request(&mut parts);
    }
    inner.call(Request::from_parts(parts, body))
}

impl<T, S, K, R, ReqBody, ResBody> Future for ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    K: KeyExtractor,
    R: Reject<ResBody>,
{
    type Output = Result<Response<ResBody>, T::Error>;

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
                    let (asked, wanted) = (call.asked.take(), call.wanted.take());
                    let admission = call.config.admit(&call.parts, answer, asked, wanted);
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
                    let admission = call.config.conclude(&call.parts, answer, call.asked.take());
                    call.go_on(admission)
                }
                StateProj::Calling { response, annotation, shadows } => {
                    if let Some(shadows) = shadows {
                        let _ = shadows.poll(cx);
                    }
                    let mut response = ready!(response.poll(cx))?;
                    if let Some(annotation) = annotation.take() {
                        annotation.annotate_response(&mut response);
                    }
                    match shadows.take() {
                        None => return Poll::Ready(Ok(response)),
                        shadows => State::Answered { response: Some(response), shadows },
                    }
                }
                StateProj::Answered { response, shadows } => {
                    if let Some(shadows) = shadows {
                        ready!(shadows.poll(cx));
                    }
                    let mut response = response.take().unwrap_or_else(|| polled_after_completion("ResponseFuture"));
                    if let Some(shadows) = shadows.take() {
                        shadows.annotate(&mut response);
                    }
                    return Poll::Ready(Ok(response));
                }
            };
            state.set(next);
        }
    }
}

impl<T, S, K, R, ReqBody> fmt::Debug for ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
