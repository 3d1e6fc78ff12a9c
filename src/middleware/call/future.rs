use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::BoxError;
use super::config::Config;
use crate::middleware::asked::Asked;
use crate::store::{Store, polled_after_completion};

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
        Calling {
            #[pin]
            response: F,
        },
        Failed {
            // None once it has been given.
            error: Option<BoxError>,
        },
    }
}

/// What waits for the decision: the ready service, and the request.
struct Call<T, S, K, R> {
    config: Arc<Config<S, K, R>>,
    inner: T,
    request: R,
    /// If there is an observer.
    asked: Option<Asked>,
}

impl<T, S, K, R> CallFuture<T, S, K, R>
where
    T: Service<R>,
    S: Store,
{
    pub(super) fn deciding(
        config: Arc<Config<S, K, R>>,
        decision: S::Future,
        inner: T,
        request: R,
        asked: Option<Asked>,
    ) -> Self {
        Self { state: State::Deciding { decision, call: Some(Call { config, inner, request, asked }) } }
    }

    pub(super) fn calling(response: T::Future) -> Self {
        Self { state: State::Calling { response } }
    }

    pub(super) fn failed(error: BoxError) -> Self {
        Self { state: State::Failed { error: Some(error) } }
    }
}

impl<T, S, K, R> Future for CallFuture<T, S, K, R>
where
    T: Service<R, Error: Into<BoxError>>,
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
                    let Some(Call { config, mut inner, request, asked }) = call.take() else {
                        polled_after_completion("CallFuture");
                    };
                    match config.admit(answer, asked) {
                        Ok(()) => State::Calling { response: inner.call(request) },
                        Err(error) => State::Failed { error: Some(error) },
                    }
                }
                StateProj::Calling { response } => return response.poll(cx).map_err(Into::into),
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
