//! What is given back of a reservation: nobody gets more by it than if the real cost had been charged at once.

use std::collections::BTreeMap;

use super::*;
use crate::limit::{Decision, Refill, Source};

const START: i64 = 1_790_000_000_000_000;

/// A take whose real cost turns out later to be less.
struct Reservation {
    decision: Decision,
    at: i64,
    /// Its place among all that was granted.
    place: usize,
}

/// What was granted: when, and how much of it is real, as far as is known.
type Granted = Vec<(i64, i64)>;

/// The states of a caller who was charged only what was real, each at its time.
fn counterfactual(policies: &Policies, granted: &Granted) -> Vec<State> {
    let mut states: Vec<_> = policies.iter().map(|policy| State::fresh(policy.strategy())).collect();
    for (at, real) in granted.iter().filter(|(_, real)| *real > 0) {
        for (policy, state) in policies.iter().zip(&mut states) {
            Mode::Charge.count(policy, state, *real, *at);
        }
    }
    states
}

/// Whether a charge can never leave more room later: not where it begins a window or an interval that begins later without
/// it. There the windows of the caller are as long as ever, but others.
fn is_monotone(strategy: Strategy) -> bool {
    !matches!(strategy, Strategy::FixedWindow(Align::FirstHit) | Strategy::TokenBucket(Refill::Interval))
}

#[test]
fn giving_back_leaves_no_more_room_than_the_real_cost() {
    let mut given = vec![];
    for (seed, &strategy) in Strategy::ALL.iter().enumerate().filter(|(_, strategy)| is_monotone(**strategy)) {
        let mut rng = Rng::with_seed(seed as u64);
        let (mut back, mut late) = (0, 0);
        for _ in 0..400 {
            let mut policy = |name| {
                let strategy = vary(&mut rng, strategy);
                Policy::new(name, strategy, quota(&mut rng, strategy)).unwrap()
            };
            let policies = Policies::new([policy("one"), policy("two")]).unwrap();
            let policies = if rng.bool() { policies } else { Policies::from(policies[0].clone()) };
            let mut states: Vec<_> = policies.iter().map(|policy| State::fresh(policy.strategy())).collect();
            let (mut now, mut granted, mut open): (i64, Granted, Vec<Reservation>) = (START, vec![], vec![]);
            let capacity = policies.iter().map(|policy| policy.quota().capacity()).min().unwrap();
            let mut reset = 1;
            for _ in 0..60 {
                now += [0, 0, 1, rng.i64(0..=reset / 8), rng.i64(0..=reset / 2), rng.i64(0..=reset)][rng.usize(..6)];
                if rng.bool() || open.is_empty() {
                    let cost = if rng.bool() { rng.u32(1..=capacity) } else { rng.u32(1..=capacity.div_ceil(8)) };
                    let check = Check::take(Key::GLOBAL, &policies, cost);
                    let verdicts = check.decide(&mut states, now);
                    reset = verdicts.each.iter().map(|verdict| verdict.reset).max().unwrap();
                    let decision = check.answer(verdicts, Source::Local);
                    if decision.is_allowed() {
                        open.push(Reservation { decision, at: now, place: granted.len() });
                        granted.push((now, cost.into()));
                    }
                } else {
                    let Reservation { decision, at, place } = open.swap_remove(rng.usize(..open.len()));
                    let cost = rng.u32(0..=decision.granted());
                    granted[place].1 -= i64::from(cost);
                    let age = Duration::from_micros((now - at) as u64);
                    let check = decision.give_back(Key::GLOBAL, cost, age).next();
                    late += u32::from(check.is_none() && cost > 0);
                    back += check.map_or(0, |check| check.decide(&mut states, now).granted);
                }
                let real = counterfactual(&policies, &granted);
                for (i, policy) in policies.iter().enumerate() {
                    for at in [now, now + rng.i64(0..=reset), now + reset] {
                        let [ours, real] = [&states[i], &real[i]].map(|state| look(state, policy.params(), at).room);
                        assert!(
                            ours <= real,
                            "seed {seed}, {policy:?}: {ours} is left at {at}, {real} really; {granted:?}"
                        );
                    }
                }
            }
        }
        given.push((strategy, back, late));
    }
    assert!(given.iter().all(|(_, back, late)| *back > 1_000 && *late > 10), "{given:?}");
}

