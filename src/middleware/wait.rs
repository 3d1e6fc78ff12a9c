use std::future::Future;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::Instant;

use super::asked::Asked;
use crate::in_flight::{InFlightTracker, Lease};
use crate::limit::{Check, Decision};
use crate::store::{Store, StoreError, instant, polled_after_completion};
use crate::wait_queues::{Acquire, Bounds, Permit, Refusal, Spent, WaitQueues, WaitRequest};

/// For how long a request that would be denied may wait for its turn, and how many may. A [`Duration`] alone is a `Wait`
/// with the default bounds.
///
/// ```
/// use std::num::NonZeroUsize;
/// use std::time::Duration;
/// use tower_redis_ratelimit::{LocalStore, PeerIp, Policy, Quota, RateLimitLayer, Strategy, Wait};
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

    /// Waits for at most so long.
    pub const fn up_to(max: Duration) -> Self {
        Self { max, bounds: Bounds { each: Self::PER_CALLER, all: Self::IN_ALL } }
    }

    /// Sets how many requests of one caller may wait in this process, under whatever policies; one more is denied at once.
    /// Defaults to 100.
    #[must_use]
    pub const fn per_caller(mut self, requests: NonZeroUsize) -> Self {
        self.bounds.each = requests.get();
        self
    }

    /// Sets how many requests of all callers may wait in this process; one more is denied at once. Defaults to 10,000.
    #[must_use]
    pub const fn in_all(mut self, requests: NonZeroUsize) -> Self {
        self.bounds.all = requests.get();
        self
    }
}

impl From<Duration> for Wait {
    fn from(max: Duration) -> Self {
        Self::up_to(max)
    }
}

/// A layer's waiting requests.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    max: Duration,
    wait_queues: WaitQueues,
}

/// A request's place in the line.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    turn: Acquire,
    wait_queues: WaitQueues,
    wanted: WaitRequest,
    /// While the service is not ready.
    permit: Option<Permit>,
    /// When the permit was taken, which may have been for another, and how old its decision is.
    taken: Option<(Instant, i64)>,
    /// What it holds in flight from then on.
    lease: Option<Lease>,
}

impl Waiting {
    pub(super) fn new(store: impl Store, in_flight: InFlightTracker, wait: Wait) -> Self {
        Self { max: wait.max, wait_queues: WaitQueues::new(store, in_flight, wait.bounds) }
    }

    /// What waits if this check is denied.
    pub(super) fn wanted(&self, check: &Check) -> WaitRequest {
        WaitRequest {
            key: *check.key(),
            policies: check.policies().clone(),
            cost: check.cost(),
            deadline: instant().checked_add(self.max),
        }
    }

    /// Has a request wait behind others, if there are any.
    pub(super) fn queue_behind(&self, wanted: &WaitRequest) -> Option<Place> {
        Some(self.placed(self.wait_queues.join_others(wanted)?, wanted))
    }

    /// Has a request wait for its turn that the store has just `denied`.
    pub(super) fn enqueue(&self, wanted: &WaitRequest, denied: Decision) -> Place {
        self.placed(self.wait_queues.join(wanted.clone(), Some(denied)), wanted)
    }

    fn placed(&self, turn: Result<Acquire, Refusal>, wanted: &WaitRequest) -> Place {
        let (wait_queues, wanted) = (self.wait_queues.clone(), wanted.clone());
        match turn {
            Ok(turn) => Place::QueuedRequest(Box::new(QueuedRequest {
                turn,
                wait_queues,
                wanted,
                permit: None,
                taken: None,
                lease: None,
            })),
            Err(refusal) => {
                let (answer, lease) = refused(refusal, &wait_queues, &wanted);
                Place::Refused(answer, lease)
            }
        }
    }
}

/// Whether a request waits.
pub(super) enum Place {
    QueuedRequest(Box<QueuedRequest>),
    /// The store's answer, if the turn cannot come in time; and what the request holds if it passes all the same.
    Refused(Result<Decision, StoreError>, Option<Lease>),
}

fn refused(
    refusal: Refusal,
    wait_queues: &WaitQueues,
    wanted: &WaitRequest,
) -> (Result<Decision, StoreError>, Option<Lease>) {
    let answer = refusal.into_answer();
    // It may pass though nobody has counted it.
    let mut lease = if answer.is_err() { wait_queues.hold(wanted) } else { None };
    if let Some(lease) = &mut lease {
        lease.answered(answer.as_ref());
    }
    (answer, lease)
}

impl QueuedRequest {
    /// What the request holds whose turn has come, or that passes all the same.
    pub(super) fn lease(&mut self) -> Option<Lease> {
        self.lease.take()
    }

    /// Notes when what was granted was charged.
    pub(super) fn charged(&self, asked: Option<Asked>) -> Option<Asked> {
        Some(asked?.of_permit(self.taken))
    }

    /// Waits for the turn, and then for the service to be ready. The answer, as of a store that was asked; or the error of a
    /// service that fails.
    ///
    /// # Panics
    ///
    /// If it is polled after it has answered.
    pub(super) fn poll<E>(
        &mut self,
        cx: &mut Context<'_>,
        poll_ready: impl FnOnce(&mut Context<'_>) -> Poll<Result<(), E>>,
    ) -> Poll<Result<Result<Decision, StoreError>, E>> {
        if self.permit.is_none() {
            match ready!(Pin::new(&mut self.turn).poll(cx)) {
                Ok(permit) => self.permit = Some(permit),
                Err(refusal) => {
                    let (answer, lease) = refused(refusal, &self.wait_queues, &self.wanted);
                    self.lease = lease;
                    return Poll::Ready(Ok(answer));
                }
            }
        }
        ready!(poll_ready(cx))?;
        match self.permit.take() {
            Some(permit) => {
                let Spent { decision, taken, lease } = permit.spend();
                (self.taken, self.lease) = (taken, lease);
                Poll::Ready(Ok(Ok(decision)))
            }
            None => polled_after_completion("QueuedRequest"),
        }
    }
}
