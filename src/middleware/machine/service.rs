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
use crate::gate::{Admission, Grant, KeyExtractor, Pending, Refusal};
use crate::settle::RequestCost;
use crate::store::Store;
use crate::util::polled_after_completion;

/// The service of a [`LimitLayer`](super::LimitLayer): it decides, then calls the inner service.
pub(in crate::middleware) struct Limit<T, S, K, H, P> {
    inner: T,
    settings: ServiceSettings<S, K, H, P>,
}

impl<T, S, K, H: 'static, P> Limit<T, S, K, H, P> {
    pub(in crate::middleware) fn poll_ready<Req>(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), P::Error<T::Error>>>
    where
        T: Service<Req>,
        P: Serve<T, Req>,
    {
        self.inner.poll_ready(cx).map_err(P::error)
    }

    pub(in crate::middleware) fn call<Req>(&mut self, request: Req) -> LimitFuture<T, S, P, Req>
    where
        T: Service<Req> + Clone,
        S: Store,
        K: KeyExtractor<H>,
        P: Serve<T, Req, Head = H>,
    {
        let (extractor, config) = self.settings.current();
        let (mut head, body) = P::split(request);
        match config.gate.admit(&**extractor, &head) {
            Admission::Granted(mut grant) => LimitFuture {
                state: State::Calling {
                    noted: config
                        .protocol
                        .note(&config.gate.notifier, &mut head, &mut grant),
                    response: self.inner.call(P::join(head, body)),
                    grant,
                },
            },
            Admission::Refused(refusal) => {
                // The ready service may hold a permit that others wait for.
                drop(take_ready(&mut self.inner));
                LimitFuture {
                    state: State::refused(config, &head, refusal),
                }
            }
            Admission::Undecided(pending) => {
                let held = HeldRequest {
                    config: Arc::clone(config),
                    inner: take_ready(&mut self.inner),
                    head,
                    body,
                };
                LimitFuture {
                    state: State::undecided(pending, held),
                }
            }
        }
    }
}

impl<T, S, K, H, P> Limit<T, S, K, H, P> {
    pub(super) fn new(inner: T, settings: ServiceSettings<S, K, H, P>) -> Self {
        Self { inner, settings }
    }

    pub(in crate::middleware) fn get_ref(&self) -> &T {
        &self.inner
    }

    pub(in crate::middleware) fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    pub(in crate::middleware) fn into_inner(self) -> T {
        self.inner
    }
}

impl<T, S: fmt::Debug, K, H, P> Limit<T, S, K, H, P> {
    /// Formats the public service `name`.
    pub(in crate::middleware) fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.current().1.gate.fmt(name, f)
    }
}

/// Takes a service that is ready, and leaves a clone that is not.
///
/// Call or drop it immediately: it may hold a permit that others wait for, such as
/// `ConcurrencyLimit`'s.
fn take_ready<T: Clone>(inner: &mut T) -> T {
    let clone = inner.clone();
    mem::replace(inner, clone)
}

impl<T: Clone, S, K, H, P> Clone for Limit<T, S, K, H, P> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: self.settings.clone(),
        }
    }
}

pin_project! {
    /// Resolves to the response of the inner service.
    pub(in crate::middleware) struct LimitFuture<T, S, P, Req>
    where
        T: Service<Req>,
        S: Store,
        P: Protocol<Req>,
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
        P: Protocol<Req>,
    {
        Undecided {
            #[pin]
            pending: Pending<S::Future>,
            // `None` once it is decided.
            held: Option<HeldRequest<T, S, P, Req>>,
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
            result: Option<ServiceResult<T, P, Req>>,
            grant: Grant<S::Future>,
        },
    }
}

/// The result of a call of the service.
type ServiceResult<T, P, Req> =
    Result<<T as Service<Req>>::Response, <P as Protocol<Req>>::Error<<T as Service<Req>>::Error>>;

