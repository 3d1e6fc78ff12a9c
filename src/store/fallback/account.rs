//! The account of one caller under one list of policies, while the primary store lacks some of its
//! charges.
//!
//! **The cost to charge.** An account has two counts of each policy: that of the primary store before the outage, and
//! the same with all local grants. Both drain or expire as the policy says, and their difference is charged. For example,
//! a bucket that drains 10 units per second counted 30 at the start, and the instance has granted 20. After 4 seconds,
//! the counts are 0 and 10, so 10 units are charged.
//!
//! - No more is charged than was granted, since a bucket drains its older units first.
//! - If no other instance has granted anything, the primary store then counts the same as without the outage.
//! - With grants of `n` instances, the primary store may count too little, but never too much. An instance does not know
//!   the others' grants, so its own count drains at the whole rate. After the count before the outage has drained, up to
//!   `n` units drain for each unit of a shared count.
//!
//! Windows and logs count each charge separately. So under these, the primary store lacks exactly the unexpired grants.

use std::mem;
use std::time::Duration;

use smallvec::SmallVec;

use crate::error::StoreError;
use crate::limit::{
    ChargedAt, Check, Decision, Extra, Key, Mode, Policies, Policy, PolicyCharge, Snapshot, State,
    Verdict,
};
use crate::store::charge_debt_of;

/// The charges and the reset of a caller that the primary store lacks. All times are in microseconds of this process's clock.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) policies: Policies,
    /// One per policy.
    counts: SmallVec<[PrimaryCount; 1]>,
    /// Microseconds that the clock of calendars was ahead at the newest grant. Counts under calendars have that clock.
    ahead: i64,
    /// The time of the newest charge that is not refundable here: charges until then were sent or
    /// reset, or are of an earlier account.
    sent_until: i64,
    /// Whether the primary store lacks a reset, which it gets before any charge.
    lacks_reset: bool,
    /// The state before the charge in flight, which counts as sent already. `None` if no charge is in flight, or if a reset
    /// has dropped it. If the runtime ends first, it stays until the next charge.
    before_charge: Option<BeforeCharge>,
}

#[derive(Debug)]
struct BeforeCharge {
    /// The `sent` of each count.
    sent: SmallVec<[State; 1]>,
    sent_until: i64,
}

/// The count of the primary store under a policy, in two versions. The primary store lacks the
/// difference.
#[derive(Debug)]
struct PrimaryCount {
    /// The count before the first grant of the fallback, and the charges that were sent since.
    sent: State,
    /// `sent` with all grants of the fallback.
    all: State,
}

/// Where a refund goes while the caller has an account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RefundTo {
    /// The account has the charge: deduct this part there, and in the fallback.
    Account(u32),
    /// A charge is on its way to the primary store, and may be the refunded one: the owner of the refund retries it.
    Later,
    /// The primary store has the charge.
    Primary,
}

impl PrimaryCount {
    fn new(counted: State) -> Self {
        Self {
            sent: counted.clone(),
            all: counted,
        }
    }

    /// Returns the cost that was not sent, as far as it still counts.
    fn unsent(&self, policy: &Policy, now: i64) -> u64 {
        (self.all.counted(policy, now) - self.sent.counted(policy, now)).max(0) as u64
    }

    /// Makes the quota that wrote `all`, if it is that of the policy, also the writer of `sent`.
    fn write_both(&mut self, policy: &Policy, now: i64) {
        if self.all.is_of(policy.params()) && !self.sent.is_of(policy.params()) {
            self.sent.rewrite(policy.params(), now);
        }
    }

    /// Counts `cost` as sent, and everything that has expired. The rest stays unsent.
    fn send(&mut self, policy: &Policy, cost: u32, now: i64) {
        let rest = limited(self.unsent(policy, now).saturating_sub(cost.into()));
        self.sent = self.all.clone();
        Mode::Refund.count(policy, &mut self.sent, rest.into(), now);
    }
}

impl Account {
    /// Opens an account with the count before this grant of the fallback, which the primary store already has. Then
    /// [`charge`](Self::charge) the grant.
    pub(super) fn new(policies: &Policies, decision: &Decision, granted: u32, now: i64) -> Self {
        let mut verdicts = decision
            .policies()
            .iter()
            .zip(&decision.verdicts().each)
            .filter(|(share, _)| !share.is_in_flight());
        let ahead = decision.verdicts().ahead;
        let mut counts = SmallVec::new();
        for policy in policies {
            let now = policy.params().time(now, ahead);
            counts.push(PrimaryCount::new(match verdicts.next() {
                Some((share, verdict)) => counted_before(policy, share, verdict, granted, now),
                // A custom fallback may have decided on other policies than requested.
                None => State::fresh(policy.kind()),
            }));
        }
        Self {
            policies: policies.clone(),
            counts,
            ahead,
            sent_until: now - 1,
            lacks_reset: false,
            before_charge: None,
        }
    }

