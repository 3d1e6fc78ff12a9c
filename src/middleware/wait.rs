use std::future::Future;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::Instant;

use super::asked::Asked;
use crate::leases::{Lease, Leases};
use crate::limit::{Check, Decision};
use crate::store::{Error, Store, instant, polled_after_completion};
use crate::turns::{Bounds, Permit, Refusal, Turn, Turns, Wanted};

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

    /// Sets how many requests of one caller may wait in this process; one more is denied at once. Defaults to 100.
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
    turns: Turns,
}

/// A request's place in the line.
#[derive(Debug)]
pub(super) struct InLine {
    turn: Turn,
    /// While the service is not ready.
    permit: Option<Permit>,
    /// When the permit was taken, which may have been for another.
    taken_at: Option<Instant>,
    /// What it holds in flight from then on.
    lease: Option<Lease>,
}

impl Waiting {
    pub(super) fn new(store: impl Store, leases: Leases, wait: Wait) -> Self {
        Self { max: wait.max, turns: Turns::new(store, leases, wait.bounds) }
    }

    /// What waits if this check is denied.
    pub(super) fn wanted(&self, check: &Check) -> Wanted {
        Wanted {
            key: *check.key(),
            policies: check.policies().clone(),
            cost: check.cost(),
            deadline: instant().checked_add(self.max),
        }
    }

    /// Has a request wait behind others, if there are any.
    pub(super) fn line_up_behind(&self, wanted: &Wanted) -> Option<Place> {
        self.turns.join_others(wanted).map(placed)
    }

    /// Has a request wait for its turn that the store has just `denied`.
    pub(super) fn line_up(&self, wanted: Wanted, denied: Decision) -> Place {
        placed(self.turns.join(wanted, Some(denied)))
    }
}

/// A place in the line, or the store's answer if the turn cannot come in time.
pub(super) type Place = Result<Box<InLine>, Result<Decision, Error>>;

fn placed(turn: Result<Turn, Refusal>) -> Place {
    turn.map(|turn| Box::new(InLine { turn, permit: None, taken_at: None, lease: None })).map_err(Refusal::into_answer)
}

impl InLine {
    /// What the request holds whose turn has come.
    pub(super) fn lease(&mut self) -> Option<Lease> {
        self.lease.take()
    }

    /// Notes when what was granted was charged.
    pub(super) fn charged(&self, asked: Option<Asked>) -> Option<Asked> {
        let asked = asked?;
        Some(self.taken_at.map_or(asked, |taken_at| asked.taken_at(taken_at)))
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
    ) -> Poll<Result<Result<Decision, Error>, E>> {
        if self.permit.is_none() {
            match ready!(Pin::new(&mut self.turn).poll(cx)) {
                Ok(permit) => {
                    self.taken_at = permit.taken_at();
                    self.permit = Some(permit);
                }
                Err(refusal) => return Poll::Ready(Ok(refusal.into_answer())),
            }
        }
        ready!(poll_ready(cx))?;
        match self.permit.take() {
            Some(permit) => {
                let (decision, lease) = permit.spend();
                self.lease = lease;
                Poll::Ready(Ok(Ok(decision)))
            }
            None => polled_after_completion("InLine"),
        }
    }
}
