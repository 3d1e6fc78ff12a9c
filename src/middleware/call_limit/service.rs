use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::{BoxError, Calls};
use crate::gate::KeyExtractor;
use crate::middleware::machine::{Limit, LimitFuture};
use crate::store::Store;

/// The service of a [`CallLimitLayer`](crate::CallLimitLayer).
pub struct CallLimit<T, S, K, Req, A = ()> {
    pub(in crate::middleware) inner: Limit<T, S, K, Req, Calls<A>>,
}

impl<T, S, K, Req> Service<Req> for CallLimit<T, S, K, Req>
where
    T: Service<Req, Error: Into<BoxError>> + Clone,
    S: Store,
    K: KeyExtractor<Req>,
    Req: 'static,
{
    type Response = T::Response;
    type Error = BoxError;
    type Future = CallFuture<T, S, Req>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        CallFuture {
            inner: self.inner.call(request),
        }
    }
}

/// With [`settle`](crate::CallLimitLayer::settle), whose rule reads the responses of this service.
impl<T, S, K, Req, Res> Service<Req> for CallLimit<T, S, K, Req, Result<Res, BoxError>>
where
    T: Service<Req, Response = Res, Error: Into<BoxError>> + Clone,
    S: Store,
    K: KeyExtractor<Req>,
    Req: 'static,
{
    type Response = Res;
    type Error = BoxError;
    type Future = CallFuture<T, S, Req, Result<Res, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        CallFuture {
            inner: self.inner.call(request),
        }
    }
}

pin_project! {
    /// Resolves to the response of a [`CallLimit`].
    pub struct CallFuture<T, S, Req, A = ()>
    where
        T: Service<Req>,
        S: Store,
        Req: 'static,
    {
        #[pin]
        inner: LimitFuture<T, S, Calls<A>, Req>,
    }
}

impl<T, S, Req> Future for CallFuture<T, S, Req>
where
    T: Service<Req, Error: Into<BoxError>> + Clone,
    S: Store,
    Req: 'static,
{
    type Output = Result<T::Response, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll(cx, "CallFuture")
    }
}

impl<T, S, Req, Res> Future for CallFuture<T, S, Req, Result<Res, BoxError>>
where
    T: Service<Req, Response = Res, Error: Into<BoxError>> + Clone,
    S: Store,
    Req: 'static,
{
    type Output = Result<Res, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll(cx, "CallFuture")
    }
}

impl<T, S, Req, A> fmt::Debug for CallFuture<T, S, Req, A>
where
    T: Service<Req>,
    S: Store,
    Req: 'static,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").finish_non_exhaustive()
    }
}
