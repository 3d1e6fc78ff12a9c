//! The account of one caller under one list of policies, while the primary store lacks some of its
//! charges.

use crate::limit::{Align, Charged, ChargedAt, Check, Decision, Key, Policies, Policy, Strategy};

use super::charges::Charges;

/// The charges and the reset of a caller that the primary store lacks.
#[derive(Debug)]
pub(super) struct Account {
    policies: Policies,
    /// Time in microseconds. Earlier charges are in the primary store, on the way there, or were reset.
    since: i64,
    charges: Charges,
    /// Set if the primary store lacks a reset: the time in microseconds at which the reset no longer matters.
    reset_until: Option<i64>,
    /// The part of a limit that the caller has used, in 255ths.
    used: u8,
    /// Time in microseconds at which the fallback counts nothing of the caller.
    counts_until: i64,
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
            counts_until: now,
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
        let used = decision.verdicts().map(|(policy, each)| each.used(policy));
        self.used = used.max().unwrap_or(0);
        let resets = decision.verdicts().map(|(_, each)| each.reset);
        self.counts_until = now.saturating_add(resets.max().unwrap_or(0));
    }

    /// Returns the part of a refund that applies to this account. `None` if the primary store must refund.
    pub(super) fn refundable(&self, check: &Check, now: i64) -> Option<u32> {
        let left = || u32::try_from(self.left(now)).unwrap_or(u32::MAX);
        match check.charged().first().map(|charged| charged.at) {
            Some(ChargedAt::Redis(_)) => None,
            Some(ChargedAt::Local(at)) if at < self.since => self.reset_until.map(|_| 0),
            // Without a charge, a refund applies to any.
            Some(ChargedAt::Local(_)) | None => Some(check.cost().min(left())),
        }
    }

    /// Refunds the [refundable](Self::refundable) part of a charge.
    pub(super) fn refund(&mut self, check: &Check, now: i64) {
        let each = self.policies.iter().enumerate();
        let of = each.map(|(i, policy)| in_account(policy, check.charged_under(i), now));
        self.charges
            .refund(&self.policies, check.cost().into(), of, now);
    }

    /// Drops all charges, and records a reset.
    pub(super) fn reset(&mut self, now: i64) {
        (self.charges, self.since) = (Charges::none(&self.policies), now + 1);
        // All earlier charges have expired at that time.
        self.reset_until = Some(now.saturating_add(self.policies.longest_count()));
    }

    /// Returns `true` if the primary store lacks an unexpired charge or a reset.
    pub(super) fn is_owed(&self, now: i64) -> bool {
        self.reset_until.is_some_and(|until| until > now) || self.left(now) > 0
    }

    /// Returns `true` if the account may be removed during an outage: nothing is owed, and the fallback counts nothing.
    /// Otherwise the next account would begin with local grants as the count of the primary store.
    pub(super) fn is_over(&self, now: i64) -> bool {
        self.counts_until <= now && !self.is_owed(now)
    }

    /// The unexpired cost that the primary store lacks: the most under any policy.
    fn left(&self, now: i64) -> u64 {
        self.charges.left(&self.policies, now).max().unwrap_or(0)
    }

    /// Takes the charges and the reset.
    pub(super) fn take(&mut self, now: i64) -> Self {
        Self {
            policies: self.policies.clone(),
            since: std::mem::replace(&mut self.since, now + 1),
            charges: self.charges.take(&self.policies),
            reset_until: self.reset_until.take(),
            ..*self
        }
    }

    /// Puts back the rest of a taken account. A reset since then drops it.
    pub(super) fn put_back(&mut self, older: &mut Self, now: i64) {
        if self.reset_until.is_some() || !older.is_owed(now) {
            return;
        }
        (self.since, self.reset_until) = (older.since, older.reset_until);
        let newer = self.charges.left(&self.policies, now);
        older.charges.charge(&self.policies, newer, now);
        std::mem::swap(&mut self.charges, &mut older.charges);
    }

    /// The next check that brings the primary store up to date: a reset, or a charge under those policies that lack it.
    /// `None` if the primary store lacks nothing.
    pub(super) fn next(&mut self, key: Key, now: i64) -> Option<Check> {
        if self.reset_until.is_some_and(|until| until > now) {
            return Some(Check::reset(key, &self.policies));
        }
        self.reset_until = None;
        let left: Vec<u64> = self.charges.left(&self.policies, now).collect();
        // Charge the cost that all policies lack first, then the rest under some of them.
        let cost = left.iter().copied().filter(|left| *left > 0).min()?;
        let each = self.policies.iter().zip(&left);
        let some = match left.contains(&0) {
            true => {
                let lack = each.filter(|(_, left)| **left > 0);
                Policies::new(lack.map(|(policy, _)| policy.clone())).ok()?
            }
            false => self.policies.clone(),
        };
        let cost = u32::try_from(cost).unwrap_or(u32::MAX);
        Some(Check::charge(key, &some, cost))
    }

    /// Records a check as done, or as lost.
    pub(super) fn done(&mut self, check: &Check, now: i64) {
        self.since = now + 1;
        self.reset_until = None;
        let costs = self.policies.iter().map(|policy| {
            let mut charged = check.policies().iter();
            let is_charged = charged.any(|charged| charged.id() == policy.id());
            u64::from(check.cost()) * u64::from(is_charged)
        });
        self.charges.charged(&self.policies, costs, now);
    }
}

