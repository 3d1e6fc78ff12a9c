//! Both ends of an answer: the check that waits in the queue, and the future that its caller holds.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision};
use crate::store::redis::batch::weight;
use crate::store::redis::topology::Node;
use crate::util::{instant, polled_after_completion};

/// A check that waits for its answer.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) check: Check,
    pub(super) since: Instant,
    /// Where it was put first.
    pub(super) place: Place,
    /// How much of a batch it takes.
    pub(super) weight: u32,
    /// The partition of its caller.
    pub(super) partition: u16,
    /// Whether only checks of the same caller may share its call.
    pub(super) alone: bool,
    /// Whether and how a node has sent it elsewhere.
    pub(super) redirect: Option<Box<Redirect>>,
    answer: oneshot::Sender<Result<Decision, StoreError>>,
}

/// Where a job was put: the numbers of a queue, and of the job in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) queue: u64,
    pub(super) job: u64,
}

/// How a check goes on after a node has sent it elsewhere.
#[derive(Debug, Default)]
pub(super) struct Redirect {
    /// The node to which the slot is being moved: it takes the check now, though the slot is not yet its own.
    pub(super) ask: Option<Node>,
    /// Since when it has been refused for good reason only to be tried again.
    pub(super) waits: Option<Instant>,
    /// How often it was sent elsewhere.
    pub(super) hops: u8,
}

/// Resolves to the answer of a [`RedisStore`](crate::RedisStore).
///
/// # Panics
///
/// If it is polled after it has answered.
#[derive(Debug)]
pub struct RedisFuture {
    /// None once it has been told.
    answer: Option<oneshot::Receiver<Result<Decision, StoreError>>>,
    /// Where its check was put.
    pub(super) place: Place,
}

impl Job {
    pub(super) fn new(check: Check, partition: u16) -> (Self, RedisFuture) {
        let (answer, receiver) = oneshot::channel();
        let place = Place::default();
        let weight = weight(&check);
        let job = Self {
            check,
            since: instant(),
            place,
            weight,
            partition,
            alone: false,
            redirect: None,
            answer,
        };
        (
            job,
            RedisFuture {
                answer: Some(receiver),
                place,
            },
        )
    }

    /// Checks of one group share a script call.
    pub(super) fn group(&self) -> (bool, u16, Option<&[u8]>) {
        (
            self.asks(),
            self.partition,
            self.alone.then(|| self.check.key().as_bytes()),
        )
    }

    /// Whether it asks a node for a slot that is being moved there.
    pub(super) fn asks(&self) -> bool {
        self.redirect
            .as_ref()
            .is_some_and(|redirect| redirect.ask.is_some())
    }

    /// Whether the caller has dropped the future.
    pub(super) fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }

    pub(super) fn answer(self, decide: impl FnOnce(Check) -> Result<Decision, StoreError>) {
        // A caller that has gone away since it was sent was charged all the same.
        let _ = self.answer.send(decide(self.check));
    }

    pub(super) fn fail(self, error: StoreError) {
        self.answer(|_| Err(error));
    }
}

impl RedisFuture {
    /// Nobody waits for the answer any longer: a worker that takes the check drops it.
    pub(super) fn abandon(&mut self) {
        self.answer = None;
    }
}

impl Future for RedisFuture {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(receiver) = &mut self.answer else {
            polled_after_completion("RedisFuture")
        };
        let answer = ready!(Pin::new(receiver).poll(cx));
        self.answer = None;
        Poll::Ready(answer.unwrap_or_else(|_| Err(no_runtime())))
    }
}

/// For what is asked where there is no runtime, or was asked on one that has ended. It says nothing of Redis.
pub(super) fn no_runtime() -> StoreError {
    StoreError::new(ErrorKind::NoRuntime).of_check()
}
