use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use super::future::Call;
use super::layer::Config;
use super::{KeyExtractor, Reject, ResponseFuture};
use crate::limit::Check;
use crate::store::Store;

/// The service that [`RateLimitLayer`](crate::RateLimitLayer) makes: it decides, and then calls the inner one.
pub struct RateLimit<T, S, K, R> {
    pub(super) inner: T,
    pub(super) config: Arc<Config<S, K, R>>,
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
    type Future = ResponseFuture<T, S, K, R, ReqBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        // The service that has been polled ready goes with the request; its clone has not been.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);

        let config = Arc::clone(&self.config);
        let (parts, body) = request.into_parts();
        let key = config.extractor.extract(&parts);
        let cost = config.cost.as_ref().map_or(1, |cost| cost(&parts));
        match key {
            Ok(key) => {
                let decision = config.store.check(Check::take(key, &config.policies, cost));
                ResponseFuture::deciding(config, Call { inner, parts, body }, decision)
            }
            Err(missing) => ResponseFuture::without_key(config, Call { inner, parts, body }, missing),
        }
    }
}

impl<T: Clone, S, K, R> Clone for RateLimit<T, S, K, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), config: Arc::clone(&self.config) }
    }
}

impl<T, S: fmt::Debug, K, R> fmt::Debug for RateLimit<T, S, K, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt("RateLimit", f)
    }
}
