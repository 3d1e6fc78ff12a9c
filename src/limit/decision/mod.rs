//! Decisions of all stores, in this crate and outside of it, and the verdicts that they consist of.

#[cfg(test)]
mod tests;

use std::time::Duration;

use smallvec::SmallVec;

use super::{
    ChargedAt, Check, EachCharge, Extra, Frees, Key, LONGEST, Mode, Policies, Policy, PolicyCharge,
    RateLimited, duration,
};

/// The verdict on one check.
///
/// With several policies, the methods report the deciding one: the one with the longest wait if
/// denied, else the one with the least remaining. [`each`](Self::each) returns all of them.
///
/// A store that could not decide returns a [`StoreError`](crate::store::StoreError), never a
/// decision.
#[must_use = "it may be a denial"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    policies: Policies,
    verdicts: Verdicts,
    /// The index of the deciding policy.
    decider: u32,
    source: Source,
    made_by: MadeBy,
    /// Whether it is a turn that was taken ahead and is due now.
    is_turn: bool,
}

/// Which store made the decision, and so has the charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MadeBy {
    /// The store that received the check.
    There,
    /// The fallback of that store, in this process.
    Locally,
    /// The fallback, and the primary store may have charged it, or neither store has.
    Unsure,
    /// Several, in a decision on several keys: the decision of each key has its own.
    Several,
}

/// Whether a check was allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The check was allowed and charged.
    Allowed,
    /// The check was charged, and is due later: [taken ahead](crate::check::Check::take_ahead).
    Later {
        /// How long to wait before proceeding, in microseconds, rounded up.
        due_in: Duration,
    },
    /// The check was denied, and nothing was charged.
    Denied {
        /// When the same check would be allowed, if nothing else is charged until then. In
        /// microseconds, rounded up.
        retry_after: Duration,
    },
    /// The cost exceeds the capacity of a policy, or the policies are [`blocked`](Policies::blocked): waiting does not help.
    /// Nothing was charged.
    ExceedsCapacity,
}

impl Outcome {
    /// Returns the name in lower case, for a metric label: `allowed`, `later`, `denied` or
    /// `exceeds_capacity`.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Later { .. } => "later",
            Self::Denied { .. } => "denied",
            Self::ExceedsCapacity => "exceeds_capacity",
        }
    }
}

/// Where a decision was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// In Redis, on the count that all instances share.
    Redis,
    /// In this process, from a cached Redis denial, which is at most a second old and whose
    /// `retry_after` has not passed. A refund or a reset by another instance takes effect within
    /// that second. A check with a larger cost than the denied one is answered if its wait follows
    /// from the denial, or if four costs are cached. The reported wait is too short only if a smaller
    /// cost was granted in that second. A check with an [id](crate::check::Check::with_id) is always
    /// decided in Redis.
    Cached,
    /// In this process, from its local count.
    Local,
    /// In this process, from a block leased from Redis; see [`Policy::leased`]. `remaining` is the
    /// rest of the block plus what Redis reported to remain, and
    /// [`reset_after`](Decision::reset_after) is that of the block's charge.
    Leased,
    /// In this process, since the caller is blocked: see
    /// [`block_after`](crate::RateLimitLayer::block_after) and [`Policies::blocked`]. No policy was checked.
    Blocked,
    /// As [`Blocked`](Self::Blocked), in a layer or limiter with
    /// [`forbid_blocked`](crate::RateLimitLayer::forbid_blocked): over HTTP the response is a 403.
    Forbidden,
    /// In a [`Store`](crate::store::Store) outside of this crate, with its name, such as
    /// `"postgres"`. The name is used as a metric label.
    Other(&'static str),
}

impl Source {
    /// Returns the name in lower case, for a metric label: `redis`, `cached`, `local`, `leased`, `blocked`, `forbidden`, or
    /// that of another store.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Cached => "cached",
            Self::Local => "local",
            Self::Leased => "leased",
            Self::Blocked => "blocked",
            Self::Forbidden => "forbidden",
            Self::Other(name) => name,
        }
    }
}

