use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use crate::middleware::call_limit::BoxError;
use crate::util::polled_after_completion;

pin_project! {
    /// Resolves to the response of a [`Throttle`](super::Throttle) with a
    /// [`max_wait`](crate::ThrottleLayer::max_wait).
    pub struct ThrottleFuture<F> {
        // `None` if the call is refused.
        #[pin]
        pub(super) response: Option<F>,
        // `None` after it was returned.
        pub(super) error: Option<BoxError>,
    }
}

impl<F, Res, E> Future for ThrottleFuture<F>
where
    F: Future<Output = Result<Res, E>>,
    E: Into<BoxError>,
{
    type Output = Result<Res, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        match this.response.as_pin_mut() {
            Some(response) => response.poll(cx).map_err(Into::into),
            None => Poll::Ready(Err(this
                .error
                .take()
                .unwrap_or_else(|| polled_after_completion("ThrottleFuture")))),
        }
    }
}

impl<F> fmt::Debug for ThrottleFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleFuture").finish_non_exhaustive()
    }
}
