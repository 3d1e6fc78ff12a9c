use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::error::StoreError;
use crate::gate::Notifier;
use crate::in_flight::InFlightTracker;
use crate::limit::{Check, Decision, Key, Policies, RateLimited};
use crate::observe::Observer;
use crate::refunds::Reserved;
use crate::settle::{Reservation, ReserveError};
use crate::store::{Answer, Store};
use crate::util::instant;
use crate::wait_queues::{Bounds, Spent, WaitQueues, WaitRequest};

/// A store with policies, for code that is not a tower service: a job worker, a WebSocket loop.
///
/// Clones share the store's counts and the queue of waiters.
///
/// ```
/// use std::time::Duration;
/// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mails = Policy::new("mails", Strategy::Gcra, Quota::per_minute(60).burst(10))?;
/// let limiter = Limiter::new(LocalStore::default(), mails);
/// let user = Key::new("user-42");
///
/// assert!(limiter.take(user, 8).await?.is_allowed());
/// assert_eq!(limiter.up_to(user, 5).await?.granted(), 2);
/// assert!(limiter.wait(user, 1, Duration::from_secs(5)).await?.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Limiter<S> {
    store: S,
    policies: Policies,
    wait_queues: WaitQueues,
    /// The requests in flight of reservations, and what settles them.
    in_flight: InFlightTracker,
    notifier: Notifier,
}

/// The [`Decision`] on what was asked for its effect: a charge, a refund or a reset. Unlike a decision, it need not be
/// looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done(Decision);

impl Deref for Done {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        &self.0
    }
}

impl<S: Store> Limiter<S> {
    /// Counts in `store` under one policy or several.
    pub fn new(store: S, policies: impl Into<Policies>) -> Self {
        let in_flight = InFlightTracker::new(&store, None);
        let wait_queues = WaitQueues::new(store.clone(), Bounds::DEFAULT);
        let wait_queues = wait_queues.with_tracker(in_flight.clone());
        Self {
            store,
            policies: policies.into(),
            wait_queues,
            in_flight,
            notifier: Notifier::default(),
        }
    }

