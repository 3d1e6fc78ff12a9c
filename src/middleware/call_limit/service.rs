use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::future::{Call, CallFuture, State};
use super::layer::Config;
use super::{BoxError, CallEnding};
use crate::gate::{Admission, Grant, KeyExtractor};
use crate::middleware::rate_limit::AsIs;
use crate::middleware::settings::Settings;
use crate::middleware::take_ready;
use crate::store::Store;

/// The service that a [`CallLimitLayer`](crate::CallLimitLayer) makes: it decides, then calls the inner service.
pub struct CallLimit<T, S, K, R, E = AsIs> {
    pub(super) inner: T,
    pub(super) settings: Settings<K, Config<S, R, E>>,
}

impl<T, S, K, R, E> Service<R> for CallLimit<T, S, K, R, E>
where
    T: Service<R, Error: Into<BoxError>> + Clone,
    S: Store,
    K: KeyExtractor<R>,
    R: 'static,
    E: CallEnding<T::Response>,
{
    type Response = T::Response;
    type Error = BoxError;
    type Future = CallFuture<T, S, R, E>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let (extractor, config) = self.settings.current();
        match config.gate.admit(extractor, &request) {
            Admission::Pass(grant, _) => CallFuture {
                state: State::calling(config, &mut self.inner, request, grant),
            },
            Admission::Refuse(refusal) => {
                drop(take_ready(&mut self.inner));
                CallFuture {
                    state: State::Answered {
                        answer: Some(Err(refusal.into())),
                        grant: Grant::default(),
                    },
                }
            }
            Admission::Undecided(pending) => {
                let ready = take_ready(&mut self.inner);
                let inner = if pending.is_queued() {
                    self.inner.clone()
                } else {
                    ready
                };
                let call = Call {
                    config: Arc::clone(config),
                    inner,
                    request,
                };
                CallFuture {
                    state: State::Undecided {
                        pending,
                        call: Some(call),
                    },
                }
            }
        }
    }
}

impl<T, S, K, R, E> CallLimit<T, S, K, R, E> {
    /// The inner service.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The inner service. Requests sent to it directly are not counted.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> T {
        self.inner
    }
}

impl<T: Clone, S, K, R, E> Clone for CallLimit<T, S, K, R, E> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: self.settings.clone(),
        }
    }
}

impl<T, S: fmt::Debug, K, R, E> fmt::Debug for CallLimit<T, S, K, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.config().gate.fmt("CallLimit", f)
    }
}
