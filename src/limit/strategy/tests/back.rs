//! Refunds of reservations: they give no caller more than charging the real cost at the start
//! would. Under windows and logs, they also give no caller less.

use std::collections::{BTreeMap, VecDeque};

use super::*;
use crate::limit::{Decision, Source};

const START: i64 = 1_790_000_000_000_000;

/// A take whose real cost later turns out to be lower.
struct Reservation {
    decision: Decision,
    at: i64,
    /// Its index among the grants.
    index: usize,
}

/// The time of each grant, and its real cost so far.
type Granted = Vec<(i64, i64)>;

/// Returns the states of a caller who was charged only the real costs, each at its time.
fn counterfactual(policies: &Policies, granted: &Granted) -> Vec<State> {
    let mut states: Vec<_> = policies
        .iter()
        .map(|policy| State::fresh(policy.kind()))
        .collect();
    for (at, real) in granted.iter().filter(|(_, real)| *real > 0) {
        for (policy, state) in policies.iter().zip(&mut states) {
            Mode::Charge.count(policy, state, *real, *at);
        }
    }
    states
}

/// Returns `true` if a refund returns exactly the unused cost, even if others were charged since. A
/// gradually refilling strategy cannot do that.
fn is_exact(strategy: Strategy) -> bool {
    is_monotone(strategy) && !strategy.frees().has_burst()
}

/// Reserves and refunds at random. After each step, passes `compare` the remaining capacity, and
/// what would remain if only the real costs had been charged. Refunds claim an age of up to `1 +
/// longer` times the real one.
fn reserve_and_refund(
    strategies: impl Fn(Strategy) -> bool,
    longer: f64,
    compare: impl Fn(i64, i64, &dyn Fn() -> String),
) {
    let mut given = vec![];
    for (seed, &strategy) in Strategy::ALL
        .iter()
        .enumerate()
        .filter(|(_, strategy)| strategies(**strategy))
    {
        let mut rng = Rng::with_seed(seed as u64);
        let (mut back, mut late) = (0, 0);
        for _ in 0..400 {
            let mut policy = |name| {
                let quota = quota(&mut rng, strategy);
                let strategy = vary(&mut rng, strategy, quota.period());
                Policy::new(name, strategy, quota).unwrap()
            };
            let policies = Policies::new([policy("one"), policy("two")]).unwrap();
            let policies = if rng.bool() {
                policies
            } else {
                Policies::from(policies[0].clone())
            };
            let mut states: Vec<_> = policies
                .iter()
                .map(|policy| State::fresh(policy.kind()))
                .collect();
            let (mut now, mut granted, mut open): (i64, Granted, Vec<Reservation>) =
                (START, vec![], vec![]);
            let capacity = policies
                .iter()
                .map(|policy| policy.quota().capacity())
                .min()
                .unwrap();
            let mut reset = 1;
            for _ in 0..60 {
                now += [
                    0,
                    0,
                    1,
                    rng.i64(0..=reset / 8),
                    rng.i64(0..=reset / 2),
                    rng.i64(0..=reset),
                ][rng.usize(..6)];
                if rng.bool() || open.is_empty() {
                    let cost = if rng.bool() {
                        rng.u32(1..=capacity)
                    } else {
                        rng.u32(1..=capacity.div_ceil(8))
                    };
                    let check = Check::take(Key::GLOBAL, &policies, cost);
                    let verdicts = check.decide(&mut states, now);
                    reset = verdicts
                        .each
                        .iter()
                        .map(|verdict| verdict.reset)
                        .max()
                        .unwrap();
                    let decision = check.answer(verdicts, Source::Local);
                    if decision.is_allowed() {
                        open.push(Reservation {
                            decision,
                            at: now,
                            index: granted.len(),
                        });
                        granted.push((now, cost.into()));
                    }
                } else {
                    let Reservation {
                        decision,
                        at,
                        index,
                    } = open.swap_remove(rng.usize(..open.len()));
                    let cost = rng.u32(0..=decision.granted());
                    granted[index].1 -= i64::from(cost);
                    let age =
                        Duration::from_micros((now - at) as u64).mul_f64(1.0 + longer * rng.f64());
                    let check = decision.refund(Key::GLOBAL, cost, age);
                    late += u32::from(check.is_none() && cost > 0);
                    back += check.map_or(0, |check| check.decide(&mut states, now).granted);
                }
                let real = counterfactual(&policies, &granted);
                for (i, policy) in policies.iter().enumerate() {
                    for at in [now, now + rng.i64(0..=reset), now + reset] {
                        let [ours, real] = [&states[i], &real[i]]
                            .map(|state| preview(state, policy.params(), at).room);
                        compare(ours, real, &|| {
                            format!(
                                "seed {seed}, {policy:?}: {ours} remain at {at}, {real} expected; {granted:?}"
                            )
                        });
                    }
                }
            }
        }
        given.push((strategy, back, late));
    }
    assert!(
        given
            .iter()
            .all(|(_, back, late)| *back > 1_000 && *late > 10),
        "{given:?}"
    );
}