    /// Sets the observer of the store, notified for example when a [`Fallback`](crate::Fallback) decides locally, if
    /// the store has none yet; of each [`Reservation`] that could not be settled; and of a policy that is leased for
    /// nothing. It is not notified of decisions, which are returned. Defaults to [a log of what needs
    /// attention](Observer); `()` turns that off.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        self.store.observe(&observer);
        let in_flight = InFlightTracker::new(&self.store, Some(Arc::clone(&observer)));
        let wait_queues = self.wait_queues.with_tracker(in_flight.clone());
        Self {
            wait_queues,
            in_flight,
            notifier: Notifier::new(observer),
            ..self
        }
    }

    /// Sets how many may [wait](Self::wait) in this process; one more is denied at once. Defaults to 10,000. Earlier
    /// clones keep their setting.
    #[must_use]
    pub fn max_waiting(self, max: NonZeroUsize) -> Self {
        Self {
            wait_queues: self.wait_queues.with_bounds(Bounds::of(max)),
            ..self
        }
    }

    /// Takes `cost`, all or nothing. See [`Check::take`].
    pub fn take(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.send(Check::take(key, &self.policies, cost))
    }

    /// Takes `cost`, all or nothing, as a [`Reservation`]: it is refunded if that is dropped, or kept, or replaced by
    /// the real cost. Under a policy of requests [in flight](crate::Policy::in_flight) it is one request, which ends
    /// when the reservation is dropped or settled, and is renewed until then:
    ///
    /// ```
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let jobs = Limiter::new(LocalStore::default(), Policy::in_flight("jobs", 2)?);
    /// let user = Key::new("user-42");
    ///
    /// let one = jobs.reserve(user, 1).await?;
    /// let two = jobs.reserve(user, 1).await?;
    /// assert!(jobs.reserve(user, 1).await.is_err());
    ///
    /// drop(one);
    /// assert!(jobs.reserve(user, 1).await.is_ok());
    /// # drop(two);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [`take`](Self::take) and the others take a slot too, but do not release it: it expires after its [time to
    /// live](crate::Policy::slot_ttl).
    ///
    /// Outside of a tokio runtime, where only a [`LocalStore`](crate::LocalStore) works, nothing is renewed in the
    /// background, but by the next call of this method.
    ///
    /// Dropping the future does not refund: what it has charged by then stays charged, but nothing is in flight.
    ///
    /// # Errors
    ///
    /// [`ReserveError::Denied`], and [`ReserveError::Failed`] if the store could not decide.
    pub async fn reserve(&self, key: Key, cost: u32) -> Result<Reservation, ReserveError> {
        self.in_flight.refunds().wake();
        let since = instant();
        let check = Check::take(key, &self.policies, cost).reserving(true);
        let mut slot = self.in_flight.hold(&check);
        let answer = self.send(check).await;
        if let Some(slot) = &mut slot {
            slot.answered(answer.as_ref());
        }
        match answer {
            Ok(decision) if decision.is_allowed() => Ok(Reservation::new(
                Reserved::new(decision, key, cost, since),
                slot,
                Arc::clone(self.in_flight.refunds()),
            )),
            Ok(denied) => Err(ReserveError::Denied(RateLimited::new(denied))),
            Err(error) => Err(ReserveError::Failed(error)),
        }
    }

    /// Takes as much of `cost` as there is room for. See [`Check::up_to`].
    pub fn up_to(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.send(Check::up_to(key, &self.policies, cost))
    }

    fn send(&self, check: Check) -> Answer<S::Future> {
        let answer = self.store.check(check);
        self.notifier.unless_leased(&self.policies);
        answer
    }

    /// Decides whether `cost` would pass. See [`Check::peek`].
    pub fn peek(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.store.check(Check::peek(key, &self.policies, cost))
    }

    /// Charges `cost` in any case. See [`Check::charge`]. Beside other policies, one of requests [in
    /// flight](crate::Policy::in_flight) is left out, also from the decision: it counts requests, not costs.
    pub fn charge(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Done, StoreError>> + Send + use<S> {
        self.effect(Check::charge(key, self.of_costs(), cost))
    }

    /// Refunds `cost`. See [`Check::refund`]. A policy of requests in flight is left out as in a
    /// [charge](Self::charge).
    pub fn refund(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Done, StoreError>> + Send + use<S> {
        self.effect(Check::refund(key, self.of_costs(), cost))
    }

    /// The policies that count costs, or all if there are none.
    fn of_costs(&self) -> &Policies {
        self.policies.without_in_flight().unwrap_or(&self.policies)
    }

    /// Forgets all charges of the caller. See [`Check::reset`].
    pub fn reset(
        &self,
        key: Key,
    ) -> impl Future<Output = Result<Done, StoreError>> + Send + use<S> {
        self.effect(Check::reset(key, &self.policies))
    }

    /// Asks at once, and waits for the answer.
    fn effect(
        &self,
        check: Check,
    ) -> impl Future<Output = Result<Done, StoreError>> + Send + use<S> {
        let answer = self.store.check(check);
        async { answer.await.map(Done) }
    }

    /// Takes `cost`, and waits for it up to `max` if necessary.
    ///
    /// The waiters for one key in this process are served in the order in which they came, whatever their costs. The
    /// decision is a denial if the wait would exceed `max`, as soon as this is known, or if [too
    /// many](Self::max_waiting) wait. Store calls do not count towards `max`: no caller is denied for their duration
    /// while there is room, and a denial may come two or three calls later.
    ///
    /// Dropping the future ends the wait and takes nothing: what was granted just then is refunded by a separate task.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub async fn wait(&self, key: Key, cost: u32, max: Duration) -> Result<Decision, StoreError> {
        let deadline = instant().checked_add(max);
        if self.policies.iter().any(|policy| policy.never_fits(cost)) {
            return self.take(key, cost).await;
        }
        let wanted = WaitRequest {
            key,
            policies: self.policies.clone(),
            cost,
            deadline,
        };
        // A wait is charged ahead of time, which no block does.
        self.notifier.unless_leased(&self.policies);
        let permit = match self.wait_queues.join(wanted, None) {
            Ok(turn) => turn.await,
            Err(refusal) => Err(refusal),
        };
        let Spent { decision, slot, .. } = match permit {
            Ok(permit) => permit.spend(),
            Err(refusal) => return refusal.into_answer(),
        };
        if let Some(slot) = slot {
            slot.leave_counted();
        }
        Ok(decision)
    }
}

impl<S: fmt::Debug> fmt::Debug for Limiter<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("store", &self.store)
            .field("policies", &self.policies)
            .field("wait_queues", &self.wait_queues)
            .finish_non_exhaustive()
    }
}
