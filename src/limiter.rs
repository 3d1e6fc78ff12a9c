use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::Either;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::background::OpQueue;
use crate::blocks::{self, BlockChange, BlockChangeKind, Blocks};
use crate::error::{ConfigError, StoreError};
use crate::gate::{Blocking, Notifier, PolicySelector, Selector, denial};
use crate::held_slots::{InFlightTracker, Slot};
use crate::limit::{
    BlockAfter, Charge, Check, Decision, Extra, JointCheck, JointDecision, Key, Mode, Policies,
    Quota, RateLimited, Source, Verdict,
};
use crate::observe::mistakes::UNENFORCED_BLOCK;
use crate::observe::{Observer, UncountedReason, shared_observer};
use crate::settle::{Reservation, ReserveError};
use crate::store::{Answer, JointFuture, Store, flush};
use crate::util::instant;
use crate::wait_queues::{Bounds, NoPermit, Permit, Spent, WaitQueues};

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
/// # Policies
///
/// The policies are a [`PolicySelector`] of the key: a [`Policy`](crate::Policy) or [`Policies`] for all callers,
/// [`Tiers`](crate::select::Tiers), [`Live`](crate::select::Live), or a closure. Limits that come from a database are
/// given [for each call](Self::under).
///
/// ```
/// use tower_redis_ratelimit::select::{Live, Tiers};
/// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Strategy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mails = |quota| Policy::new("mails", Strategy::SlidingLog, quota);
/// let large = Key::new("user-7");
/// let live = Live::new(Tiers::new(mails("60/h")?).caller(large, mails("6000/h")?));
/// let limiter = Limiter::new(LocalStore::default(), live.clone());
///
/// assert!(limiter.take(large, 100).await?.is_allowed());
/// live.replace(Tiers::new(mails("50/h")?));
/// assert!(!limiter.take(large, 1).await?.is_allowed());
/// # Ok(())
/// # }
/// ```
///
/// The selector may exempt a caller, who is not counted then. The decisions on that caller allow everything, under a policy named `exempt`, and
/// their source is `Source::Other("exempt")`. It may also return [`Policies::blocked`], which denies everything.
///
/// # Denials
///
/// | method | a denial is |
/// |---|---|
/// | [`take`](Self::take), [`take_with_id`](Self::take_with_id), [`up_to`](Self::up_to), [`wait`](Self::wait), [`peek`](Self::peek) | `Ok` of a [`Decision`]: both answers have a remaining amount, and a denial is no failure of the limiter. With [`Decision::allowed`], `?` returns a denial |
/// | [`reserve`](Self::reserve), [`reserve_within`](Self::reserve_within) | [`ReserveError::Denied`]: there is no [`Reservation`] to return |
/// | [`charge`](Self::charge), [`refund`](Self::refund), [`reset`](Self::reset) | impossible: they are never denied |
///
/// # Runtimes
///
/// Every method sends its check when it is called, not when its future is polled. The future borrows nothing. In
/// `runtime.block_on(limiter.take(key, 1))` the call is outside of the runtime. There a
/// [`RedisStore`](crate::RedisStore) decides nothing, a [`Fallback`](crate::Fallback) decides each check locally, and
/// nothing can wait. Call them inside: `runtime.block_on(async { limiter.take(key, 1).await })`.
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
    limits: Limits,
    wait_queues: WaitQueues,
    /// Tracks the requests in flight of reservations, and settles reservations.
    in_flight: InFlightTracker,
    notifier: Notifier,
    /// `None` if blocks are not enforced.
    blocking: Option<Blocking<Key>>,
    forbids_blocked: bool,
    extends_blocks: bool,
}

