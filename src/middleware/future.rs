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
        state: State<T, T::Future, S::Future, ReqBody>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<T, C, D, ReqBody> {
        Deciding {
            #[pin]
            decision: D,
            // The ready service and what it is to be called with, until the decision is there.
            call: Option<Call<T, ReqBody>>,
            // When it was asked for, if anybody is told.
            since: Option<Instant>,
        },
        WithoutKey {
            missing: MissingKey,
        },
        Calling {
            #[pin]
            response: C,
            // None for a request that nobody counted.
            decision: Option<Decision>,
        },
    }
}

/// A call that waits for its decision.
pub(super) struct Call<T, ReqBody> {
    pub(super) inner: T,
    pub(super) parts: Parts,
    pub(super) body: ReqBody,
}

impl<T: Service<Request<ReqBody>>, ReqBody> Call<T, ReqBody> {
    fn make(mut self) -> T::Future {
        self.inner.call(Request::from_parts(self.parts, self.body))
    }
}

impl<T, S, K, R, ReqBody> ResponseFuture<T, S, K, R, ReqBody>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    pub(super) fn deciding(config: Arc<Config<S, K, R>>, call: Call<T, ReqBody>, decision: S::Future) -> Self {
        let since = config.observer.as_ref().map(|_| instant());
        Self { config, state: State::Deciding { decision, call: Some(call), since } }
    }

    pub(super) fn without_key(config: Arc<Config<S, K, R>>, call: Call<T, ReqBody>, missing: MissingKey) -> Self {
        let state = match config.on_missing_key {
            OnMissingKey::Allow if !missing.is_of_server() => State::Calling { response: call.make(), decision: None },
            _ => State::WithoutKey { missing },
        };
        Self { config, state }
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
            let (decision, call) = match this.state.as_mut().project() {
                StateProj::Deciding { decision, call, since } => {
                    let decision = ready!(decision.poll(cx));
                    config.tell(&decision, *since);
                    (decision, call.take())
                }
                StateProj::WithoutKey { missing } => {
                    return Poll::Ready(Ok(config.reject.reject(Rejection::MissingKey(missing))));
                }
                StateProj::Calling { response, decision } => {
                    let mut response = ready!(response.poll(cx))?;
                    if let Some(decision) = decision.take() {
                        config.leave_trace(&mut response, decision);
                    }
                    return Poll::Ready(Ok(response));
                }
            };
            let decision = match decision {
                Ok(decision) if decision.is_allowed() => Some(decision),
                Ok(decision) => {
                    let mut response = config.reject.reject(Rejection::Denied(&decision));
                    config.leave_trace(&mut response, decision);
                    return Poll::Ready(Ok(response));
                }
                Err(error) => match config.on_error {
                    OnError::Allow => None,
                    OnError::Reject => return Poll::Ready(Ok(config.unavailable(&error))),
                },
            };
            // There is always a call to make: it is taken here alone, and this state is left at once.
            let Some(mut call) = call else { return Poll::Pending };
            if let Some(decision) = &decision {
                call.parts.extensions.insert(decision.clone());
            }
            this.state.set(State::Calling { response: call.make(), decision });
        }
    }
}

impl<S, K, R> Config<S, K, R> {
    fn tell(&self, decision: &Result<Decision, Error>, since: Option<Instant>) {
        if let (Some(observer), Some(since)) = (&self.observer, since) {
            match decision {
                Ok(decision) => observer.0.decided(decision, instant() - since),
                Err(error) => observer.0.failed(error),
            }
        }
    }

    fn unavailable<B>(&self, error: &Error) -> Response<B>
    where
        R: Reject<B>,
    {
        self.reject.reject(Rejection::Unavailable(error))
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
