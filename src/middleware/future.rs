use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::header::RETRY_AFTER;
use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_service::Service;

use super::headers::{self, retry_after};
use super::layer::{Config, OnError, OnMissingKey};
use super::{MissingKey, Reason, Reject, Rejection};
use crate::limit::Decision;
use crate::store::{Error, Store, instant, polled_after_completion};

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
            // None once it is made.
            call: Option<C>,
        },
        Calling {
            #[pin]
            response: F,
            // None for a request that nobody counted.
            trace: Option<Trace>,
        },
        Rejected {
            // None once it is given.
            response: Option<Res>,
        },
    }
}

/// The ready service and what it is to be called with, until the decision is there.
struct Call<T, S, K, R, ReqBody> {
    config: Arc<Config<S, K, R>>,
    inner: T,
    parts: Parts,
    body: ReqBody,
    /// When the decision was asked for, if anybody is told.
    since: Option<Instant>,
}

/// What a response is given of the decision on its request.
pub(super) struct Trace {
    decision: Decision,
    /// Whether it has the header fields.
    fields: bool,
}

impl<T, S, K, R, ReqBody> ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    pub(super) fn deciding(
        config: Arc<Config<S, K, R>>,
        decision: S::Future,
        inner: T,
        parts: Parts,
        body: ReqBody,
        since: Option<Instant>,
    ) -> Self {
        Self { state: State::Deciding { decision, call: Some(Call { config, inner, parts, body, since }) } }
    }

    // Inline, or the request is moved three times more.
    #[inline(always)]
    pub(super) fn calling(inner: &mut T, parts: Parts, body: ReqBody, trace: Option<Trace>) -> Self {
        Self { state: State::Calling { response: call(inner, parts, body, trace.as_ref()), trace } }
    }

    pub(super) fn rejected(response: T::Response) -> Self {
        Self { state: State::Rejected { response: Some(response) } }
    }
}

/// Calls the service, which finds the decision with the request.
#[inline(always)]
fn call<T, B>(inner: &mut T, mut parts: Parts, body: B, trace: Option<&Trace>) -> T::Future
where
    T: Service<Request<B>>,
{
    if let Some(Trace { decision, .. }) = trace {
        parts.extensions.insert(decision.clone());
    }
    inner.call(Request::from_parts(parts, body))
}

impl<T, S, K, R, ReqBody, ResBody> Future for ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>>,
    S: Store,
    R: Reject<ResBody>,
{
    type Output = Result<Response<ResBody>, T::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Deciding { decision, call: waiting } => {
                    let decision = ready!(decision.poll(cx));
                    // There is always a call to make: it is taken here alone, and this state is left with it.
                    let Some(Call { config, mut inner, parts, body, since }) = waiting.take() else {
                        polled_after_completion("ResponseFuture");
                    };
                    match config.admit(decision, since, &parts) {
                        Ok(trace) => State::Calling { response: call(&mut inner, parts, body, trace.as_ref()), trace },
                        Err(response) => State::Rejected { response: Some(response) },
                    }
                }
                StateProj::Calling { response, trace } => {
                    let mut response = ready!(response.poll(cx))?;
                    if let Some(trace) = trace.take() {
                        trace.leave(&mut response);
                    }
                    return Poll::Ready(Ok(response));
                }
                StateProj::Rejected { response } => {
                    let response = response.take().unwrap_or_else(|| polled_after_completion("ResponseFuture"));
                    return Poll::Ready(Ok(response));
                }
            };
            state.set(next);
        }
    }
}

impl<S, K, R> Config<S, K, R> {
    /// Now, if anybody is told how long a decision took.
    pub(super) fn now(&self) -> Option<Instant> {
        self.observer.as_ref().map(|_| instant())
    }

    /// Whether a request without a key passes, uncounted.
    pub(super) fn lets_pass(&self, missing: MissingKey) -> bool {
        self.on_missing_key == OnMissingKey::Allow && missing.is_absent()
    }

    /// The trace of the decision by which a request passes, or none if nobody could count it.
    ///
    /// # Errors
    ///
    /// The response to one that does not pass.
    pub(super) fn admit<B>(
        &self,
        decision: Result<Decision, Error>,
        since: Option<Instant>,
        request: &Parts,
    ) -> Result<Option<Trace>, Response<B>>
    where
        R: Reject<B>,
    {
        if let (Some(observer), Some(since)) = (&self.observer, since) {
            match &decision {
                Ok(decision) => observer.0.decided(decision, instant() - since),
                Err(error) => observer.0.failed(error),
            }
        }
        match decision {
            Ok(decision) if decision.is_allowed() => Ok(Some(Trace { decision, fields: self.fields })),
            Ok(decision) => {
                let mut response = self.reject.reject(Rejection::new(Reason::Denied(&decision), request));
                if let Some(wait) = decision.retry_after() {
                    response.headers_mut().entry(RETRY_AFTER).or_insert_with(|| retry_after(wait).into());
                }
                Trace { decision, fields: self.fields }.leave(&mut response);
                Err(response)
            }
            Err(error) => match self.on_error {
                OnError::Allow => Ok(None),
                OnError::Reject => Err(self.reject.reject(Rejection::new(Reason::Unavailable(&error), request))),
            },
        }
    }
}

impl Trace {
    /// Leaves the decision with the response, for whoever looks and whoever reads.
    fn leave<B>(self, response: &mut Response<B>) {
        if self.fields {
            headers::append(response.headers_mut(), &self.decision);
        }
        // With layers in layers, the innermost tells why the response is what it is.
        if response.extensions().get::<Decision>().is_none() {
            response.extensions_mut().insert(self.decision);
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
