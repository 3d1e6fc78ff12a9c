//! Every strategy against its definition: a naive model that keeps every grant and reckons in fractions.

use std::time::Duration;

use fastrand::Rng;

use super::ask::{Ask, Look};
use super::{Align, Followed, Params, State, Strategy, params};
use crate::limit::{Check, Key, Mode, Outcome, Policies, Policy, Quota};
use crate::twins::twins;

/// A state at a moment.
fn look(state: &State, params: &Params, now: i64) -> Look {
    state.look(params, &Ask { mode: Mode::Peek, cost: 0, within: 0, now })
}

/// All that was granted, and what the definition says of one more.
#[derive(Clone)]
pub(super) struct Model {
    pub(super) strategy: Strategy,
    pub(super) limit: i128,
    pub(super) period: i128,
    pub(super) burst: i128,
    /// Times and costs.
    pub(super) grants: Vec<(i128, i128)>,
}

impl Model {
    fn new(strategy: Strategy, quota: Quota) -> Self {
        Self {
            strategy,
            limit: quota.limit().into(),
            period: quota.period().as_micros() as i128,
            burst: quota.capacity().into(),
            grants: vec![],
        }
    }

    /// The sum of what was granted at times that `counts`.
    pub(super) fn granted(&self, counts: impl Fn(i128) -> bool) -> i128 {
        self.grants.iter().filter(|(time, _)| counts(*time)).map(|(_, cost)| cost).sum()
    }
}

/// Whether a strategy would grant a cost now, by its definition.
macro_rules! define {
    ($($variant:ident: $module:ident, $letter:literal, $number:literal, $kinds:tt;)*) => {
        impl Model {
            fn allows(&self, cost: i128, now: i128) -> bool {
                match self.strategy { $(Strategy::$variant { .. } => super::$module::allows(self, cost, now),)* }
            }
        }
    };
}

twins!(define);

/// The same strategy, with other parameters.
pub(super) fn vary(rng: &mut Rng, strategy: Strategy) -> Strategy {
    match strategy {
        Strategy::FixedWindow(Align::Clock { .. }) => {
            Strategy::FixedWindow(Align::Clock { offset: Duration::from_micros(rng.u64(..100_000_000)) })
        }
        Strategy::SlidingWindow { .. } => Strategy::SlidingWindow { cells: rng.u16(1..=20) },
        same => same,
    }
}

/// Quotas whose intervals are whole in ticks, which most are.
fn quota(rng: &mut Rng, strategy: Strategy) -> Quota {
    let quota = match rng.u8(..8) {
        0 => Quota::per_second(3),
        1 => Quota::per(7, Duration::from_secs(10)),
        2 => Quota::per_day(1),
        3 => Quota::per_second(300_000),
        4 => Quota::per(rng.u32(1..10), Duration::from_micros(rng.u64(1..50))),
        5 => Quota::per_day(1_000_000),
        _ => Quota::per(rng.u32(1..100), Duration::from_micros(rng.u64(1..10_000_000))),
    };
    match strategy {
        Strategy::SlidingLog => Quota::per(quota.limit().min(params::MAX_LOG), quota.period()),
        _ if strategy.has_burst() && rng.bool() => quota.burst(rng.u32(1..=2 * quota.limit())),
        _ => quota,
    }
}

