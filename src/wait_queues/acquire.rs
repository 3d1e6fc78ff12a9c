use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::runtime::Id;
use tokio::sync::oneshot;

use super::queue::Answer;
use super::{Permit, QueueId, Refusal, SharedQueues};
use crate::error::{ErrorKind, StoreError};

/// Resolves to a permit when its turn has come. Dropped, it leaves the queue.
pub(crate) struct Acquire {
    pub(super) shared: Arc<SharedQueues>,
    pub(super) id: QueueId,
    pub(super) queue: u64,
    pub(super) number: u64,
    pub(super) answer: oneshot::Receiver<Answer>,
}

impl Acquire {
    /// The runtime that asks for it.
    pub(crate) fn runtime(&self) -> Id {
        self.id.runtime
    }
}

impl Future for Acquire {
    type Output = Result<Permit, Refusal>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Or a task that has done much since it yielded would not see what is there.
        if let Ok(answer) = self.answer.try_recv() {
            return Poll::Ready(answer);
        }
        let answer = ready!(Pin::new(&mut self.answer).poll(cx));
        // The runtime that asked has ended.
        Poll::Ready(answer.unwrap_or_else(|_| {
            Err(Refusal::Failed(
                StoreError::new(ErrorKind::NoRuntime).of_check(),
            ))
        }))
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        // An answer that it has not read goes with the receiver: a permit then goes on to the next one.
        drop(
            self.shared
                .with_queue(&self.id, self.queue, |queue| queue.leave(self.number)),
        );
    }
}
