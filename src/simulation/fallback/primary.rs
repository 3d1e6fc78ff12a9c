//! The two stores of an instance: a primary store that fails as planned, and an observed local store.

use std::future::{Future, Pending};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::world::{Fate, Reply, World};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision};
use crate::store::{Answer, Backend, LocalStore, Store, Withdraw};

/// The primary store as one instance reaches it. All instances share its count; each has separate
/// faults.
#[derive(Debug, Clone)]
pub(super) struct Primary {
    pub(super) world: World,
    pub(super) instance: usize,
}

/// Every store must reply or fail within a bounded time.
const TIMEOUT: Duration = Duration::from_secs(2);

impl Store for Primary {
    type Future = Waiting;

    fn check(&self, check: Check) -> Answer<Waiting> {
        let (request, fate) = self.world.state().arrives(self.instance, &check);
        if let (0, 0, false, 0, Reply::Error(error)) =
            (fate.queued, fate.sent, fate.runs, fate.back, &fate.answer)
        {
            self.world.state().answers(request, Some(error));
            return Answer::ready(Err(error.clone()));
        }
        let (reply, answer) = oneshot::channel();
        tokio::spawn(serve(self.world.clone(), request, check, fate, reply));
        let world = self.world.clone();
        Answer::pending(Waiting {
            world,
            request,
            answer,
            is_answered: false,
        })
    }

    fn backend(&self) -> Backend<'_, Waiting> {
        Backend::<Waiting>::default().withdrawing(self)
    }
}

impl Withdraw<Waiting> for Primary {
    fn withdraw(&self, mut future: Pin<&mut Waiting>) -> bool {
        let withdrawn = self.world.state().withdraws(future.request);
        if withdrawn {
            future.answer.close();
        }
        withdrawn
    }
}

/// Delivers a request, also after its future was dropped.
async fn serve(
    world: World,
    request: usize,
    check: Check,
    fate: Fate,
    mut reply: oneshot::Sender<Result<Decision, StoreError>>,
) {
    wait(fate.queued).await;
    if reply.is_closed() {
        world.state().withdrawn(request);
        return;
    }
    world.state().sends(request);
    wait(fate.sent).await;
    let decision = if fate.runs {
        Some(world.state().runs(request, check))
    } else {
        None
    };
    wait(fate.back).await;
    match (fate.answer, decision) {
        (Reply::Decision, Some(decision)) => {
            // If this is after the deadline, the instance has dropped the receiver.
            if reply.send(Ok(decision)).is_ok() {
                world.state().answers(request, None);
            }
        }
        (Reply::Error(error), _) => {
            world.state().answers(request, Some(&error));
            let _ = reply.send(Err(error));
        }
        _ => {
            world.state().lost(request);
            if timeout(TIMEOUT, reply.closed()).await.is_err() {
                let _ = reply.send(Err(StoreError::new(ErrorKind::Timeout)));
            }
        }
    }
}

async fn wait(millis: u64) {
    if millis > 0 {
        sleep(Duration::from_millis(millis)).await;
    }
}

pub(super) struct Waiting {
    world: World,
    request: usize,
    answer: oneshot::Receiver<Result<Decision, StoreError>>,
    is_answered: bool,
}

impl Future for Waiting {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = Pin::new(&mut self.answer).poll(cx).map(Result::unwrap);
        self.is_answered = answer.is_ready();
        answer
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_answered {
            self.world.state().abandons(self.request);
        }
    }
}

/// The local store of an instance. All its decisions are entered in the ledger.
#[derive(Debug, Clone)]
pub(super) struct Local {
    pub(super) world: World,
    pub(super) instance: usize,
    pub(super) store: LocalStore,
}

impl Store for Local {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let answer = self.store.check(check.clone());
        if let Answer::Ready {
            answer: Ok(decision),
        } = &answer
        {
            self.world
                .state()
                .decides_locally(self.instance, &check, decision);
        }
        answer
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        self.store.backend()
    }
}
