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
        #[pin]
        pub(super) state: State<S>,
    }
}

pin_project! {
    #[project = StateProj]
    pub(super) enum State<S: Store> {
        Sent {
            #[pin]
            answer: S::Future,
        },
        /// Waits for the answer to an ask.
        Waiting {
            inner: Arc<Inner<S>>,
            answered: oneshot::Receiver<()>,
            check: Option<Check>,
        },
        Done,
    }
}

impl<S: Store> LeasedFuture<S> {
    pub(super) fn sent(answer: Answer<S::Future>) -> Answer<Self> {
        match answer {
            Answer::Ready { answer } => Answer::ready(answer),
            Answer::Pending { future } => Answer::pending(Self { state: State::Sent { answer: future } }),
        }
    }

    /// See [`Store::withdraw`].
    pub(super) fn withdraw(self: Pin<&mut Self>, store: &S) -> bool {
        match self.project().state.project() {
            StateProj::Sent { answer } => store.withdraw(answer),
            StateProj::Waiting { .. } => true,
            StateProj::Done => false,
        }
    }
}

impl<S: Store> Future for LeasedFuture<S> {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let answer = match state.as_mut().project() {
                StateProj::Sent { answer } => Answer::ready(ready!(answer.poll(cx))),
                StateProj::Waiting { inner, answered, check } => {
                    // The sender is dropped, and sends nothing.
                    let _ = ready!(Pin::new(answered).poll(cx));
                    match check.take() {
                        Some(check) => inner.decide_now(check),
                        None => polled_after_completion("LeasedFuture"),
                    }
                }
                StateProj::Done => polled_after_completion("LeasedFuture"),
            };
            match answer {
                Answer::Ready { answer } => {
                    state.set(State::Done);
                    return Poll::Ready(answer);
                }
                Answer::Pending { future } => state.set(State::Sent { answer: future }),
            }
        }
    }
}

impl<S: Store> fmt::Debug for LeasedFuture<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasedFuture").finish_non_exhaustive()
    }
}