/// The policies of a call.
#[derive(Clone)]
enum Limits {
    Selected(Selector<Key>),
    /// Given for a call: the quotas of one name may differ.
    Given(Policies),
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

/// A granted cost, with its charge and its slot.
struct Granted {
    decision: Decision,
    /// `None` for an exempt caller.
    charge: Option<Charge>,
    slot: Option<Slot>,
}

/// A check whose decision is reported to the observer.
struct Reported {
    notifier: Notifier,
    key: Key,
    cost: u32,
    /// Time of the call. `None` if no observer needs it.
    since: Option<Instant>,
    is_exempt: bool,
    /// Counts and sends denials. `None` if blocks are not enforced.
    blocking: Option<(Blocking<Key>, OpQueue)>,
}

impl<S: Store> Limiter<S> {
    /// Creates a limiter that counts in `store`. `policies` selects the policies of a caller: see [Policies](#policies).
    pub fn new(store: S, policies: impl PolicySelector<Key>) -> Self {
        let in_flight = InFlightTracker::new(&store, None);
        let queues = WaitQueues::new(store.clone(), Bounds::DEFAULT);
        let wait_queues = queues.with_tracker(in_flight.clone());
        Self {
            store,
            limits: Limits::Selected(Selector::new(policies)),
            wait_queues,
            in_flight,
            notifier: Notifier::default(),
            blocking: None,
            forbids_blocked: false,
            extends_blocks: false,
        }
    }

    /// Returns this limiter with other policies, such as the limits of a customer that the application has read from its
    /// database. Counts, waiters and the observer are shared, and nothing is allocated, so call it for each check:
    ///
    /// ```
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policies, Policy, Quota, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let of_customer = |limit| Policy::new("exports", Strategy::SlidingLog, Quota::per_day(limit)).map(Policies::from);
    /// let limiter = Limiter::new(LocalStore::default(), of_customer(10)?);
    ///
    /// // From the customer's row. Keep it with the row: a list caches derived values.
    /// let bought = of_customer(500)?;
    /// let decision = limiter.under(&bought).take(Key::new("customer-7"), 20).await?;
    /// assert_eq!(decision.remaining(), 480);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Customers may have different quotas under one name. If all of them are counted by windows, logs or counters, a
    /// changed limit continues the count.
    #[must_use]
    pub fn under(&self, policies: &Policies) -> Self {
        Self {
            store: self.store.clone(),
            limits: Limits::Given(policies.clone()),
            wait_queues: self.wait_queues.clone(),
            in_flight: self.in_flight.clone(),
            notifier: self.notifier.clone(),
            blocking: self.blocking.clone(),
            forbids_blocked: self.forbids_blocked,
            extends_blocks: self.extends_blocks,
        }
    }

    /// Blocks a caller who is denied too often, like [that of a layer](crate::RateLimitLayer::block_after). Denied calls of
    /// [`take`](Self::take), [`take_with_id`](Self::take_with_id), [`up_to`](Self::up_to), [`wait`](Self::wait),
    /// [`reserve`](Self::reserve) and [`reserve_within`](Self::reserve_within) are strikes, and these methods and
    /// [`peek`](Self::peek) deny a blocked caller.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let codes = Policy::new("codes", Strategy::SlidingLog, "5/min")?;
    /// let limiter = Limiter::new(LocalStore::default(), codes).block_after("20/min", Duration::from_secs(600))?;
    ///
    /// // Also by an operator.
    /// let user = Key::new("user-42");
    /// limiter.block(user, Duration::from_secs(86_400)).await?;
    /// assert!(!limiter.take(user, 1).await?.is_allowed());
    /// limiter.unblock(user).await?;
    /// assert!(limiter.take(user, 1).await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`BlockAfter::new`](crate::reject::BlockAfter::new).
    pub fn block_after(
        self,
        strikes: impl TryInto<Quota, Error: Into<ConfigError>>,
        time: Duration,
    ) -> Result<Self, ConfigError> {
        let rule = BlockAfter::new(strikes, time)?;
        Ok(Self {
            blocking: Some(Blocking::new(&self.store, Some(rule))),
            ..self
        })
    }

    /// Enforces the blocks of [`block`](Self::block) and of layers. Denials begin no block. Included in
    /// [`block_after`](Self::block_after).
    #[must_use]
    pub fn with_blocks(self) -> Self {
        Self {
            blocking: Some(Blocking::new(&self.store, None)),
            ..self
        }
    }

    /// Sets whether denials of a caller that [`block_after`](Self::block_after) has blocked extend the block, like
    /// [that of a layer](crate::RateLimitLayer::extend_blocks). A [`peek`](Self::peek) does not. Defaults to `false`.
    #[must_use]
    pub fn extend_blocks(self, extend: bool) -> Self {
        Self {
            extends_blocks: extend,
            ..self
        }
    }

