//! The account of one caller under one list of policies, while the primary store lacks some of its
//! charges.
//!
//! **The cost to charge.** Let `[x]` be the part of a charge of `x` that a bucket still counts, `u` the amount that the
//! primary store counted when an instance began to grant locally, and `g` the amount that the instance has granted
//! since. The instance charges `[u + g] - [u]` instead of `[g]`: a bucket drains `u` first, and `g` only after that.
//!
//! - This is at most `g`, since a bucket counts two charges together at most like each one separately.
//! - If no other instance has granted anything, the primary store counts `[u]`, and then `[u + g]`: the same as without
//!   the outage.
//! - With grants `g1 .. gn` of `n` instances, it counts `[u] + sum([u + gi] - [u])`. This never exceeds `[u +
//!   sum(gi)]`, because a fuller bucket is empty, and stops draining, for a shorter time. Until `u` has drained it is
//!   not less either, as each `[u + gi] - [u]` is then `gi`. After that, up to `n` times the rate drains, since no
//!   instance knows the grants of the others. Draining only an instance's share of the rate would charge drained cost
//!   again if a caller uses one instance only.
//!
//! Windows and logs count each charge separately, so that `[u + g] - [u]` is `[g]`.

use smallvec::SmallVec;

use crate::error::StoreError;
use crate::limit::{ChargedAt, Check, Decision, Key, Mode, Policies, Policy, Snapshot, State};

/// One state per policy.
type States = SmallVec<[State; 1]>;

/// The charges and the reset of a caller that the primary store lacks. All times are in microseconds.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) policies: Policies,
    /// The counts of each policy before the first grant of the fallback, and the charges that were sent since.
    sent: States,
    /// `sent` with all grants of the fallback.
    all: States,
    /// All charges until this time were sent or reset.
    sent_until: i64,
    /// Whether the primary store lacks a reset, which it gets before any charge.
    lacks_reset: bool,
    /// Whether a check was sent since the account was opened or reset.
    pub(super) is_sent: bool,
    /// Time after which the fallback counts nothing of the caller, and the reset does not matter.
    matters_until: i64,
    /// The part of a limit that the caller had used after the last grant, in 255ths, rounded down.
    pub(super) used: u8,
}

/// A check that the account counts as sent to the primary store.
pub(super) struct Sent {
    pub(super) check: Check,
    /// The account without the check: `sent` and `sent_until`.
    before: (States, i64),
}

impl Account {
    /// Opens an account with a decision of the fallback. The primary store already counts everything the decision counts,
    /// except the grant.
    pub(super) fn new(policies: &Policies, decision: &Decision, granted: u32, now: i64) -> Self {
        let before = decision.clone().settled(granted, 0);
        let parts = before.verdicts().zip(decision.verdicts());
        let mut parts = parts.filter(|((part, _), _)| !part.is_in_flight());
        // These are counts of an instance's share: the primary store is assumed to count the same proportion of the
        // whole policy.
        let each = policies.iter().map(|policy| {
            let Some(((part, before), (_, after))) = parts.next() else {
                return State::fresh(policy.kind());
            };
            let [whole, capacity] = [policy, part].map(|policy| policy.params().capacity);
            let (used, reset) = if policy.frees().is_gradual() && after.remaining == 0 {
                // There may be a debt, which hides the amount used before it, but not the time.
                let grant = part.quota().time_for(granted.into()).as_micros();
                (
                    2 * whole,
                    after.reset - i64::try_from(grant).unwrap_or(i64::MAX),
                )
            } else {
                let used = i128::from((capacity - before.remaining).max(0)) * i128::from(whole);
                ((used / i128::from(capacity.max(1))) as i64, before.reset)
            };
            if reset <= 0 {
                return State::fresh(policy.kind());
            }
            // A share whose limit was rounded down drains more slowly than the whole, and a custom fallback may
            // report any time.
            let periods = (used as u64).div_ceil(policy.quota().limit().into()) as i64;
            let until = now + reset.min(periods * policy.params().period);
            let counted = Snapshot { used, until };
            State::resume(policy.kind(), policy.params(), now, counted)
        });
        let sent: States = each.collect();
        Self {
            policies: policies.clone(),
            all: sent.clone(),
            sent,
            sent_until: now - 1,
            lacks_reset: false,
            is_sent: false,
            matters_until: now,
            used: 0,
        }
    }

    /// Returns `true` if `policies` have the same counts, possibly under another quota.
    pub(super) fn is_under(&self, policies: &Policies) -> bool {
        self.policies.id() == policies.id()
    }

