use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::layer::Config;
use super::protocol::{Protocol, Serve};
use crate::gate::{Grant, Pending, Refusal};
use crate::limit::Decision;
use crate::store::Store;
use crate::util::polled_after_completion;

pin_project! {
    /// Resolves to the response of a [`Limit`](super::Limit).
    pub struct LimitFuture<T, S, P, Req>
    where
        T: Service<Req>,
        S: Store,
        P: Serve<T, Req>,
    {
        #[pin]
        pub(super) state: State<T, S, P, Req>,
    }
}

pin_project! {
    #[project = StateProj]
    pub(super) enum State<T, S, P, Req>
    where
        T: Service<Req>,
        S: Store,
        P: Serve<T, Req>,
    {
        Undecided {
            #[pin]
            pending: Pending<S::Future>,
            // `None` once it is decided.
            held: Option<Held<T, S, P, P::Body>>,
        },
        Calling {
            #[pin]
            response: T::Future,
            grant: Grant<S::Future>,
            noted: P::Noted,
        },
        // Waits for the checks of dry runs. The inner future is already dropped, since it may hold a
        // permit, such as `ConcurrencyLimit`'s.
        Answered {
            // `None` once it is returned.
            result: Option<Result<T::Response, P::Error>>,
            grant: Grant<S::Future>,
        },
    }
}

/// A request that waits for its decision, and the service for it.
pub(super) struct Held<T, S, P: Protocol, B> {
    pub(super) config: Arc<Config<S, P>>,
    pub(super) inner: T,
    pub(super) head: P::Head,
    pub(super) body: B,
}

impl<T, S, P, Req> State<T, S, P, Req>
where
    T: Service<Req>,
    S: Store,
    P: Serve<T, Req>,
{
    pub(super) fn calling(
        config: &Config<S, P>,
        inner: &mut T,
        request: (P::Head, P::Body),
        grant: Grant<S::Future>,
        decision: Option<Decision>,
    ) -> Self {
        let notifier = &config.gate.notifier;
        let (response, noted) = config
            .protocol
            .call(notifier, inner, request, &grant, decision);
        Self::Calling {
            response,
            grant,
            noted,
        }
    }

    pub(super) fn refused(config: &Config<S, P>, head: &P::Head, refusal: Refusal) -> Self {
        Self::Answered {
            result: Some(config.protocol.refuse(head, refusal)),
            grant: Grant::default(),
        }
    }
}

impl<T, S, P, Req> Future for LimitFuture<T, S, P, Req>
where
    T: Service<Req> + Clone,
    S: Store,
    P: Serve<T, Req>,
{
    type Output = Result<P::Response, P::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Undecided { pending, held } => {
                    let Some(Held {
                        config,
                        inner,
                        head,
                        ..
                    }) = held
                    else {
                        polled_after_completion(P::FUTURE);
                    };
                    let admitted =
                        ready!(pending.poll(cx, &config.gate, head, inner)).map_err(P::error)?;
                    // Always `Some`: only this arm takes it, and then replaces the state.
                    let Some(mut held) = held.take() else {
                        polled_after_completion(P::FUTURE);
                    };
                    match admitted {
                        Ok((grant, decision)) => {
                            let request = (held.head, held.body);
                            State::calling(&held.config, &mut held.inner, request, grant, decision)
                        }
                        Err(refusal) => State::refused(&held.config, &held.head, refusal),
                    }
                }
                StateProj::Calling {
                    response,
                    grant,
                    noted,
                } => {
                    let _ = grant.poll_shadows(cx);
                    let result = ready!(response.poll(cx));
                    let result = P::settle(noted, result, grant);
                    // An error does not wait for the checks of dry runs.
                    if result.is_err() || !grant.has_shadows() {
                        return Poll::Ready(P::finish(result, grant));
                    }
                    State::Answered {
                        result: Some(result),
                        grant: mem::take(grant),
                    }
                }
                StateProj::Answered { result, grant } => {
                    ready!(grant.poll_shadows(cx));
                    let result = result
                        .take()
                        .unwrap_or_else(|| polled_after_completion(P::FUTURE));
                    return Poll::Ready(P::finish(result, grant));
                }
            };
            state.set(next);
        }
    }
}

impl<T, S, P, Req> fmt::Debug for LimitFuture<T, S, P, Req>
where
    T: Service<Req>,
    S: Store,
    P: Serve<T, Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(P::FUTURE).finish_non_exhaustive()
    }
}
