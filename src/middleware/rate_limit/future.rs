use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::config::Config;
use super::settle::Rule;
use super::{AsIs, Ending};
use crate::gate::{Admitted, Grant, Pending};
use crate::limit::Decision;
use crate::middleware::DryRun;
use crate::middleware::headers::Headers;
use crate::middleware::reject::{HttpReject, Reject};
use crate::settle::Settled;
use crate::store::Store;
use crate::util::polled_after_completion;

pin_project! {
    /// Resolves to the response of a [`RateLimit`](crate::rate_limit::RateLimit).
    pub struct ResponseFuture<T, S, ReqBody, R = HttpReject, E = AsIs>
    where
        T: Service<Request<ReqBody>>,
        S: Store,
    {
        #[pin]
        pub(super) state: State<T::Future, T::Response, S::Future, Call<T, S, R, ReqBody, E>>,
    }
}

pin_project! {
    #[project = StateProj]
    pub(super) enum State<F, Res, D, C> {
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
            // The decision for the header fields and extensions of the response, if it has any.
            annotated: Option<Decision>,
            headers: Headers,
            shows_decision: bool,
            rule: Option<Arc<Rule>>,
        },
        // The inner future has been dropped: it may hold a permit, such as `ConcurrencyLimit`'s.
        Answered {
            // `None` after it was returned.
            response: Option<Res>,
            grant: Grant<D>,
        },
    }
}

/// The service and the request, which wait for the decision.
pub(super) struct Call<T, S, R, ReqBody, E> {
    pub(super) config: Arc<Config<S, R, E>>,
    pub(super) inner: T,
    pub(super) parts: Parts,
    pub(super) body: ReqBody,
}

impl<F, Res, D, C> State<F, Res, D, C> {
    /// Calls the service, whose handler finds the decision and the [`Charge`](crate::settle::Charge) in the request's
    /// extensions.
    pub(super) fn calling<T, S, R, E, B>(
        config: &Config<S, R, E>,
        inner: &mut T,
        mut parts: Parts,
        body: B,
        grant: Grant<D>,
        decision: Option<Decision>,
    ) -> Self
    where
        T: Service<Request<B>, Future = F>,
    {
        if let Some(charge) = grant.charge()
            && let Some(outer) = parts.extensions.insert(charge.clone())
        {
            charge.count_for(outer);
        }
        let (headers, shows_decision, rule) =
            (config.headers, config.shows_decision, config.rule.clone());
        let is_annotated = shows_decision || headers != Headers::NONE;
        let annotated = decision.as_ref().filter(|_| is_annotated).cloned();
        if let Some(decision) = decision
            && let Some(outer) = parts.extensions.insert(decision)
            && let Some(inner) = parts.extensions.get()
        {
            config.gate.notifier.counted_twice(&outer, inner);
        }
        let response = inner.call(Request::from_parts(parts, body));
        Self::Calling {
            response,
            grant,
            annotated,
            headers,
            shows_decision,
            rule,
        }
    }

    pub(super) fn answered(response: Res) -> Self {
        Self::Answered {
            response: Some(response),
            grant: Grant::default(),
        }
    }
}

impl<T, S, R, E, ReqBody, ResBody> Call<T, S, R, ReqBody, E>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: Reject<ResBody>,
{
    /// Calls the service, or responds with the rejection.
    fn proceed<D>(mut self, admitted: Admitted<D>) -> State<T::Future, T::Response, D, Self> {
        match admitted {
            Ok((grant, decision)) => State::calling(
                &self.config,
                &mut self.inner,
                self.parts,
                self.body,
                grant,
                decision,
            ),
            Err(refusal) => State::answered(self.config.respond(&self.parts, refusal)),
        }
    }
}

/// Settles the charge after the response head, and corrects the decision accordingly.
fn settle<D, B>(
    response: Response<B>,
    grant: &mut Grant<D>,
    decision: &mut Option<Decision>,
    rule: &Rule,
) -> Response<B> {
    let (parts, body) = response.into_parts();
    if let Some(Settled { reserved, cost }) = grant.settle(rule(&parts))
        && cost != reserved
    {
        *decision = decision
            .take()
            .map(|decision| decision.settled(reserved, cost));
    }
    Response::from_parts(parts, body)
}

impl<T, S, R, E, ReqBody, ResBody> Future for ResponseFuture<T, S, ReqBody, R, E>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    R: Reject<ResBody>,
    E: Ending,
{
    type Output = Result<Response<E::Body<ResBody>>, T::Error>;

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
                        parts,
                        ..
                    }) = waiting
                    else {
                        polled_after_completion("ResponseFuture");
                    };
                    let admitted = ready!(pending.poll(cx, &config.gate, parts, inner))?;
                    // Always `Some`: only this arm takes it, and then replaces the state.
                    let Some(call) = waiting.take() else {
                        polled_after_completion("ResponseFuture");
                    };
                    call.proceed(admitted)
                }
                StateProj::Calling {
                    response,
                    grant,
                    annotated,
                    headers,
                    shows_decision,
                    rule,
                } => {
                    let _ = grant.poll_shadows(cx);
                    let mut response = ready!(response.poll(cx))?;
                    if let Some(rule) = rule {
                        response = settle(response, grant, annotated, rule);
                    }
                    if let Some(decision) = annotated.take() {
                        headers.annotate(grant.update(decision), &mut response, *shows_decision);
                    }
                    if !grant.has_shadows() {
                        return Poll::Ready(Ok(E::wrap(response, grant.take_charge())));
                    }
                    State::Answered {
                        response: Some(response),
                        grant: mem::take(grant),
                    }
                }
                StateProj::Answered { response, grant } => {
                    ready!(grant.poll_shadows(cx));
                    let mut response = response
                        .take()
                        .unwrap_or_else(|| polled_after_completion("ResponseFuture"));
                    if let Some(decisions) = grant.take_shadows() {
                        response
                            .extensions_mut()
                            .get_or_insert_default::<DryRun>()
                            .extend(decisions);
                    }
                    return Poll::Ready(Ok(E::wrap(response, grant.take_charge())));
                }
            };
            state.set(next);
        }
    }
}

impl<T, S, R, ReqBody, E> fmt::Debug for ResponseFuture<T, S, ReqBody, R, E>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