/// Grants, what remains, how long to wait and when all is fresh: each is what the definition says, to the microsecond.
#[test]
fn every_strategy_is_its_definition() {
    for (seed, &strategy) in Strategy::ALL.iter().enumerate() {
        let mut rng = Rng::with_seed(seed as u64);
        let mut denied = 0;
        for _ in 0..150 {
            let strategy = vary(&mut rng, strategy);
            let quota = quota(&mut rng, strategy);
            let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
            let params = policies[0].params();
            let context = format!("seed {seed}, {:?}", policies[0]);
            let mut model = Model::new(strategy, quota);
            let mut state = [State::fresh(strategy)];
            let mut now = 1_790_000_000_000_000 + rng.i64(0..1_000_000);
            let mut times = vec![1];
            for _ in 0..60 {
                let cost = match rng.u8(..6) {
                    0 => quota.capacity(),
                    1 => rng.u32(..=quota.capacity() + 1),
                    2 | 3 => rng.u32(..=quota.capacity()) / 4,
                    _ => 1,
                };
                let take = |state: &[State; 1], cost: u32, now: i64| {
                    Check::take(Key::GLOBAL, &policies, cost).decide(&mut state.clone(), now)
                };
                let before = model.clone();
                let expected = before.allows(cost.into(), now.into());
                let verdicts = Check::take(Key::GLOBAL, &policies, cost).decide(&mut state, now);
                let verdict = *verdicts.first();
                assert_eq!(verdict.wait == 0, expected, "{context}: cost {cost} at {now}, {:?}", before.grants);
                if expected {
                    assert_eq!(verdicts.granted, i64::from(cost), "{context}");
                    if cost > 0 {
                        model.grants.push((now.into(), cost.into()));
                    }
                } else if cost > quota.capacity() {
                    assert_eq!(verdict.wait, -1, "{context}");
                } else {
                    denied += 1;
                    let retry = now + verdict.wait;
                    assert_eq!(take(&state, cost, retry).granted, i64::from(cost), "{context}: not at {retry}");
                    assert_eq!(take(&state, cost, retry - 1).granted, 0, "{context}: before {retry}");
                    times.push(verdict.wait);
                }

                let remaining = i128::from(verdict.remaining);
                assert!(model.allows(remaining, now.into()) || remaining == 0, "{context}: {remaining} remain");
                assert!(!model.allows(remaining + 1, now.into()), "{context}: more than {remaining} remain");

                let seen =
                    |at: i64| (look(&state[0], params, at).loaded, look(&State::fresh(strategy), params, at).loaded);
                let (loaded, fresh) = seen(now + verdict.reset);
                assert_eq!(loaded, fresh, "{context}: not fresh after {}", verdict.reset);
                if verdict.reset > 0 {
                    let (loaded, fresh) = seen(now + verdict.reset - 1);
                    assert_ne!(loaded, fresh, "{context}: fresh before {}", verdict.reset);
                }
                times.push(verdict.reset);
                let time = times[rng.usize(..times.len())];
                now += [0, 1, time, time - 1, rng.i64(0..=time.max(0)), rng.i64(0..=time / 8)][rng.usize(..6)].max(0);
            }
        }
        assert!(denied > 500, "seed {seed}: only {denied} denials");
    }
}

/// A rate that is not whole in ticks is never too high, and too low by less than 0.1 %.
#[test]
fn every_rate_is_right() {
    let mut rng = Rng::with_seed(0);
    for _ in 0..100_000 {
        // Evenly over the orders of magnitude.
        let mut size = |bits: u32| {
            let bits = rng.u32(1..=bits);
            rng.u64(1..1 << bits)
        };
        let (limit, period, burst) = (size(32) as u32, size(44), size(32) as u32);
        let quota = Quota::per(limit, Duration::from_micros(period)).burst(burst);
        let Ok(policy) = Policy::new("p", Strategy::Gcra, quota) else { continue };
        let params = policy.params();
        let exact = i128::from(period) * i128::from(params.ticks);
        let ours = i128::from(params.interval) * i128::from(limit);
        assert!(ours >= exact, "{quota} grants too much");
        assert!((ours - exact) * 1000 <= exact, "{quota} is off by more than 0.1 %");
        assert!(2 * params.full <= 1 << 52 && params.furthest < 1 << 51, "{quota} overflows");
    }
    for quota in [Quota::per_second(3), Quota::per_second(300_000), Quota::per_day(1_000_000)] {
        let policy = Policy::new("p", Strategy::Gcra, quota).unwrap();
        let params = policy.params();
        let (interval, limit) = (i128::from(params.interval), i128::from(quota.limit()));
        assert_eq!(interval * limit, quota.period().as_micros() as i128 * i128::from(params.ticks), "{quota} is exact");
    }
}

/// A state of a clock that was ahead locks nobody out, and grants nothing for it.
#[test]
fn a_clock_that_goes_back_locks_nobody_out() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL {
        let policies: Policies = Policy::new("p", vary(&mut rng, strategy), Quota::per_second(10)).unwrap().into();
        let (policy, mut now) = (&policies[0], 1_790_000_000_000_000);
        let mut state = [State::fresh(policy.strategy())];
        let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
        assert_eq!(take(10).decide(&mut state, now).granted, 10);
        // An hour back, as after a failover to another host.
        now -= 3_600_000_000;
        let verdicts = take(1).decide(&mut state, now);
        assert_eq!(verdicts.granted, 0, "{policy:?}: a clock gave a fresh start");
        assert!(verdicts.first().wait <= 2_000_000, "{policy:?}: {:?}", verdicts.first());
        for _ in 0..3 {
            now += 1_000_000;
            take(1).decide(&mut state, now);
        }
        now += 2_000_000;
        assert_eq!(take(10).decide(&mut state, now).granted, 10, "{policy:?} is locked out");
    }
}