/// The verdict of a single policy on a check. A [`Store`](crate::store::Store) outside of this
/// crate combines verdicts into a [`Decision`] with [`Check::decided`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use]
pub struct Verdict {
    /// The largest cost that would be allowed now.
    pub(crate) remaining: i64,
    /// 0 if this policy allows the check, else [`NEVER`](Self::NEVER) or the microseconds until it
    /// would.
    pub(crate) wait: i64,
    /// Microseconds until every charge has expired.
    pub(crate) reset: i64,
}

/// The verdicts of a check's policies, in order.
#[derive(Debug)]
pub(crate) struct Verdicts {
    /// The amount charged or refunded.
    pub(crate) granted: i64,
    /// When Redis, [`Counts`](super::Counts) or a [`LocalStore`](crate::LocalStore) decided, in
    /// microseconds of that clock, or the fallback of a [`Fallback`](crate::Fallback), in microseconds of
    /// this process's clock; 0 if another store did.
    pub(crate) at: i64,
    /// Microseconds that the clock of calendars is ahead of that of `at`.
    pub(crate) ahead: i64,
    /// Microseconds since the original decision, if this is a repetition under an
    /// [id](Check::with_id).
    pub(crate) age: i64,
    /// One per policy. Most checks have a single policy, whose verdict is stored inline.
    pub(crate) each: SmallVec<[Verdict; 1]>,
}

/// Converts a wait in microseconds. A negative one is zero.
fn micros(wait: i64) -> Duration {
    Duration::from_micros(wait.max(0) as u64)
}

impl Decision {
    #[inline]
    pub(super) fn new(policies: Policies, verdicts: Verdicts, source: Source) -> Self {
        let decider = verdicts.decider() as u32;
        Self {
            policies,
            verdicts,
            decider,
            source,
            made_by: MadeBy::There,
            is_turn: false,
        }
    }

    /// Returns whether the check was allowed, with the wait.
    #[inline]
    pub fn outcome(&self) -> Outcome {
        match self.verdict().wait {
            0 => Outcome::Allowed,
            Verdict::NEVER => Outcome::ExceedsCapacity,
            // A denial grants nothing, so this was charged in advance.
            wait if self.verdicts.granted > 0 => Outcome::Later {
                due_in: micros(wait),
            },
            wait => Outcome::Denied {
                retry_after: micros(wait),
            },
        }
    }

    /// Returns `true` if the check is allowed now; `false` if it is allowed only later.
    #[inline]
    pub fn is_allowed(&self) -> bool {
        self.verdict().is_allowed()
    }

    /// Returns a denial as an error, for `?`. A decision that was charged and is due [later](Outcome::Later) is `Ok`: wait,
    /// then proceed.
    ///
    /// ```
    /// use tower_redis_ratelimit::check::RateLimited;
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(LocalStore::default(), Policy::new("mails", Strategy::Gcra, "1/h")?);
    /// limiter.take(Key::new("ann"), 1).await?.allowed()?;
    /// let denied: RateLimited = limiter.take(Key::new("ann"), 1).await?.allowed().unwrap_err();
    /// assert!(denied.retry_after().is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RateLimited`], with the decision.
    pub fn allowed(self) -> Result<Self, RateLimited> {
        match self.outcome() {
            Outcome::Allowed | Outcome::Later { .. } => Ok(self),
            Outcome::Denied { .. } | Outcome::ExceedsCapacity => Err(RateLimited::new(self)),
        }
    }

    /// Returns the amount charged or refunded: the whole cost for a
    /// [`take`](crate::check::Check::take) that was allowed.
    pub fn granted(&self) -> u32 {
        clamp(self.verdicts.granted)
    }

    /// Returns the largest cost that the deciding policy ever allows in one check: its burst. An instance that decides
    /// in an outage allows at most its share of that, which bounds [`remaining`](Self::remaining).
    pub fn capacity(&self) -> u32 {
        self.policy().whole().quota().capacity()
    }

    /// Returns the largest cost that would be allowed now.
    pub fn remaining(&self) -> u32 {
        clamp(self.verdict().remaining)
    }

