use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::admit::Next;
use super::wait::QueuedRequest;
use super::{Admitted, Gate, Question};
use crate::error::StoreError;
use crate::limit::Decision;
use crate::store::Store;

pin_project! {
    #[project = Projected]
    /// A request that is not decided yet.
    pub(crate) struct Pending<D> {
        #[pin]
        stage: Stage<D>,
        question: Question,
    }
}

pin_project! {
    #[project = StageProj]
    enum Stage<D> {
        /// The check is in progress.
        Asked {
            #[pin]
            answer: D,
        },
        /// It waits for its turn.
        Queued {
            request: Box<QueuedRequest>,
        },
    }
}

impl<D> Pending<D> {
    pub(super) fn asked(answer: D, question: Question) -> Self {
        Self {
            stage: Stage::Asked { answer },
            question,
        }
    }

    pub(super) fn queued(request: Box<QueuedRequest>, question: Question) -> Self {
        Self {
            stage: Stage::Queued { request },
            question,
        }
    }

    /// Whether it waits for its turn, with a service that is not ready.
    pub(crate) fn is_queued(&self) -> bool {
        matches!(self.stage, Stage::Queued { .. })
    }

    /// Whether the request passes. `inner` is the service that is ready for it; while it [waits](Self::is_queued), one
    /// that is polled for readiness when its turn has come.
    ///
    /// # Errors
    ///
    /// The error of a service that does not become ready.
    ///
    /// It must not be polled again when it is known.
    pub(crate) fn poll<S, R, T, Q>(
        self: Pin<&mut Self>,
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
        let Projected {
            mut stage,
            question,
        } = self.project();
        loop {
            let next = match stage.as_mut().project() {
                StageProj::Asked { answer } => {
                    let answer = ready!(answer.poll(cx));
                    gate.answered(request, question, answer)
                }
                StageProj::Queued { request: queued } => {
                    let turn = ready!(queued.poll(cx, |cx| inner.poll_ready(cx)))?;
                    Next::Admitted(gate.conclude_turn(request, question, &queued.policies, turn))
                }
            };
            match next {
                Next::Admitted(admitted) => return Poll::Ready(Ok(admitted)),
                Next::Wait(request) => {
                    // The ready one may hold a permit that others wait for.
                    *inner = inner.clone();
                    stage.set(Stage::Queued { request });
                }
            }
        }
    }
}
