use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::Http;
use crate::gate::KeyExtractor;
use crate::middleware::machine::{Limit, LimitFuture};
use crate::middleware::reject::{HttpReject, Reject};
use crate::store::Store;

/// The service of a [`RateLimitLayer`](crate::RateLimitLayer).
pub struct RateLimit<T, S, K, R = HttpReject> {
    pub(in crate::middleware) inner: Limit<T, S, K, Parts, Http<R>>,
}

impl<T, S, K, R, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimit<T, S, K, R>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    K: KeyExtractor,
    R: Reject<ResBody>,
{
    type Response = T::Response;
    type Error = T::Error;
    type Future = ResponseFuture<T, S, ReqBody, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        ResponseFuture {
            inner: self.inner.call(request),
        }
    }
}

pin_project! {
    /// Resolves to the response of a [`RateLimit`].
    pub struct ResponseFuture<T, S, ReqBody, R = HttpReject>
    where
        T: Service<Request<ReqBody>>,
        S: Store,
    {
        #[pin]
        inner: LimitFuture<T, S, Http<R>, Request<ReqBody>>,
    }
}

impl<T, S, ReqBody, ResBody, R> Future for ResponseFuture<T, S, ReqBody, R>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    R: Reject<ResBody>,
{
    type Output = Result<T::Response, T::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll(cx, "ResponseFuture")
    }
}

impl<T, S, ReqBody, R> fmt::Debug for ResponseFuture<T, S, ReqBody, R>
where
    T: Service<Request<ReqBody>>,
    S: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
