use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::{BoxError, CallFuture};
use crate::gate::{Admission, Gate, KeyExtractor};
use crate::middleware::settings::Settings;
use crate::middleware::take_ready;
use crate::store::Store;

/// The service that a [`CallLimitLayer`](crate::CallLimitLayer) makes: it decides, then calls the inner service.
pub struct CallLimit<T, S, K, R> {
    pub(super) inner: T,
    pub(super) settings: Settings<K, Gate<S, R>>,
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
    type Future = CallFuture<T, S, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let (extractor, gate) = self.settings.current();
        match gate.admit(extractor, &request) {
            Admission::Pass(grant) => CallFuture::calling(self.inner.call(request), grant),
            Admission::Refuse(refusal) => {
                drop(take_ready(&mut self.inner));
                CallFuture::answered(Err(refusal.into()))
            }
            Admission::Undecided(pending) => {
                let ready = take_ready(&mut self.inner);
                let inner = if pending.is_queued() { self.inner.clone() } else { ready };
                CallFuture::undecided(pending, Arc::clone(gate), inner, request)
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
        Self { inner: self.inner.clone(), settings: self.settings.clone() }
    }
}

impl<T, S: fmt::Debug, K, R> fmt::Debug for CallLimit<T, S, K, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.config().fmt("CallLimit", f)
    }
}
