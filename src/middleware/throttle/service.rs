use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::{Sleep, sleep};
use tower_service::Service;

use crate::gate::{Notifier, Question, Selector};
use crate::limit::{Key, Policies};
use crate::wait_queues::{Acquire, Permit, Refusal, WaitQueues, WaitRequest};

/// The service that a [`ThrottleLayer`](crate::ThrottleLayer) makes: ready when it has a permit.
pub struct Throttle<T> {
    inner: T,
    settings: Arc<Settings>,
    state: State,
}

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) wait_queues: WaitQueues,
    pub(super) key: Key,
    pub(super) policies: Selector<()>,
    /// Whether a call proceeds without a permit if the store cannot decide.
    pub(super) allow_on_error: bool,
    pub(super) notifier: Notifier,
}

enum State {
    Idle,
    Waiting(Acquire, Question),
    /// The store could not decide, or too many wait: until the next try, on this runtime.
    Pausing(Pin<Box<Sleep>>, Option<Id>),
    /// None if unlimited, or if the store could not decide and that is allowed.
    Ready(Option<Permit>),
}

/// How long to wait before the next try.
const PAUSE: Duration = Duration::from_millis(250);

const NEVER_ENDS: &str = "a policy counts requests in flight, which a `ThrottleLayer` does not: put that policy into a \
                          `CallLimitLayer` or a `RateLimitLayer`";

impl Settings {
    /// The policies that count over time: the end of a call is not known.
    fn policies(&self) -> Option<Policies> {
        let policies = self.policies.find(&(), Some(&self.key))?;
        if policies.in_flight().is_some() {
            self.notifier.misconfigured(NEVER_ENDS);
        }
        policies.without_in_flight().cloned()
    }

    fn enqueue(&self) -> State {
        let Some(policies) = self.policies() else { return State::Ready(None) };
        let question = Question::new(self.key, 1, self.notifier.since());
        let wanted = WaitRequest { key: self.key, policies, cost: 1, deadline: None };
        match self.wait_queues.join(wanted, None) {
            Ok(turn) => State::Waiting(turn, question),
            Err(refusal) => self.refused(refusal, &question),
        }
    }

    /// Charges a call that has not waited.
    fn charge(&self) {
        if let Some(policies) = self.policies() {
            self.wait_queues.charge(self.key, &policies, 1);
        }
    }

    fn granted(&self, permit: Permit, question: &Question) -> State {
        self.notifier.answered(&self.key, question, &Ok(permit.decision()), false);
        State::Ready(Some(permit))
    }

    fn refused(&self, refusal: Refusal, question: &Question) -> State {
        let Refusal::Failed(error) = refusal else { return State::pausing() };
        self.notifier.answered(&self.key, question, &Err(error), false);
        if self.allow_on_error { State::Ready(None) } else { State::pausing() }
    }
}

impl State {
    fn pausing() -> Self {
        Self::Pausing(Box::pin(sleep(PAUSE)), runtime())
    }

    /// Whether it waits on another runtime, which may have ended or be blocked.
    fn is_elsewhere(&self) -> bool {
        match self {
            Self::Waiting(turn, _) => runtime().is_some_and(|here| here != turn.runtime()),
            Self::Pausing(_, there) => runtime() != *there,
            Self::Idle | Self::Ready(_) => false,
        }
    }
}

fn runtime() -> Option<Id> {
    Handle::try_current().ok().map(|runtime| runtime.id())
}

impl<T> Throttle<T> {
    pub(super) fn new(inner: T, settings: Arc<Settings>) -> Self {
        Self { inner, settings, state: State::Idle }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The inner service. Direct calls take no permit.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Returns the inner service. A held permit is passed on.
    pub fn into_inner(self) -> T {
        self.inner
    }
}

impl<T: Service<R>, R> Service<R> for Throttle<T> {
    type Response = T::Response;
    type Error = T::Error;
    type Future = T::Future;

    /// # Panics
    ///
    /// Outside of a tokio runtime.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        let ready = ready!(self.inner.poll_ready(cx));
        if ready.is_err() {
            // What is held goes on, or leaves the line.
            self.state = State::Idle;
            return Poll::Ready(ready);
        }
        if self.state.is_elsewhere() {
            self.state = State::Idle;
        }
        loop {
            self.state = match &mut self.state {
                State::Idle => self.settings.enqueue(),
                State::Waiting(turn, question) => match ready!(Pin::new(turn).poll(cx)) {
                    Ok(permit) => self.settings.granted(permit, question),
                    Err(refusal) => self.settings.refused(refusal, question),
                },
                State::Pausing(pause, _) => {
                    ready!(pause.as_mut().poll(cx));
                    State::Idle
                }
                State::Ready(_) => return Poll::Ready(Ok(())),
            }
        }
    }

    fn call(&mut self, request: R) -> T::Future {
        match mem::replace(&mut self.state, State::Idle) {
            State::Ready(permit) => drop(permit.map(Permit::spend)),
            _ => self.settings.charge(),
        }
        self.inner.call(request)
    }
}

/// Has no permit yet.
impl<T: Clone> Clone for Throttle<T> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), Arc::clone(&self.settings))
    }
}

impl<T: fmt::Debug> fmt::Debug for Throttle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Idle => "idle",
            State::Waiting(..) => "waiting",
            State::Pausing(..) => "pausing",
            State::Ready(_) => "ready",
        };
        f.debug_struct("Throttle").field("inner", &self.inner).field("state", &state).finish_non_exhaustive()
    }
}
