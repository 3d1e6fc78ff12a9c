use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use crate::error::StoreError;
use crate::gate::Notifier;
use crate::held_slots::InFlightTracker;
use crate::leases::without_block;
use crate::limit::{Check, Decision, IsPolicies, Key, Policies, RateLimited};
use crate::observe::Observer;
use crate::settle::{Reservation, ReserveError};
use crate::store::{Answer, Store, flush};
use crate::util::instant;
use crate::wait_queues::{Bounds, Spent, WaitQueues};

/// A store with policies, for code that is not a tower service, such as a job worker or a WebSocket
/// loop.
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
///
/// # Runtimes
///
/// [`take`](Self::take) and the other methods that are no `async fn` send the check when they are called, not when the
/// result is polled. In `runtime.block_on(limiter.take(key, 1))` that is outside of the runtime. There a
/// [`RedisStore`](crate::RedisStore) decides nothing, and a [`Fallback`](crate::Fallback) decides each check locally. Call
/// them inside: `runtime.block_on(async { limiter.take(key, 1).await })`.
///
/// The tasks that settle and release [reservations](Self::reserve) and renew their slots run on the tokio
/// runtime that first needed them. After that runtime has shut down, the next check starts them on its
/// own runtime. While that runtime is alive and runs nothing, no reservation of any runtime is settled,
/// released or renewed. A multi-threaded runtime always runs, and so does `#[tokio::main]`. A
/// current-thread runtime runs only inside of `block_on`: with a `block_on` for each check, a refund may
/// never be sent. Keep one thread in `block_on` there, or use a multi-threaded runtime.
#[derive(Clone)]
pub struct Limiter<S> {
    store: S,
    policies: Policies,
    wait_queues: WaitQueues,
    /// Tracks the requests in flight of reservations, and settles reservations.
    in_flight: InFlightTracker,
    notifier: Notifier,
}

/// The [`Decision`] on a charge, refund or reset. It may be ignored: the operation has already
/// taken effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied(Decision);

impl Applied {
    /// Returns the decision.
    pub fn decision(&self) -> &Decision {
        &self.0
    }

    /// Returns the decision by value.
    pub fn into_decision(self) -> Decision {
        self.0
    }
}

impl<S: Store> Limiter<S> {
    /// Creates a limiter that counts in `store` under one or several policies.
    pub fn new(store: S, policies: impl IsPolicies) -> Self {
        let in_flight = InFlightTracker::new(&store, None);
        let queues = WaitQueues::new(store.clone(), Bounds::DEFAULT);
        let wait_queues = queues.with_tracker(in_flight.clone());
        Self {
            store,
            policies: policies.into(),
            wait_queues,
            in_flight,
            notifier: Notifier::default(),
        }
    }