#[test]
fn a_refund_never_frees_too_much() {
    for longer in [0.0, 0.5] {
        reserve_and_refund(is_monotone, longer, |ours, real, context| {
            assert!(ours <= real, "{}", context())
        });
    }
}

#[test]
fn windows_and_logs_refund_the_whole_difference() {
    reserve_and_refund(is_exact, 0.0, |ours, real, context| {
        assert!(ours >= real, "{}", context())
    });
}

/// The time of a take, its cost, and the part of it that is refunded later.
type Taken = (i64, u32, u32);

/// Returns the number of denied takes that would have been partly refunded, and of those that would
/// not; and the total cost that was kept.
fn settled_later(
    strategy: Strategy,
    quota: Quota,
    takes: impl Iterator<Item = Taken>,
    later: i64,
) -> ([u32; 2], u64) {
    let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
    let mut state = [State::fresh(strategy)];
    let mut open: VecDeque<(i64, Decision, u32)> = VecDeque::new();
    let (mut denied, mut kept) = ([0, 0], 0);
    for (now, cost, back) in takes {
        while open.front().is_some_and(|(at, ..)| at + later <= now) {
            let (at, decision, back) = open.pop_front().unwrap();
            if let Some(check) =
                decision.refund(Key::GLOBAL, back, Duration::from_micros(later as u64))
            {
                check.decide(&mut state, at + later);
            }
        }
        let check = Check::take(Key::GLOBAL, &policies, cost);
        let verdicts = check.decide(&mut state, now);
        let decision = check.answer(verdicts, Source::Local);
        if decision.is_allowed() {
            kept += u64::from(cost - back);
            open.push_back((now, decision, back));
        } else {
            denied[usize::from(back == 0)] += 1;
        }
    }
    (denied, kept)
}

const SECOND: i64 = 1_000_000;

/// Only failures count, 5 per minute: a user who mistypes a password once in ten minutes is never
/// locked out.
#[test]
fn a_right_password_is_never_denied() {
    let mut locked_out = vec![];
    for strategy in Strategy::ALL
        .iter()
        .copied()
        .chain([Strategy::SlidingWindow { cells: 60 }])
    {
        // One attempt every 10 s for 3 hours: the first of every ten minutes is wrong.
        let takes = (0..1_080).map(|i| (START + 10 * i * SECOND, 1, u32::from(i % 60 != 0)));
        let ([right, wrong], _) = settled_later(strategy, Quota::per_minute(5), takes, SECOND / 10);
        println!("{strategy:?}: {right} right passwords denied, {wrong} wrong ones");
        locked_out.extend((right + wrong > 0).then_some((strategy, right, wrong)));
    }
    assert!(
        locked_out.is_empty(),
        "denied right and wrong passwords: {locked_out:?}"
    );
}

/// Reserving five times the real cost leaves as much of the quota usable as reserving the real
/// cost, except for reservations that are still open.
#[test]
fn excess_reservations_do_not_exhaust_the_quota() {
    const MINUTES: i64 = 10;
    let mut unused = vec![];
    for &strategy in Strategy::ALL {
        // The demand is twice the quota.
        let used = |cost| {
            let takes = (0..20 * 60 * MINUTES).map(|i| (START + i * SECOND / 20, cost, cost - 100));
            settled_later(strategy, Quota::per_minute(60_000), takes, SECOND / 10).1 as f64
        };
        let share = used(500) / used(100);
        println!(
            "{strategy:?}: {:.1} % of the quota is usable",
            100.0 * share
        );
        unused.extend((share < 0.97).then_some((strategy, share)));
    }
    assert!(unused.is_empty(), "usable parts of the quota: {unused:?}");
}

/// In each window, and between two refills of a bucket, the kept cost is within the limit, even if
/// a refunded charge started the window, and if another policy counts charges for longer.
#[test]
fn refunds_keep_each_window_within_limit() {
    for strategy in Strategy::ALL
        .iter()
        .copied()
        .filter(|strategy| !is_monotone(*strategy))
    {
        let mut rng = Rng::with_seed(7);
        let mut back = 0;
        for _ in 0..400 {
            let quota = Quota::per(
                rng.u32(1..50),
                Duration::from_micros(rng.u64(10..1_000_000)),
            );
            let (limit, period) = (i64::from(quota.limit()), quota.period().as_micros() as i64);
            let short = Policy::new("p", strategy, quota).unwrap();
            let long = Quota::per(100_000, quota.period() * rng.u32(2..200));
            let long = Policy::new("long", Strategy::SlidingLog, long).unwrap();
            let policies: Policies = if rng.bool() {
                short.into()
            } else {
                Policies::new([short, long]).unwrap()
            };
            let mut states: Vec<_> = policies
                .iter()
                .map(|policy| State::fresh(policy.kind()))
                .collect();
            let (mut now, mut open): (i64, Vec<Reservation>) = (START, vec![]);
            // The kept cost per end of a window, or time of a refill.
            let mut kept: BTreeMap<i64, i64> = BTreeMap::new();
            for _ in 0..60 {
                now += [
                    0,
                    1,
                    rng.i64(0..=period / 8),
                    rng.i64(0..=period / 2),
                    rng.i64(0..=period),
                ][rng.usize(..5)];
                if rng.bool() || open.is_empty() {
                    let check = Check::take(Key::GLOBAL, &policies, rng.u32(1..=quota.limit()));
                    let verdicts = check.decide(&mut states, now);
                    let decision = check.answer(verdicts, Source::Local);
                    if decision.is_allowed() {
                        *kept
                            .entry(now + decision.verdicts().each[0].reset)
                            .or_default() += i64::from(decision.granted());
                        open.push(Reservation {
                            decision,
                            at: now,
                            index: 0,
                        });
                    }
                } else {
                    let Reservation { decision, at, .. } =
                        open.swap_remove(rng.usize(..open.len()));
                    let cost = rng.u32(0..=decision.granted());
                    let end = at + decision.verdicts().each[0].reset;
                    kept.entry(end).and_modify(|kept| *kept -= i64::from(cost));
                    let age = Duration::from_micros((now - at) as u64);
                    if let Some(check) = decision.refund(Key::GLOBAL, cost, age) {
                        back += check.decide(&mut states, now).granted;
                    }
                }
            }
            assert!(
                kept.values().all(|kept| *kept <= limit),
                "{:?}: {kept:?}",
                policies[0]
            );
        }
        assert!(back > 1_000, "{strategy:?}: {back}");
    }
}