    /// Adds a grant of the fallback. A quota of these counts may have changed since the last grant. The clock of calendars is
    /// `ahead`.
    pub(super) fn charge(&mut self, policies: &Policies, cost: u32, now: i64, ahead: i64) {
        self.policies = policies.clone();
        self.ahead = ahead;
        for (policy, count, now) in self.each_mut(now) {
            Mode::Charge.count(policy, &mut count.all, cost.into(), now);
            // A bucket drains at the rate of the quota that wrote it: if these rates differed, so would the parts that
            // drain.
            count.write_both(policy, now);
        }
    }

    /// Drops all charges, and records a reset.
    pub(super) fn reset(&mut self, now: i64) {
        for (policy, count) in self.policies.iter().zip(&mut self.counts) {
            *count = PrimaryCount::new(State::fresh(policy.kind()));
        }
        self.sent_until = now;
        self.lacks_reset = true;
        self.before_charge = None;
    }

    /// Returns where a refund goes.
    pub(super) fn refund_to(&self, check: &Check, now: i64) -> RefundTo {
        let unsent = self.unsent(now);
        let is_sent = match charged(check) {
            [charged, ..] => match charged.at {
                ChargedAt::Redis(_) => return RefundTo::Primary,
                ChargedAt::Local(at) => at <= self.sent_until,
            },
            // A refund that names no charge applies to any unsent one.
            [] => unsent == 0,
        };
        if !is_sent {
            RefundTo::Account(check.cost().min(limited(unsent)))
        } else if self.lacks_reset {
            // The reset has dropped the charge.
            RefundTo::Account(0)
        } else if self.before_charge.is_some() {
            RefundTo::Later
        } else {
            RefundTo::Primary
        }
    }

    /// Deducts the part of a refund that goes to the [account](RefundTo::Account). Returns it for the fallback, or `None` if
    /// the refund goes elsewhere.
    pub(super) fn refund(&mut self, check: &Check, now: i64) -> Option<Check> {
        let RefundTo::Account(part) = self.refund_to(check, now) else {
            return None;
        };
        for (i, (policy, count, now)) in self.each_mut(now).enumerate() {
            let cost = limited(count.unsent(policy, now)).min(part);
            let charge = match charged(check).get(i) {
                Some(charge) => *charge,
                None => PolicyCharge::just_now(check.cost().into()),
            };
            charge.refund(policy, &mut count.all, cost.into(), now);
        }
        let refund = Check::refund(*check.key(), check.policies(), part);
        Some(refund.with_extra(Extra::Charged(charged(check).into())))
    }

    /// Returns `true` if the primary store lacks an unexpired charge or a reset.
    pub(super) fn is_owed(&self, now: i64) -> bool {
        self.lacks_reset || self.unsent(now) > 0
    }

    /// Returns the largest part of a limit that the caller has used, in 255ths.
    pub(super) fn used(&self, now: i64) -> u8 {
        let mut most = 0;
        for (policy, count, now) in self.each(now) {
            let capacity = policy.params().capacity.max(1);
            let used = count.all.counted(policy, now).clamp(0, capacity);
            most = most.max((used * 255 / capacity) as u8);
        }
        most
    }

    /// Returns the unexpired cost that was not sent: the most under any policy.
    fn unsent(&self, now: i64) -> u64 {
        let mut most = 0;
        for (policy, count, now) in self.each(now) {
            most = most.max(count.unsent(policy, now));
        }
        most
    }

    /// Each policy, its count, and the time `now` by the clock of that count.
    fn each(&self, now: i64) -> impl Iterator<Item = (&Policy, &PrimaryCount, i64)> {
        let each = self.policies.iter().zip(&self.counts);
        each.map(move |(policy, count)| (policy, count, policy.params().time(now, self.ahead)))
    }

    fn each_mut(&mut self, now: i64) -> impl Iterator<Item = (&Policy, &mut PrimaryCount, i64)> {
        let ahead = self.ahead;
        let each = self.policies.iter().zip(&mut self.counts);
        each.map(move |(policy, count)| (policy, count, policy.params().time(now, ahead)))
    }

