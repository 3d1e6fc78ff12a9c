use super::*;

/// A state from a clock that was ahead locks no caller out, and grants nothing extra.
#[test]
fn a_backward_clock_locks_no_caller_out() {
    let mut rng = Rng::with_seed(0);
    // With some charges that have expired since, or without.
    for (&strategy, before) in Strategy::ALL
        .iter()
        .flat_map(|strategy| [(strategy, 0), (strategy, 25)])
    {
        let quota = Quota::per_second(10);
        let strategy = vary(&mut rng, strategy, quota.period());
        let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
        let (policy, mut now) = (&policies[0], 1_790_000_000_000_000);
        let mut state = [State::fresh(policy.kind())];
        let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
        for _ in 0..before {
            take(1).decide(&mut state, now);
            now += 100_000;
        }
        let rest = Check::up_to(Key::GLOBAL, &policies, 10)
            .decide(&mut state, now)
            .granted;
        assert!(rest == 10 || before > 0);
        // The clock goes back an hour, as after a failover to another host.
        now -= 3_600_000_000;
        let verdicts = take(1).decide(&mut state, now);
        assert_eq!(
            verdicts.granted, 0,
            "{policy:?}: a clock gave a fresh start"
        );
        assert!(
            verdicts.each[0].wait <= 2_000_000,
            "{policy:?}: {:?}",
            verdicts.each[0]
        );
        for _ in 0..3 {
            now += 1_000_000;
            take(1).decide(&mut state, now);
        }
        now += 2_000_000;
        assert_eq!(
            take(10).decide(&mut state, now).granted,
            10,
            "{policy:?} is locked out"
        );
    }
}

/// In logs and cells, a step back of the clock moves the charges made after it, and no others. A
/// denial saves the moved charges.
#[test]
fn a_small_step_back_moves_later_charges() {
    const START: i64 = 1_790_000_000_000_000;
    for strategy in [
        Strategy::SlidingLog,
        Strategy::SlidingWindow { cells: 1000 },
    ] {
        let policies: Policies = Policy::new("p", strategy, Quota::per_second(1000))
            .unwrap()
            .into();
        let mut state = [State::fresh(strategy)];
        let take = |cost| Check::take(Key::GLOBAL, &policies, cost);
        // One charge every millisecond, then a step back of 1 ms.
        for i in 0..1000 {
            assert_eq!(take(1).decide(&mut state, START + i * 1_000).granted, 1);
        }
        let now = START + 998_000;
        for _ in 0..2 {
            let wait = take(1).decide(&mut state, now).each[0].wait;
            assert!(
                (1..=3_000).contains(&wait),
                "{strategy:?}: a wait of {wait} us for the first of them"
            );
        }
        // Without the step, only the last millisecond would differ.
        for left in [1000, 999, 500, 100, 2] {
            let at = START + 1_000_000 + (1000 - left) * 1_000;
            let remaining = take(0).decide(&mut state, at).each[0].remaining;
            assert!(
                (1000 - left..=1003 - left).contains(&remaining),
                "{strategy:?}: {remaining} remain, {left} charged"
            );
        }
        let (clone, reset) = (state.clone(), take(0).decide(&mut state, now).each[0].reset);
        assert!(
            (1_000_000..=1_002_000).contains(&reset),
            "{strategy:?}: fresh after {reset} us"
        );
        // A charge made now counts from now, and later charges follow it.
        for at in [now + 3_000, now + 5_000] {
            assert_eq!(take(1).decide(&mut state, at).granted, 1, "{strategy:?}");
        }
        assert_ne!(state, clone);
    }
}