    /// Adds a grant of the fallback. A quota of these counts may have changed since the last grant.
    pub(super) fn charge(&mut self, policies: &Policies, decision: &Decision, cost: u32, now: i64) {
        if !self.policies.is(policies) {
            self.policies = policies.clone();
        }
        for (policy, all) in self.policies.iter().zip(&mut self.all) {
            Mode::Charge.count(policy, all, cost.into(), now);
        }
        self.used = 0;
        for (policy, verdict) in decision.verdicts() {
            self.used = self.used.max(verdict.used(policy));
            self.matters_until = self.matters_until.max(now.saturating_add(verdict.reset));
        }
    }

    /// Drops all charges, and records a reset.
    pub(super) fn reset(&mut self, now: i64) {
        let fresh = self
            .policies
            .iter()
            .map(|policy| State::fresh(policy.kind()));
        self.sent = fresh.collect();
        self.all = self.sent.clone();
        (self.sent_until, self.lacks_reset, self.is_sent) = (now, true, false);
        // All earlier charges have expired at that time.
        self.matters_until = now.saturating_add(self.policies.longest_count());
    }

    /// Returns the part of a refund that applies to this account, which is 0 if a reset has dropped the charge. `None`
    /// if the charge was sent: the primary store must refund it.
    pub(super) fn refundable(&self, check: &Check, now: i64) -> Option<u32> {
        match check.charged().first().map(|charged| charged.at) {
            Some(ChargedAt::Redis(_)) => None,
            Some(ChargedAt::Local(at)) if at <= self.sent_until => self.lacks_reset.then_some(0),
            // Without a charge, a refund applies to any.
            Some(ChargedAt::Local(_)) | None => Some(check.cost().min(limited(self.left(now)))),
        }
    }

    /// Refunds the [refundable](Self::refundable) part of a charge.
    pub(super) fn refund(&mut self, check: &Check, now: i64) {
        let states = self.sent.iter().zip(&mut self.all);
        for (i, (policy, (sent, all))) in self.policies.iter().zip(states).enumerate() {
            let cost = limited(unsent(policy, sent, all, now)).min(check.cost());
            check.charged_under(i).refund(policy, all, cost.into(), now);
        }
    }

    /// Returns `true` if the primary store lacks an unexpired charge or a reset.
    pub(super) fn is_owed(&self, now: i64) -> bool {
        self.lacks_reset && now < self.matters_until || self.left(now) > 0
    }

    /// Returns `true` if the account may be removed during an outage: nothing is owed, and the fallback counts nothing.
    /// Otherwise the next account would begin with local grants as the count of the primary store.
    pub(super) fn is_over(&self, now: i64) -> bool {
        self.matters_until <= now && self.left(now) == 0
    }

    /// The unexpired cost that was not sent: the most under any policy.
    fn left(&self, now: i64) -> u64 {
        self.each_left(now).max().unwrap_or(0)
    }

    fn each_left(&self, now: i64) -> impl Iterator<Item = u64> {
        let states = self.policies.iter().zip(self.sent.iter().zip(&self.all));
        states.map(move |(policy, (sent, all))| unsent(policy, sent, all, now))
    }

    /// Returns the next check that brings the primary store up to date, and counts it as sent: a reset, or a charge under
    /// those policies that lack it. `None` if the primary store lacks nothing.
    pub(super) fn send(&mut self, key: Key, now: i64) -> Option<Sent> {
        self.lacks_reset &= now < self.matters_until;
        let before = (self.sent.clone(), self.sent_until);
        if self.lacks_reset {
            let check = Check::reset(key, &self.policies);
            self.is_sent = true;
            return Some(Sent { check, before });
        }
        // Charge the cost that all policies lack first, then the rest under some of them.
        let left: SmallVec<[u64; 1]> = self.each_left(now).collect();
        let cost = limited(left.iter().copied().filter(|left| *left > 0).min()?);
        let lack = self
            .policies
            .iter()
            .zip(&left)
            .filter(|(_, left)| **left > 0);
        let policies = if left.contains(&0) {
            Policies::new(lack.map(|(policy, _)| policy.clone())).ok()?
        } else {
            self.policies.clone()
        };
        let states = self.sent.iter_mut().zip(&self.all).zip(left);
        for (policy, ((sent, all), left)) in self.policies.iter().zip(states) {
            *sent = all.clone();
            let rest = limited(left.saturating_sub(cost.into()));
            Mode::Refund.count(policy, sent, rest.into(), now);
        }
        (self.sent_until, self.is_sent) = (now, true);
        let check = Check::charge(key, &policies, cost);
        Some(Sent { check, before })
    }

