use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use super::copies::Copies;
use super::future::Call;
use super::layer::Config;
use super::{KeyExtractor, Reject, Rejection, ResponseFuture};
use crate::limit::Check;
use crate::store::Store;

/// The service that [`RateLimitLayer`](crate::RateLimitLayer) makes: it decides, and then calls the inner one.
pub struct RateLimit<T, S, K, R> {
    pub(super) inner: T,
    pub(super) config: Copies<Config<S, K, R>>,
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
        let config = Arc::clone(self.config.mine());
        let (parts, body) = request.into_parts();
        let key = match config.extractor.extract(&parts) {
            Ok(key) => key,
            Err(missing) if config.lets_pass(missing) => {
                return ResponseFuture::calling(config, Call { parts, body }, &mut self.inner, None);
            }
            Err(missing) => {
                let response = config.reject.reject(Rejection::MissingKey(&missing));
                return ResponseFuture::rejected(config, response);
            }
        };
        let cost = config.cost.as_ref().map_or(1, |cost| cost(&parts));
        let since = config.now();
        match config.store.try_check(Check::take(key, &config.policies, cost)) {
            Ok(decision) => match config.admit(decision, since) {
                Ok(decision) => ResponseFuture::calling(config, Call { parts, body }, &mut self.inner, decision),
                Err(response) => ResponseFuture::rejected(config, response),
            },
            Err(decision) => {
                // The service that has been polled ready goes with the request; its clone has not been.
                let clone = self.inner.clone();
                let inner = mem::replace(&mut self.inner, clone);
                ResponseFuture::deciding(config, Call { parts, body }, inner, decision, since)
            }
        }
    }
}

impl<T: Clone, S, K, R> Clone for RateLimit<T, S, K, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), config: self.config.clone() }
    }
}

impl<T, S: fmt::Debug, K, R> fmt::Debug for RateLimit<T, S, K, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.mine().fmt("RateLimit", f)
    }
}