    /// Returns the next check that the primary store lacks, and counts it as sent. `None` if it lacks nothing.
    ///
    /// The reset is first. Then come charges, each of the smallest cost that any policy lacks,
    /// under all policies that lack something. For example, if a part has expired under one of two
    /// policies, the next check charges the rest under the other.
    pub(super) fn send(&mut self, key: Key, now: i64) -> Option<Check> {
        if mem::take(&mut self.lacks_reset) {
            return Some(Check::reset(key, &self.policies));
        }
        // The smallest cost, and the policies that lack it.
        let mut least = u64::MAX;
        let mut lacking = vec![];
        for (policy, count, now) in self.each(now) {
            let unsent = count.unsent(policy, now);
            if unsent > 0 {
                least = least.min(unsent);
                lacking.push(policy.clone());
            }
        }
        let policies = self.list_of(lacking)?;
        let cost = limited(least);
        let mut sent = SmallVec::new();
        for (policy, count, now) in self.each_mut(now) {
            sent.push(count.sent.clone());
            count.send(policy, cost, now);
        }
        self.before_charge = Some(BeforeCharge {
            sent,
            sent_until: mem::replace(&mut self.sent_until, now),
        });
        let pause = self.pause(now);
        if !pause.is_zero() && policies.iter().all(Policy::is_pause) {
            // The longest pause of all instances counts, not their sum.
            return Some(charge_debt_of(key, &policies, pause));
        }
        Some(Check::charge(key, &policies, cost))
    }

    /// Returns a list of some of the policies. `None` without any.
    fn list_of(&self, some: Vec<Policy>) -> Option<Policies> {
        if some.len() == self.policies.iter().len() {
            // The list itself: its texts and ids are cached with it.
            return Some(self.policies.clone());
        }
        Policies::new(some).ok()
    }

    /// Returns how long the longest pause of the account still lasts.
    fn pause(&self, now: i64) -> Duration {
        let mut longest = Duration::ZERO;
        for (policy, count, now) in self.each(now) {
            if policy.is_pause() {
                let debt = count.all.counted(policy, now) - policy.params().capacity;
                longest = longest.max(policy.quota().time_for(debt.max(0) as u64));
            }
        }
        longest
    }

    /// Handles the outcome of a check that was sent. A charge is repeated only if it was certainly not sent, a reset until
    /// the primary store has replied. Another reset in the meantime is sent too.
    pub(super) fn replied(&mut self, check: &Check, answer: &Result<Decision, StoreError>) {
        if check.mode() == Mode::Reset {
            self.lacks_reset |= !is_reply(answer);
            return;
        }
        let before = self.before_charge.take();
        if let Some(before) = before
            && let Err(error) = answer
            && error.is_not_sent()
        {
            for (count, sent) in self.counts.iter_mut().zip(before.sent) {
                count.sent = sent;
            }
            self.sent_until = before.sent_until;
        }
    }
}

/// Returns the refunded charge under each policy; empty for a charge made just before.
fn charged(check: &Check) -> &[PolicyCharge] {
    match check.extra() {
        Some(Extra::Charged(charged)) => charged,
        _ => &[],
    }
}

/// Estimates the count of the primary store under a policy from the count of the fallback before it
/// granted this. The fallback counts under a share, which has fewer units than the whole policy,
/// but the same time.
fn counted_before(
    policy: &Policy,
    share: &Policy,
    verdict: &Verdict,
    granted: u32,
    now: i64,
) -> State {
    let before = if policy.frees().is_gradual() {
        bucket_before(policy, share, verdict, granted)
    } else {
        charges_before(policy, share, verdict, granted)
    };
    if before.reset <= 0 {
        return State::fresh(policy.kind());
    }
    let snapshot = Snapshot {
        used: before.used,
        until: now.saturating_add(before.reset),
        writer: policy.params().writer,
    };
    State::resume(policy.kind(), policy.params(), now, snapshot)
}

/// A count of the whole policy.
struct Before {
    used: i64,
    /// The time until nothing counts.
    reset: i64,
}

