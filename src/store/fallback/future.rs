use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

use super::Shared;
use crate::limit::{Check, Decision};
use crate::store::{Error, ErrorKind, Store};

pin_project! {
    /// Resolves to the answer of a [`Fallback`].
    pub struct FallbackFuture<P: Store, F: Store> {
        pub(super) shared: Arc<Shared<P, F>>,
        #[pin]
        pub(super) state: State<P::Future, F::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    pub(super) enum State<P, F> {
        Answered {
            // None once it has been told.
            answer: Option<Result<Decision, Error>>,
        },
        Primary {
            #[pin]
            answer: P,
            // Runs once the primary store has not answered at once.
            #[pin]
            deadline: Option<Sleep>,
            check: Option<Check>,
        },
        Fallback {
            #[pin]
            answer: F,
            // A check that the primary store was not asked. One that it was asked may have been charged there.
            unsent: Option<Check>,
        },
    }
}

impl<P: Store, F: Store> Future for FallbackFuture<P, F> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let shared = &*this.shared;
        loop {
            let (error, check) = match this.state.as_mut().project() {
                StateProj::Answered { answer } => return answer.take().map_or(Poll::Pending, Poll::Ready),
                StateProj::Fallback { answer, unsent } => {
                    let answer = ready!(answer.poll(cx));
                    shared.note(unsent.as_ref(), &answer);
                    return Poll::Ready(answer);
                }
                StateProj::Primary { answer, mut deadline, check } => match answer.poll(cx) {
                    Poll::Ready(Ok(decision)) => {
                        if let Some(check) = check {
                            shared.succeeded(check, &decision);
                        }
                        return Poll::Ready(Ok(decision));
                    }
                    Poll::Ready(Err(error)) => (error, check.take()),
                    Poll::Pending => {
                        if deadline.is_none() {
                            deadline.set(Some(sleep(shared.settings.deadline)));
                        }
                        if let Some(deadline) = deadline.as_mut().as_pin_mut() {
                            ready!(deadline.poll(cx));
                        }
                        (Error::new(ErrorKind::Timeout), check.take())
                    }
                },
            };
            this.shared.failed(&error);
            match check {
                Some(check) => {
                    let unsent = error.is_unsent().then(|| check.clone());
                    let answer = shared.fallback.check(shared.part(check));
                    this.state.set(State::Fallback { answer, unsent });
                }
                None => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl<P: Store, F: Store> fmt::Debug for FallbackFuture<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FallbackFuture").finish_non_exhaustive()
    }
}
