//! The two stores of an instance: a primary store that fails as planned, and a local one that is watched.

use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::world::World;
use crate::limit::{Check, Decision, Key};
use crate::store::{Error, ErrorKind, LocalStore, Store};

/// What becomes of a request, in milliseconds each.
#[derive(Debug)]
pub(super) struct Fate {
    /// How long it is not sent: who goes away before is not charged.
    pub(super) queued: u64,
    /// How long until it runs, from then on.
    pub(super) sent: u64,
    pub(super) runs: bool,
    /// How long until it is answered, from then on.
    pub(super) back: u64,
    pub(super) answer: Reply,
}

#[derive(Debug)]
pub(super) enum Reply {
    Decision,
    Error(Error),
    Never,
}

/// One count for all instances, as each of them reaches it.
#[derive(Debug, Clone)]
pub(super) struct Primary {
    pub(super) world: World,
    pub(super) instance: usize,
}

/// As a store has to: in bounded time.
const TIMEOUT: Duration = Duration::from_secs(2);

impl Store for Primary {
    type Future = Answer;

    fn check(&self, check: Check) -> Answer {
        match self.try_check(check) {
            Ok(answer) => Answer::Ready(Some(answer)),
            Err(waiting) => waiting,
        }
    }

    fn try_check(&self, check: Check) -> Result<Result<Decision, Error>, Answer> {
        let (request, fate) = self.world.state().arrives(self.instance, &check);
        if let (0, 0, false, 0, Reply::Error(error)) = (fate.queued, fate.sent, fate.runs, fate.back, &fate.answer) {
            self.world.state().answers(request, Some(error));
            return Ok(Err(error.clone()));
        }
        let (told, answer) = oneshot::channel();
        tokio::spawn(serve(self.world.clone(), request, check, fate, told));
        Err(Answer::Waiting(answer))
    }
}

/// A request on its way. It goes on when nobody waits for it any more.
async fn serve(
    world: World,
    request: usize,
    check: Check,
    fate: Fate,
    mut told: oneshot::Sender<Result<Decision, Error>>,
) {
    wait(fate.queued).await;
    if told.is_closed() {
        world.state().withdrawn(request);
        return;
    }
    wait(fate.sent).await;
    let decision = if fate.runs { Some(world.state().runs(request, check)) } else { None };
    wait(fate.back).await;
    match (fate.answer, decision) {
        (Reply::Decision, Some(decision)) => {
            world.state().answers(request, None);
            let _ = told.send(Ok(decision));
        }
        (Reply::Error(error), _) => {
            world.state().answers(request, Some(&error));
            let _ = told.send(Err(error));
        }
        _ => {
            world.state().lost(request);
            if timeout(TIMEOUT, told.closed()).await.is_err() {
                let _ = told.send(Err(Error::new(ErrorKind::Timeout)));
            }
        }
    }
}

async fn wait(millis: u64) {
    if millis > 0 {
        sleep(Duration::from_millis(millis)).await;
    }
}

pub(super) enum Answer {
    Ready(Option<Result<Decision, Error>>),
    Waiting(oneshot::Receiver<Result<Decision, Error>>),
}

impl Future for Answer {
    type Output = Result<Decision, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Ready(answer) => Poll::Ready(answer.take().unwrap()),
            Self::Waiting(answer) => Pin::new(answer).poll(cx).map(Result::unwrap),
        }
    }
}

/// The local store of an instance. Everything that it decides is told.
#[derive(Debug, Clone)]
pub(super) struct Local {
    pub(super) world: World,
    pub(super) instance: usize,
    pub(super) store: LocalStore,
}

impl Store for Local {
    type Future = Ready<Result<Decision, Error>>;

    fn check(&self, check: Check) -> Self::Future {
        let decision = self.store.check(check.clone()).into_inner();
        if let Ok(decision) = &decision {
            self.world.state().decides_locally(self.instance, &check, decision);
        }
        ready(decision)
    }

    fn try_check(&self, check: Check) -> Result<Result<Decision, Error>, Self::Future> {
        Ok(self.check(check).into_inner())
    }

    fn follow(&self, key: &Key, decision: &Decision) {
        self.store.follow(key, decision);
    }
}
