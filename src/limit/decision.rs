use std::iter;
use std::time::Duration;

use super::{Policies, Policy};

/// The verdict on one check.
///
/// With several policies it speaks for the one that decided: when denied, the one that asks for the longest wait; when
/// allowed, the one with the least left. [`each`](Self::each) tells them all.
///
/// A store that could not decide gives an [`Error`](crate::Error), never a decision.
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
pub enum Outcome {
    /// It passed, and was charged.
    Allowed,
    /// It did not pass, and nothing was charged.
    Denied {
        /// When the same check would pass, if nobody else takes anything until then; to the microsecond, rounded up.
        retry_after: Duration,
    },
    /// Its cost is above the capacity of a policy: no wait helps, and nothing was charged.
    NeverFits,
}

/// Where a decision was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// In Redis, on the count that all instances share.
    Redis,
    /// In this process, by a denial of Redis that still holds: nothing but a refund, a reset or another policy could
    /// make it untrue before its `retry_after`. What another instance gives back or resets stays unseen for that
    /// long, and so does a window that began earlier by another quota of the same name. A check of a larger cost than was
    /// denied is told the wait of the smaller one. What is told beside a cost that never fits, such as what remains, is up
    /// to a minute old.
    Cached,
    /// In this process, on a count of its own.
    Local,
    /// In a [`Store`](crate::Store) outside of this crate, by its name, such as `"postgres"`. The name is a label of
    /// metrics.
    Other(&'static str),
}

impl Source {
    /// Its name in lower case, as a label of a metric: `redis`, `cached`, `local`, or that of another store.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Cached => "cached",
            Self::Local => "local",
            Self::Other(name) => name,
        }
    }
}

/// What one policy says of a check. A [`Store`](crate::Store) outside of this crate makes a [`Decision`] of them, with
/// [`Check::decided`](super::Check::decided).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Verdict {
    /// The largest cost that would pass now.
    pub(crate) remaining: i64,
    /// 0 if this policy let the check pass, [`NEVER`](Self::NEVER), or how many microseconds until it would.
    pub(crate) wait: i64,
    /// How many microseconds until nothing is charged any more.
    pub(crate) reset: i64,
}

impl Verdict {
    /// The wait for what will never pass.
    pub(crate) const NEVER: i64 = -1;
    /// Of a policy that has nothing to say.
    pub(super) const NONE: Self = Self { remaining: 0, wait: 0, reset: 0 };

    /// Whether this policy let the check pass.
    pub(crate) fn is_allowed(&self) -> bool {
        self.wait == 0
    }
}

/// What the policies of a check say of it, in their order.
///
/// The first is kept apart, since most checks have one policy: their verdicts take no memory elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdicts {
    /// What was charged, or given back.
    pub(crate) granted: i64,
    pub(crate) first: Verdict,
    pub(crate) others: Box<[Verdict]>,
}

impl Verdicts {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Verdict> {
        iter::once(&self.first).chain(&self.others)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Verdict> {
        iter::once(&mut self.first).chain(&mut self.others)
    }

    /// What the policy at this index says.
    fn of(&self, policy: usize) -> &Verdict {
        policy.checked_sub(1).and_then(|i| self.others.get(i)).unwrap_or(&self.first)
    }

    /// The index of the policy that decides: the one that asks for the longest wait, else the one with the least left,
    /// else the first.
    fn decider(&self) -> usize {
        let rank = |v: &Verdict| (v.wait == Verdict::NEVER, v.wait, -v.remaining);
        let mut decider = 0;
        for (i, verdict) in self.others.iter().enumerate() {
            if rank(verdict) > rank(self.of(decider)) {
                decider = i + 1;
            }
        }
        decider
    }

    /// How many microseconds to wait, if they deny and a wait helps.
    pub(crate) fn wait(&self) -> Option<i64> {
        match self.of(self.decider()).wait {
            0 | Verdict::NEVER => None,
            wait => Some(wait),
        }
    }

    /// The same, told to a check of these policies: quotas may have changed since, and none leaves more than its capacity.
    pub(crate) fn within(&self, policies: &Policies) -> Self {
        let mut verdicts = self.clone();
        for (verdict, policy) in verdicts.iter_mut().zip(policies.iter()) {
            verdict.remaining = verdict.remaining.min(policy.params().capacity);
        }
        verdicts
    }

    /// The same denial so many microseconds later.
    pub(crate) fn later(&self, elapsed: i64) -> Self {
        let mut verdicts = self.clone();
        for verdict in verdicts.iter_mut() {
            if verdict.wait > 0 {
                verdict.wait = (verdict.wait - elapsed).max(1);
            }
            verdict.reset = (verdict.reset - elapsed).max(0);
        }
        verdicts
    }
}

/// A wait in microseconds. The twins make none below zero.
fn micros(wait: i64) -> Duration {
    Duration::from_micros(wait.max(0) as u64)
}

impl Decision {
    pub(super) fn new(policies: Policies, verdicts: Verdicts, source: Source) -> Self {
        let decider = verdicts.decider();
        Self { policies, verdicts, decider, source }
    }

    /// Whether the check passed.
    pub fn outcome(&self) -> Outcome {
        match self.verdict().wait {
            0 => Outcome::Allowed,
            Verdict::NEVER => Outcome::NeverFits,
            wait => Outcome::Denied { retry_after: micros(wait) },
        }
    }

    /// Whether the check passed.
    pub fn is_allowed(&self) -> bool {
        self.verdict().is_allowed()
    }

    /// How much was charged, or given back: the whole cost for a [`take`](crate::Check::take) that passed.
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
            Outcome::Allowed | Outcome::NeverFits => None,
        }
    }

    /// How long until the deciding policy has nothing charged any more, if nothing more is.
    pub fn reset_after(&self) -> Duration {
        micros(self.verdict().reset)
    }

    /// The policy that decided.
    pub fn policy(&self) -> &Policy {
        &self.policies[self.decider]
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
        (0..self.policies.iter().len()).map(|decider| Self { decider, ..self.clone() })
    }

    /// The same as a denial: of one that would pass, for the shortest wait.
    pub(crate) fn denied(self) -> Self {
        if !self.is_allowed() {
            return self;
        }
        let mut verdicts = self.verdicts;
        if let Some(decider) = verdicts.iter_mut().nth(self.decider) {
            decider.wait = 1;
        }
        Self::new(self.policies, verdicts, self.source)
    }

    /// The same, with another wait where a policy never lets the check pass: as told by its index.
    pub(crate) fn wait_instead(self, wait: impl Fn(usize, &Verdict) -> i64) -> Self {
        let mut verdicts = self.verdicts;
        for (i, verdict) in verdicts.iter_mut().enumerate().filter(|(_, verdict)| verdict.wait == Verdict::NEVER) {
            verdict.wait = wait(i, verdict);
        }
        Self::new(self.policies, verdicts, self.source)
    }

    /// What each policy says of the check.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = (&Policy, &Verdict)> {
        self.policies.iter().zip(self.verdicts.iter())
    }

    fn verdict(&self) -> &Verdict {
        self.verdicts.of(self.decider)
    }
}

/// No twin makes a cost above a `u32`.
fn clamp(cost: i64) -> u32 {
    cost.clamp(0, i64::from(u32::MAX)) as u32
}