/// Of a log and of cells, a step back of the clock moves what was charged after it, and nothing else; a denial saves that.
#[test]
fn a_small_step_back_moves_only_what_was_charged_after_it() {
    const START: i64 = 1_790_000_000_000_000;
    for strategy in [Strategy::SlidingLog, Strategy::SlidingWindow { cells: 1000 }] {
        let policies: Policies = Policy::new("p", strategy, Quota::per_second(1000)).unwrap().into();
        let mut state = [State::fresh(strategy)];
        let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
        // One every millisecond, then a step back of 1 ms.
        for i in 0..1000 {
            assert_eq!(take(1).decide(&mut state, START + i * 1_000).granted, 1);
        }
        let now = START + 998_000;
        for _ in 0..2 {
            let wait = take(1).decide(&mut state, now).first().wait;
            assert!((1..=3_000).contains(&wait), "{strategy:?}: a wait of {wait} us for the first of them");
        }
        // All is as it would have been, but for that last millisecond.
        for left in [1000, 999, 500, 100, 2] {
            let at = START + 1_000_000 + (1000 - left) * 1_000;
            let remaining = take(0).decide(&mut state, at).first().remaining;
            assert!(
                (1000 - left..=1003 - left).contains(&remaining),
                "{strategy:?}: {remaining} remain, {left} charged"
            );
        }
        let (clone, reset) = (state.clone(), take(0).decide(&mut state, now).first().reset);
        assert!((1_000_000..=1_002_000).contains(&reset), "{strategy:?}: fresh after {reset} us");
        // What is charged meanwhile counts from now on, and what comes later follows it.
        for at in [now + 3_000, now + 5_000] {
            assert_eq!(take(1).decide(&mut state, at).granted, 1, "{strategy:?}");
        }
        assert_ne!(state, clone);
    }
}

/// Of a log and of cells, a caller who is asked under two near quotas in turn gets about what either would give it.
#[test]
fn two_near_quotas_in_turn_count_as_one() {
    let seconds = Duration::from_secs;
    let window = |cells| Strategy::SlidingWindow { cells };
    let policies =
        |strategy, limit, period| Policies::from(Policy::new("p", strategy, Quota::per(limit, period)).unwrap());
    for (one, other) in [
        (policies(Strategy::SlidingLog, 100, seconds(60)), policies(Strategy::SlidingLog, 110, seconds(60))),
        (policies(Strategy::SlidingLog, 100, seconds(60)), policies(Strategy::SlidingLog, 100, seconds(61))),
        (policies(window(10), 100, seconds(60)), policies(window(10), 110, seconds(60))),
        (policies(window(10), 100, seconds(60)), policies(window(10), 100, seconds(61))),
        (policies(window(10), 100, seconds(60)), policies(window(11), 100, seconds(60))),
        (policies(window(10), 100, seconds(60)), policies(window(9), 110, seconds(57))),
        (policies(window(100), 100, seconds(60)), policies(window(101), 100, seconds(60))),
        (policies(window(1), 100, seconds(60)), policies(window(2), 100, seconds(60))),
        (policies(window(1), 100, seconds(60)), policies(window(1), 100, seconds(61))),
        (policies(window(1000), 10, seconds(60)), policies(window(999), 11, seconds(60))),
    ] {
        // Twice a second and four times a second, in turn and in pairs; `pattern` tells who asks.
        for (step, cost, pattern) in [
            (500_000, 1, [0, 1, 0, 1]),
            (250_000, 1, [0, 0, 1, 1]),
            (130_001, 1, [0, 1, 1, 1]),
            (700_000, 7, [0, 1, 0, 1]),
        ] {
            let both = [&one, &other];
            let granted = |pattern: [usize; 4]| -> i64 {
                let mut state = [State::fresh(one[0].strategy())];
                let take = |i: i64| {
                    let now = 1_790_000_000_000_000 + i * step;
                    let check = Check::take(Key::GLOBAL, both[pattern[i as usize % 4]], cost);
                    let before = state.clone();
                    let granted = check.decide(&mut state, now).granted;
                    assert!(granted > 0 || state == before, "{one:?}, {other:?}: a denial writes");
                    granted
                };
                (0..1_200_000_000 / step).map(take).sum()
            };
            let alone = [granted([0; 4]), granted([1; 4])];
            let in_turn = granted(pattern);
            let (least, most) = (alone[0].min(alone[1]), alone[0].max(alone[1]));
            assert!(
                10 * in_turn >= 9 * least && 10 * in_turn <= 11 * most,
                "{one:?} alone {}, {other:?} alone {}, in turn {in_turn}",
                alone[0],
                alone[1]
            );
        }
    }
}