    /// Returns the [capacity](Self::capacity) minus the [remaining](Self::remaining) cost: at most the capacity, also in
    /// debt. A [peek](crate::check::Check::peek) shows a caller's usage and charges
    /// nothing; [`each`](Self::each) returns the usage under each policy.
    ///
    /// In an outage, the units that other instances may grant count as used. A [cached](Source::Cached) denial
    /// reports the usage at the time of the denial. If a bucket's quota has changed shortly before an outage, it may report too
    /// little there, by at most one burst: the instance knows when the count is empty, but not the quota that drains it.
    ///
    /// ```
    /// use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policies, Policy, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = Policies::new([
    ///     Policy::new("burst", Strategy::Gcra, "10/h")?,
    ///     Policy::new("daily", Strategy::SlidingLog, "100/d")?,
    /// ])?;
    /// let limiter = Limiter::new(LocalStore::default(), policies);
    /// let _ = limiter.take(Key::new("ann"), 3).await?;
    /// let usage = limiter.peek(Key::new("ann"), 0).await?;
    /// assert_eq!((usage.used(), usage.capacity()), (3, 10));
    /// let of_all: Vec<u32> = usage.each().map(|each| each.used()).collect();
    /// assert_eq!(of_all, [3, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn used(&self) -> u32 {
        self.capacity().saturating_sub(self.remaining())
    }

    /// Returns how long to wait before the same check can be allowed. `None` if it was not denied,
    /// or if waiting does not help.
    #[doc(alias = "Retry-After")]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.outcome() {
            Outcome::Denied { retry_after } => Some(retry_after),
            Outcome::Allowed | Outcome::Later { .. } | Outcome::ExceedsCapacity => None,
        }
    }

    /// Returns the time until all charges of the deciding policy have expired, if nothing more is
    /// charged.
    pub fn reset_after(&self) -> Duration {
        micros(self.verdict().reset)
    }

    /// Returns the deciding policy. In an outage it has the instance's share of the quota.
    pub fn policy(&self) -> &Policy {
        &self.policies[self.decider as usize]
    }

    /// Returns `true` for the denial of a blocked caller that shows no wait.
    pub(crate) fn is_final(&self) -> bool {
        match self.source {
            Source::Forbidden => true,
            Source::Blocked => self.retry_after().is_none(),
            _ => false,
        }
    }

    /// Returns the index of the deciding policy.
    pub(crate) fn decider(&self) -> usize {
        self.decider as usize
    }

    /// Returns all policies of the check, in order.
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Returns where the decision was made.
    pub fn source(&self) -> Source {
        self.source
    }

    /// Iterates over the decisions of the single policies, in order.
    ///
    /// If one policy denies, the policies that could cover the check still report it as allowed,
    /// although nothing was charged.
    pub fn each(&self) -> impl ExactSizeIterator<Item = Decision> + '_ {
        (0..self.policies.iter().len()).map(|decider| Self {
            decider: decider as u32,
            ..self.clone()
        })
    }

    /// Returns the checks that refund `cost` of this decision's grant, such as the unused part of
    /// an estimate. `age` is the time since the check was sent; overestimating it is safe, it
    /// refunds less.
    ///
    /// The refund never gives a caller more than if only the rest had been charged: what has
    /// refilled since, or was counted in a window that has ended, is not refunded again. Windows
    /// and logs refund the whole difference, since it is deducted from the charge itself. A window
    /// that this charge started keeps its start.
    ///
    /// For grants by Redis, a [`LocalStore`](crate::LocalStore) and [`Counts`](crate::store::Counts), the
    /// age is measured by the clock of that store, even if the refund takes long to arrive. After a failover to a server whose clock differs, the greater age counts. A decision
    /// repeated under an [id](crate::check::Check::with_id) is as old as the charge.
    ///
    /// Buckets refund only what has not drained or refilled since: with 100 per second, at most 30
    /// of 50 that were granted 0.2 s ago, and nothing after 0.5 s. A caller that has sent nothing
    /// else has regained the rest in that time. If others share the limit, the rest stays charged.
    ///
    /// A policy of requests [in flight](crate::Policy::in_flight) refunds nothing: it counts a
    /// request until it ends.
    ///
    /// A [`Fallback`](crate::Fallback) refunds a charge where it was made. If that is Redis and
    /// Redis is down, the check fails with an error that is
    /// [unsent](crate::store::StoreError::is_not_sent): send a new one later. Layers and
    /// [`Limiter::reserve`](crate::Limiter::reserve) do so for as long as the charge counts.
    ///
    /// There are no checks of a decision on [several keys](crate::check::JointCheck), if nothing was granted, if all of it has expired, or if the fallback
    /// granted a check that was also sent to Redis and got no reply: a refund in Redis could free
    /// what Redis never charged. Send each check
    /// once, and refund a decision once; of decisions under one id, refund only one. After a reset,
    /// or after the store has lost its data, newer charges cannot be distinguished from this
    /// decision's grant, so they may be refunded instead. In total a caller gains no more than by
    /// the reset itself: the capacity a second time.
    ///
    /// ```
    /// use std::time::Instant;
    /// use tower_redis_ratelimit::check::Check;
    /// use tower_redis_ratelimit::store::Store;
    /// use tower_redis_ratelimit::{Key, LocalStore, Policy, Quota, Strategy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (store, key) = (LocalStore::default(), Key::new("user-42"));
    /// let policies = Policy::new("tokens", Strategy::SlidingLog, Quota::per_minute(1_000))?.into();
    ///
    /// let sent_at = Instant::now();
    /// let decision = store.check(Check::take(key, &policies, 500)).await?;
    /// // Only 312 of them were used.
    /// if let Some(check) = decision.refund(key, 500 - 312, sent_at.elapsed()) {
    ///     assert_eq!(store.check(check).await?.remaining(), 1_000 - 312);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn refund(&self, key: Key, cost: u32, age: Duration) -> Option<Check> {
        let part = cost.min(self.granted());
        if part == 0 || matches!(self.made_by, MadeBy::Unsure | MadeBy::Several) {
            return None;
        }
        let charge = PolicyCharge {
            age: (duration::micros(age) + self.verdicts.age).min(LONGEST),
            at: self.charged_at(),
            cost: self.granted().into(),
            reset: 0,
            is_turn: self.is_turn || self.due_in().is_some(),
        };
        let mut each = EachCharge::new();
        for (policy, verdict) in self.policies.iter().zip(&self.verdicts.each) {
            if !policy.is_in_flight() {
                let reset = verdict.reset;
                each.push(PolicyCharge { reset, ..charge });
            }
        }
        if each.iter().all(|charge| charge.left() <= 0) {
            return None;
        }
        // A store reconciles its local charges with the undivided policies.
        let whole = self.policies.whole();
        let refund = Check::refund(key, whole.without_in_flight()?, part);
        Some(refund.with_extra(Extra::Charged(each)))
    }

    /// Returns how long to wait before proceeding, if the check was charged [in
    /// advance](crate::check::Check::take_ahead).
    pub fn due_in(&self) -> Option<Duration> {
        match self.outcome() {
            Outcome::Later { due_in } => Some(due_in),
            Outcome::Allowed | Outcome::Denied { .. } | Outcome::ExceedsCapacity => None,
        }
    }

    /// The same decision when what was taken ahead is due, as if it had been charged then.
    pub(crate) fn due(mut self) -> Self {
        self.is_turn |= self.due_in().is_some();
        let waited = self.verdict().wait;
        let mut verdicts = self.verdicts.clone();
        // A fallback finds its charge by the time at which it was made.
        if verdicts.at > 0 && self.made_by == MadeBy::There {
            verdicts.at += waited;
        }
        for verdict in &mut verdicts.each {
            verdict.wait = 0;
            verdict.reset = (verdict.reset - waited).max(0);
        }
        self.with_verdicts(verdicts)
    }

    /// Returns where it was charged.
    pub(super) fn charged_at(&self) -> ChargedAt {
        match self.made_by {
            MadeBy::There | MadeBy::Several => ChargedAt::Redis(self.verdicts.at),
            MadeBy::Locally | MadeBy::Unsure => ChargedAt::Local(self.verdicts.at),
        }
    }

    /// Returns which store made the decision.
    pub(crate) fn made_by(&self) -> MadeBy {
        self.made_by
    }

    /// Sets which store made the decision.
    pub(crate) fn with_maker(self, made_by: MadeBy) -> Self {
        Self { made_by, ..self }
    }

    /// Returns `true` if it repeats an earlier decision under an id, and has charged nothing.
    pub(crate) fn is_repeated(&self) -> bool {
        self.verdicts.age > 0
    }

    /// Returns the decision as if only `cost` had been granted.
    pub(super) fn of_charge(mut self, cost: u32) -> Self {
        self.verdicts.granted = cost.into();
        self
    }

    /// Returns the verdicts of the policies.
    pub(crate) fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }

    /// Replaces the verdicts, and selects the deciding policy.
    pub(crate) fn with_verdicts(self, verdicts: Verdicts) -> Self {
        Self {
            decider: verdicts.decider() as u32,
            verdicts,
            ..self
        }
    }

    #[inline]
    fn verdict(&self) -> &Verdict {
        self.verdicts.of(self.decider as usize)
    }
}

