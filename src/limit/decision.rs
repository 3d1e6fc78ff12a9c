use std::time::Duration;

use super::{
    Charged, ChargedAt, Check, EachCharged, Key, LONGEST, Policies, Policy, Verdict, Verdicts,
    duration,
};

/// The verdict on one check.
///
/// With several policies it speaks for the one that decided: when denied, the one that asks for the longest wait; when
/// allowed, the one with the least left. [`each`](Self::each) has all of them.
///
/// A store that could not decide gives a [`StoreError`](crate::store::StoreError), never a decision.
#[must_use = "it may be a denial"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    policies: Policies,
    verdicts: Verdicts,
    /// The index of the policy that decided.
    decider: usize,
    source: Source,
}

/// Whether a check passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It passed, and was charged.
    Allowed,
    /// It was charged, and passes later: [taken ahead](crate::check::Check::take_ahead).
    Later {
        /// How long to wait before going on; to the microsecond, rounded up.
        due_in: Duration,
    },
    /// It did not pass, and nothing was charged.
    Denied {
        /// When the same check would pass, if nobody else takes anything until then; to the microsecond, rounded up.
        retry_after: Duration,
    },
    /// Its cost is above the capacity of a policy: no wait helps, and nothing was charged.
    ExceedsCapacity,
}

impl Outcome {
    /// Its name in lower case, as a label of a metric: `allowed`, `later`, `denied` or `exceeds_capacity`.
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
    /// In this process, by a denial of Redis that is at most a second old, and whose `retry_after` is not over. A refund
    /// or a reset by another instance takes effect within that second. A check of a larger cost than was denied gets the
    /// wait of the smaller one. A check with an [id](crate::check::Check::with_id) is always decided in Redis.
    Cached,
    /// In this process, on its own count.
    Local,
    /// In this process, by what was charged in Redis ahead: see [`Policy::leased`]. What remains is what is left of that
    /// here. It counts as charged when that was: [`reset_after`](Decision::reset_after) is as it was told then.
    Leased,
    /// In a [`Store`](crate::store::Store) outside of this crate, by its name, such as `"postgres"`. The name is a
    /// label of metrics.
    Other(&'static str),
}

impl Source {
    /// Its name in lower case, as a label of a metric: `redis`, `cached`, `local`, `leased`, or that of another store.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Cached => "cached",
            Self::Local => "local",
            Self::Leased => "leased",
            Self::Other(name) => name,
        }
    }
}

/// A wait in microseconds. Never below zero.
fn micros(wait: i64) -> Duration {
    Duration::from_micros(wait.max(0) as u64)
}

impl Decision {
    #[inline]
    pub(super) fn new(policies: Policies, verdicts: Verdicts, source: Source) -> Self {
        let decider = verdicts.decider();
        Self {
            policies,
            verdicts,
            decider,
            source,
        }
    }

    /// Whether the check passed.
    pub fn outcome(&self) -> Outcome {
        match self.verdict().wait {
            0 => Outcome::Allowed,
            Verdict::NEVER => Outcome::ExceedsCapacity,
            // Only what is taken ahead is charged and has to wait.
            wait if self.verdicts.granted > 0 => Outcome::Later {
                due_in: micros(wait),
            },
            wait => Outcome::Denied {
                retry_after: micros(wait),
            },
        }
    }

    /// Whether the check passed, and not only later.
    pub fn is_allowed(&self) -> bool {
        self.verdict().is_allowed()
    }

    /// How much was charged, or refunded: the whole cost for a [`take`](crate::check::Check::take) that passed.
    pub fn granted(&self) -> u32 {
        clamp(self.verdicts.granted)
    }

    /// The largest cost that the deciding policy ever lets pass at once: its burst.
    pub fn capacity(&self) -> u32 {
        self.policy().quota().capacity()
    }

    /// The largest cost that would pass now.
    pub fn remaining(&self) -> u32 {
        clamp(self.verdict().remaining)
    }

    /// How long to wait before the same check can pass, if it was denied for now.
    pub fn retry_after(&self) -> Option<Duration> {
        match self.outcome() {
            Outcome::Denied { retry_after } => Some(retry_after),
            Outcome::Allowed | Outcome::Later { .. } | Outcome::ExceedsCapacity => None,
        }
    }

    /// How long until nothing charged to the deciding policy counts, if nothing more is charged.
    pub fn reset_after(&self) -> Duration {
        micros(self.verdict().reset)
    }