/// The charge, as an account counts it under this policy.
///
/// A window from the first hit begins here with the first charge of the account. In the fallback, an earlier charge may
/// have begun it, so its reset differs. This reset includes all charges made at the start of the window here or later.
fn in_account(policy: &Policy, charged: Charged, now: i64) -> Charged {
    match (charged.at, policy.strategy()) {
        (ChargedAt::Local(at), Some(Strategy::FixedWindow(Align::FirstHit))) => Charged {
            age: now - at,
            reset: policy.params().period / 2 + 1,
            ..charged
        },
        _ => charged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Mode;
    use crate::store::{Answer, LocalStore, Store};

    const SECOND: i64 = 1_000_000;

    fn log(name: &str, quota: &str) -> Policy {
        Policy::new(name, Strategy::SlidingLog, quota.parse().unwrap()).unwrap()
    }

    /// An account with a local grant of this cost, at this time.
    fn account(policies: &Policies, cost: u32, now: i64) -> (Account, Decision) {
        let check = Check::take(Key::GLOBAL, policies, cost);
        let Answer::Ready { answer } = LocalStore::default().check(check) else {
            unreachable!()
        };
        let decision = answer.unwrap().charged_locally(now, false);
        let mut account = Account::new(policies, &decision, cost, now);
        account.charge(policies, &decision, cost, now);
        (account, decision)
    }

    fn refundable(account: &Account, decision: &Decision, now: i64) -> Option<u32> {
        let refund = decision.refund(Key::GLOBAL, 5, Default::default()).next();
        account.refundable(&refund.unwrap(), now)
    }

    /// One of two policies was charged: the primary store refunds under both, later.
    #[test]
    fn a_charge_on_its_way_is_not_refunded_here() {
        let policies = Policies::new([log("a", "10/h"), log("b", "10/h")]).unwrap();
        let (mut account, decision) = account(&policies, 5, SECOND);
        assert_eq!(refundable(&account, &decision, SECOND), Some(5));
        let mut taken = account.take(SECOND);
        assert_eq!(refundable(&account, &decision, SECOND), None);
        taken.done(
            &Check::charge(Key::GLOBAL, &log("a", "10/h").into(), 5),
            SECOND,
        );
        account.put_back(&mut taken, SECOND);
        assert_eq!(refundable(&account, &decision, SECOND), None);
        let rest = account.next(Key::GLOBAL, SECOND).unwrap();
        assert_eq!((rest.policies().iter().len(), rest.cost()), (1, 5));
    }

    #[test]
    fn unsent_charges_stay_refundable() {
        let policies = log("a", "10/h").into();
        let (mut account, decision) = account(&policies, 5, SECOND);
        let mut taken = account.take(SECOND);
        account.put_back(&mut taken, SECOND);
        assert_eq!(refundable(&account, &decision, SECOND), Some(5));
    }

    #[test]
    fn a_reset_drops_what_was_taken() {
        let policies = log("a", "10/h").into();
        let (mut account, decision) = account(&policies, 5, SECOND);
        let mut taken = account.take(SECOND);
        account.reset(SECOND);
        account.put_back(&mut taken, SECOND);
        assert_eq!(refundable(&account, &decision, SECOND), Some(0));
        let reset = account.next(Key::GLOBAL, SECOND).unwrap();
        assert_eq!(reset.mode(), Mode::Reset);
        account.done(&reset, SECOND);
        assert!(account.next(Key::GLOBAL, SECOND).is_none());
    }

    /// The reply to the older charges takes long.
    #[test]
    fn newer_charges_keep_their_time() {
        let policies = log("a", "10/10s").into();
        let (mut account, _) = account(&policies, 5, SECOND);
        let mut taken = account.take(SECOND);
        let (_, decision) = super::tests::account(&policies, 3, 2 * SECOND);
        account.charge(&policies, &decision, 3, 2 * SECOND);
        let sent = taken.next(Key::GLOBAL, SECOND).unwrap();
        taken.done(&sent, SECOND);
        account.put_back(&mut taken, 9 * SECOND);
        assert_eq!(account.left(11 * SECOND), 3);
        assert_eq!(account.left(12 * SECOND), 0);
    }
}
