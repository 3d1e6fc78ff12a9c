use std::num::NonZeroU32;

use super::*;
use crate::store::part_of;

/// A changed limit takes effect immediately, and keeps the count.
#[test]
fn a_changed_limit_is_no_fresh_start() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL
        .iter()
        .filter(|strategy| !strategy.frees().has_burst())
    {
        let strategy = vary(&mut rng, strategy, Quota::per_minute(1).period());
        let limits = [1, 7, 10, 1000];
        for (old, new) in limits.iter().flat_map(|old| limits.map(|new| (*old, new))) {
            let policies = |limit| {
                Policies::from(Policy::new("p", strategy, Quota::per_minute(limit)).unwrap())
            };
            let now = 1_790_000_000_000_000;
            let mut state = [State::fresh(strategy)];
            assert_eq!(
                Check::take(Key::GLOBAL, &policies(old), old)
                    .decide(&mut state, now)
                    .granted,
                i64::from(old)
            );

            let new_policies = policies(new);
            assert_eq!(policies(old)[0].id(), new_policies[0].id());
            let peek = Check::peek(Key::GLOBAL, &new_policies, 1).decide(&mut state.clone(), now);
            let most = i64::from(new.saturating_sub(old));
            assert!(
                peek.first().remaining <= most,
                "{strategy:?} {old} to {new}: {peek:?}"
            );
            // A denied check is allowed after the reported wait, by the new limit.
            let all = Check::take(Key::GLOBAL, &new_policies, new);
            let wait = all.decide(&mut state, now).first().wait;
            let later = all.clone().decide(&mut state, now + wait);
            let outcome = all.answer(later, crate::limit::Source::Local).outcome();
            assert_eq!(
                outcome,
                Outcome::Allowed,
                "{strategy:?} {old} to {new}: not after {wait}"
            );
        }
    }
}

/// A refund under a lowered limit is deducted from the whole count.
#[test]
fn a_lowered_limit_keeps_all_charges() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL
        .iter()
        .filter(|strategy| !strategy.frees().has_burst())
    {
        let strategy = vary(&mut rng, strategy, Quota::per_day(1).period());
        let [high, low] = [1000, 10].map(|limit| {
            Policies::from(Policy::new("p", strategy, Quota::per_day(limit)).unwrap())
        });
        let (now, mut state) = (1_790_000_000_000_000, [State::fresh(strategy)]);
        assert_eq!(
            Check::take(Key::GLOBAL, &high, 1000)
                .decide(&mut state, now)
                .granted,
            1000
        );
        assert_eq!(
            Check::refund(Key::GLOBAL, &low, 5)
                .decide(&mut state, now)
                .granted,
            5,
            "{strategy:?}"
        );
        assert_eq!(
            Check::up_to(Key::GLOBAL, &high, 1000)
                .decide(&mut state, now)
                .granted,
            5,
            "{strategy:?}"
        );
    }
}

/// A state that continues another store's count grants at most as much as that store would, now or
/// later, and is fresh at the same time. With shares, all instances together do not exceed that
/// either.
#[test]
fn a_warmed_state_grants_no_more() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL {
        for _ in 0..300 {
            let quota = quota(&mut rng, strategy);
            let strategy = vary(&mut rng, strategy, quota.period());
            let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
            let params = policies[0].params();
            let mut state = [State::fresh(strategy)];
            let mut now = 1_790_000_000_000_000 + rng.i64(0..1_000_000);
            for _ in 0..20 {
                let cost = rng.u32(1..=quota.capacity());
                let verdict = *Check::up_to(Key::GLOBAL, &policies, cost)
                    .decide(&mut state, now)
                    .first();
                let followed = Snapshot {
                    used: params.capacity - verdict.remaining,
                    until: now + verdict.reset,
                    writer: params.writer,
                };
                let resumed = State::resume(strategy.into(), params, now, followed);
                let room = |state: &State, at: i64| preview(state, params, at).room;
                let instances =
                    NonZeroU32::new(rng.u32(1..=quota.limit().min(quota.capacity()).min(20)))
                        .unwrap();
                let (share, whole) = (part_of(&policies[0], instances), &policies[0]);
                // Rounded up, as the local store does.
                let capacity = share.params().capacity;
                let used = capacity - verdict.remaining * capacity / params.capacity;
                let part = State::resume(
                    strategy.into(),
                    share.params(),
                    now,
                    Snapshot { used, ..followed },
                );
                let room_of_all =
                    |at| i64::from(instances.get()) * preview(&part, share.params(), at).room;
                // The reported time is rounded up to the microsecond, in which this much may
                // refill.
                let flows = if strategy.frees().is_gradual() {
                    1 + params.ticks / params.interval
                } else {
                    0
                };
                let lost = verdict.remaining - room(&resumed, now);
                assert!(
                    (0..=flows).contains(&lost),
                    "{:?} {followed:?}: {lost} lost",
                    policies[0]
                );
                for _ in 0..5 {
                    let later = now + rng.i64(0..=verdict.reset);
                    assert!(
                        room(&resumed, later) <= room(&state[0], later),
                        "{:?} {followed:?}",
                        policies[0]
                    );
                    let (all, most) = (room_of_all(later), room(&state[0], later));
                    assert!(
                        all <= most,
                        "{whole:?} {followed:?}: {all} and not {most} by {instances}"
                    );
                }
                let fresh = room(&resumed, followed.until);
                assert_eq!(
                    fresh, params.capacity,
                    "{:?} {followed:?} is not fresh in time",
                    policies[0]
                );
                now += rng.i64(0..=verdict.reset + 2);
            }
        }
    }
}

/// Charges can be refunded and reset even if they are far above a lowered limit.
#[test]
fn charges_above_a_lowered_quota_are_refundable() {
    let mut rng = Rng::with_seed(0);
    for &strategy in Strategy::ALL
        .iter()
        .filter(|strategy| !strategy.frees().has_burst())
    {
        let strategy = vary(&mut rng, strategy, Quota::per_day(1).period());
        let policies =
            |limit| Policies::from(Policy::new("p", strategy, Quota::per_day(limit)).unwrap());
        let (high, low) = (policies(1000), policies(10));
        let now = 1_790_000_000_000_000;
        let mut state = [State::fresh(strategy)];
        assert_eq!(
            Check::take(Key::GLOBAL, &high, 1000)
                .decide(&mut state, now)
                .granted,
            1000
        );
        let mut given = state.clone();
        assert_eq!(
            Check::refund(Key::GLOBAL, &low, 5)
                .decide(&mut given, now)
                .granted,
            5,
            "{strategy:?}"
        );
        Check::reset(Key::GLOBAL, &low).decide(&mut state, now);
        assert_eq!(
            Check::take(Key::GLOBAL, &low, 10)
                .decide(&mut state, now)
                .granted,
            10,
            "{strategy:?}"
        );
    }
}