/// The count of a gradual bucket. The time until it is empty shows how full it is, also in a debt, so it is counted in
/// ticks: a share of 5 per second that has just granted 1 and is empty in 600 ms was empty in 400 ms before that, as is
/// the whole bucket of 10 per second with 4 units.
fn bucket_before(policy: &Policy, share: &Policy, verdict: &Verdict, granted: u32) -> Before {
    let params = share.params();
    // The primary store has rounded the time up, and so has the fallback: without these two microseconds, the primary store
    // could be charged a unit that has refilled.
    let level = (verdict.reset - 2).saturating_mul(params.ticks);
    let of_grant = i64::from(granted).saturating_mul(params.interval);
    let level_before = level.saturating_sub(of_grant);
    Before {
        // `State::resume` reads only the time.
        used: policy.params().capacity,
        reset: level_before
            .checked_div_euclid(params.ticks)
            .unwrap_or_default(),
    }
}

/// The count of a window, log or bucket by the interval, in units: a share of 5 that has just granted 1 and has 2 left
/// had used 2 before that, which are 4 units of the whole 10.
fn charges_before(policy: &Policy, share: &Policy, verdict: &Verdict, granted: u32) -> Before {
    let whole = policy.params().capacity;
    let part = share.params().capacity;
    let of_part = (part - verdict.remaining - i64::from(granted)).max(0);
    let used = (i128::from(of_part) * i128::from(whole) / i128::from(part.max(1))) as i64;
    // In batches, the time includes that of the grant, and a share may need more batches than the whole.
    let periods = (used as u64).div_ceil(policy.quota().limit().into()) as i64;
    Before {
        used,
        reset: verdict.reset.min(periods * policy.params().period),
    }
}

/// Returns `true` if the primary store has replied to a check, even if it has refused it.
pub(super) fn is_reply(answer: &Result<Decision, StoreError>) -> bool {
    match answer {
        Ok(_) => true,
        Err(error) => error.is_check_only() && !error.is_not_sent(),
    }
}

