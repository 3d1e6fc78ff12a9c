//! What is to be charged, as each whole policy counts it on top of what the primary store counts by itself.
//!
//! Let `[x]` be what a bucket counts by now of what it was charged, `u` what the primary store had counted when an
//! instance began to grant by itself, and `g` what it has granted since. It charges `[u + g] - [u]`, not `[g]`: until `u`
//! has flowed back, nothing else does.
//!
//! - That is never more than `g`, since a bucket counts of two charges at most what it counts of each alone.
//! - If no other instance has granted anything, the primary store counts `[u]` and then `[u + g]`: what it would count
//!   without the outage.
//! - With grants `g1 .. gn` of `n` instances it counts `[u] + sum([u + gi] - [u])`. That is never more than `[u + sum(gi)]`:
//!   the more a bucket is charged, the shorter it is empty, when nothing flows back. Nor is it less until `u` has flowed back,
//!   as `[u + gi] - [u]` is `gi` by then. From then on up to `n` times the rate flows back, since no instance knows of the
//!   others' grants. At its part of the rate a caller of one instance would be charged what has flowed back.
//!
//! Windows and logs count each charge by itself: there `[u + g] - [u]` is `[g]`.

use smallvec::SmallVec;

use crate::limit::{Charged, Decision, Mode, Policies, Policy, Snapshot, State};

type States = SmallVec<[State; 1]>;

/// See above: a state for each policy.
#[derive(Debug, Clone)]
pub(super) struct Charges {
    /// What the primary store counts by itself.
    before: States,
    /// That and what is to be charged.
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

    /// None, where an instance has counted so much of its part of each policy: then the primary store counts as much of
    /// the whole.
    pub(super) fn after(policies: &Policies, counted: Decision, now: i64) -> Self {
        let mut parts = counted.verdicts().filter(|(part, _)| !part.is_in_flight());
        let before = policies.iter().map(|policy| match parts.next() {
            Some((part, verdict)) if policy.frees().has_burst() && verdict.reset > 0 => {
                let [whole, part] = [policy, part].map(|policy| policy.params().capacity);
                let used = (i128::from(part - verdict.remaining) * i128::from(whole)
                    / i128::from(part)) as i64;
                // A part may be rounded down, and then flows back later; and a fallback of a user's may tell any time.
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

    /// How much is to be charged under each policy: what still counts.
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

    /// Takes a charge out again, or a part of it: of what is to be charged, not of what the primary store counts. The most
    /// that a policy took out.
    pub(super) fn refund(
        &mut self,
        policies: &Policies,
        cost: u64,
        of: impl IntoIterator<Item = Charged>,
        now: i64,
    ) -> u64 {
        let each = policies
            .iter()
            .zip(self.before.iter().zip(&mut self.all))
            .zip(of);
        let given = each.map(|((policy, (before, all)), of)| {
            // A window or a log counts nothing before: it need not be copied to see how much is left.
            let most = if policy.frees().has_burst() {
                left(policy, before, all, now)
            } else {
                cost
            };
            of.refund(policy, all, clamped(cost.min(most)), now)
        });
        given.max().unwrap_or(0).max(0) as u64
    }
}

fn left(policy: &Policy, before: &State, all: &State, now: i64) -> u64 {
    let counted =
        |state: &State| Mode::Refund.count(policy, &mut state.clone(), u32::MAX.into(), now);
    (counted(all) - counted(before)).max(0) as u64
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

    /// Whatever an instance has counted, and however often the limit of a window changes.
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
                        let given = charges.refund(&current, rng.u64(0..2_000), [of], now);
                        assert!(given <= most, "seed {seed}");
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
