use super::*;

/// The grants, the remaining capacity, the wait and the reset equal those of the definition, to the
/// microsecond.
#[test]
fn every_strategy_equals_its_definition() {
    for (seed, &strategy) in Strategy::ALL.iter().enumerate() {
        let mut rng = Rng::with_seed(seed as u64);
        let mut denied = 0;
        for _ in 0..150 {
            let quota = quota(&mut rng, strategy);
            let strategy = vary(&mut rng, strategy, quota.period());
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
                let verdict = verdicts.each[0];
                assert_eq!(
                    verdict.wait == 0,
                    expected,
                    "{context}: cost {cost} at {now}, {:?}",
                    before.grants
                );
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
                    assert_eq!(
                        take(&state, cost, retry).granted,
                        i64::from(cost),
                        "{context}: not at {retry}"
                    );
                    assert_eq!(
                        take(&state, cost, retry - 1).granted,
                        0,
                        "{context}: before {retry}"
                    );
                    times.push(verdict.wait);
                }

                let remaining = i128::from(verdict.remaining);
                assert!(
                    model.allows(remaining, now.into()) || remaining == 0,
                    "{context}: {remaining} remain"
                );
                assert!(
                    !model.allows(remaining + 1, now.into()),
                    "{context}: more than {remaining} remain"
                );

                let seen = |at: i64| {
                    (
                        preview(&state[0], params, at).registers,
                        preview(&State::fresh(strategy), params, at).registers,
                    )
                };
                let (registers, fresh) = seen(now + verdict.reset);
                assert_eq!(
                    registers, fresh,
                    "{context}: not fresh after {}",
                    verdict.reset
                );
                if verdict.reset > 0 {
                    let (registers, fresh) = seen(now + verdict.reset - 1);
                    assert_ne!(
                        registers, fresh,
                        "{context}: fresh before {}",
                        verdict.reset
                    );
                }
                times.push(verdict.reset);
                let time = times[rng.usize(..times.len())];
                now += [
                    0,
                    1,
                    time,
                    time - 1,
                    rng.i64(0..=time.max(0)),
                    rng.i64(0..=time / 8),
                ][rng.usize(..6)]
                .max(0);
            }
        }
        assert!(denied > 500, "seed {seed}: only {denied} denials");
    }
}

/// A rate that is not an integer number of ticks is never too high, and less than 0.1 % too low.
#[test]
fn every_rate_is_accurate() {
    let mut rng = Rng::with_seed(0);
    for _ in 0..100_000 {
        // Uniform over the orders of magnitude.
        let mut size = |bits: u32| {
            let bits = rng.u32(1..=bits);
            rng.u64(1..1 << bits)
        };
        let (limit, period, burst) = (size(32) as u32, size(44), size(32) as u32);
        let quota = Quota::per(limit, Duration::from_micros(period)).burst(burst);
        let Ok(policy) = Policy::new("p", Strategy::Gcra, quota) else {
            continue;
        };
        let params = policy.params();
        let exact = i128::from(period) * i128::from(params.ticks);
        let ours = i128::from(params.interval) * i128::from(limit);
        assert!(ours >= exact, "{quota} grants too much");
        assert!(
            (ours - exact) * 1000 <= exact,
            "{quota} is off by more than 0.1 %"
        );
        assert!(
            2 * params.full <= 1 << 52 && params.furthest < 1 << 51,
            "{quota} overflows"
        );
    }
    for quota in [
        Quota::per_second(3),
        Quota::per_second(300_000),
        Quota::per_day(1_000_000),
    ] {
        let policy = Policy::new("p", Strategy::Gcra, quota).unwrap();
        let params = policy.params();
        let (interval, limit) = (i128::from(params.interval), i128::from(quota.limit()));
        assert_eq!(
            interval * limit,
            quota.period().as_micros() as i128 * i128::from(params.ticks),
            "{quota} is exact"
        );
    }
}