/// Converts a cost, which fits a `u32`.
fn clamp(cost: i64) -> u32 {
    cost.clamp(0, i64::from(u32::MAX)) as u32
}

impl Verdict {
    /// The wait of a check that can never be allowed.
    pub(crate) const NEVER: i64 = -1;
    /// The verdict of a policy that does not restrict the check.
    pub(super) const NONE: Self = Self {
        remaining: 0,
        wait: 0,
        reset: 0,
    };

    /// The policy allows the check.
    pub const fn allowed() -> Self {
        Self {
            remaining: i64::MAX,
            wait: 0,
            reset: 0,
        }
    }

    /// The policy denies the check until `retry_after` has passed, rounded up to microseconds,
    /// provided that nothing else is charged.
    pub fn denied(retry_after: Duration) -> Self {
        let wait = duration::micros(retry_after).max(1);
        Self {
            remaining: 0,
            wait,
            reset: wait,
        }
    }

    /// The cost exceeds the policy's capacity, so waiting does not help.
    pub const fn exceeds_capacity() -> Self {
        Self {
            remaining: i64::MAX,
            wait: Self::NEVER,
            reset: 0,
        }
    }

    /// Sets the largest cost that would be allowed now. Defaults to 0 for a denial, and otherwise
    /// to the maximum.
    pub fn with_remaining(self, remaining: u32) -> Self {
        Self {
            remaining: i64::from(remaining),
            ..self
        }
    }

