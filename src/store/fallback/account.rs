//! The account of one caller under one list of policies, while the primary store does not know of all its charges.

use crate::limit::{Charged, Check, Decision, Key, LONGEST, Policies};

use super::charges::Charges;

/// What the primary store has yet to be told of a caller.
#[derive(Debug)]
pub(super) struct Account {
    policies: Policies,
    /// When it was opened or reset, in microseconds. Earlier charges are in the primary store, or forgotten.
    since: i64,
    charges: Charges,
    /// Until when a reset matters that the primary store does not know of, in microseconds.
    reset_until: Option<i64>,
    /// How much of a limit the caller has used, in 255ths.
    used: u8,
}

/// One check that brings the primary store up to date.
#[derive(Debug)]
pub(super) enum Step {
    Reset,
    /// Charges a cost under those policies that lack it.
    Charge(Policies, u32),
}

impl Account {
    /// The account of a caller about whom the fallback has made this decision: whatever else that counted, the primary store
    /// counts.
    pub(super) fn new(policies: &Policies, decision: &Decision, granted: u32, now: i64) -> Self {
        let before = decision.clone().settled(granted, 0);
        Self {
            policies: policies.clone(),
            since: now,
            charges: Charges::after(policies, before, now),
            reset_until: None,
            used: 0,
        }
    }

    pub(super) fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Returns `true` if it is of the same counts.
    pub(super) fn is_under(&self, policies: &Policies) -> bool {
        self.policies.id() == policies.id()
    }

    /// How much of a limit the caller had used when it was last granted something, in 255ths, rounded down.
    pub(super) fn used(&self) -> u8 {
        self.used
    }

    /// Adds what the fallback has granted. A quota of these counts may have changed since the last time.
    pub(super) fn charge(&mut self, policies: &Policies, decision: &Decision, cost: u32, now: i64) {
        if !self.policies.is(policies) {
            self.policies = policies.clone();
        }
        let costs = std::iter::repeat(u64::from(cost));
        self.charges.charge(&self.policies, costs, now);
        let used = decision
            .verdicts()
            .map(|(policy, verdict)| verdict.used(policy));
        self.used = used.max().unwrap_or(0);
    }

    /// Takes out a part of a charge.
    ///
    /// Its age says how much of it is left, and not until when it was to count: that is of a window which may have begun
    /// before that of this account.
    pub(super) fn refund(&mut self, check: &Check, now: i64) {
        let of = (0..self.policies.iter().len()).map(|policy| Charged {
            reset: LONGEST,
            ..check.charged_under(policy)
        });
        self.charges
            .refund(&self.policies, check.cost().into(), of, now);
    }

    /// Forgets all charges.
    pub(super) fn reset(&mut self, now: i64) {
        (self.charges, self.since) = (Charges::none(&self.policies), now + 1);
        // What it undoes counts no longer than a full count takes to expire.
        self.reset_until = Some(now.saturating_add(self.policies.longest_count()));
    }

    /// How much of a charge of this time, or of any, may be refunded here. `None` if it is in the primary store.
    pub(super) fn refundable(&self, at: Option<i64>, now: i64) -> Option<u64> {
        match at {
            Some(at) if at < self.since => self.reset_until.map(|_| 0),
            _ => Some(self.left(now)),
        }
    }

    /// The most that a policy still counts of what the primary store was not told.
    pub(super) fn left(&self, now: i64) -> u64 {
        self.charges.left(&self.policies, now).max().unwrap_or(0)
    }

    /// The next step, until the primary store is up to date.
    pub(super) fn next(&mut self, now: i64) -> Option<Step> {
        if self.reset_until.is_some_and(|until| until > now) {
            return Some(Step::Reset);
        }
        self.reset_until = None;
        let left: Vec<u64> = self.charges.left(&self.policies, now).collect();
        // As much as all policies lack, then the rest under some of them.
        let cost = left.iter().copied().filter(|left| *left > 0).min()?;
        let lack = self
            .policies
            .iter()
            .zip(&left)
            .filter(|(_, left)| **left > 0);
        let some = match left.contains(&0) {
            true => Policies::new(lack.map(|(policy, _)| policy.clone())).ok()?,
            false => self.policies.clone(),
        };
        Some(Step::Charge(some, u32::try_from(cost).unwrap_or(u32::MAX)))
    }

    /// The primary store knows of this step, or it was lost on the way.
    pub(super) fn done(&mut self, step: &Step, now: i64) {
        match step {
            Step::Reset => self.reset_until = None,
            Step::Charge(some, cost) => {
                let ids: Vec<u64> = some.iter().map(|policy| policy.id()).collect();
                let costs = self
                    .policies
                    .iter()
                    .map(|policy| match ids.contains(&policy.id()) {
                        true => u64::from(*cost),
                        false => 0,
                    });
                self.charges.told(&self.policies, costs, now);
            }
        }
    }

    /// Puts what is left of an older account of the same counts before this one.
    pub(super) fn put_after(&mut self, mut older: Self, now: i64) {
        self.used = self.used.max(older.used);
        if self.reset_until.is_some() {
            return;
        }
        self.since = older.since;
        self.reset_until = older.reset_until;
        older
            .charges
            .charge(&self.policies, self.charges.left(&self.policies, now), now);
        self.charges = older.charges;
    }
}

impl Step {
    pub(super) fn check(&self, key: Key, account: &Account) -> Check {
        match self {
            Self::Reset => Check::reset(key, &account.policies),
            Self::Charge(some, cost) => Check::charge(key, some, *cost),
        }
    }

    /// How much it charges.
    pub(super) fn cost(&self) -> u64 {
        match self {
            Self::Reset => 0,
            Self::Charge(_, cost) => (*cost).into(),
        }
    }
}