    /// Records the reply to a check. A charge is repeated only if it was certainly not sent, a reset until the primary
    /// store has replied.
    pub(super) fn replied(&mut self, sent: Sent, answer: &Result<Decision, StoreError>) {
        let is_charge = sent.check.mode() == Mode::Charge;
        match answer {
            // A reset that is owed has dropped the charge, or was the check.
            Err(error) if error.is_not_sent() && !self.lacks_reset => {
                (self.sent, self.sent_until) = sent.before;
            }
            Err(error) if error.is_not_sent() || !error.is_check_only() => {}
            // Another reset since then was not sent.
            _ => self.lacks_reset &= is_charge || !self.is_sent,
        }
    }
}

fn unsent(policy: &Policy, sent: &State, all: &State, now: i64) -> u64 {
    (all.counted(policy, now) - sent.counted(policy, now)).max(0) as u64
}

fn limited(cost: u64) -> u32 {
    u32::try_from(cost).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::Duration;

    use fastrand::Rng;
    use futures_util::FutureExt;

    use super::*;
    use crate::error::ErrorKind;
    use crate::limit::{PolicyCharge, Quota, Source, Strategy};
    use crate::simulation::pick;
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

    fn send(account: &mut Account, now: i64) -> Sent {
        account.send(Key::GLOBAL, now).unwrap()
    }

    fn unsent_error() -> StoreError {
        StoreError::new(ErrorKind::Unreachable).not_sent()
    }

    /// One of two policies was charged: the primary store refunds under both, later.
    #[test]
    fn a_sent_charge_is_not_refunded_here() {
        let policies = Policies::new([log("a", "10/s"), log("b", "10/h")]).unwrap();
        let (mut account, _) = account(&policies, 5, SECOND);
        let later = SECOND * 3 / 2;
        let (_, decision) = super::tests::account(&policies, 2, later);
        account.charge(&policies, &decision, 2, later);
        assert_eq!(refundable(&account, &decision, later), Some(2));
        // The first charge has expired under `a`.
        let now = 2 * SECOND;
        let sent = send(&mut account, now);
        assert_eq!(
            (sent.check.policies().iter().len(), sent.check.cost()),
            (2, 2)
        );
        assert_eq!(refundable(&account, &decision, now), None);
        account.replied(sent, &Ok(decision.clone()));
        let rest = send(&mut account, now);
        assert_eq!(
            (rest.check.policies().iter().len(), rest.check.cost()),
            (1, 5)
        );
        account.replied(rest, &Err(unsent_error()));
        assert_eq!(refundable(&account, &decision, now), None);
        assert_eq!(send(&mut account, now).check.cost(), 5);
        assert!(account.send(Key::GLOBAL, now).is_none());
    }

    #[test]
    fn unsent_charges_stay_refundable() {
        let policies = log("a", "10/h").into();
        let (mut account, decision) = account(&policies, 5, SECOND);
        let sent = send(&mut account, SECOND);
        account.replied(sent, &Err(unsent_error()));
        assert_eq!(refundable(&account, &decision, SECOND), Some(5));
        // A charge without a reply is not repeated.
        let sent = send(&mut account, SECOND);
        account.replied(sent, &Err(StoreError::new(ErrorKind::Timeout)));
        assert_eq!(refundable(&account, &decision, SECOND), None);
        assert!(!account.is_owed(SECOND));
    }

    #[test]
    fn a_reset_drops_what_was_sent() {
        let policies = log("a", "10/h").into();
        let (mut account, decision) = account(&policies, 5, SECOND);
        let sent = send(&mut account, SECOND);
        account.reset(SECOND);
        account.replied(sent, &Err(unsent_error()));
        assert_eq!(refundable(&account, &decision, SECOND), Some(0));
        let reset = send(&mut account, SECOND);
        assert_eq!(reset.check.mode(), Mode::Reset);
        account.replied(reset, &Ok(decision));
        assert!(account.send(Key::GLOBAL, SECOND).is_none());
    }

    /// A reply to the first one is no reply to the second.
    #[test]
    fn a_reset_during_a_reset_is_sent() {
        let policies = log("a", "10/h").into();
        let (mut account, decision) = account(&policies, 5, SECOND);
        account.reset(SECOND);
        let first = send(&mut account, 2 * SECOND);
        account.reset(3 * SECOND);
        account.replied(first, &Ok(decision.clone()));
        let second = send(&mut account, 4 * SECOND);
        assert_eq!(second.check.mode(), Mode::Reset);
        account.replied(second, &Ok(decision));
        assert!(!account.is_owed(4 * SECOND));
    }

    /// The reply to the older charges takes long.
    #[test]
    fn newer_charges_keep_their_time() {
        let policies = log("a", "10/10s").into();
        for is_sent in [true, false] {
            let (mut account, _) = account(&policies, 5, SECOND);
            let sent = send(&mut account, SECOND);
            let (_, decision) = super::tests::account(&policies, 3, 2 * SECOND);
            account.charge(&policies, &decision, 3, 2 * SECOND);
            let error = StoreError::new(ErrorKind::Timeout);
            let error = if is_sent { error } else { error.not_sent() };
            account.replied(sent, &Err(error));
            assert_eq!(account.left(10 * SECOND), if is_sent { 3 } else { 8 });
            assert_eq!(account.left(11 * SECOND), 3);
            assert_eq!(account.left(12 * SECOND), 0);
        }
    }

    /// The counter rounds the overlap of its previous window, so that the part of one grant is 0 before it is 1.
    #[test]
    fn rounding_repeats_no_charge() {
        let counter =
            Policy::new("b", Strategy::SlidingCounter, "10/1000s".parse().unwrap()).unwrap();
        let policies = Policies::new([log("a", "10/100d"), counter]).unwrap();
        let (now, local) = (10_500 * SECOND, LocalStore::default());
        let charge = |cost| {
            let check = Check::charge(Key::GLOBAL, &policies, cost);
            local.check(check).now_or_never().unwrap().unwrap()
        };
        let _ = charge(3);
        let decision = charge(1);
        let mut account = Account::new(&policies, &decision, 1, now);
        account.charge(&policies, &decision, 1, now);
        let sent = send(&mut account, 11_550 * SECOND);
        assert_eq!(
            (sent.check.policies().iter().len(), sent.check.cost()),
            (1, 1)
        );
        account.replied(sent, &Ok(decision));
        assert!(account.send(Key::GLOBAL, 11_700 * SECOND).is_none());
    }

    fn any_policy(name: &str, strategy: Strategy, rng: &mut Rng) -> Policy {
        let (limit, period) = (rng.u32(1..2_000), Duration::from_secs(rng.u64(1..7_200)));
        let quota = Quota::per(limit, period);
        let quota = if strategy.frees().has_burst() {
            quota.burst(rng.u32(1..3_000))
        } else {
            quota
        };
        Policy::new(name, strategy, quota).unwrap()
    }

    /// Holds for any counts of an instance, if the limit of a window changes often, and under two policies.
    #[tokio::test]
    async fn no_more_is_charged_than_was_granted() {
        for seed in 0..4_000 {
            let mut rng = Rng::with_seed(seed);
            let strategy = *pick(&mut rng, Strategy::ALL);
            let mut current = Policies::from(any_policy("test", strategy, &mut rng));
            let is_alone = rng.bool();
            if !is_alone {
                let other = any_policy("other", *pick(&mut rng, Strategy::ALL), &mut rng);
                current = Policies::new([current[0].clone(), other]).unwrap();
            }
            let (local, mut now) = (LocalStore::default(), 1_700_000_000_000_000);
            let part = current.share(NonZeroU32::new(rng.u32(1..8)).unwrap());
            let check = Check::charge(Key::GLOBAL, &part, rng.u32(0..4_000));
            let counted = local.check(check).await.unwrap();
            assert_eq!(counted.source(), Source::Local);
            let mut account = Account::new(&current, &counted, 0, now);
            let (mut granted, mut sent) = (0, 0);
            let most_cost = *pick(&mut rng, &[2, 2_000]);
            let most_wait = *pick(&mut rng, &[60_000_000, 3_600_000_000]);
            for _ in 0..20 {
                let most = account.left(now);
                match rng.u8(..5) {
                    0 if is_alone && !strategy.frees().has_burst() => {
                        let quota = Quota::per(rng.u32(1..2_000), current[0].quota().period());
                        current = Policy::new("test", strategy, quota).unwrap().into();
                    }
                    1 => {
                        let of = PolicyCharge::just_now(rng.i64(0..2_000));
                        let each = current.iter().map(|_| of).collect();
                        let cost = rng.u32(0..2_000);
                        let refund = Check::refund_of(Key::GLOBAL, &current, cost, each);
                        account.refund(&refund, now);
                        assert!(account.left(now) <= most, "seed {seed}");
                    }
                    2 => {
                        while let Some(check) = account.send(Key::GLOBAL, now) {
                            sent += u64::from(check.check.cost());
                        }
                        assert_eq!(account.left(now), 0, "seed {seed}: sent once");
                    }
                    _ => {
                        let cost = rng.u32(0..=most_cost);
                        account.charge(&current, &counted, cost, now);
                        granted += u64::from(cost);
                    }
                }
                let left = account.left(now);
                assert!(
                    sent + left <= granted,
                    "seed {seed}, {current:?}: {sent} and {left} of {granted}"
                );
                now += rng.i64(0..most_wait);
            }
        }
    }
}
