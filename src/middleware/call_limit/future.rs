use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::layer::Config;
use super::{BoxError, CallEnding};
use crate::gate::{Grant, Pending};
use crate::middleware::rate_limit::AsIs;
use crate::store::Store;
use crate::util::polled_after_completion;

pin_project! {
    /// Resolves to the response of a [`CallLimit`](crate::call_limit::CallLimit).
    pub struct CallFuture<T, S, R, E = AsIs>
    where
        T: Service<R>,
        S: Store,
    {
        #[pin]
        pub(super) state: State<T::Future, T::Response, S::Future, Call<T, S, R, E>, E>,
    }
}

pin_project! {
    #[project = StateProj]
    pub(super) enum State<F, Res, D, C, E> {
        Undecided {
            #[pin]
            pending: Pending<D>,
            // `None` after the decision.
            call: Option<C>,
        },
        Calling {
            #[pin]
            response: F,
            grant: Grant<D>,
            ending: E,
        },
        // The inner future has been dropped: it may hold a permit, such as `ConcurrencyLimit`'s.
        Answered {
            // `None` after it was returned.
            answer: Option<Result<Res, BoxError>>,
            // Includes the shadow checks that are still pending.
            grant: Grant<D>,
        },
    }
}

/// The service and the request, which wait for the decision.
pub(super) struct Call<T, S, R, E> {
    pub(super) config: Arc<Config<S, R, E>>,
    pub(super) inner: T,
    pub(super) request: R,
}

impl<F, Res, D, C, E: Clone> State<F, Res, D, C, E> {
    pub(super) fn calling<T, S, R>(
        config: &Config<S, R, E>,
        inner: &mut T,
        request: R,
        grant: Grant<D>,
    ) -> Self
    where
        T: Service<R, Future = F>,
    {
        Self::Calling {
            response: inner.call(request),
            grant,
            ending: config.ending.clone(),
        }
    }
}

impl<T, S, R, E> Future for CallFuture<T, S, R, E>
where
    T: Service<R, Error: Into<BoxError>> + Clone,
    S: Store,
    R: 'static,
    E: CallEnding<T::Response>,
{
    type Output = Result<T::Response, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Undecided {
                    pending,
                    call: waiting,
                } => {
                    let Some(Call {
                        config,
                        inner,
                        request,
                    }) = waiting
                    else {
                        polled_after_completion("CallFuture");
                    };
                    let admitted = ready!(pending.poll(cx, &config.gate, request, inner))
                        .map_err(Into::into)?;
                    // Always `Some`: only this arm takes it, and then replaces the state.
                    let Some(mut call) = waiting.take() else {
                        polled_after_completion("CallFuture");
                    };
                    match admitted {
                        Ok((grant, _)) => {
                            State::calling(&call.config, &mut call.inner, call.request, grant)
                        }
                        Err(refusal) => return Poll::Ready(Err(refusal.into())),
                    }
                }
                StateProj::Calling {
                    response,
                    grant,
                    ending,
                } => {
                    let _ = grant.poll_shadows(cx);
                    let answer = ready!(response.poll(cx)).map_err(Into::into);
                    if let Some(settlement) = ending.settlement(&answer) {
                        grant.settle(settlement);
                    }
                    grant.end();
                    if !grant.has_shadows() {
                        return Poll::Ready(answer);
                    }
                    State::Answered {
                        answer: Some(answer),
                        grant: mem::take(grant),
                    }
                }
                StateProj::Answered { answer, grant } => {
                    ready!(grant.poll_shadows(cx));
                    return Poll::Ready(
                        answer
                            .take()
                            .unwrap_or_else(|| polled_after_completion("CallFuture")),
                    );
                }
            };
            state.set(next);
        }
    }
}

impl<T, S, R, E> fmt::Debug for CallFuture<T, S, R, E>
where
    T: Service<R>,
    S: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").finish_non_exhaustive()
    }
}
