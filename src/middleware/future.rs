use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_service::Service;

use super::layer::{Config, OnError, OnMissingKey};
use super::{MissingKey, Reject, Rejection};
use crate::limit::Decision;
use crate::store::{Error, Store, instant};

pin_project! {
    /// Resolves to the response of a [`RateLimit`](crate::RateLimit).
    pub struct ResponseFuture<T, S, K, R, ReqBody>
    where
        T: Service<Request<ReqBody>>,
        S: Store,
    {
        config: Arc<Config<S, K, R>>,
        #[pin]
        state: State<T, T::Future, T::Response, S::Future, ReqBody>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<T, F, Res, D, ReqBody> {
        Deciding {
            #[pin]
            decision: D,
            // The ready service and what it is to be called with, until the decision is there.
            call: Option<(T, Call<ReqBody>)>,
            // When it was asked for, if anybody is told.
            since: Option<Instant>,
        },
        Calling {
            #[pin]
            response: F,
            // None for a request that nobody counted.
            decision: Option<Decision>,
        },
        Rejected {
            // None once it has been given.
            response: Option<Res>,
        },
    }
}

/// A request whose head can be looked at.
pub(super) struct Call<ReqBody> {
    pub(super) parts: Parts,
    pub(super) body: ReqBody,
}

impl<ReqBody> Call<ReqBody> {
    /// Calls the service, which finds the decision with the request.
    fn make<T: Service<Request<ReqBody>>>(mut self, inner: &mut T, decision: Option<&Decision>) -> T::Future {
        if let Some(decision) = decision {
            self.parts.extensions.insert(decision.clone());
        }
        inner.call(Request::from_parts(self.parts, self.body))
    }
}

impl<T, S, K, R, ReqBody> ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    pub(super) fn deciding(
        config: Arc<Config<S, K, R>>,
        call: Call<ReqBody>,
        inner: T,
        decision: S::Future,
        since: Option<Instant>,
    ) -> Self {
        Self { config, state: State::Deciding { decision, call: Some((inner, call)), since } }
    }

    pub(super) fn calling(
        config: Arc<Config<S, K, R>>,
        call: Call<ReqBody>,
        inner: &mut T,
        decision: Option<Decision>,
    ) -> Self {
        Self { config, state: State::Calling { response: call.make(inner, decision.as_ref()), decision } }
    }

    pub(super) fn rejected(config: Arc<Config<S, K, R>>, response: T::Response) -> Self {
        Self { config, state: State::Rejected { response: Some(response) } }
    }
}

impl<T, S, K, R, ReqBody, ResBody> Future for ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>>,
    S: Store,
    R: Reject<ResBody>,
{
    type Output = Result<Response<ResBody>, T::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let config = &**this.config;
        loop {
            let state = match this.state.as_mut().project() {
                StateProj::Deciding { decision, call, since } => {
                    let decision = ready!(decision.poll(cx));
                    // There is always a call to make: it is taken here alone, and this state is left at once.
                    let Some((mut inner, call)) = call.take() else { return Poll::Pending };
                    match config.admit(decision, *since) {
                        Ok(decision) => State::Calling { response: call.make(&mut inner, decision.as_ref()), decision },
                        Err(response) => return Poll::Ready(Ok(response)),
                    }
                }
                StateProj::Calling { response, decision } => {
                    let mut response = ready!(response.poll(cx))?;
                    if let Some(decision) = decision.take() {
                        config.leave_trace(&mut response, decision);
                    }
                    return Poll::Ready(Ok(response));
                }
                StateProj::Rejected { response } => {
                    return response.take().map_or(Poll::Pending, |r| Poll::Ready(Ok(r)));
                }
            };
            this.state.set(state);
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
        self.on_missing_key == OnMissingKey::Allow && !missing.is_of_server()
    }

    /// The decision by which a request passes, or none if nobody could count it.
    ///
    /// # Errors
    ///
    /// The response to one that does not pass.
    pub(super) fn admit<B>(
        &self,
        decision: Result<Decision, Error>,
        since: Option<Instant>,
    ) -> Result<Option<Decision>, Response<B>>
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
            Ok(decision) if decision.is_allowed() => Ok(Some(decision)),
            Ok(decision) => {
                let mut response = self.reject.reject(Rejection::Denied(&decision));
                self.leave_trace(&mut response, decision);
                Err(response)
            }
            Err(error) => match self.on_error {
                OnError::Allow => Ok(None),
                OnError::Reject => Err(self.reject.reject(Rejection::Unavailable(&error))),
            },
        }
    }

    /// Leaves the decision with the response, for whoever looks and whoever reads.
    fn leave_trace<B>(&self, response: &mut Response<B>, decision: Decision) {
        if let Some(fields) = &self.fields {
            fields.append(response.headers_mut(), &decision);
        }
        // With layers in layers, the innermost tells why the response is what it is.
        if response.extensions().get::<Decision>().is_none() {
            response.extensions_mut().insert(decision);
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