    /// Gives the denials of blocked callers the source [`Source::Forbidden`], whose response over HTTP is a 403. See
    /// [that of a layer](crate::RateLimitLayer::forbid_blocked).
    #[must_use]
    pub fn forbid_blocked(self) -> Self {
        Self {
            forbids_blocked: true,
            ..self
        }
    }

    /// Blocks a caller for `time`, at most 366 days: in every instance within a second, in each layer and limiter over
    /// the store that enforces blocks ([`block_after`](Self::block_after) or [`with_blocks`](Self::with_blocks)), and whose first policy
    /// has the name of the caller's first policy here. A blocked caller keeps the later end. A time below a millisecond
    /// does nothing.
    ///
    /// [`reset`](Self::reset) ends no block: [`unblock`](Self::unblock) does.
    ///
    /// # Errors
    ///
    /// Returns the error of the store. Then the block holds in this process, and is sent when the store can be
    /// reached, if a layer or limiter of this process enforces blocks.
    pub fn block(
        &self,
        key: Key,
        time: Duration,
    ) -> impl Future<Output = Result<(), StoreError>> + Send + 'static {
        let end = instant() + time.min(blocks::LONGEST);
        self.change_block(key, BlockChangeKind::Extend(end))
    }

    /// Ends the block of a caller and, if this limiter has [`block_after`](Self::block_after), the strikes: in every instance within a
    /// second. Strikes that other instances have not sent yet remain.
    ///
    /// # Errors
    ///
    /// As [`block`](Self::block).
    pub fn unblock(
        &self,
        key: Key,
    ) -> impl Future<Output = Result<(), StoreError>> + Send + 'static {
        let strikes = match &self.blocking {
            Some(blocking) => blocking.unblock(self.policies(&key)[0].name(), key),
            None => None,
        };
        let reset = strikes.map(|strikes| self.store.check(strikes));
        let changed = self.change_block(key, BlockChangeKind::End { was_known: false });
        async move {
            if let Some(reset) = reset {
                let _reset = reset.await?;
            }
            changed.await
        }
    }

    fn change_block(
        &self,
        key: Key,
        kind: BlockChangeKind,
    ) -> impl Future<Output = Result<(), StoreError>> + Send + 'static {
        let blocks = match &self.blocking {
            Some(blocking) => Some(blocking.blocks().clone()),
            None => self.store.backend().blocks(),
        };
        let may_be_enforced = blocks.as_ref().is_some_and(Blocks::may_be_enforced);
        if !may_be_enforced && matches!(kind, BlockChangeKind::Extend(_)) {
            self.in_flight.ops().suspect(&format!(
                "a `Limiter` has blocked a caller, and no layer or limiter over its store enforces blocks: add `.with_blocks()` or \
                 `.block_after(..)` to each that must deny the caller{UNENFORCED_BLOCK}"
            ));
        }
        let sent = blocks.map(|blocks| {
            let caller = blocks::caller(self.policies(&key)[0].name(), &key);
            let changes = blocks.change_and_take(BlockChange { caller, kind });
            self.store.backend().send_blocks(changes)
        });
        async move {
            match sent {
                Some(sent) => sent.await,
                None => Ok(()),
            }
        }
    }

    /// Returns the decision on a check that the store need not decide: its caller is exempt or blocked.
    fn without_store(&self, check: &Check) -> Option<Decision> {
        let policies = check.policies();
        let admits = matches!(check.mode(), Mode::Take | Mode::UpTo | Mode::Peek);
        if policies.is_exempt() {
            Some(exempt_decision(check))
        } else if policies.are_blocked() && admits {
            Some(denial(check, None, self.forbids_blocked))
        } else if policies.are_blocked() {
            // Nothing is charged, so there is nothing to refund.
            Some(check.decided(Source::Blocked, 0, |_| Verdict::allowed().with_remaining(0)))
        } else if admits {
            self.block_of(check)
        } else {
            None
        }
    }

    /// Returns the denial of a check if its caller is blocked.
    fn block_of(&self, check: &Check) -> Option<Decision> {
        let blocking = self.blocking.as_ref()?;
        // Also starts the task again if its runtime has shut down.
        self.store.backend().sync_blocks();
        let key = check.key();
        let rest = blocking.rest(key, key, check.policies())?;
        if self.extends_blocks && check.mode() != Mode::Peek {
            blocking.extend(key, key, check.policies(), rest);
        }
        Some(denial(check, Some(rest), self.forbids_blocked))
    }

    /// Sets the observer. As that of a layer, it receives the [decisions](crate::observe::Event::Decided) on all takes:
    /// [`take`](Self::take), [`take_with_id`](Self::take_with_id), [`up_to`](Self::up_to), [`wait`](Self::wait),
    /// [`reserve`](Self::reserve) and [`reserve_within`](Self::reserve_within), and [exempt](crate::observe::Event::Uncounted) callers.
    /// It also receives each [failure](crate::observe::Event::Failed) of the store; each [`Reservation`] that could not be settled; each
    /// policy that is leased without effect; and, only [suspected](crate::observe::Event::Suspected), each policy with another quota in another
    /// limiter or layer, an id that never changes, and a block that nothing enforces. Unless the store has an observer, it receives
    /// the store's events too, such as that a [`Fallback`](crate::Fallback) decides locally. Defaults to
    /// [a log of problems](Observer); `()` disables that.
    #[must_use]
    pub fn observer(self, observer: impl Observer) -> Self {
        let observer = shared_observer(observer);
        self.store.backend().observe(&observer);
        if let Limits::Selected(selector) = &self.limits {
            selector.observe(&observer);
        }
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
    ///
    /// # Errors
    ///
    /// Returns the error of the store. A denial is [`Ok`](Self#denials).
    pub fn take(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        self.decide(Check::take(key, &self.policies(&key), cost))
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
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    #[doc(alias("idempotency", "Idempotency-Key"))]
    pub fn take_with_id(
        &self,
        key: Key,
        cost: u32,
        id: impl AsRef<[u8]>,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        let id = Key::new(id);
        self.notifier.has_id(&id);
        let take = Check::take(key, &self.policies(&key), cost);
        self.decide(take.with_extra(Extra::Id(id)))
    }

    /// Takes `cost` of each of several keys under its own policies, all or nothing: of a user, its organization and the
    /// whole service. A denial charges nothing, and names the denying [policy](Decision::policy). The limiter's own
    /// policies are not used.
    ///
    /// ```
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policies, Policy, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let per_user = Policies::from(Policy::new("user", Strategy::Gcra, "10/h")?);
    /// let per_org = Policies::from(Policy::new("org", Strategy::Gcra, "15/h")?);
    /// let limiter = Limiter::new(LocalStore::default(), per_user.clone());
    /// let take = |user| limiter.take_all([(Key::new(user), &per_user), (Key::new("acme"), &per_org)], 10);
    ///
    /// assert!(take("ann").await?.is_allowed());
    /// assert_eq!(take("bob").await?.policy().name(), "org");
    /// assert_eq!(limiter.peek(Key::new("bob"), 0).await?.remaining(), 10);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [Several keys](crate::guide::keys#several-keys) has the guarantees of each store. A blocked caller is the first key.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take), and of the kind [`Configuration`](crate::store::ErrorKind::Configuration) as
    /// [`JointCheck::take`](crate::check::JointCheck::take).
    pub fn take_all<'a>(
        &self,
        parts: impl IntoIterator<Item = (Key, &'a Policies)>,
        cost: u32,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        let parts: SmallVec<[(Key, &Policies); JointCheck::MAX_KEYS]> = parts.into_iter().collect();
        if let Some(take) = blocked_take(&parts, cost) {
            return Either::Left(self.decide(take));
        }
        let decided = JointCheck::take(parts, cost).map(|joint| self.decide_all(joint));
        Either::Right(async move { Ok(decided?.await?.into_decision()) })
    }

    /// Takes `cost`, or the largest part of it that is allowed. See [`Check::up_to`].
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn up_to(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        self.decide(Check::up_to(key, &self.policies(&key), cost))
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
    /// As [`take`](Self::take).
    pub fn wait(
        &self,
        key: Key,
        cost: u32,
        max: Duration,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        let granted = self.grant_within(key, cost, max);
        async move {
            match granted.await {
                Ok(Granted { decision, slot, .. }) => {
                    // The decision does not show when the request ends, so the slot expires.
                    if let Some(slot) = slot {
                        slot.leave_counted();
                    }
                    Ok(decision)
                }
                Err(refusal) => refusal.into_answer(),
            }
        }
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
    /// [`take`](Self::take) and [`wait`](Self::wait) take a slot too, but do not release it: the slot
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
    pub fn reserve(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Reservation, ReserveError>> + Send + 'static {
        let granted = self.grant(key, cost);
        let ops = self.in_flight.ops().clone();
        async move { Ok(granted.await?.into_reservation(ops)) }
    }

    /// Takes `cost` of each of several keys as one [`Reservation`], as [`take_all`](Self::take_all) does. It settles the
    /// same cost of each key, and holds a slot under the policies of requests in flight of each.
    ///
    /// # Errors
    ///
    /// As [`reserve`](Self::reserve) and [`take_all`](Self::take_all).
    pub fn reserve_all<'a>(
        &self,
        parts: impl IntoIterator<Item = (Key, &'a Policies)>,
        cost: u32,
    ) -> impl Future<Output = Result<Reservation, ReserveError>> + Send + 'static {
        let ops = self.in_flight.ops().clone();
        // Restart the sender if its runtime has shut down: it will settle the reservation.
        ops.wake();
        let since = instant();
        let parts: SmallVec<[(Key, &Policies); JointCheck::MAX_KEYS]> = parts.into_iter().collect();
        if let Some(take) = blocked_take(&parts, cost) {
            let denied = self.decide(take);
            return Either::Left(async move {
                let denied = RateLimited::new(denied.await?);
                Err(ReserveError::Denied(denied))
            });
        }
        let sent = JointCheck::take(parts, cost).map(|joint| {
            // Before the check is sent: if this future is dropped before the reply, the slots are released.
            let slots = self.in_flight.track_all(&joint);
            let answer = self.decide_all(joint.clone());
            (joint, slots, answer)
        });
        Either::Right(async move {
            let (joint, mut slots, answer) = sent.map_err(StoreError::from)?;
            let answer = answer.await;
            slots.on_reply(answer.as_ref());
            let decided = answer?;
            if !decided.decision().is_allowed() {
                let denied = RateLimited::new(decided.into_decision());
                return Err(ReserveError::Denied(denied));
            }
            let charges = decided.charges(&joint, since, instant());
            let decision = decided.into_decision();
            Ok(Reservation::new(decision, charges, slots, ops))
        })
    }

    /// Takes `cost` as a [`Reservation`], like [`reserve`](Self::reserve), waiting up to `max` if necessary, as
    /// [`wait`](Self::wait) does.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let jobs = Limiter::new(LocalStore::default(), Policy::in_flight("jobs", 1)?);
    /// let user = Key::new("user-42");
    ///
    /// let first = jobs.reserve(user, 1).await?;
    /// let second = jobs.reserve_within(user, 1, Duration::from_secs(30));
    /// drop(first);
    /// second.await?.keep();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Dropping the future ends the wait and takes nothing.
    ///
    /// # Errors
    ///
    /// As [`reserve`](Self::reserve). A wait that would exceed `max` is [`ReserveError::Denied`].
    pub fn reserve_within(
        &self,
        key: Key,
        cost: u32,
        max: Duration,
    ) -> impl Future<Output = Result<Reservation, ReserveError>> + Send + 'static {
        let granted = self.grant_within(key, cost, max);
        let ops = self.in_flight.ops().clone();
        async move { Ok(granted.await?.into_reservation(ops)) }
    }

    /// Decides whether `cost` would be allowed. See [`Check::peek`]. The observer does not receive the decision, since it
    /// admits nothing.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn peek(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        self.ask(Check::peek(key, &self.policies(&key), cost))
    }

    /// Charges `cost` even beyond the limit. See [`Check::charge`]. A policy of requests [in
    /// flight](crate::Policy::in_flight) counts requests, not costs. If there are other policies,
    /// it is skipped, also in the decision.
    ///
    /// # Errors
    ///
    /// Returns the error of the store.
    pub fn charge(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Applied, StoreError>> + Send + 'static {
        let answer = self.ask(Check::charge(key, of_costs(&self.policies(&key)), cost));
        async { answer.await.map(Applied) }
    }

    /// Refunds `cost`. See [`Check::refund`]. A policy of requests in flight is skipped, as in a
    /// [charge](Self::charge).
    ///
    /// # Errors
    ///
    /// Returns the error of the store.
    pub fn refund(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Applied, StoreError>> + Send + 'static {
        let answer = self.ask(Check::refund(key, of_costs(&self.policies(&key)), cost));
        async { answer.await.map(Applied) }
    }

    /// Resets the caller's counts. See [`Check::reset`].
    ///
    /// # Errors
    ///
    /// Returns the error of the store.
    pub fn reset(
        &self,
        key: Key,
    ) -> impl Future<Output = Result<Applied, StoreError>> + Send + 'static {
        let answer = self.ask(Check::reset(key, &self.policies(&key)));
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
    pub fn flush(&self) -> impl Future<Output = bool> + Send + 'static {
        let store = self.store.clone();
        let ops = self.in_flight.ops().clone();
        async move {
            // A store of your own may owe more than its hooks know.
            flush(&store, Some(&ops)).await && store.flush().await
        }
    }

    /// Returns the policies of this caller.
    fn policies(&self, key: &Key) -> Cow<'_, Policies> {
        match &self.limits {
            Limits::Given(policies) => Cow::Borrowed(policies),
            Limits::Selected(selector) => match selector.find(key, Some(key)) {
                Some(policies) => Cow::Owned(policies),
                None => Cow::Borrowed(Policies::exempt()),
            },
        }
    }

    /// Sends a take immediately, and reports its decision.
    fn decide(
        &self,
        check: Check,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        self.report_shared_count();
        let reported = self.reported(&check);
        let answer = match self.without_store(&check) {
            Some(decision) => Answer::ready(Ok(decision)),
            None => {
                self.notifier.examine_lease(&self.store, &check);
                self.store.check(check)
            }
        };
        async move {
            let answer = answer.await;
            reported.answered(&answer);
            reported.strike(&answer);
            answer
        }
    }

    /// Sends a take of several keys immediately, and reports its decision.
    fn decide_all(
        &self,
        joint: JointCheck,
    ) -> impl Future<Output = Result<JointDecision, StoreError>> + Send + 'static {
        let reported = self.reported(joint.first());
        let answer = match self.block_of(joint.first()) {
            Some(denied) => JointFuture::ready(Ok(joint.combine(vec![Some(denied)]))),
            None => self.notifier.send_all(&self.store, joint.clone()),
        };
        async move {
            let answer = answer.await;
            let Reported {
                notifier,
                since,
                blocking,
                key,
                ..
            } = reported;
            notifier.joint_answered(&joint, since, &answer, false);
            // The denial of another key is not the fault of the first one.
            if let Some((blocking, ops)) = blocking
                && let Ok(decided) = &answer
                && let Some(Some(first)) = decided.parts().first()
            {
                blocking.denied(&key, &key, first, &ops);
            }
            answer
        }
    }

    /// Sends a check immediately that admits nothing: only its failure is reported.
    fn ask(
        &self,
        check: Check,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send + 'static {
        let key = *check.key();
        let notifier = self.notifier.clone();
        let answer = match self.without_store(&check) {
            Some(decision) => Answer::ready(Ok(decision)),
            None => self.store.check(check),
        };
        async move {
            let answer = answer.await;
            if let Err(error) = &answer {
                notifier.failed(&key, error);
            }
            answer
        }
    }

    /// Takes a cost that is settled later.
    fn grant(
        &self,
        key: Key,
        cost: u32,
    ) -> impl Future<Output = Result<Granted, NoPermit>> + Send + 'static {
        // Restart the sender if its runtime has shut down: it will settle the reservation.
        self.in_flight.ops().wake();
        let since = instant();
        let check = Check::take(key, &self.policies(&key), cost).without_block();
        let is_exempt = check.policies().is_exempt();
        // Before the check is sent: if this future is dropped before the reply, the slot is released.
        let mut slot = self.in_flight.track(&check);
        let answer = self.decide(check);
        async move {
            let answer = answer.await;
            if let Some(slot) = &mut slot {
                slot.on_reply(answer.as_ref());
            }
            let decision = answer.map_err(NoPermit::Failed)?;
            if !decision.is_allowed() {
                return Err(NoPermit::Denied(decision));
            }
            let charge = if is_exempt {
                None
            } else {
                Some(Charge::new(key, decision.clone(), cost, since, instant()))
            };
            Ok(Granted {
                decision,
                charge,
                slot,
            })
        }
    }

    /// Takes a cost in its turn.
    fn grant_within(
        &self,
        key: Key,
        cost: u32,
        max: Duration,
    ) -> impl Future<Output = Result<Granted, NoPermit>> + Send + 'static {
        let policies = self.policies(&key);
        // A cost that never fits is denied without a turn: other requests would wait behind it forever.
        let needs_no_turn =
            policies.is_exempt() || policies.iter().any(|policy| policy.never_fits(cost));
        if needs_no_turn {
            return Either::Left(self.grant(key, cost));
        }
        self.report_shared_count();
        // Waiting does not use leased blocks.
        self.notifier.never_leased(&policies);
        let take = Check::take(key, &policies, cost);
        let reported = self.reported(&take);
        let joined = match self.block_of(&take) {
            Some(denied) => Err(NoPermit::Denied(denied)),
            None => self
                .wait_queues
                .join(&take, instant().checked_add(max), None),
        };
        Either::Right(async move {
            let granted = match joined {
                Ok(turn) => turn.await.map(Permit::spend),
                Err(refusal) => Err(refusal),
            };
            let is_full = matches!(granted, Err(NoPermit::Full(_)));
            let answer = match &granted {
                Ok(spent) => Ok(spent.decision.clone()),
                Err(refusal) => refusal.clone().into_answer(),
            };
            reported.answered(&answer);
            if !is_full {
                reported.strike(&answer);
            }
            let Spent {
                decision,
                charge,
                slot,
            } = granted?;
            Ok(Granted {
                decision,
                charge: Some(charge),
                slot,
            })
        })
    }

    /// Notes the time of a check, if the observer needs it. Call it before the check is sent.
    fn reported(&self, check: &Check) -> Reported {
        Reported {
            notifier: self.notifier.clone(),
            key: *check.key(),
            cost: check.cost(),
            since: self.notifier.since(),
            is_exempt: check.policies().is_exempt(),
            blocking: self
                .blocking
                .clone()
                .map(|blocking| (blocking, self.in_flight.ops().clone())),
        }
    }

    /// Reports, once, a policy with another quota in another limiter or layer.
    #[inline]
    fn report_shared_count(&self) {
        if let Limits::Selected(Selector::Fixed(policies)) = &self.limits {
            self.notifier
                .shared_count(|| self.store.backend().waiters(), policies);
        }
    }
}