/// If a caller does nothing else, the state equals one in which only the rest was charged. That
/// also holds for several reservations at the same time, refunded in any order.
#[test]
fn an_immediate_refund_restores_the_excess() {
    for (seed, &strategy) in Strategy::ALL.iter().enumerate() {
        let mut rng = Rng::with_seed(seed as u64);
        for _ in 0..200 {
            let quota = Quota::per_minute(1_000);
            let strategy = vary(&mut rng, strategy, quota.period());
            let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
            let params = policies[0].params();
            let mut state = [State::fresh(strategy)];
            // A random time within a window of the clock.
            let now = START - START.rem_euclid(60_000_000) + rng.i64(0..60_000_000);
            let age = if rng.bool() {
                0
            } else {
                rng.i64(0..90_000_000)
            };
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
                if let Some(check) =
                    decision.refund(Key::GLOBAL, cost, Duration::from_micros(age as u64))
                {
                    check.decide(&mut state, now + age);
                }
            }
            let real = counterfactual(&policies, &real);
            let [ours, real] =
                [&state[0], &real[0]].map(|state| preview(state, params, now + age).room);
            assert_eq!(ours, real, "seed {seed}, {:?} {age} us later", policies[0]);
        }
    }
}

/// Only an estimated part of a sliding counter's previous window counts, but a refund lowers the whole
/// count of that window.
#[test]
fn a_refund_reports_what_it_deducts() {
    let policies = Policy::new("p", Strategy::SlidingCounter, "100/10s")
        .unwrap()
        .into();
    let mut state = [State::fresh(Strategy::SlidingCounter)];
    let mut decide = |check: Check, now| check.decide(&mut state, START + now * SECOND);
    let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
    assert_eq!(decide(take(20), 9).granted, 20);
    assert_eq!(decide(take(10), 18).each[0].remaining, 100 - 4 - 10);
    let refunded = decide(Check::refund(Key::GLOBAL, &policies, 18), 18);
    // A fifth of the remaining 12 in the previous window counts.
    assert_eq!((refunded.granted, refunded.each[0].remaining), (18, 97));
    let refunded = decide(Check::refund(Key::GLOBAL, &policies, 18), 18);
    assert_eq!((refunded.granted, refunded.each[0].remaining), (12, 100));
}

#[test]
fn a_reset_allows_at_most_twice_capacity() {
    let mut rng = Rng::with_seed(5);
    for (&strategy, reset_at) in Strategy::ALL.iter().zip([10, 20, 40].into_iter().cycle()) {
        let policies = Policies::from(
            Policy::new("api", strategy, Quota::per(20, Duration::from_secs(3_600))).unwrap(),
        );
        let (mut states, mut open, mut used) = ([State::fresh(strategy)], vec![], 0);
        let mut most = 0;
        for step in 0..400 {
            let mut decide = |check: Check| {
                let verdicts = check.decide(&mut states, START);
                check.answer(verdicts, Source::Local)
            };
            if step == reset_at {
                let _ = decide(Check::reset(Key::GLOBAL, &policies));
            } else if step < reset_at || open.is_empty() || rng.bool() {
                let decision = decide(Check::take(Key::GLOBAL, &policies, rng.u32(1..=3)));
                used += decision.granted();
                open.push(decision);
            } else {
                let decision = open.swap_remove(rng.usize(..open.len()));
                let cost = rng.u32(0..=decision.granted());
                if let Some(check) = decision.refund(Key::GLOBAL, cost, Duration::ZERO) {
                    let _ = decide(check);
                }
                used -= cost;
            }
            most = most.max(used);
            assert!(used <= 40, "{strategy:?}: {used} of 20 after step {step}");
        }
        assert!(
            most > 20,
            "{strategy:?}: the reset allows more than the capacity"
        );
    }
}
