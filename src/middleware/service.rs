use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use super::config::{Admission, Config, Start};
use super::copies::Copies;
use super::future::Call;
use super::ready::take_ready;
use super::{AsIs, Ending, KeyExtractor, Reject, ResponseFuture};
use crate::store::Store;

/// The service that a [`RateLimitLayer`](crate::RateLimitLayer) makes: it decides, then calls the inner service.
pub struct RateLimit<T, S, K, R, E = AsIs> {
    pub(super) inner: T,
    pub(super) config: Copies<Config<S, K, R, E>>,
}

impl<T, S, K, R, E, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimit<T, S, K, R, E>
where
    T: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    K: KeyExtractor,
    R: Reject<ResBody>,
    E: Ending,
{
    type Response = Response<E::Body<ResBody>>;
    type Error = T::Error;
    type Future = ResponseFuture<T, S, K, R, ReqBody, E>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let config = self.config.current();
        let (mut parts, body) = request.into_parts();
        match config.start(&parts) {
            Start::Decided(Admission::Pass(annotation, by)) => {
                let account = config.ending.open(&mut parts, annotation.as_ref(), by);
                let shadows = config.shadows(&parts, &account);
                ResponseFuture::calling(config, &mut self.inner, parts, body, annotation, account, shadows)
            }
            Start::Decided(Admission::Reject(response)) => {
                drop(take_ready(&mut self.inner));
                ResponseFuture::rejected(response)
            }
            Start::Decided(Admission::Wait(place, asked)) => {
                let config = Arc::clone(config);
                drop(take_ready(&mut self.inner));
                let inner = self.inner.clone();
                ResponseFuture::waiting(
                    place,
                    Call { config, inner, parts, body, asked, wanted: None, lease: Default::default() },
                )
            }
            Start::Deciding(future, asked, wanted, lease) => {
                let config = Arc::clone(config);
                let inner = take_ready(&mut self.inner);
                ResponseFuture::deciding(future, Call { config, inner, parts, body, asked, wanted, lease })
            }
        }
    }
}

impl<T, S, K, R, E> RateLimit<T, S, K, R, E> {
    /// The inner service.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The inner service. A request that it is called with from here is not counted.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Gives the inner service back.
    pub fn into_inner(self) -> T {
        self.inner
    }
}

impl<T: Clone, S, K, R, E> Clone for RateLimit<T, S, K, R, E> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), config: self.config.clone() }
    }
}

impl<T, S: fmt::Debug, K, R, E> fmt::Debug for RateLimit<T, S, K, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.current().fmt("RateLimit", f)
    }
}
