use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::wait::QueuedRequest;
use super::{Admission, Admitted, Gate, Question};
use crate::limit::Decision;
use crate::store::{Store, StoreError, polled_after_completion};
use crate::wait_queues::WaitRequest;

pin_project! {
    /// A request of which it is not known yet whether it passes.
    pub(crate) struct Pending<D> {
        #[pin]
        stage: Stage<D>,
        // None once it is known.
        question: Option<Question>,
    }
}

pin_project! {
    #[project = StageProj]
    enum Stage<D> {
        /// The store has been asked.
        Asked {
            #[pin]
            answer: D,
            // What it waits for if it is denied and may wait.
            wanted: Option<Box<WaitRequest>>,
        },
        /// It waits for its turn.
        Queued {
            request: Box<QueuedRequest>,
        },
    }
}

impl<D> Pending<D> {
    pub(super) fn asked(answer: D, question: Question, wanted: Option<Box<WaitRequest>>) -> Self {
        Self { stage: Stage::Asked { answer, wanted }, question: Some(question) }
    }

    pub(super) fn queued(request: QueuedRequest, question: Question) -> Self {
        Self { stage: Stage::Queued { request: Box::new(request) }, question: Some(question) }
    }

    /// Whether it waits for its turn, with a service that is not ready.
    pub(crate) fn is_queued(&self) -> bool {
        matches!(self.stage, Stage::Queued { .. })
    }

    /// Whether the request passes. `inner` is the service that is ready for it; or while it [waits](Self::is_queued) for its
    /// turn, one that is polled ready when that has come.
    ///
    /// # Errors
    ///
    /// That of a service that does not become ready.
    ///
    /// # Panics
    ///
    /// If it is polled after it was ready.
    pub(crate) fn poll<S, R, T, Q>(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        gate: &Gate<S, R>,
        request: &R,
        inner: &mut T,
    ) -> Poll<Result<Admitted<D>, T::Error>>
    where
        D: Future<Output = Result<Decision, StoreError>>,
        S: Store<Future = D>,
        R: 'static,
        T: Service<Q> + Clone,
    {
        loop {
            let this = self.as_mut().project();
            let next = match this.stage.project() {
                StageProj::Asked { answer, wanted } => {
                    let answer = ready!(answer.poll(cx));
                    let Some(question) = this.question.take() else { polled_after_completion("Pending") };
                    gate.answered(request, question, answer, wanted.take())
                }
                StageProj::Queued { request: queued } => {
                    let turn = ready!(queued.poll(cx, |cx| inner.poll_ready(cx)))?;
                    let Some(question) = this.question.take() else { polled_after_completion("Pending") };
                    gate.conclude_turn(request, question, queued.wanted(), turn).into()
                }
            };
            match next {
                Admission::Pass(grant) => return Poll::Ready(Ok(Ok(grant))),
                Admission::Refuse(refusal) => return Poll::Ready(Ok(Err(refusal))),
                Admission::Undecided(pending) => {
                    // The ready one may hold a permit that others wait for.
                    *inner = inner.clone();
                    self.set(pending);
                }
            }
        }
    }
}
