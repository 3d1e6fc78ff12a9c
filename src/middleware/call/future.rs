use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::BoxError;
use super::config::{Admission, Config};
use crate::in_flight::Lease;
use crate::middleware::asked::Asked;
use crate::middleware::wait::QueuedRequest;
use crate::store::{Store, polled_after_completion};
use crate::wait_queues::WaitRequest;

pin_project! {
    /// Resolves to the response of a [`CallLimit`](crate::CallLimit).
    pub struct CallFuture<T, S, K, R>
    where
        T: Service<R>,
        S: Store,
    {
        #[pin]
        state: State<T::Future, S::Future, Call<T, S, K, R>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, D, C> {
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
            // Until the response.
            lease: Option<Lease>,
        },
        Failed {
            // None once it has been given.
            error: Option<BoxError>,
        },
    }
}

/// What waits for the decision: the ready service, and the request.
pub(super) struct Call<T, S, K, R> {
    pub(super) config: Arc<Config<S, K, R>>,
    pub(super) inner: T,
    pub(super) request: R,
    /// If there is an observer.
    pub(super) asked: Option<Asked>,
    /// What it waits for if it is denied and may wait.
    pub(super) wanted: Option<Box<WaitRequest>>,
    /// What it holds while it runs, if it passes.
    pub(super) lease: Option<Lease>,
}

impl<T, S, K, R> CallFuture<T, S, K, R>
where
    T: Service<R>,
    S: Store,
{
    pub(super) fn deciding(decision: S::Future, call: Call<T, S, K, R>) -> Self {
        Self { state: State::Deciding { decision, call: Some(call) } }
    }

    pub(super) fn waiting(place: Box<QueuedRequest>, call: Call<T, S, K, R>) -> Self {
        Self { state: State::Waiting { place, call: Some(call) } }
    }

    pub(super) fn calling(response: T::Future, lease: Option<Lease>) -> Self {
        Self { state: State::Calling { response, lease } }
    }

    pub(super) fn failed(error: BoxError) -> Self {
        Self { state: State::Failed { error: Some(error) } }
    }
}

impl<T: Service<R> + Clone, S, K, R> Call<T, S, K, R> {
    /// What follows from what becomes of the request.
    fn go_on<D>(mut self, admission: Admission) -> State<T::Future, D, Self> {
        match admission {
            Admission::Pass(lease) => State::Calling { response: self.inner.call(self.request), lease },
            Admission::Wait(place, asked) => {
                // The ready one may hold a permit that others wait for.
                let inner = self.inner.clone();
                State::Waiting { place, call: Some(Self { inner, asked, ..self }) }
            }
            Admission::Fail(error) => State::Failed { error: Some(error) },
        }
    }
}

impl<T, S, K, R> Future for CallFuture<T, S, K, R>
where
    T: Service<R, Error: Into<BoxError>> + Clone,
    S: Store,
{
    type Output = Result<T::Response, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Deciding { decision, call } => {
                    let answer = ready!(decision.poll(cx));
                    // It is there: only this arm takes it, and leaves this state at once.
                    let Some(mut call) = call.take() else {
                        polled_after_completion("CallFuture");
                    };
                    let (asked, wanted, lease) = (call.asked.take(), call.wanted.take(), call.lease.take());
                    let admission = call.config.admit(answer, asked, wanted, lease);
                    call.go_on(admission)
                }
                StateProj::Waiting { place, call } => {
                    let answer = match call {
                        Some(call) => ready!(place.poll(cx, |cx| call.inner.poll_ready(cx))).map_err(Into::into)?,
                        None => polled_after_completion("CallFuture"),
                    };
                    // It is there: only this arm takes it, and leaves this state at once.
                    let Some(mut call) = call.take() else {
                        polled_after_completion("CallFuture");
                    };
                    let admission = call.config.conclude(answer, call.asked.take(), place.lease());
                    call.go_on(admission)
                }
                StateProj::Calling { response, lease } => {
                    let response = ready!(response.poll(cx));
                    *lease = None;
                    return Poll::Ready(response.map_err(Into::into));
                }
                StateProj::Failed { error } => {
                    return Poll::Ready(Err(error.take().unwrap_or_else(|| polled_after_completion("CallFuture"))));
                }
            };
            state.set(next);
        }
    }
}

impl<T, S, K, R> fmt::Debug for CallFuture<T, S, K, R>
where
    T: Service<R>,
    S: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").finish_non_exhaustive()
    }
}