impl Granted {
    fn into_reservation(self, ops: OpQueue) -> Reservation {
        Reservation::new(self.decision, self.charge, self.slot, ops)
    }
}

impl Reported {
    fn answered(&self, answer: &Result<Decision, StoreError>) {
        let Self {
            notifier,
            key,
            cost,
            since,
            is_exempt,
            ..
        } = self;
        if *is_exempt {
            notifier.uncounted(UncountedReason::Exempt, true);
        } else if notifier.is_notified(answer.as_ref()) {
            notifier.answered(key, *cost, *since, answer, false);
        }
    }

    /// Counts a denial, which may block the caller.
    fn strike(&self, answer: &Result<Decision, StoreError>) {
        if let (Some((blocking, ops)), Ok(decision)) = (&self.blocking, answer) {
            blocking.denied(&self.key, &self.key, decision, ops);
        }
    }
}

/// Returns the policies that count costs, or all policies if no policy does.
fn of_costs(policies: &Policies) -> &Policies {
    policies.without_in_flight().unwrap_or(policies)
}

/// Returns the take of the first key whose policies are blocked, which denies all.
fn blocked_take(parts: &[(Key, &Policies)], cost: u32) -> Option<Check> {
    let (key, policies) = parts.iter().find(|(_, policies)| policies.are_blocked())?;
    Some(Check::take(*key, policies, cost))
}

fn exempt_decision(check: &Check) -> Decision {
    check.decided(Source::Other("exempt"), check.cost(), |_| {
        Verdict::allowed()
    })
}

impl<S: fmt::Debug> fmt::Debug for Limiter<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut limiter = f.debug_struct("Limiter");
        limiter.field("store", &self.store);
        match &self.limits {
            Limits::Selected(selector) => limiter.field("policies", selector),
            Limits::Given(policies) => limiter.field("policies", policies),
        };
        limiter
            .field("wait_queues", &self.wait_queues)
            .finish_non_exhaustive()
    }
}
