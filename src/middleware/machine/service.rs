use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::layer::{Config, ServiceSettings};
use super::protocol::{Protocol, Serve};
use crate::gate::{Admission, Admitted, Grant, KeyExtractor, Pending, Refusal};
use crate::middleware::take_ready;
use crate::store::Store;
use crate::util::polled_after_completion;

/// A service that is `Clone`: a layer calls a clone of it once the store has decided. Implemented for every `Clone` type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not `Clone`, and a limited service is cloned for each request",
    label = "this service is not `Clone`",
    note = "derive `Clone` for the service, and share what is large in an `Arc`",
    note = "a service that cannot be cloned: put `tower::buffer::Buffer::new(service, 1_024)` around it"
)]
pub trait IsClone: Clone {}

#[diagnostic::do_not_recommend]
impl<T: Clone> IsClone for T {}

/// The cost of a request: a `u32`, the return type of a closure for [`cost`](super::LimitLayer::cost).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the cost of a request",
    label = "the closure must return a `u32`",
    note = "another integer: `u32::try_from(cost).unwrap_or(u32::MAX)`",
    note = "a cost that must be awaited: `.cost(|_| 0)`, and `RequestCost::reserve` in the handler"
)]
pub trait IsCost: Into<u32> {}

impl IsCost for u32 {}

/// The service of a [`LimitLayer`](super::LimitLayer): it decides, then calls the inner service.
pub struct Limit<T, S, K, P: Protocol> {
    inner: T,
    settings: ServiceSettings<S, K, P>,
}

impl<T, S, K, P, Req> Service<Req> for Limit<T, S, K, P>
where
    T: Service<Req> + Clone,
    S: Store,
    K: KeyExtractor<P::Head>,
    P: Serve<T, Req>,
{
    type Response = P::Response;
    type Error = P::Error;
    type Future = LimitFuture<T, S, P, Req>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(P::error)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let (extractor, config) = self.settings.current();
        let (mut head, body) = P::split(request);
        let mut grant = Grant::default();
        match config.gate.admit(extractor, &head, &mut grant) {
            Admission::Decided(Ok(())) => LimitFuture {
                state: State::Calling {
                    noted: config
                        .protocol
                        .note(&config.gate.notifier, &mut head, &mut grant),
                    response: self.inner.call(P::join(head, body)),
                    grant,
                },
            },
            Admission::Decided(Err(refusal)) => {
                // It may hold a permit that others wait for.
                drop(take_ready(&mut self.inner));
                LimitFuture {
                    state: State::refused(config, &head, refusal),
                }
            }
            Admission::Undecided(pending) => {
                // A request that waits for its turn drops the ready service: it may hold a permit that others wait for.
                let ready = take_ready(&mut self.inner);
                let inner = if pending.is_queued() {
                    self.inner.clone()
                } else {
                    ready
                };
                let held = Some(HeldRequest {
                    config: Arc::clone(config),
                    inner,
                    head,
                    body,
                });
                LimitFuture {
                    state: State::Undecided { pending, held },
                }
            }
        }
    }
}

impl<T, S, K, P: Protocol> Limit<T, S, K, P> {
    pub(super) fn new(inner: T, settings: ServiceSettings<S, K, P>) -> Self {
        Self { inner, settings }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The inner service. Requests sent to it directly are not counted.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> T {
        self.inner
    }
}

impl<T: Clone, S, K, P: Protocol> Clone for Limit<T, S, K, P> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: self.settings.clone(),
        }
    }
}

impl<T, S: fmt::Debug, K, P: Protocol> fmt::Debug for Limit<T, S, K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.current().1.gate.fmt(P::SERVICE, f)
    }
}

pin_project! {
    /// Resolves to the response of a [`Limit`](super::Limit).
    pub struct LimitFuture<T, S, P, Req>
    where
        T: Service<Req>,
        S: Store,
        P: Serve<T, Req>,
    {
        #[pin]
        state: State<T, S, P, Req>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<T, S, P, Req>
    where
        T: Service<Req>,
        S: Store,
        P: Serve<T, Req>,
    {
        Undecided {
            #[pin]
            pending: Pending<S::Future>,
            // `None` once it is decided.
            held: Option<HeldRequest<T, S, P, P::Body>>,
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
struct HeldRequest<T, S, P: Protocol, B> {
    config: Arc<Config<S, P>>,
    inner: T,
    head: P::Head,
    body: B,
}

impl<T, S, P, Req> State<T, S, P, Req>
where
    T: Service<Req>,
    S: Store,
    P: Serve<T, Req>,
{
    #[inline]
    fn decided(
        request: HeldRequest<T, S, P, P::Body>,
        admitted: Admitted,
        mut grant: Grant<S::Future>,
    ) -> Self {
        let HeldRequest {
            config,
            mut inner,
            mut head,
            body,
        } = request;
        let notifier = &config.gate.notifier;
        match admitted {
            Ok(()) => Self::Calling {
                noted: config.protocol.note(notifier, &mut head, &mut grant),
                response: inner.call(P::join(head, body)),
                grant,
            },
            Err(refusal) => Self::refused(&config, &head, refusal),
        }
    }

    fn refused(config: &Config<S, P>, head: &P::Head, refusal: Refusal) -> Self {
        Self::Answered {
            result: Some(config.protocol.refuse(&config.gate.notifier, head, refusal)),
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
                    let Some(request) = held else {
                        polled_after_completion(P::FUTURE);
                    };
                    let HeldRequest {
                        config,
                        inner,
                        head,
                        ..
                    } = request;
                    let mut grant = Grant::default();
                    let polled = pending.poll(cx, &config.gate, head, &mut grant, inner);
                    let admitted = ready!(polled).map_err(P::error)?;
                    // Always `Some`: only this arm takes it, and then replaces the state.
                    let Some(decided) = held.take() else {
                        polled_after_completion(P::FUTURE);
                    };
                    State::decided(decided, admitted, grant)
                }
                StateProj::Calling {
                    response,
                    grant,
                    noted,
                } => {
                    // They have no task: they advance with the inner call.
                    let _ = grant.poll_shadows(cx);
                    let response = ready!(response.poll(cx));
                    let result = P::settle(noted, response, grant);
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
                    let Some(result) = result.take() else {
                        polled_after_completion(P::FUTURE);
                    };
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
