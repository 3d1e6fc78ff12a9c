use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::config::{Admission, Config, Start};
use super::future::Call;
use super::{BoxError, CallFuture};
use crate::middleware::KeyExtractor;
use crate::middleware::ready::take_ready;
use crate::store::Store;

/// The service that a [`CallLimitLayer`](crate::CallLimitLayer) makes: it decides, then calls the inner service.
pub struct CallLimit<T, S, K, R> {
    pub(super) inner: T,
    pub(super) config: Arc<Config<S, K, R>>,
}

impl<T, S, K, R> Service<R> for CallLimit<T, S, K, R>
where
    T: Service<R, Error: Into<BoxError>> + Clone,
    S: Store,
    K: KeyExtractor<R>,
    R: 'static,
{
    type Response = T::Response;
    type Error = BoxError;
    type Future = CallFuture<T, S, K, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: R) -> Self::Future {
        match self.config.start(&request) {
            Start::Decided(Admission::Pass(lease)) => CallFuture::calling(self.inner.call(request), lease),
            Start::Decided(Admission::Wait(place, asked)) => {
                drop(take_ready(&mut self.inner));
                let (config, inner) = (Arc::clone(&self.config), self.inner.clone());
                CallFuture::waiting(place, Call { config, inner, request, asked, wanted: None, lease: None })
            }
            Start::Decided(Admission::Fail(error)) => {
                drop(take_ready(&mut self.inner));
                CallFuture::failed(error)
            }
            Start::Deciding(decision, asked, wanted, lease) => {
                let (config, inner) = (Arc::clone(&self.config), take_ready(&mut self.inner));
                CallFuture::deciding(decision, Call { config, inner, request, asked, wanted, lease })
            }
        }
    }
}

impl<T, S, K, R> CallLimit<T, S, K, R> {
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

impl<T: Clone, S, K, R> Clone for CallLimit<T, S, K, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), config: Arc::clone(&self.config) }
    }
}

impl<T, S: fmt::Debug, K, R> fmt::Debug for CallLimit<T, S, K, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt("CallLimit", f)
    }
}