    /// Sets the observer. It receives a store's events, such as that a
    /// [`Fallback`](crate::Fallback) decides locally, unless the store has an observer; each
    /// [`Reservation`] that could not be settled; each policy that is leased without effect; and one
    /// that has another quota in another limiter or layer, which is only
    /// [suspected](Observer::suspected). It does not receive decisions, which are returned to the caller: report them by
    /// [`Observer::decided`], with [`Decided::new`](crate::observe::event::Decided::new). Defaults to [a
    /// log of problems](Observer); `()` disables that.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        self.store.backend().observe(&observer);
        let in_flight = InFlightTracker::new(&self.store, Some(Arc::clone(&observer)));
        let wait_queues = self.wait_queues.with_tracker(in_flight.clone());
        Self {
            wait_queues,
            in_flight,
            notifier: Notifier::new(observer),
            ..self
        }
    }

    /// Sets the maximum number of concurrent [waiters](Self::wait) in this process; further ones
    /// are denied immediately. Defaults to 10,000. Earlier clones keep their setting.
    #[must_use]
    pub fn max_waiting(self, max: NonZeroUsize) -> Self {
        Self {
            wait_queues: self.wait_queues.with_bounds(Bounds::of(max)),
            ..self
        }
    }

    /// Takes `cost`, all or nothing. See [`Check::take`]. Call it [inside of a runtime](Self#runtimes).
    pub fn take(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.send(Check::take(key, &self.policies, cost))
    }

    /// Takes `cost`, all or nothing, and once for each `id` of the caller: a repeated take under this
    /// id gets the decision of the first one, and is not charged. Under policies with requests [in
    /// flight](crate::Policy::in_flight) each take is charged. See [`Check::with_id`].
    ///
    /// ```
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mails = Policy::new("mails", Strategy::Gcra, Quota::per_minute(60).burst(10))?;
    /// let limiter = Limiter::new(LocalStore::default(), mails);
    /// let user = Key::new("user-42");
    ///
    /// // The queue delivers a message twice.
    /// for _ in 0..2 {
    ///     assert_eq!(limiter.take_with_id(user, 8, "message-7").await?.remaining(), 2);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias("idempotency", "Idempotency-Key"))]
    pub fn take_with_id(&self, key: Key, cost: u32, id: impl AsRef<[u8]>) -> Answer<S::Future> {
        self.send(Check::take(key, &self.policies, cost).with_id(id))
    }

    /// Takes `cost`, all or nothing, as a [`Reservation`]. Dropping the reservation refunds the
    /// cost; it can also be kept, or replaced by the actual cost. Under a policy of requests [in
    /// flight](crate::Policy::in_flight), the reservation is one request, which is renewed until
    /// the reservation is dropped or settled:
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
    /// [`take`](Self::take) and the other methods take a slot too, but do not release it: the slot
    /// expires after its [time to live](crate::Policy::slot_ttl).
    ///
    /// Outside of a Tokio runtime, where only a [`LocalStore`](crate::LocalStore) works, slots are
    /// not renewed in the background, only by the next call of this method.
    ///
    /// Dropping the future refunds nothing: a cost that is already charged stays charged, but
    /// nothing is in flight.
    ///
    /// # Errors
    ///
    /// [`ReserveError::Denied`] if the policies deny the cost, and [`ReserveError::Failed`] if the
    /// store could not decide.
    pub async fn reserve(&self, key: Key, cost: u32) -> Result<Reservation, ReserveError> {
        // Restart the sender if its runtime has shut down: it will settle the reservation.
        self.in_flight.ops().wake();
        let since = instant();
        let check = without_block(Check::take(key, &self.policies, cost));
        // Before the check is sent: if this future is dropped before the reply, the slot is released.
        let mut slot = self.in_flight.track(&check);
        let answer = self.send(check).await;
        if let Some(slot) = &mut slot {
            slot.on_reply(answer.as_ref());
        }
        match answer {
            Ok(decision) if decision.is_allowed() => {
                let ops = self.in_flight.ops().clone();
                Ok(Reservation::new(key, decision, cost, since, slot, ops))
            }
            Ok(denied) => Err(ReserveError::Denied(RateLimited::new(denied))),
            Err(error) => Err(ReserveError::Failed(error)),
        }
    }

    /// Takes `cost`, or the largest part of it that is allowed. See [`Check::up_to`].
    pub fn up_to(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.send(Check::up_to(key, &self.policies, cost))
    }

    fn send(&self, check: Check) -> Answer<S::Future> {
        self.report_shared_count();
        self.notifier.send(&self.store, check)
    }

    /// Reports, once, a policy with another quota in another limiter or layer.
    #[inline]
    fn report_shared_count(&self) {
        self.notifier
            .shared_count(|| self.store.backend().waiters(), &self.policies);
    }

    /// Decides whether `cost` would be allowed. See [`Check::peek`].
    pub fn peek(&self, key: Key, cost: u32) -> Answer<S::Future> {
        self.store.check(Check::peek(key, &self.policies, cost))
    }

    /// Charges `cost` even beyond the limit. See [`Check::charge`]. A policy of requests [in
    /// flight](crate::Policy::in_flight) counts requests, not costs. If there are other policies,
    /// it is skipped, also in the decision.
    pub fn charge(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Applied, StoreError>> + Send + use<S> {
        self.effect(Check::charge(key, self.of_costs(), cost))
    }

    /// Refunds `cost`. See [`Check::refund`]. A policy of requests in flight is skipped, as in a
    /// [charge](Self::charge).
    pub fn refund(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Applied, StoreError>> + Send + use<S> {
        self.effect(Check::refund(key, self.of_costs(), cost))
    }

    /// Returns the policies that count costs, or all policies if no policy does.
    fn of_costs(&self) -> &Policies {
        self.policies.without_in_flight().unwrap_or(&self.policies)
    }

    /// Resets the caller's counts. See [`Check::reset`].
    pub fn reset(
        &self,
        key: Key,
    ) -> impl Future<Output = Result<Applied, StoreError>> + Send + use<S> {
        self.effect(Check::reset(key, &self.policies))
    }

    /// Sends the check immediately, and returns a future of the result.
    fn effect(
        &self,
        check: Check,
    ) -> impl Future<Output = Result<Applied, StoreError>> + Send + use<S> {
        // Sent here, so that it is not lost if the future is dropped before its first poll.
        let answer = self.store.check(check);
        async { answer.await.map(Applied) }
    }

    /// Waits until this process owes the store nothing, for at most 1 s: [`Store::flush`]. That includes this limiter's
    /// [reservations](Self::reserve), and the operations of other limiters and layers over the store. Returns `false` if something
    /// is left. Call it at the end of a process, which loses the rest.
    ///
    /// ```
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Quota, Strategy};
    ///
    /// #[tokio::main(flavor = "current_thread")]
    /// async fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     let rows = Policy::new("rows", Strategy::SlidingLog, Quota::per_hour(10_000))?;
    ///     let limiter = Limiter::new(LocalStore::default(), rows);
    ///
    ///     let job = limiter.reserve(Key::new("user-42"), 8_000).await?;
    ///     job.settle(1_200);
    ///
    ///     assert!(limiter.flush().await);
    ///     Ok(())
    /// }
    /// ```
    pub async fn flush(&self) -> bool {
        flush(&self.store, Some(self.in_flight.ops())).await
    }

    /// Takes `cost`, waiting up to `max` if necessary.
    ///
    /// Waiters for one key in this process are served in FIFO order. Under strategies that refill
    /// gradually, waiters of different costs are served in the order in which the store has reserved
    /// their turns.
    /// The decision is a denial if the wait would exceed `max`, as soon as that is certain, or if
    /// the [maximum](Self::max_waiting) number of waiters is reached. Store calls do not count
    /// towards `max`: no caller is denied because of their duration while the cost is allowed, and
    /// a denial may be returned two or three calls later.
    ///
    /// A task that waits for one unit after another takes at most one per round trip to the store. For a faster rate,
    /// wait for several units, or from several tasks.
    ///
    /// Dropping the future ends the wait and takes nothing: a grant that arrives at that moment is
    /// refunded by a separate task.
    ///
    /// # Errors
    ///
    /// Returns the error of the store.
    pub async fn wait(&self, key: Key, cost: u32, max: Duration) -> Result<Decision, StoreError> {
        let deadline = instant().checked_add(max);
        // Denied without a turn: other requests would wait behind it forever.
        if self.policies.iter().any(|policy| policy.never_fits(cost)) {
            return self.take(key, cost).await;
        }
        self.report_shared_count();
        let take = Check::take(key, &self.policies, cost);
        // Waiting does not use leased blocks.
        self.notifier.never_leased(&self.policies);
        let permit = match self.wait_queues.join(&take, deadline, None) {
            Ok(turn) => turn.await,
            Err(refusal) => Err(refusal),
        };
        let Spent { decision, slot, .. } = match permit {
            Ok(permit) => permit.spend(),
            Err(refusal) => return refusal.into_answer(),
        };
        // The decision does not show when the request ends, so the slot expires.
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