/// In each window, and between two refills of a bucket, no more is kept than the policy allows: also where a charge that is
/// given back has begun them.
#[test]
fn giving_back_lets_no_more_pass_in_a_window_that_it_began() {
    for strategy in Strategy::ALL.iter().copied().filter(|strategy| !is_monotone(*strategy)) {
        let mut rng = Rng::with_seed(7);
        let mut back = 0;
        for _ in 0..400 {
            let quota = Quota::per(rng.u32(1..50), Duration::from_micros(rng.u64(10..1_000_000)));
            let (limit, period) = (i64::from(quota.limit()), quota.period().as_micros() as i64);
            let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
            let mut state = [State::fresh(strategy)];
            let (mut now, mut open): (i64, Vec<Reservation>) = (START, vec![]);
            // By when the window ends, or the bucket is refilled: what was kept.
            let mut kept: BTreeMap<i64, i64> = BTreeMap::new();
            for _ in 0..60 {
                now += [0, 1, rng.i64(0..=period / 8), rng.i64(0..=period / 2), rng.i64(0..=period)][rng.usize(..5)];
                if rng.bool() || open.is_empty() {
                    let check = Check::take(Key::GLOBAL, &policies, rng.u32(1..=quota.limit()));
                    let verdicts = check.decide(&mut state, now);
                    let decision = check.answer(verdicts, Source::Local);
                    if decision.is_allowed() {
                        *kept.entry(now + decision.verdicts().next().unwrap().1.reset).or_default() +=
                            i64::from(decision.granted());
                        open.push(Reservation { decision, at: now, place: 0 });
                    }
                } else {
                    let Reservation { decision, at, .. } = open.swap_remove(rng.usize(..open.len()));
                    let cost = rng.u32(0..=decision.granted());
                    let end = at + decision.verdicts().next().unwrap().1.reset;
                    kept.entry(end).and_modify(|kept| *kept -= i64::from(cost));
                    let age = Duration::from_micros((now - at) as u64);
                    if let Some(check) = decision.give_back(Key::GLOBAL, cost, age).next() {
                        back += check.decide(&mut state, now).granted;
                    }
                }
            }
            assert!(kept.values().all(|kept| *kept <= limit), "{:?}: {kept:?}", policies[0]);
        }
        assert!(back > 1_000, "{strategy:?}: {back}");
    }
}

/// Of a caller of whom nobody else asks anything, all is as if only the rest had been charged; also when others have
/// reserved at the same time, whatever the order in which they give back.
#[test]
fn what_is_given_back_at_once_is_what_was_not_needed() {
    for (seed, &strategy) in Strategy::ALL.iter().enumerate() {
        let mut rng = Rng::with_seed(seed as u64);
        for _ in 0..200 {
            let strategy = vary(&mut rng, strategy);
            let policies: Policies = Policy::new("p", strategy, Quota::per_minute(1_000)).unwrap().into();
            let params = policies[0].params();
            let mut state = [State::fresh(strategy)];
            // The clock's windows begin in it.
            let now = START - START.rem_euclid(60_000_000) + rng.i64(0..60_000_000);
            let age = if rng.bool() { 0 } else { rng.i64(0..90_000_000) };
            let count = if age == 0 { rng.usize(1..20) } else { 1 };
            let mut open = vec![];
            for _ in 0..count {
                let check = Check::take(Key::GLOBAL, &policies, rng.u32(1..=50));
                let verdicts = check.decide(&mut state, now);
                open.push(check.answer(verdicts, Source::Local));
            }
            rng.shuffle(&mut open);
            let mut real = vec![];
            for decision in open {
                let cost = rng.u32(0..=decision.granted());
                real.push((now, i64::from(decision.granted() - cost)));
                if let Some(check) = decision.give_back(Key::GLOBAL, cost, Duration::from_micros(age as u64)).next() {
                    check.decide(&mut state, now + age);
                }
            }
            let real = counterfactual(&policies, &real);
            let [ours, real] = [&state[0], &real[0]].map(|state| look(state, params, now + age).room);
            assert_eq!(ours, real, "seed {seed}, {:?} {age} us later", policies[0]);
        }
    }
}
