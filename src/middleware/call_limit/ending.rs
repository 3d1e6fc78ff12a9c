use std::fmt;
use std::sync::Arc;

use super::BoxError;
use crate::middleware::machine::AsIs;
use crate::settle::Settlement;

/// How long a [`CallLimitLayer`](crate::CallLimitLayer) with responses `Res` holds what a call has taken: [`AsIs`] or
/// [`UntilAnswer`].
pub trait CallEnding<Res>: sealed::CallEnding {
    /// Settles what a call has reserved.
    #[doc(hidden)]
    fn settlement(&self, answer: &Result<Res, BoxError>) -> Option<Settlement>;
}

mod sealed {
    pub trait CallEnding: Clone + Send + Sync + 'static {}
}

/// Settles the charge of a call when the inner service has returned its result.
///
/// [`CallLimitLayer::settle`](crate::CallLimitLayer::settle) makes such layers.
pub struct UntilAnswer<Res> {
    rule: Arc<AnswerRule<Res>>,
}

type AnswerRule<Res> = dyn Fn(&Result<Res, BoxError>) -> Settlement + Send + Sync;

impl<Res> UntilAnswer<Res> {
    pub(super) fn new(
        rule: impl Fn(&Result<Res, BoxError>) -> Settlement + Send + Sync + 'static,
    ) -> Self {
        Self {
            rule: Arc::new(rule),
        }
    }
}

impl sealed::CallEnding for AsIs {}

impl<Res: 'static> sealed::CallEnding for UntilAnswer<Res> {}

impl<Res> CallEnding<Res> for AsIs {
    #[inline]
    fn settlement(&self, _: &Result<Res, BoxError>) -> Option<Settlement> {
        None
    }
}

impl<Res: 'static> CallEnding<Res> for UntilAnswer<Res> {
    fn settlement(&self, answer: &Result<Res, BoxError>) -> Option<Settlement> {
        Some((self.rule)(answer))
    }
}

impl<Res> Clone for UntilAnswer<Res> {
    fn clone(&self) -> Self {
        Self {
            rule: Arc::clone(&self.rule),
        }
    }
}

impl<Res> fmt::Debug for UntilAnswer<Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UntilAnswer").finish_non_exhaustive()
    }
}
