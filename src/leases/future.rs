use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::sync::oneshot;

use super::inner::Inner;
use crate::error::StoreError;
use crate::limit::{Check, Decision};
use crate::store::{Answer, Store};
use crate::util::polled_after_completion;

pin_project! {
    /// Resolves to the answer of a [`Leased`](crate::Leased).
    ///
    /// # Panics
    ///
    /// If it is polled after it has answered.
    pub struct LeasedFuture<S: Store> {
        // Until the block arrives that it waits for.
        pub(super) waiting: Option<(Arc<Inner<S>>, Check, oneshot::Receiver<()>)>,
        #[pin]
        pub(super) sent: Option<S::Future>,
    }
}

impl<S: Store> Future for LeasedFuture<S> {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Some((.., arrived)) = this.waiting {
            // The sender is dropped, and sends nothing.
            let _ = ready!(Pin::new(arrived).poll(cx));
        }
        if let Some((inner, check, _)) = this.waiting.take() {
            match inner.decide_now(check) {
                Answer::Ready { answer } => return Poll::Ready(answer),
                Answer::Pending { future } => this.sent.set(Some(future)),
            }
        }
        match this.sent.as_pin_mut() {
            Some(sent) => sent.poll(cx),
            None => polled_after_completion("LeasedFuture"),
        }
    }
}

impl<S: Store> fmt::Debug for LeasedFuture<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasedFuture").finish_non_exhaustive()
    }
}
