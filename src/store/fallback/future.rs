use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::partition::{Asked, Partition};
use crate::error::StoreError;
use crate::limit::{Check, Decision};
use crate::store::{Answer, Store};
use crate::util::polled_after_completion;

pin_project! {
    /// Resolves to the decision of a [`Fallback`](crate::Fallback).
    ///
    /// # Panics
    ///
    /// If it is polled after it has resolved.
    pub struct FallbackFuture<P: Store, F: Store> {
        pub(super) partition: Arc<Partition<P, F>>,
        #[pin]
        pub(super) state: State<P::Future, F::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    pub(super) enum State<P, F> {
        Primary {
            #[pin]
            answer: P,
            // Set at the first poll that finds no reply.
            #[pin]
            deadline: Option<Sleep>,
            // `None` after the deadline of a check for a block: its late reply still reports the quota to refund.
            asked: Option<Asked>,
            at: Instant,
            check: Check,
        },
        Fallback {
            #[pin]
            answer: F,
            check: Check,
            // Whether the check was sent to the primary store too, which may have charged it.
            sent: bool,
        },
        Done,
    }
}

impl<P: Store, F: Store> FallbackFuture<P, F> {
    /// See [`Withdraw`](crate::store::Withdraw).
    pub(super) fn withdraw(self: Pin<&mut Self>) -> bool {
        let this = self.project();
        match this.state.project() {
            StateProj::Primary { answer, .. } => this.partition.primary.backend().withdraw(answer),
            StateProj::Fallback {
                answer,
                sent: false,
                ..
            } => this.partition.fallback.backend().withdraw(answer),
            StateProj::Fallback { sent: true, .. } | StateProj::Done => false,
        }
    }
}

impl<P: Store, F: Store> Future for FallbackFuture<P, F> {
    type Output = Result<Decision, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let partition = this.partition;
        loop {
            let (check, sent) = match this.state.as_mut().project() {
                StateProj::Done => polled_after_completion("FallbackFuture"),
                StateProj::Fallback {
                    answer,
                    check,
                    sent,
                } => {
                    let answer = ready!(answer.poll(cx));
                    let answer = partition.fell_back(check, *sent, answer, None);
                    this.state.set(State::Done);
                    return Poll::Ready(answer);
                }
                StateProj::Primary {
                    mut answer,
                    mut deadline,
                    asked,
                    at,
                    check,
                } => match answer.as_mut().poll(cx) {
                    Poll::Ready(Ok(decision)) => {
                        if let Some(asked) = *asked {
                            partition.succeeded(check, &decision, asked);
                        }
                        this.state.set(State::Done);
                        return Poll::Ready(Ok(decision));
                    }
                    Poll::Ready(Err(error)) => {
                        if let Some(asked) = *asked {
                            partition.failed(check, &error, asked);
                        }
                        if check.is_for_block() {
                            this.state.set(State::Done);
                            return Poll::Ready(Err(error));
                        }
                        (check.clone(), !error.is_not_sent())
                    }
                    Poll::Pending => {
                        let Some(ticket) = *asked else {
                            return Poll::Pending;
                        };
                        if deadline.is_none() {
                            let after = partition.settings.deadline;
                            // If the deadline overflows, only `sleep` accepts it.
                            deadline.set(Some(
                                at.checked_add(after)
                                    .map_or_else(|| sleep(after), sleep_until),
                            ));
                        }
                        if let Some(deadline) = deadline.as_mut().as_pin_mut() {
                            ready!(deadline.poll(cx));
                        }
                        partition.failed(check, &partition.late(check.key()), ticket);
                        if check.is_for_block() {
                            *asked = None;
                            continue;
                        }
                        (check.clone(), !partition.primary.backend().withdraw(answer))
                    }
                },
            };
            match partition.fall_back(&check, sent) {
                Answer::Ready { answer } => {
                    this.state.set(State::Done);
                    return Poll::Ready(answer);
                }
                Answer::Pending { future } => this.state.set(State::Fallback {
                    answer: future,
                    check,
                    sent,
                }),
            }
        }
    }
}

impl<P: Store, F: Store> fmt::Debug for FallbackFuture<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FallbackFuture").finish_non_exhaustive()
    }
}
