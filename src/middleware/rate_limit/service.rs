use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use super::config::Config;
use super::future::{Call, ResponseFuture, State};
use super::{AsIs, Ending};
use crate::gate::{Admission, KeyExtractor};
use crate::middleware::reject::{HttpReject, Reject};
use crate::middleware::settings::Settings;
use crate::middleware::take_ready;
use crate::store::Store;

/// The service that a [`RateLimitLayer`](crate::RateLimitLayer) makes: it decides, then calls the inner service.
pub struct RateLimit<T, S, K, R = HttpReject, E = AsIs> {
    pub(super) inner: T,
    pub(super) settings: Settings<K, Config<S, R, E>>,
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
    type Future = ResponseFuture<T, S, ReqBody, R, E>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (extractor, config) = self.settings.current();
        let (parts, body) = request.into_parts();
        match config.gate.admit(extractor, &parts) {
            Admission::Pass(grant, decision) => ResponseFuture {
                state: State::calling(config, &mut self.inner, parts, body, grant, decision),
            },
            Admission::Refuse(refusal) => {
                drop(take_ready(&mut self.inner));
                ResponseFuture {
                    state: State::answered(config.respond(&parts, refusal)),
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
                    parts,
                    body,
                };
                ResponseFuture {
                    state: State::Undecided {
                        pending,
                        call: Some(call),
                    },
                }
            }
        }
    }
}

impl<T, S, K, R, E> RateLimit<T, S, K, R, E> {
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

impl<T: Clone, S, K, R, E> Clone for RateLimit<T, S, K, R, E> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: self.settings.clone(),
        }
    }
}

impl<T, S: fmt::Debug, K, R, E> fmt::Debug for RateLimit<T, S, K, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.config().gate.fmt("RateLimit", f)
    }
}
