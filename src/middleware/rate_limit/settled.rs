use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::http::HeadRule;
use super::{Http, TrackedBody};
use crate::gate::KeyExtractor;
use crate::middleware::machine::{Config, Limit, LimitFuture, LimitLayer};
use crate::middleware::reject::{HttpReject, Reject};
use crate::store::Store;

/// A [`RateLimitLayer`](crate::RateLimitLayer) that settles the charges of requests, created by
/// [`settle`](crate::RateLimitLayer::settle) and [`until_body_end`](crate::RateLimitLayer::until_body_end).
///
/// It has the same settings. The body of its responses is a [`TrackedBody`], since a request's charge is settled when
/// that has ended and every clone of the request's [`RequestCost`](crate::settle::RequestCost) is dropped.
pub struct SettledLayer<S, K, R = HttpReject> {
    pub(in crate::middleware) inner: LimitLayer<S, K, Parts, Http<R>>,
}

impl<S: Store, K, R> SettledLayer<S, K, R> {
    /// Settles by `rule`, or only by a request's [`RequestCost`](crate::settle::RequestCost).
    pub(super) fn new(plain: LimitLayer<S, K, Parts, Http<R>>, rule: Option<HeadRule>) -> Self {
        let inner = plain.change_to(|Config { mut gate, protocol }| {
            gate.settle();
            Config {
                gate,
                protocol: protocol.with_rule(rule),
            }
        });
        Self { inner }
    }
}

/// The service of a [`SettledLayer`].
pub struct Settled<T, S, K, R = HttpReject> {
    pub(in crate::middleware) inner: Limit<T, S, K, Parts, Http<R>>,
}

impl<T, S, K, R, ReqBody, ResBody> Service<Request<ReqBody>> for Settled<T, S, K, R>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    K: KeyExtractor,
    R: Reject<ResBody>,
{
    type Response = Response<TrackedBody<ResBody>>;
    type Error = T::Error;
    type Future = SettledFuture<T, S, ReqBody, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        SettledFuture {
            inner: self.inner.call(request),
        }
    }
}

pin_project! {
    /// Resolves to the response of a [`Settled`].
    pub struct SettledFuture<T, S, ReqBody, R = HttpReject>
    where
        T: Service<Request<ReqBody>>,
        S: Store,
    {
        #[pin]
        inner: LimitFuture<T, S, Http<R>, Request<ReqBody>>,
    }
}

impl<T, S, ReqBody, ResBody, R> Future for SettledFuture<T, S, ReqBody, R>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    R: Reject<ResBody>,
{
    type Output = Result<Response<TrackedBody<ResBody>>, T::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut inner = self.project().inner;
        let response = ready!(inner.as_mut().poll(cx, "SettledFuture"))?;
        let charge = inner.take_charge();
        if response.status() == StatusCode::SWITCHING_PROTOCOLS
            && let Some(charge) = &charge
        {
            charge.upgraded();
        }
        Poll::Ready(Ok(response.map(|body| TrackedBody::new(body, charge))))
    }
}

impl<T, S, ReqBody, R> fmt::Debug for SettledFuture<T, S, ReqBody, R>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SettledFuture").finish_non_exhaustive()
    }
}
