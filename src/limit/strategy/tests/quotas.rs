use std::num::NonZeroU32;

use super::*;

/// Of a log and of cells, a caller who is asked under two near quotas in turn gets about what either would give it.
#[test]
fn alternating_near_quotas_count_as_one() {
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
                let mut state = [State::fresh(one[0].kind())];
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
/// fresh when it would have been. Under a share, all instances together grant no more.
#[test]
fn a_warmed_state_grants_no_more() {
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
                let followed = Snapshot { used: params.capacity - verdict.remaining, until: now + verdict.reset };
                let resumed = State::resume(strategy.into(), params, now, followed);
                let room = |state: &State, at: i64| preview(state, params, at).room;
                let instances = NonZeroU32::new(rng.u32(1..=quota.limit().min(quota.capacity()).min(20))).unwrap();
                let (share, whole) = (policies[0].share(instances), &policies[0]);
                // Rounded up, as the local store does.
                let capacity = share.params().capacity;
                let used = capacity - verdict.remaining * capacity / params.capacity;
                let part = State::resume(strategy.into(), share.params(), now, Snapshot { used, ..followed });
                let room_of_all = |at| i64::from(instances.get()) * preview(&part, share.params(), at).room;
                // A time is told rounded up to the microsecond, in which so much may flow back.
                let flows = if strategy.frees().is_gradual() { 1 + params.ticks / params.interval } else { 0 };
                let lost = verdict.remaining - room(&resumed, now);
                assert!((0..=flows).contains(&lost), "{:?} {followed:?}: {lost} lost", policies[0]);
                for _ in 0..5 {
                    let later = now + rng.i64(0..=verdict.reset);
                    assert!(room(&resumed, later) <= room(&state[0], later), "{:?} {followed:?}", policies[0]);
                    let (all, most) = (room_of_all(later), room(&state[0], later));
                    assert!(all <= most, "{whole:?} {followed:?}: {all} and not {most} by {instances}");
                }
                let fresh = room(&resumed, followed.until);
                assert_eq!(fresh, params.capacity, "{:?} {followed:?} is not fresh in time", policies[0]);
                now += rng.i64(0..=verdict.reset + 2);
            }
        }
    }
}

/// However far the quota falls below what is charged, that can be refunded and forgotten.
#[test]
fn charges_above_a_lowered_quota_are_refundable() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL {
        let strategy = vary(&mut rng, strategy);
        let policies = |limit| Policies::from(Policy::new("p", strategy, Quota::per_day(limit)).unwrap());
        let (high, low) = (policies(1000), policies(10));
        let now = 1_790_000_000_000_000;
        let mut state = [State::fresh(strategy)];
        assert_eq!(Check::take(Key::GLOBAL, &high, 1000).decide(&mut state, now).granted, 1000);
        let mut given = state.clone();
        assert_eq!(Check::refund(Key::GLOBAL, &low, 5).decide(&mut given, now).granted, 5, "{strategy:?}");
        Check::reset(Key::GLOBAL, &low).decide(&mut state, now);
        assert_eq!(Check::take(Key::GLOBAL, &low, 10).decide(&mut state, now).granted, 10, "{strategy:?}");
    }
}