    /// Sets the time until every charge has expired, if none is added; rounded up to microseconds.
    /// Defaults to the wait of a denial, and otherwise to zero.
    pub fn with_reset_after(self, reset_after: Duration) -> Self {
        Self {
            reset: duration::micros(reset_after),
            ..self
        }
    }

    /// Removes contradictions with the granted amount.
    pub(super) fn corrected(self, check: &Check, policy: &Policy, granted: i64) -> Self {
        let capacity = i64::from(policy.quota().capacity());
        let takes_slot = check.mode().takes() && policy.is_in_flight();
        let (cost, charged) = if takes_slot {
            (1, granted.min(1))
        } else {
            (i64::from(check.cost()), granted)
        };
        let most = match check.mode() {
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge if self.is_allowed() => {
                capacity - charged
            }
            Mode::Take | Mode::TakeAhead | Mode::Peek if !self.is_allowed() => {
                capacity.min(cost - 1)
            }
            Mode::UpTo | Mode::Charge => 0,
            _ => capacity,
        };
        Self {
            remaining: self.remaining.min(most).max(0),
            reset: self.reset.max(self.wait),
            ..self
        }
    }

    /// Returns `true` if [`wait_of_larger`](Self::wait_of_larger) is exact, or one more under a meter.
    pub(crate) fn knows_wait_of_larger(&self, policy: &Policy, cost: u32) -> bool {
        if policy.never_fits(cost) || i64::from(cost) <= self.remaining {
            return true;
        }
        match policy.frees() {
            Frees::Gradually | Frees::WithWindow | Frees::OnRelease => true,
            Frees::InBatches | Frees::WithCell | Frees::OneByOne | Frees::Fading => false,
        }
    }

    /// Returns the microseconds until a larger cost than the decided one would be allowed. If that is not
    /// [known](Self::knows_wait_of_larger), until nothing is charged.
    pub(crate) fn wait_of_larger(&self, policy: &Policy, cost: u32) -> i64 {
        if policy.never_fits(cost) {
            return Self::NEVER;
        }
        if i64::from(cost) <= self.remaining {
            return self.wait;
        }
        let kept = match policy.frees() {
            // It counts one, regardless of the cost.
            Frees::OnRelease => return self.wait,
            // The meter need not be empty.
            Frees::Gradually => policy.params().time_for(policy.quota().capacity() - cost),
            Frees::WithWindow
            | Frees::InBatches
            | Frees::WithCell
            | Frees::OneByOne
            | Frees::Fading => 0,
        };
        self.wait.max(self.reset - kept)
    }