fn limited(cost: u64) -> u32 {
    u32::try_from(cost).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use fastrand::Rng;
    use futures_util::FutureExt;

    use super::*;
    use crate::error::ErrorKind;
    use crate::limit::{MadeBy, Quota, Source, Strategy};
    use crate::simulation::pick;
    use crate::store::fallback::share::share_of;
    use crate::store::{Answer, LocalStore, Store};

    const SECOND: i64 = 1_000_000;

    fn log(name: &str, quota: &str) -> Policy {
        Policy::new(name, Strategy::SlidingLog, quota).unwrap()
    }

    /// An account with a local grant of this cost, at this time.
    fn account(policies: &Policies, cost: u32, now: i64) -> (Account, Decision) {
        let check = Check::take(Key::GLOBAL, policies, cost);
        let Answer::Ready { answer } = LocalStore::default().check(check) else {
            unreachable!()
        };
        let decision = answer.unwrap();
        let mut verdicts = decision.verdicts().clone();
        verdicts.at = now;
        let decision = decision.with_verdicts(verdicts);
        let decision = decision.with_maker(MadeBy::Locally);
        let mut account = Account::new(policies, &decision, cost, now);
        account.charge(policies, cost, now, 0);
        (account, decision)
    }

    fn refund_to(account: &Account, decision: &Decision, now: i64) -> RefundTo {
        let refund = decision.refund(Key::GLOBAL, 5, Default::default());
        account.refund_to(&refund.unwrap(), now)
    }

    fn send(account: &mut Account, now: i64) -> Check {
        account.send(Key::GLOBAL, now).unwrap()
    }

    fn unsent_error() -> StoreError {
        StoreError::new(ErrorKind::Unreachable).not_sent()
    }

    /// The first check charges both policies, and the second one the rest under `b`. A refund waits
    /// while a check is in flight, and then goes to the primary store.
    #[test]
    fn a_sent_charge_is_not_refunded_here() {
        let policies = Policies::new([log("a", "10/s"), log("b", "10/h")]).unwrap();
        let (mut account, _) = account(&policies, 5, SECOND);
        let later = SECOND * 3 / 2;
        let (_, decision) = super::tests::account(&policies, 2, later);
        account.charge(&policies, 2, later, 0);
        assert_eq!(refund_to(&account, &decision, later), RefundTo::Account(2));
        // The first charge has expired under `a`.
        let now = 2 * SECOND;
        let sent = send(&mut account, now);
        assert_eq!((sent.policies().iter().len(), sent.cost()), (2, 2));
        assert_eq!(refund_to(&account, &decision, now), RefundTo::Later);
        account.replied(&sent, &Ok(decision.clone()));
        let rest = send(&mut account, now);
        assert_eq!((rest.policies()[0].name(), rest.cost()), ("b", 5));
        assert_eq!(refund_to(&account, &decision, now), RefundTo::Later);
        account.replied(&rest, &Err(unsent_error()));
        assert_eq!(refund_to(&account, &decision, now), RefundTo::Primary);
        assert_eq!(send(&mut account, now).cost(), 5);
        assert!(account.send(Key::GLOBAL, now).is_none());
    }

    #[test]
    fn unsent_charges_stay_refundable() {
        let policies = log("a", "10/h").into();
        let (mut account, decision) = account(&policies, 5, SECOND);
        let unnamed = Check::refund(Key::GLOBAL, &policies, 5);
        let both = |account: &Account| {
            [
                refund_to(account, &decision, SECOND),
                account.refund_to(&unnamed, SECOND),
            ]
        };
        let sent = send(&mut account, SECOND);
        assert_eq!(both(&account), [RefundTo::Later; 2]);
        account.replied(&sent, &Err(unsent_error()));
        assert_eq!(both(&account), [RefundTo::Account(5); 2]);
        // A charge without a reply is not repeated.
        let sent = send(&mut account, SECOND);
        account.replied(&sent, &Err(StoreError::new(ErrorKind::Timeout)));
        assert_eq!(both(&account), [RefundTo::Primary; 2]);
        assert!(!account.is_owed(SECOND));
    }

    #[test]
    fn a_reset_drops_what_was_sent() {
        let policies = log("a", "10/h").into();
        let (mut account, decision) = account(&policies, 5, SECOND);
        let sent = send(&mut account, SECOND);
        account.reset(SECOND);
        account.replied(&sent, &Err(unsent_error()));
        let dropped = RefundTo::Account(0);
        assert_eq!(refund_to(&account, &decision, SECOND), dropped);
        let reset = send(&mut account, SECOND);
        assert_eq!(reset.mode(), Mode::Reset);
        account.replied(&reset, &Ok(decision));
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
        account.replied(&first, &Ok(decision.clone()));
        let second = send(&mut account, 4 * SECOND);
        assert_eq!(second.mode(), Mode::Reset);
        account.replied(&second, &Ok(decision));
        assert!(!account.is_owed(4 * SECOND));
    }

    /// The reply to the older charges takes long.
    #[test]
    fn newer_charges_keep_their_time() {
        let policies = log("a", "10/10s").into();
        for is_sent in [true, false] {
            let (mut account, _) = account(&policies, 5, SECOND);
            let sent = send(&mut account, SECOND);
            account.charge(&policies, 3, 2 * SECOND, 0);
            let error = StoreError::new(ErrorKind::Timeout);
            let error = if is_sent { error } else { error.not_sent() };
            account.replied(&sent, &Err(error));
            assert_eq!(account.unsent(10 * SECOND), if is_sent { 3 } else { 8 });
            assert_eq!(account.unsent(11 * SECOND), 3);
            assert_eq!(account.unsent(12 * SECOND), 0);
        }
    }

    /// The counter rounds the overlap of its previous window, so that the part of one grant is 0 before it is 1.
    #[test]
    fn rounding_repeats_no_charge() {
        let counter = Policy::new("b", Strategy::SlidingCounter, "10/1000s").unwrap();
        let policies = Policies::new([log("a", "10/100d"), counter]).unwrap();
        let (now, local) = (10_500 * SECOND, LocalStore::default());
        let charge = |cost| {
            let check = Check::charge(Key::GLOBAL, &policies, cost);
            local.check(check).now_or_never().unwrap().unwrap()
        };
        let _ = charge(3);
        let decision = charge(1);
        let mut account = Account::new(&policies, &decision, 1, now);
        account.charge(&policies, 1, now, 0);
        let sent = send(&mut account, 11_550 * SECOND);
        assert_eq!((sent.policies().iter().len(), sent.cost()), (1, 1));
        account.replied(&sent, &Ok(decision));
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

    /// For any initial count, under one policy whose quota changes often, or under two policies.
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
            let part = share_of(&current, NonZeroU32::new(rng.u32(1..8)).unwrap());
            let check = Check::charge(Key::GLOBAL, &part, rng.u32(0..4_000));
            let counted = local.check(check).await.unwrap();
            assert_eq!(counted.source(), Source::Local);
            let mut account = Account::new(&current, &counted, 0, now);
            let (mut granted, mut sent) = (0, 0);
            let most_cost = *pick(&mut rng, &[2, 2_000]);
            let most_wait = *pick(&mut rng, &[60_000_000, 3_600_000_000]);
            for _ in 0..20 {
                let most = account.unsent(now);
                match rng.u8(..5) {
                    0 if is_alone && strategy.frees().has_burst() => {
                        current = any_policy("test", strategy, &mut rng).into();
                    }
                    0 if is_alone => {
                        let quota = Quota::per(rng.u32(1..2_000), current[0].quota().period());
                        current = Policy::new("test", strategy, quota).unwrap().into();
                    }
                    1 => {
                        let of = PolicyCharge::just_now(rng.i64(0..2_000));
                        let each = current.iter().map(|_| of).collect();
                        let cost = rng.u32(0..2_000);
                        let refund = Check::refund(Key::GLOBAL, &current, cost)
                            .with_extra(Extra::Charged(each));
                        account.refund(&refund, now);
                        assert!(account.unsent(now) <= most, "seed {seed}");
                    }
                    2 => {
                        while let Some(check) = account.send(Key::GLOBAL, now) {
                            sent += u64::from(check.cost());
                        }
                        assert_eq!(account.unsent(now), 0, "seed {seed}: sent once");
                    }
                    _ => {
                        let cost = rng.u32(0..=most_cost);
                        account.charge(&current, cost, now, 0);
                        granted += u64::from(cost);
                    }
                }
                let left = account.unsent(now);
                assert!(
                    sent + left <= granted,
                    "seed {seed}, {current:?}: {sent} and {left} of {granted}"
                );
                now += rng.i64(0..most_wait);
            }
        }
    }

    /// Under gradual buckets, the primary store counts no unit more than without the outage.
    #[test]
    fn a_reconciliation_rounds_no_unit_up() {
        let gradual = |strategy: &&Strategy| strategy.frees().is_gradual();
        let strategies: Vec<_> = Strategy::ALL.iter().filter(gradual).collect();
        let (mut wrong, mut few, mut charged) = (vec![], 0, 0);
        for seed in 0..200 {
            let mut rng = Rng::with_seed(seed);
            let policy = any_policy("test", **pick(&mut rng, &strategies), &mut rng);
            let (kind, params) = (policy.kind(), policy.params());
            let unit = policy.quota().time_for(1).as_micros() as i64;
            let policies = Policies::from(policy.clone());
            let mut over = 0;
            for _ in 0..1_100 {
                let mut now = 1_700_000_000_000_000;
                // The primary store, and the fallback that has followed its last decision.
                let mut primary = State::fresh(kind);
                let cost = rng.i64(0..=params.capacity);
                let (seen, _) = Mode::Take.decide(&policy, &mut primary, cost, now);
                let followed = Snapshot {
                    used: params.capacity - seen.remaining,
                    until: now + seen.reset,
                    writer: params.writer,
                };
                let mut fallback = State::resume(kind, params, now, followed);
                now += unit * rng.i64(0..20) + *pick(&mut rng, &[0, 1, unit / 3]);
                let mut account = None;
                let mut uninterrupted = primary.clone();
                for _ in 0..rng.u8(1..4) {
                    let cost = rng.u32(1..10);
                    let check = Check::up_to(Key::GLOBAL, &policies, cost);
                    let verdicts = check.decide(std::slice::from_mut(&mut fallback), now);
                    let granted = limited(verdicts.granted as u64);
                    let decision = check.answer(verdicts, Source::Local);
                    let account = account
                        .get_or_insert_with(|| Account::new(&policies, &decision, granted, now));
                    account.charge(&policies, granted, now, 0);
                    Mode::Charge.count(&policy, &mut uninterrupted, granted.into(), now);
                    now += unit * rng.i64(0..4);
                }
                let mut account = account.unwrap();
                let expected = uninterrupted.counted(&policy, now);
                while let Some(check) = account.send(Key::GLOBAL, now) {
                    Mode::Charge.count(&policy, &mut primary, check.cost().into(), now);
                    charged += check.cost();
                }
                let counted = primary.counted(&policy, now);
                over += u32::from(counted > expected);
                few += u32::from(counted < expected);
            }
            wrong.extend((over > 0).then_some((seed, policy, over)));
        }
        assert!(wrong.is_empty(), "{} seeds: {wrong:?}", wrong.len());
        assert!(charged > 1_000_000 && few < 1_000, "{charged}, {few}");
    }
}
