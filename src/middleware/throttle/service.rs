use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::time::{Instant, Sleep, sleep};
use tower_service::Service;

use super::future::ThrottleFuture;
use crate::gate::{Notifier, OnError, Selector, denial};
use crate::limit::{Check, Key, Policies, RateLimited};
use crate::middleware::call_limit::BoxError;
use crate::observe::UncountedReason;
use crate::observe::mistakes::IN_FLIGHT_IN_THROTTLE;
use crate::util::{instant, jittered};
use crate::wait_queues::{Acquire, NoPermit, Permit, WaitQueues};

/// The service that a [`ThrottleLayer`](crate::ThrottleLayer) makes. It is ready when it has a
/// permit or, with a [`max_wait`](crate::ThrottleLayer::max_wait), when no permit can arrive in
/// time. `E` is that of the [layer](crate::ThrottleLayer#naming-the-type).
pub struct Throttle<T, E = Infallible> {
    inner: T,
    settings: Arc<ThrottleSettings>,
    state: Readiness,
    error: PhantomData<fn() -> E>,
}

#[derive(Clone)]
pub(super) struct ThrottleSettings {
    pub(super) wait_queues: WaitQueues,
    pub(super) key: Key,
    pub(super) policies: Selector<()>,
    /// Maximum wait of a call. `None` means no limit.
    pub(super) max_wait: Option<Duration>,
    pub(super) on_error: OnError,
    pub(super) notifier: Notifier,
}

enum Readiness {
    Idle,
    /// Since this time, if an observer needs it.
    Waiting(Acquire, Option<Instant>),
    /// The store could not decide, or the queue is full: sleeps until the next attempt, on this
    /// runtime.
    Pausing(Pin<Box<Sleep>>, Option<Id>),
    /// `None` if calls are unlimited, or if the store could not decide, by [`OnError::Allow`].
    Ready(Option<Permit>),
    /// With a maximum wait: the error of the next call, until this time. After that, the call is charged
    /// without a permit. `None` if waiting never helps.
    Refused(BoxError, Option<Instant>),
}

/// Delay before the next attempt. Shorter than the time for which a wait queue remembers a failure.
const PAUSE: Duration = Duration::from_millis(250);

const NEVER_ENDS: &str = "a `ThrottleLayer` cannot limit requests in flight: move that policy to a `CallLimitLayer` or \
                          a `RateLimitLayer`";

impl ThrottleSettings {
    /// Returns the policies without those of requests in flight, since a throttle does not see
    /// calls end.
    fn policies(&self) -> Option<Policies> {
        let policies = self.policies.find(&(), Some(&self.key))?;
        if policies.in_flight().is_some() {
            self.notifier
                .misconfigured(format_args!("{NEVER_ENDS}{IN_FLIGHT_IN_THROTTLE}"));
        }
        // A leased block cannot grant a permit, so a lease has no effect here.
        self.notifier.never_leased(&policies);
        policies.without_in_flight().cloned()
    }

    fn enqueue(&self) -> Readiness {
        let Some(policies) = self.policies() else {
            return Readiness::Ready(None);
        };
        let since = self.notifier.since();
        let deadline = self.max_wait.and_then(|max| instant().checked_add(max));
        let take = Check::take(self.key, &policies, 1);
        if policies.are_blocked() {
            if self.max_wait.is_none() {
                // Other policies may replace them.
                return Readiness::pausing();
            }
            let denied = denial(&take, None, false);
            let answer = Ok(denied.clone());
            self.notifier.answered(&self.key, 1, since, &answer, false);
            return Readiness::Refused(RateLimited::new(denied).into(), None);
        }
        match self.wait_queues.join(&take, deadline, None) {
            Ok(turn) => Readiness::Waiting(turn, since),
            Err(refusal) => self.refused(refusal, since),
        }
    }

    /// Charges a call without a permit. Returns `false` if calls are unlimited.
    fn charge(&self) -> bool {
        let policies = self.policies();
        if let Some(policies) = &policies {
            self.wait_queues.charge(self.key, policies, 1);
        }
        policies.is_some()
    }

    fn granted(&self, permit: Permit, since: Option<Instant>) -> Readiness {
        self.notifier
            .answered(&self.key, 1, since, &Ok(permit.decision()), false);
        Readiness::Ready(Some(permit))
    }

    fn refused(&self, refusal: NoPermit, since: Option<Instant>) -> Readiness {
        let is_timed = self.max_wait.is_some();
        let answer = match refusal {
            NoPermit::Denied(_) | NoPermit::Full(_) if !is_timed => return Readiness::pausing(),
            NoPermit::Denied(decision) | NoPermit::Full(decision) => Ok(decision),
            NoPermit::Failed(error) => Err(error),
        };
        self.notifier.answered(&self.key, 1, since, &answer, false);
        match answer {
            Ok(denied) => {
                let until = denied.retry_after().and_then(later);
                Readiness::Refused(RateLimited::new(denied).into(), until)
            }
            Err(_) if self.on_error.passes_undecided() => {
                self.notifier.uncounted(UncountedReason::Failed, true);
                Readiness::Ready(None)
            }
            Err(error) if is_timed => Readiness::Refused(error.into(), later(PAUSE)),
            Err(_) => Readiness::pausing(),
        }
    }
}

