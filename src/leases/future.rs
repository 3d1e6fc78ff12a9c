use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;

use super::caller::BlockWait;
use super::inner::SharedLeases;
use crate::error::StoreError;
use crate::limit::{Check, Decision};
use crate::store::{Answer, Store};
use crate::util::polled_after_completion;

pin_project! {
    /// Resolves to the decision of a [`Leased`](crate::Leased) store.
    ///
    /// # Panics
    ///
    /// If it is polled after it has resolved.
    pub struct LeasedFuture<S: Store> {
        // Set while the check waits for a block.
        pub(super) waiting: Option<(Arc<SharedLeases<S>>, Check, BlockWait)>,
        #[pin]
        pub(super) sent: Option<S::Future>,
    }
}

impl<S: Store> Future for LeasedFuture<S> {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let this = self.as_mut().project();
            let has_arrived = match this.waiting {
                Some((.., wait)) => ready!(wait.arrival.as_mut().poll(cx)),
                None => false,
            };
            let Some((inner, check, wait)) = this.waiting.take() else {
                return match this.sent.as_pin_mut() {
                    Some(sent) => sent.poll(cx),
                    None => polled_after_completion("LeasedFuture"),
                };
            };
            let answer = if has_arrived {
                inner.check(check, Some(wait.until))
            } else {
                inner.send(check)
            };
            match answer {
                Answer::Ready { answer } => return Poll::Ready(answer),
                Answer::Pending { future } => self.set(future),
            }
        }
    }
}

impl<S: Store> fmt::Debug for LeasedFuture<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasedFuture").finish_non_exhaustive()
    }
}
