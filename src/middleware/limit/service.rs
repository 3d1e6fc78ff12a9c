use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::future::{Held, LimitFuture, State};
use super::layer::Settings;
use super::protocol::{Protocol, Serve};
use crate::gate::{Admission, KeyExtractor};
use crate::middleware::take_ready;
use crate::store::Store;

/// A service that is `Clone`: a layer calls a clone of it once the store has decided. Implemented for every `Clone` type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not `Clone`, and a limited service is cloned for each request",
    label = "this service is not `Clone`",
    note = "derive `Clone` for the service, and share what is large in an `Arc`",
    note = "a service that cannot be cloned: put `tower::buffer::Buffer::new(service, 1_024)` around it"
)]
pub trait IsClone: Clone {}

#[diagnostic::do_not_recommend]
impl<T: Clone> IsClone for T {}

/// The service of a [`LimitLayer`](super::LimitLayer): it decides, then calls the inner service.
pub struct Limit<T, S, K, P: Protocol> {
    inner: T,
    settings: Settings<S, K, P>,
}

impl<T, S, K, P, Req> Service<Req> for Limit<T, S, K, P>
where
    T: Service<Req> + Clone,
    S: Store,
    K: KeyExtractor<P::Head>,
    P: Serve<T, Req>,
{
    type Response = P::Response;
    type Error = P::Error;
    type Future = LimitFuture<T, S, P, Req>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(P::error)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let (extractor, config) = self.settings.current();
        let (head, body) = P::split(request);
        let state = match config.gate.admit(extractor, &head) {
            Admission::Pass(grant, decision) => {
                State::calling(config, &mut self.inner, (head, body), grant, decision)
            }
            Admission::Refuse(refusal) => {
                drop(take_ready(&mut self.inner));
                State::refused(config, &head, refusal)
            }
            Admission::Undecided(pending) => {
                let ready = take_ready(&mut self.inner);
                let inner = if pending.is_queued() {
                    self.inner.clone()
                } else {
                    ready
                };
                State::Undecided {
                    pending,
                    held: Some(Held {
                        config: Arc::clone(config),
                        inner,
                        head,
                        body,
                    }),
                }
            }
        };
        LimitFuture { state }
    }
}

impl<T, S, K, P: Protocol> Limit<T, S, K, P> {
    pub(super) fn new(inner: T, settings: Settings<S, K, P>) -> Self {
        Self { inner, settings }
    }

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

impl<T: Clone, S, K, P: Protocol> Clone for Limit<T, S, K, P> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: self.settings.clone(),
        }
    }
}

impl<T, S: fmt::Debug, K, P: Protocol> fmt::Debug for Limit<T, S, K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.current().1.gate.fmt(P::SERVICE, f)
    }
}
