//! Requests that wait for their turn instead of being rejected: see [`Wait`].

use std::future::Future;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use super::Question;
use crate::in_flight::InFlightTracker;
use crate::limit::{Check, Decision, Policies};
use crate::store::Store;
use crate::util::{instant, polled_after_completion};
use crate::wait_queues::{Acquire, Bounds, Permit, Refusal, WaitQueues, WaitRequest};

/// How long a request that would be denied may wait for its turn, and how many may wait. A [`Duration`] alone is a
/// `Wait` with the default bounds.
///
/// ```
/// use std::num::NonZeroUsize;
/// use std::time::Duration;
/// use tower_redis_ratelimit::extract::PeerIp;
/// use tower_redis_ratelimit::wait::Wait;
/// use tower_redis_ratelimit::{LocalStore, Policy, Quota, RateLimitLayer, Strategy};
///
/// # fn main() -> Result<(), tower_redis_ratelimit::ConfigError> {
/// const FEW: NonZeroUsize = NonZeroUsize::new(20).unwrap();
/// let policy = Policy::new("api", Strategy::Gcra, Quota::per_second(50))?;
/// let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, policy)
///     .wait(Wait::up_to(Duration::from_secs(2)).per_caller(FEW));
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    max: Duration,
    bounds: Bounds,
}

impl Wait {
    const PER_CALLER: usize = 100;
    const IN_ALL: usize = 10_000;

    /// Creates a `Wait` of at most `max` per request, with the default bounds.
    pub const fn up_to(max: Duration) -> Self {
        Self {
            max,
            bounds: Bounds {
                each: Self::PER_CALLER,
                all: Self::IN_ALL,
            },
        }
    }

    /// Sets how many requests of one caller may wait in this process, under all policies; one more
    /// is denied immediately. Defaults to 100.
    #[must_use]
    pub const fn per_caller(mut self, requests: NonZeroUsize) -> Self {
        self.bounds.each = requests.get();
        self
    }

    /// Sets how many requests of all callers may wait in this process; one more is denied
    /// immediately. Defaults to 10,000: a hundred callers with the maximum of
    /// [`per_caller`](Self::per_caller) leave no place for others.
    #[must_use]
    pub const fn total(mut self, requests: NonZeroUsize) -> Self {
        self.bounds.all = requests.get();
        self
    }
}

impl From<Duration> for Wait {
    fn from(max: Duration) -> Self {
        Self::up_to(max)
    }
}

/// The queues of a layer.
#[derive(Clone)]
pub(super) struct Waiting {
    max: Duration,
    queues: WaitQueues,
}

/// A request in its queue.
pub(super) struct QueuedRequest {
    turn: Acquire,
    pub(super) policies: Policies,
    /// The granted permit, until the service is ready.
    permit: Option<Permit>,
}

impl Waiting {
    pub(super) fn new(store: impl Store, in_flight: InFlightTracker, wait: Wait) -> Self {
        Self {
            max: wait.max,
            queues: WaitQueues::new(store, wait.bounds).with_tracker(in_flight),
        }
    }

    pub(super) fn with_tracker(self, in_flight: InFlightTracker) -> Self {
        Self {
            queues: self.queues.with_tracker(in_flight),
            ..self
        }
    }

    /// Returns `true` if other requests of this caller wait, so that the request must wait too.
    #[inline]
    pub(super) fn has_line(&self, check: &Check) -> bool {
        self.queues.has_line(check)
    }

    /// Joins the queue. `denied` is the denial of the store, if the request was checked.
    pub(super) fn join(
        &self,
        question: &Question,
        policies: &Policies,
        denied: Option<Decision>,
    ) -> Result<Box<QueuedRequest>, Refusal> {
        let wanted = WaitRequest {
            key: question.key,
            policies: policies.clone(),
            cost: question.cost,
            deadline: instant().checked_add(self.max),
        };
        Ok(Box::new(QueuedRequest {
            turn: self.queues.join(wanted, denied)?,
            policies: policies.clone(),
            permit: None,
        }))
    }
}

impl QueuedRequest {
    /// Waits for the turn, and then for the service to be ready. Resolves to the permit, the reason
    /// for a missing permit, or the error of the service.
    ///
    /// # Panics
    ///
    /// If it is polled after it was ready.
    pub(super) fn poll<E>(
        &mut self,
        cx: &mut Context<'_>,
        poll_ready: impl FnOnce(&mut Context<'_>) -> Poll<Result<(), E>>,
    ) -> Poll<Result<Result<Permit, Refusal>, E>> {
        if self.permit.is_none() {
            match ready!(Pin::new(&mut self.turn).poll(cx)) {
                Ok(permit) => self.permit = Some(permit),
                Err(refusal) => return Poll::Ready(Ok(Err(refusal))),
            }
        }
        ready!(poll_ready(cx))?;
        let permit = self
            .permit
            .take()
            .unwrap_or_else(|| polled_after_completion("QueuedRequest"));
        Poll::Ready(Ok(Ok(permit)))
    }
}
