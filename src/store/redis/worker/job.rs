//! A queued check and the future that its caller awaits.

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

/// A queued or sent check.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) check: Check,
    pub(super) since: Instant,
    /// Its first place in a queue.
    pub(super) place: Place,
    /// Its share of a batch's capacity.
    pub(super) weight: u32,
    /// The partition of its caller.
    pub(super) partition: u16,
    /// Whether only checks of the same caller may share its call.
    pub(super) alone: bool,
    /// Set after a node has redirected it.
    pub(super) redirect: Option<Box<Redirect>>,
    answer: oneshot::Sender<Result<Decision, StoreError>>,
}

/// The numbers of a queue and of a job in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) queue: u64,
    pub(super) job: u64,
}

/// The redirections of a check.
#[derive(Debug, Default)]
pub(super) struct Redirect {
    /// The node that imports the check's slot. It decides the check after `ASKING`, although it does not own the slot
    /// yet.
    pub(super) ask: Option<Node>,
    /// Time of the first rejection because the keys were on two nodes.
    pub(super) waits: Option<Instant>,
    /// Number of redirections so far.
    pub(super) hops: u8,
}

/// Resolves to the decision of a [`RedisStore`](crate::RedisStore).
///
/// # Panics
///
/// If it is polled after it has resolved.
#[derive(Debug)]
pub struct RedisFuture {
    /// `None` after it has resolved, or was withdrawn.
    answer: Option<oneshot::Receiver<Result<Decision, StoreError>>>,
    /// The first place of its check.
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

    /// Consecutive checks of the same group share a script call.
    pub(super) fn group(&self) -> (bool, u16, Option<&[u8]>) {
        (
            self.asks(),
            self.partition,
            self.alone.then(|| self.check.key().as_bytes()),
        )
    }

    /// Returns `true` if its call is preceded by `ASKING`, because the node imports the slot.
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
        // If the caller has dropped the future since the check was sent, the charge stands.
        let _ = self.answer.send(decide(self.check));
    }

    pub(super) fn fail(self, error: StoreError) {
        self.answer(|_| Err(error));
    }
}

impl RedisFuture {
    /// Drops the receiver, so that the worker that takes the check drops it unsent.
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

/// The error of a check outside of a runtime, or on a runtime that has shut down: no evidence about Redis.
pub(super) fn no_runtime() -> StoreError {
    StoreError::new(ErrorKind::NoRuntime).check_only()
}
