//! The cost to charge to the primary store after an outage.
//!
//! Let `[x]` be the part of a charge of `x` that a bucket still counts, `u` the amount that the primary store counted
//! when an instance began to grant locally, and `g` the amount that the instance has granted since. The instance
//! charges `[u + g] - [u]` instead of `[g]`: a bucket drains `u` first, and `g` only after that.
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

use crate::limit::{Charged, Decision, Mode, Policies, Policy, Snapshot, State};

type States = SmallVec<[State; 1]>;

/// The counts with and without the cost to charge: one state per policy.
#[derive(Debug, Clone)]
pub(super) struct Charges {
    /// The counts of the primary store.
    before: States,
    /// These counts and the cost to charge.
    all: States,
}

impl Charges {
    pub(super) fn none(policies: &Policies) -> Self {
        Self::on(
            policies
                .iter()
                .map(|policy| State::fresh(policy.kind()))
                .collect(),
        )
    }

    /// No cost to charge, on top of the counts of an instance's share: the primary store is assumed to count the same
    /// proportion of the whole policy.
    pub(super) fn after(policies: &Policies, counted: Decision, now: i64) -> Self {
        let mut parts = counted.verdicts().filter(|(part, _)| !part.is_in_flight());
        let before = policies.iter().map(|policy| match parts.next() {
            Some((part, verdict)) if policy.frees().has_burst() && verdict.reset > 0 => {
                let [whole, part] = [policy, part].map(|policy| policy.params().capacity);
                let used = (i128::from(part - verdict.remaining) * i128::from(whole)
                    / i128::from(part)) as i64;
                // A share whose limit was rounded down drains more slowly than the whole, and a custom fallback may
                // report any time.
                let periods = (used as u64).div_ceil(policy.quota().limit().into()) as i64;
                let until = now + verdict.reset.min(periods * policy.params().period);
                State::resume(
                    policy.kind(),
                    policy.params(),
                    now,
                    Snapshot { used, until },
                )
            }
            _ => State::fresh(policy.kind()),
        });
        Self::on(before.collect())
    }

    fn on(before: States) -> Self {
        Self {
            all: before.clone(),
            before,
        }
    }

    /// Takes the cost to charge. Further charges count on top of it.
    pub(super) fn take(&mut self, policies: &Policies) -> Self {
        let each = policies.iter().zip(&self.all);
        let rest = each.map(|(policy, all)| match policy.frees().has_burst() {
            true => all.clone(),
            false => State::fresh(policy.kind()),
        });
        let rest = Self::on(rest.collect());
        std::mem::replace(self, rest)
    }

    /// The unexpired cost to charge under each policy.
    pub(super) fn left<'a>(
        &'a self,
        policies: &'a Policies,
        now: i64,
    ) -> impl Iterator<Item = u64> + 'a {
        let each = policies.iter().zip(self.before.iter().zip(&self.all));
        each.map(move |(policy, (before, all))| left(policy, before, all, now))
    }

    pub(super) fn charge(
        &mut self,
        policies: &Policies,
        costs: impl IntoIterator<Item = u64>,
        now: i64,
    ) {
        for ((policy, state), cost) in policies.iter().zip(&mut self.all).zip(costs) {
            Mode::Charge.count(policy, state, clamped(cost), now);
        }
    }

    /// Records costs that were charged to the primary store. A bucket counts them before the rest.
    /// Windows and logs count each charge separately.
    pub(super) fn charged(
        &mut self,
        policies: &Policies,
        costs: impl IntoIterator<Item = u64>,
        now: i64,
    ) {
        let states = self.before.iter_mut().zip(&mut self.all);
        for ((policy, (before, all)), cost) in policies.iter().zip(states).zip(costs) {
            let is_all = cost >= left(policy, before, all, now);
            match policy.frees().has_burst() {
                true if is_all => *before = all.clone(),
                true => {
                    Mode::Charge.count(policy, before, clamped(cost), now);
                }
                false if is_all => *all = State::fresh(policy.kind()),
                false => {
                    Mode::Refund.count(policy, all, clamped(cost), now);
                }
            }
        }
    }

    /// Removes a charge or a part of it from the cost to charge. The counts of the primary store do not change.
    pub(super) fn refund(
        &mut self,
        policies: &Policies,
        cost: u64,
        of: impl IntoIterator<Item = Charged>,
        now: i64,
    ) {
        let states = self.before.iter().zip(&mut self.all);
        for ((policy, (before, all)), of) in policies.iter().zip(states).zip(of) {
            let most = left(policy, before, all, now);
            of.refund(policy, all, clamped(cost.min(most)), now);
        }
    }
}

fn left(policy: &Policy, before: &State, all: &State, now: i64) -> u64 {
    (all.counted(policy, now) - before.counted(policy, now)).max(0) as u64
}

fn clamped(cost: u64) -> i64 {
    u32::try_from(cost).unwrap_or(u32::MAX).into()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::Duration;

    use fastrand::Rng;

    use super::*;
    use crate::limit::{Check, Key, Quota, Source, Strategy};
    use crate::simulation::pick;
    use crate::store::{LocalStore, Store};

    fn policies(strategy: Strategy, rng: &mut Rng) -> Policies {
        let (limit, period) = (rng.u32(1..2_000), Duration::from_secs(rng.u64(1..7_200)));
        let quota = Quota::per(limit, period);
        let quota = if strategy.frees().has_burst() {
            quota.burst(rng.u32(1..3_000))
        } else {
            quota
        };
        Policy::new("test", strategy, quota).unwrap().into()
    }

    /// Holds for any counts of an instance, and if the limit of a window changes often.
    #[tokio::test]
    async fn no_more_is_charged_than_was_granted() {
        for seed in 0..4_000 {
            let mut rng = Rng::with_seed(seed);
            let strategy = *pick(&mut rng, Strategy::ALL);
            let mut current = policies(strategy, &mut rng);
            let (local, mut now) = (LocalStore::default(), 1_700_000_000_000_000);
            let part = current.share(NonZeroU32::new(rng.u32(1..8)).unwrap());
            let counted = local
                .check(Check::charge(Key::GLOBAL, &part, rng.u32(0..4_000)))
                .await
                .unwrap();
            assert_eq!(counted.source(), Source::Local);
            let (mut charges, mut granted) =
                (Charges::after(&current, counted.settled(0, 0), now), 0);
            for _ in 0..10 {
                let most: u64 = charges.left(&current, now).sum();
                match rng.u8(..4) {
                    0 if !strategy.frees().has_burst() => {
                        let period = current[0].quota().period();
                        current =
                            Policy::new("test", strategy, Quota::per(rng.u32(1..2_000), period))
                                .unwrap()
                                .into();
                    }
                    1 => {
                        let of = Charged::just_now(rng.i64(0..2_000));
                        charges.refund(&current, rng.u64(0..2_000), [of], now);
                        let left: u64 = charges.left(&current, now).sum();
                        assert!(left <= most, "seed {seed}");
                    }
                    _ => {
                        let cost = rng.u64(0..2_000);
                        charges.charge(&current, [cost], now);
                        granted += cost;
                    }
                }
                let left: u64 = charges.left(&current, now).sum();
                assert!(
                    left <= granted,
                    "seed {seed}, {current:?}: {left} of {granted}"
                );
                now += rng.i64(0..3_600_000_000);
            }
            let left: Vec<u64> = charges.left(&current, now).collect();
            charges.charged(&current, left, now);
            let rest: u64 = charges.left(&current, now).sum();
            assert_eq!(rest, 0, "seed {seed}, {current:?}: charged once");
        }
    }
}