    /// The verdict with the highest rank decides. [`NEVER`](Self::NEVER) is the longest wait.
    #[inline]
    fn rank(&self) -> (bool, i64, i64) {
        (self.wait == Self::NEVER, self.wait, -self.remaining)
    }

    /// Returns `true` if this policy allows the check.
    #[inline]
    pub(crate) fn is_allowed(&self) -> bool {
        self.wait == 0
    }

    /// Returns the used part of the capacity in 255ths, rounded down: 255 means that nothing
    /// remains.
    #[inline]
    pub(crate) fn used(&self, policy: &Policy) -> u8 {
        let capacity = policy.params().capacity.max(1);
        let used = (capacity - self.remaining).clamp(0, capacity);
        (used as u64 * 255 / capacity as u64) as u8
    }
}

impl Verdicts {
    /// Creates verdicts without a time.
    #[inline]
    pub(crate) fn new(granted: i64, each: SmallVec<[Verdict; 1]>) -> Self {
        Self {
            granted,
            at: 0,
            ahead: 0,
            age: 0,
            each,
        }
    }

    /// Creates the verdicts of a check of one policy, without a time.
    #[inline]
    pub(crate) fn of_one(granted: i64, verdict: Verdict) -> Self {
        Self::new(granted, SmallVec::from_buf([verdict]))
    }

    /// Returns the time of the reply by the clock of calendars, in microseconds. `None` if the store has reported no time.
    pub(crate) fn calendar_micros(&self) -> Option<i64> {
        if self.at > 0 {
            Some(self.at + self.age + self.ahead)
        } else {
            None
        }
    }

    /// Returns the verdict of the policy at this index.
    #[inline]
    pub(super) fn of(&self, policy: usize) -> &Verdict {
        self.each.get(policy).unwrap_or(&Verdict::NONE)
    }

    /// Returns the index of the deciding policy: the first with the longest wait, then the
    /// least remaining.
    #[inline]
    pub(super) fn decider(&self) -> usize {
        let mut decider = 0;
        for i in 1..self.each.len() {
            if self.of(i).rank() > self.of(decider).rank() {
                decider = i;
            }
        }
        decider
    }

    /// Returns `true` if all policies allow the check now.
    pub(super) fn is_allowed(&self) -> bool {
        self.each.iter().all(Verdict::is_allowed)
    }

    /// Returns those on a check under some of the policies, which begin at this index.
    pub(super) fn part(&self, first: usize, policies: &Policies) -> Self {
        let last = (first + policies.len()).min(self.each.len());
        let each = self.each.get(first..last).unwrap_or_default();
        let is_of_slots = policies.without_in_flight().is_none();
        Self {
            // A request in flight is granted as one, regardless of its cost.
            granted: if is_of_slots {
                self.granted.min(1)
            } else {
                self.granted
            },
            each: SmallVec::from_slice(each),
            ..*self
        }
    }

    /// Returns the wait in microseconds, if the check is denied and waiting helps.
    pub(crate) fn wait(&self) -> Option<i64> {
        match self.of(self.decider()).wait {
            0 | Verdict::NEVER => None,
            wait => Some(wait),
        }
    }

    /// Returns the same verdicts `elapsed` microseconds later.
    pub(crate) fn later(&self, elapsed: i64) -> Self {
        let mut verdicts = self.clone();
        for verdict in &mut verdicts.each {
            if verdict.wait > 0 {
                verdict.wait = (verdict.wait - elapsed).max(1);
            }
            verdict.reset = (verdict.reset - elapsed).max(0);
        }
        verdicts
    }
}

/// Compares the verdicts, but not when they were made.
impl PartialEq for Verdicts {
    fn eq(&self, other: &Self) -> bool {
        (self.granted, &self.each) == (other.granted, &other.each)
    }
}

impl Eq for Verdicts {}

/// Faster than the derived implementation, which copies lists of any length: most lists have one
/// element.
impl Clone for Verdicts {
    #[inline]
    fn clone(&self) -> Self {
        let each = match self.each[..] {
            [one] => SmallVec::from_buf([one]),
            _ => SmallVec::from_slice(&self.each),
        };
        Self { each, ..*self }
    }
}