/// A request that waits for its decision, and the service for it.
struct HeldRequest<T, S, P: Protocol<Req>, Req> {
    config: Arc<Config<S, P::Head, P>>,
    inner: T,
    head: P::Head,
    body: P::Body,
}

impl<T, S, P, Req> State<T, S, P, Req>
where
    T: Service<Req> + Clone,
    S: Store,
    P: Serve<T, Req>,
{
    #[inline]
    fn of(admission: Admission<S::Future>, request: HeldRequest<T, S, P, Req>) -> Self {
        let HeldRequest {
            config,
            mut inner,
            mut head,
            body,
        } = request;
        let notifier = &config.gate.notifier;
        match admission {
            Admission::Granted(mut grant) => Self::Calling {
                noted: config.protocol.note(notifier, &mut head, &mut grant),
                response: inner.call(P::join(head, body)),
                grant,
            },
            Admission::Refused(refusal) => Self::refused(&config, &head, refusal),
            Admission::Undecided(pending) => {
                let held = HeldRequest {
                    config,
                    inner,
                    head,
                    body,
                };
                Self::undecided(pending, held)
            }
        }
    }

    fn refused(config: &Config<S, P::Head, P>, head: &P::Head, refusal: Refusal) -> Self {
        Self::Answered {
            result: Some(config.protocol.refuse(&config.gate.notifier, head, refusal)),
            grant: Grant::default(),
        }
    }

    #[inline]
    fn undecided(pending: Pending<S::Future>, mut request: HeldRequest<T, S, P, Req>) -> Self {
        if pending.is_queued() {
            // The ready service may hold a permit that others wait for, as of a concurrency limit: drop it.
            request.inner = request.inner.clone();
        }
        Self::Undecided {
            pending,
            held: Some(request),
        }
    }
}

impl<T, S, P, Req> LimitFuture<T, S, P, Req>
where
    T: Service<Req> + Clone,
    S: Store,
    P: Serve<T, Req>,
{
    /// Polls for the public future `name`.
    pub(in crate::middleware) fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        name: &'static str,
    ) -> Poll<ServiceResult<T, P, Req>> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Undecided { pending, held } => {
                    let Some(request) = held else {
                        polled_after_completion(name);
                    };
                    let HeldRequest {
                        config,
                        inner,
                        head,
                        ..
                    } = request;
                    let polled = pending.poll(cx, &config.gate, head, |cx| inner.poll_ready(cx));
                    let admission = ready!(polled).map_err(P::error)?;
                    // Always `Some`: only this arm takes it, and then replaces the state.
                    let Some(request) = held.take() else {
                        polled_after_completion(name);
                    };
                    State::of(admission, request)
                }
                StateProj::Calling {
                    response,
                    grant,
                    noted,
                } => {
                    // They have no task: they advance with the inner call.
                    let _ = grant.poll_shadows(cx);
                    let mut result = ready!(response.poll(cx)).map_err(P::error);
                    P::settle(noted, &mut result, grant);
                    // An error does not wait for the checks of dry runs.
                    if result.is_err() || !grant.has_shadows() {
                        P::finish(&mut result, grant);
                        return Poll::Ready(result);
                    }
                    State::Answered {
                        result: Some(result),
                        grant: mem::take(grant),
                    }
                }
                StateProj::Answered { result, grant } => {
                    ready!(grant.poll_shadows(cx));
                    let Some(mut result) = result.take() else {
                        polled_after_completion(name);
                    };
                    P::finish(&mut result, grant);
                    return Poll::Ready(result);
                }
            };
            state.set(next);
        }
    }

    /// Moves the charge out of the completed future: the response body owns it until its end.
    pub(in crate::middleware) fn take_charge(self: Pin<&mut Self>) -> Option<RequestCost> {
        match self.project().state.project() {
            StateProj::Calling { grant, .. } | StateProj::Answered { grant, .. } => {
                grant.take_charge()
            }
            StateProj::Undecided { .. } => None,
        }
    }
}
