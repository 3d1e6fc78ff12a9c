use super::*;

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
                peek.each[0].remaining <= most,
                "{strategy:?} {old} to {new}: {peek:?}"
            );
            // A denied check is allowed after the reported wait, by the new limit.
            let all = Check::take(Key::GLOBAL, &new_policies, new);
            let wait = all.decide(&mut state, now).each[0].wait;
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