    /// The policy that decided.
    pub fn policy(&self) -> &Policy {
        &self.policies[self.decider]
    }

    /// The index of the policy that decided.
    pub(crate) fn decider(&self) -> usize {
        self.decider
    }

    /// All policies of the check, in their order.
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Where it was decided.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The same check as each of its policies sees it, in their order.
    ///
    /// When one policy denies, those with room for the check are allowed here although nothing was charged.
    pub fn each(&self) -> impl ExactSizeIterator<Item = Decision> + '_ {
        (0..self.policies.iter().len()).map(|decider| Self {
            decider,
            ..self.clone()
        })
    }

    /// The same decision so many microseconds later; if below zero, earlier.
    pub(crate) fn later(self, elapsed: i64) -> Self {
        Self {
            verdicts: self.verdicts.later(elapsed),
            ..self
        }
    }

    /// The same as a denial for this time, so long after it was made.
    pub(crate) fn denied_for(self, wait: Duration, age: Duration) -> Self {
        let mut verdicts = self
            .verdicts
            .later(i64::try_from(age.as_micros()).unwrap_or(LONGEST));
        verdicts.granted = 0;
        if let Some(decider) = verdicts
            .each
            .get_mut(self.decider)
            .filter(|decider| decider.wait != Verdict::NEVER)
        {
            decider.wait = duration::micros(wait).max(1);
            decider.reset = decider.reset.max(decider.wait);
        }
        Self::new(self.policies, verdicts, self.source)
    }

    /// The checks that refund `cost` of what this decision granted `age` ago, such as the unused part of an estimate.
    ///
    /// A caller never gets more by it than if only the rest had been charged: what has flowed back meanwhile, or was
    /// counted in a window that has ended, is not refunded again. So measure `age` from before the check was sent until
    /// the refund is. Too great an age is safe: less is refunded. Windows and logs refund the whole difference, since
    /// it is taken out of the charge itself. A window that this charge began stays as it is.
    ///
    /// For what Redis granted, the age is by Redis's clock, even if the refund takes long to arrive. After a failover
    /// to a server whose clock differs, the greater age counts. A decision repeated under an
    /// [id](crate::check::Check::with_id) is as old as the charge.
    ///
    /// Buckets refund only what has not leaked or refilled in the meantime: with 100 per second, at most 30 of 50 that
    /// were granted 0.2 s ago, and nothing after 0.5 s. A caller that has sent nothing else has these by then. If
    /// others share the limit, the rest stays charged.
    ///
    /// A policy of requests [in flight](crate::Policy::in_flight) is not refunded: it counts a request until it ends.
    ///
    /// A [`Fallback`](crate::Fallback) refunds a charge where it was made: if that is Redis and Redis is away, the check
    /// fails with an error that is [unsent](crate::store::StoreError::is_unsent). Send it again later. Layers and
    /// [`Limiter::reserve`](crate::Limiter::reserve) do so for as long as the charge counts.
    ///
    /// There are no checks if nothing was granted, or none of it counts any more. Send each check once, and refund a
    /// decision once; of decisions under one id, only one. What was charged after a reset, or after the store has lost
    /// its data, cannot be told apart from what this decision granted before, so that may be refunded instead. In total
    /// a caller gets no more than by the reset itself: the capacity once more.
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
    /// let asked_at = Instant::now();
    /// let decision = store.check(Check::take(key, &policies, 500)).await?;
    /// // It took only 312 of them.
    /// for check in decision.refund(key, 500 - 312, asked_at.elapsed()) {
    ///     assert_eq!(store.check(check).await?.remaining(), 1_000 - 312);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn refund(
        &self,
        key: Key,
        cost: u32,
        age: Duration,
    ) -> impl Iterator<Item = Check> + use<> {
        let age = (duration::micros(age) + self.verdicts.age).min(LONGEST);
        let cost = cost.min(self.granted());
        let over_time = self.verdicts().filter(|(policy, _)| !policy.is_in_flight());
        let charged = Charged {
            age,
            at: self.charged_at(),
            cost: self.granted().into(),
            reset: 0,
        };
        let charged: EachCharged = over_time
            .map(|(_, verdict)| Charged {
                reset: verdict.reset,
                ..charged
            })
            .collect();
        let policies = || self.policies.whole().without_in_flight().cloned();
        let check = |policies| Check::refund_of(key, &policies, cost, charged.clone());
        (cost > 0 && charged.iter().any(|charged| charged.left() > 0))
            .then(policies)
            .flatten()
            .map(check)
            .into_iter()
    }

    /// How long to wait before going on, if it was charged [ahead of time](crate::check::Check::take_ahead).
    pub fn due_in(&self) -> Option<Duration> {
        match self.outcome() {
            Outcome::Later { due_in } => Some(due_in),
            Outcome::Allowed | Outcome::Denied { .. } | Outcome::ExceedsCapacity => None,
        }
    }

    /// The same decision when what was taken ahead is due, for one of the requests that share it at this cost each.
    pub(crate) fn due(self, cost: u32) -> Self {
        let mut verdicts = self.verdicts;
        verdicts.granted = i64::from(cost);
        for verdict in &mut verdicts.each {
            verdict.wait = 0;
        }
        Self::new(self.policies, verdicts, self.source)
    }

    /// The same decision, with the wait that `wait` returns for each policy whose capacity is exceeded, by its index.
    pub(crate) fn wait_instead(self, wait: impl Fn(usize, &Verdict) -> i64) -> Self {
        let mut verdicts = self.verdicts;
        for (i, verdict) in verdicts
            .each
            .iter_mut()
            .enumerate()
            .filter(|(_, verdict)| verdict.wait == Verdict::NEVER)
        {
            verdict.wait = wait(i, verdict);
        }
        Self::new(self.policies, verdicts, self.source)
    }

    /// The same decision after another cost replaced what was reserved, as far as is known without a call to the store.
    pub(crate) fn settled(self, reserved: u32, cost: u32) -> Self {
        let Self {
            policies,
            mut verdicts,
            source,
            ..
        } = self;
        // More than nothing is refunded, less is charged.
        let back = i64::from(reserved) - i64::from(cost);
        verdicts.granted = i64::from(cost);
        for (policy, verdict) in policies.iter().zip(&mut verdicts.each) {
            verdict.refund(policy, back);
        }
        Self::new(policies, verdicts, source)
    }

    /// Where it was charged.
    pub(crate) fn charged_at(&self) -> ChargedAt {
        match self.source {
            Source::Local => ChargedAt::Local(self.verdicts.at),
            Source::Redis | Source::Cached | Source::Leased | Source::Other(_) => {
                ChargedAt::Redis(self.verdicts.at)
            }
        }
    }

    /// The same decision, charged in this process at this time by its clock.
    pub(crate) fn charged_locally(mut self, at: i64) -> Self {
        self.verdicts.at = at;
        self
    }

    /// Returns `true` if an earlier decision was repeated under an id, so that nothing was charged.
    pub(crate) fn is_repeated(&self) -> bool {
        self.verdicts.age > 0
    }

    /// The same, as Redis would have decided at this time.
    #[cfg(test)]
    pub(crate) fn decided_at(mut self, at: i64) -> Self {
        (self.verdicts.at, self.source) = (at, Source::Redis);
        self
    }

    /// The decision on a check that takes its cost out of what this one granted to the caller so long ago, so that so much
    /// is left of it. What the store had left then remains too. It is [refunded](Self::refund) as if it had been charged alone then.
    pub(crate) fn part(&self, check: Check, left: u32, age: Duration) -> Self {
        let mut verdicts = self.verdicts.clone();
        (verdicts.granted, verdicts.age) = (
            check.cost().into(),
            self.verdicts.age + duration::micros(age),
        );
        for (verdict, policy) in verdicts.each.iter_mut().zip(self.policies.iter()) {
            verdict.remaining =
                (verdict.remaining + i64::from(left)).min(policy.quota().capacity().into());
        }
        Self {
            decider: self.decider,
            ..check.answer(verdicts, Source::Leased)
        }
    }

    /// The same decision, if no more of it is charged.
    pub(crate) fn of_charge(mut self, cost: u32) -> Self {
        self.verdicts.granted = cost.into();
        self
    }

    /// The verdict of each policy.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = (&Policy, &Verdict)> {
        self.policies.iter().zip(&self.verdicts.each)
    }

    fn verdict(&self) -> &Verdict {
        self.verdicts.of(self.decider)
    }
}

/// Costs fit a `u32`.
fn clamp(cost: i64) -> u32 {
    cost.clamp(0, i64::from(u32::MAX)) as u32
}
