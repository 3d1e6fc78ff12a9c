//! The account of one caller under one list of policies, while the primary store lacks some of its
//! charges.

use crate::limit::{Charged, Check, Decision, Key, LONGEST, Policies};

use super::charges::Charges;

/// The charges and the reset of a caller that the primary store lacks.
#[derive(Debug)]
pub(super) struct Account {
    policies: Policies,
    /// Time in microseconds when it was opened or reset. Earlier charges are in the primary store, or were reset.
    since: i64,
    charges: Charges,
    /// Set if the primary store lacks a reset: the time in microseconds at which the reset no longer matters.
    reset_until: Option<i64>,
    /// The part of a limit that the caller has used, in 255ths.
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
    /// Opens an account with a decision of the fallback. The primary store already counts everything the decision counts,
    /// except the grant.
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

    /// Returns `true` if `policies` have the same counts, possibly under another quota.
    pub(super) fn is_under(&self, policies: &Policies) -> bool {
        self.policies.id() == policies.id()
    }

    /// The part of a limit that the caller had used after the last grant, in 255ths, rounded down.
    pub(super) fn used(&self) -> u8 {
        self.used
    }

    /// Adds a grant of the fallback. A quota of these counts may have changed since the last grant.
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

    /// Refunds a part of a charge.
    ///
    /// Only the age of the charge limits the refund. Its `reset` is that of another window, which may
    /// have begun before the window of this account.
    pub(super) fn refund(&mut self, check: &Check, now: i64) {
        let of = (0..self.policies.iter().len()).map(|policy| Charged {
            reset: LONGEST,
            ..check.charged_under(policy)
        });
        self.charges
            .refund(&self.policies, check.cost().into(), of, now);
    }

    /// Drops all charges, and records a reset.
    pub(super) fn reset(&mut self, now: i64) {
        (self.charges, self.since) = (Charges::none(&self.policies), now + 1);
        // All earlier charges have expired at that time.
        self.reset_until = Some(now.saturating_add(self.policies.longest_count()));
    }

    /// Upper bound of a refund here, for a charge made at `at` or for any charge. `None` if the charge is in the
    /// primary store.
    pub(super) fn refundable(&self, at: Option<i64>, now: i64) -> Option<u64> {
        match at {
            Some(at) if at < self.since => self.reset_until.map(|_| 0),
            _ => Some(self.left(now)),
        }
    }

    /// The unexpired cost that the primary store lacks: the most under any policy.
    pub(super) fn left(&self, now: i64) -> u64 {
        self.charges.left(&self.policies, now).max().unwrap_or(0)
    }

    /// The next step. `None` if the primary store is up to date.
    pub(super) fn next(&mut self, now: i64) -> Option<Step> {
        if self.reset_until.is_some_and(|until| until > now) {
            return Some(Step::Reset);
        }
        self.reset_until = None;
        let left: Vec<u64> = self.charges.left(&self.policies, now).collect();
        // Charge the cost that all policies lack first, then the rest under some of them.
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

    /// Records a step as done, or as lost.
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
                self.charges.charged(&self.policies, costs, now);
            }
        }
    }

    /// Merges an older account of the same counts.
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

    /// The cost that it charges.
    pub(super) fn cost(&self) -> u64 {
        match self {
            Self::Reset => 0,
            Self::Charge(_, cost) => (*cost).into(),
        }
    }
}