impl Readiness {
    fn pausing() -> Self {
        Self::Pausing(Box::pin(sleep(jittered(PAUSE, 1.0..1.2))), runtime())
    }

    /// Returns `true` if it waits on another runtime, which may have shut down or be blocked.
    fn is_elsewhere(&self) -> bool {
        match self {
            Self::Waiting(turn, _) => runtime().is_some_and(|here| here != turn.runtime()),
            Self::Pausing(_, there) => runtime() != *there,
            Self::Idle | Self::Ready(_) | Self::Refused(..) => false,
        }
    }

    fn has_expired(&self) -> bool {
        matches!(self, Self::Refused(_, until) if has_passed(*until))
    }
}

fn has_passed(until: Option<Instant>) -> bool {
    until.is_some_and(|until| until <= instant())
}

fn later(wait: Duration) -> Option<Instant> {
    instant().checked_add(wait)
}

fn runtime() -> Option<Id> {
    Handle::try_current().ok().map(|runtime| runtime.id())
}

impl<T, E> Throttle<T, E> {
    pub(super) fn new(inner: T, settings: Arc<ThrottleSettings>) -> Self {
        Self {
            inner,
            settings,
            state: Readiness::Idle,
            error: PhantomData,
        }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The inner service. Direct calls need no permit.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Returns the inner service. A held permit is passed on.
    pub fn into_inner(self) -> T {
        self.inner
    }

    /// Ready when the inner service is ready and there is a permit, or an error for the next call.
    fn poll_permit<R>(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), T::Error>>
    where
        T: Service<R>,
    {
        let ready = ready!(self.inner.poll_ready(cx));
        if ready.is_err() {
            // Dropping the state passes on the permit, or leaves the queue.
            self.state = Readiness::Idle;
            return Poll::Ready(ready);
        }
        // A refusal stays ready until its end. Then a permit may arrive in time.
        if self.state.is_elsewhere() || self.state.has_expired() {
            self.state = Readiness::Idle;
        }
        loop {
            self.state = match &mut self.state {
                Readiness::Idle => self.settings.enqueue(),
                Readiness::Waiting(turn, _) => {
                    let turn = ready!(Pin::new(turn).poll(cx));
                    // Replace the state first: the future must not be polled again, even if an
                    // observer panics.
                    let Readiness::Waiting(_, since) =
                        mem::replace(&mut self.state, Readiness::Idle)
                    else {
                        continue;
                    };
                    match turn {
                        Ok(permit) => self.settings.granted(permit, since),
                        Err(refusal) => self.settings.refused(refusal, since),
                    }
                }
                Readiness::Pausing(pause, _) => {
                    ready!(pause.as_mut().poll(cx));
                    Readiness::Idle
                }
                Readiness::Ready(_) | Readiness::Refused(..) => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Uses the permit.
    ///
    /// # Errors
    ///
    /// With a maximum wait, the reason why there is no permit.
    fn use_permit(&mut self) -> Result<(), BoxError> {
        match mem::replace(&mut self.state, Readiness::Idle) {
            Readiness::Ready(permit) => drop(permit.map(Permit::spend)),
            Readiness::Refused(error, until) if !has_passed(until) => return Err(error),
            // It was ready to fail for longer than the reported wait.
            Readiness::Refused(..) => {
                self.settings.charge();
            }
            Readiness::Idle | Readiness::Waiting(..) | Readiness::Pausing(..) => {
                if self.settings.charge() {
                    self.settings.notifier.call_without_ready();
                }
            }
        }
        Ok(())
    }
}

impl<T: Service<R>, R> Service<R> for Throttle<T> {
    type Response = T::Response;
    type Error = T::Error;
    type Future = T::Future;

    /// # Panics
    ///
    /// Outside a Tokio runtime.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        self.poll_permit(cx)
    }

    fn call(&mut self, request: R) -> T::Future {
        // Always `Ok`: only a maximum wait makes a call fail.
        let _ = self.use_permit();
        self.inner.call(request)
    }
}

impl<T, R> Service<R> for Throttle<T, BoxError>
where
    T: Service<R, Error: Into<BoxError>>,
{
    type Response = T::Response;
    type Error = BoxError;
    type Future = ThrottleFuture<T::Future>;

    /// # Panics
    ///
    /// Outside a Tokio runtime.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.poll_permit(cx).map_err(Into::into)
    }

    fn call(&mut self, request: R) -> Self::Future {
        match self.use_permit() {
            Ok(()) => ThrottleFuture {
                response: Some(self.inner.call(request)),
                error: None,
            },
            Err(error) => ThrottleFuture {
                response: None,
                error: Some(error),
            },
        }
    }
}

/// The clone has no permit.
impl<T: Clone, E> Clone for Throttle<T, E> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), Arc::clone(&self.settings))
    }
}

impl<T: fmt::Debug, E> fmt::Debug for Throttle<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            Readiness::Idle => "idle",
            Readiness::Waiting(..) => "waiting",
            Readiness::Pausing(..) => "pausing",
            Readiness::Ready(_) => "ready",
            Readiness::Refused(..) => "refused",
        };
        f.debug_struct("Throttle")
            .field("inner", &self.inner)
            .field("state", &state)
            .finish_non_exhaustive()
    }
}