/// A quota that changes, up or down, takes effect at once, and is no fresh start.
#[test]
fn a_changed_quota_is_no_fresh_start() {
    let mut rng = Rng::with_seed(0);
    let quotas = [
        Quota::per_second(10),
        Quota::per_minute(10),
        Quota::per_second(1),
        Quota::per_second(1000),
        Quota::per_day(7),
    ];
    for &strategy in Strategy::ALL {
        let strategy = vary(&mut rng, strategy);
        for (old, new) in quotas.iter().flat_map(|old| quotas.map(|new| (*old, new))) {
            let policies = |quota| Policies::from(Policy::new("p", strategy, quota).unwrap());
            let now = 1_790_000_000_000_000;
            let mut state = [State::fresh(strategy)];
            let used = old.limit();
            let taken = Check::take(Key::GLOBAL, &policies(old), used).decide(&mut state, now);
            assert_eq!(taken.granted, i64::from(used));

            let new_policies = policies(new);
            let peek = Check::peek(Key::GLOBAL, &new_policies, 1).decide(&mut state.clone(), now);
            let most = i64::from(new.limit().saturating_sub(used));
            assert!(peek.first().remaining <= most, "{strategy:?} {old} to {new}: {peek:?}");
            // What is denied passes after the wait that it was told, by the new quota.
            let all = Check::take(Key::GLOBAL, &new_policies, new.limit());
            let wait = all.decide(&mut state, now).first().wait;
            let later = all.clone().decide(&mut state, now + wait);
            let outcome = all.answer(later, crate::limit::Source::Local).outcome();
            assert_eq!(outcome, Outcome::Allowed, "{strategy:?} {old} to {new}: not after {wait}");
        }
    }
}

/// A state that goes on from what another store said grants no more than that store would have, now or later, and is
/// fresh when it would have been.
#[test]
fn what_is_followed_is_no_fresh_start() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL {
        for _ in 0..300 {
            let strategy = vary(&mut rng, strategy);
            let quota = quota(&mut rng, strategy);
            let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
            let params = policies[0].params();
            let mut state = [State::fresh(strategy)];
            let mut now = 1_790_000_000_000_000 + rng.i64(0..1_000_000);
            for _ in 0..20 {
                let cost = rng.u32(1..=quota.capacity());
                let verdict = *Check::up_to(Key::GLOBAL, &policies, cost).decide(&mut state, now).first();
                let followed = Followed { used: params.capacity - verdict.remaining, until: now + verdict.reset };
                let resumed = State::resume(strategy, params, now, followed);
                let room = |state: &State, at: i64| look(state, params, at).room;
                // A time is told rounded up to the microsecond, in which so much may flow back.
                let flows = if strategy.is_steady() { 1 + params.ticks / params.interval } else { 0 };
                let lost = verdict.remaining - room(&resumed, now);
                assert!((0..=flows).contains(&lost), "{:?} {followed:?}: {lost} lost", policies[0]);
                for _ in 0..5 {
                    let later = now + rng.i64(0..=verdict.reset);
                    assert!(room(&resumed, later) <= room(&state[0], later), "{:?} {followed:?}", policies[0]);
                }
                let fresh = room(&resumed, followed.until);
                assert_eq!(fresh, params.capacity, "{:?} {followed:?} is not fresh in time", policies[0]);
                now += rng.i64(0..=verdict.reset + 2);
            }
        }
    }
}

/// However far the quota falls below what is charged, that can be given back and forgotten.
#[test]
fn what_a_lowered_quota_does_not_hold_can_be_given_back() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL {
        let strategy = vary(&mut rng, strategy);
        let policies = |limit| Policies::from(Policy::new("p", strategy, Quota::per_day(limit)).unwrap());
        let (high, low) = (policies(1000), policies(10));
        let now = 1_790_000_000_000_000;
        let mut state = [State::fresh(strategy)];
        assert_eq!(Check::take(Key::GLOBAL, &high, 1000).decide(&mut state, now).granted, 1000);
        let mut given = state.clone();
        assert_eq!(Check::give_back(Key::GLOBAL, &low, 5).decide(&mut given, now).granted, 5, "{strategy:?}");
        Check::reset(Key::GLOBAL, &low).decide(&mut state, now);
        assert_eq!(Check::take(Key::GLOBAL, &low, 10).decide(&mut state, now).granted, 10, "{strategy:?}");
    }
}
