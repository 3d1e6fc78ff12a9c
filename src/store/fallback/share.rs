//! The share of one instance: what it may grant while the primary store cannot decide.

use std::num::NonZeroU32;
use std::sync::Mutex;

use crate::limit::{Policies, Policy, Quota};
use crate::util::lock;

/// The share that was made last of a list of policies, kept with the list: the number of instances changes rarely.
type LastShare = Mutex<Option<(NonZeroU32, Policies)>>;

/// Returns the share of one of `instances` instances in each policy.
pub(super) fn share_of(policies: &Policies, instances: NonZeroU32) -> Policies {
    let mut last = lock(policies.extension::<LastShare>());
    if let Some((of, share)) = &*last
        && *of == instances
    {
        return share.clone();
    }
    let each = policies.iter().map(|policy| part_of(policy, instances));
    // It cannot fail: the shares have the names of the policies.
    let share = Policies::new(each).unwrap_or_else(|_| policies.clone());
    *last = Some((instances, share.clone()));
    share
}

/// Returns the share of one of `instances` instances. Together the shares grant no more than the policy, unless the limit or
/// burst is below the number of instances: both are rounded down, but to at least 1. If the strategy refills gradually, the
/// rate is divided exactly. A pause and a blocked policy are the same for all instances.
fn part_of(policy: &Policy, instances: NonZeroU32) -> Policy {
    if policy.is_pause() || policy.is_blocked() {
        return policy.clone();
    }
    let quota = policy.quota();
    let limit = (quota.limit() / instances).max(1);
    let burst = (quota.capacity() / instances).max(1);
    if policy.frees().is_gradual() {
        // A longer period divides the rate exactly, unless it is too long for a quota.
        let period = quota.period().saturating_mul(instances.get());
        let by_period = Quota::per(quota.limit(), period).burst(burst);
        if let Ok(share) = policy.share_of(by_period, instances) {
            return share;
        }
    }
    let by_limit = quota.with_limit(limit).burst(burst);
    let share = policy.share_of(by_limit, instances);
    share.unwrap_or_else(|_| policy.clone())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fastrand::Rng;

    use super::*;
    use crate::limit::{
        Check, Key, Mode, Snapshot, Source, State, Strategy, Verdict, any_quota, room, vary,
    };
    use crate::store::{LocalStore, Store as _};

    fn policy(name: &str, limit: u32) -> Policy {
        Policy::new(name, Strategy::Gcra, Quota::per_second(limit)).unwrap()
    }

    #[test]
    fn a_share_is_made_once() {
        let list = Policies::from(policy("one", 100));
        let share = |instances| share_of(&list, NonZeroU32::new(instances).unwrap());
        let address = |share: &Policies| share.as_slice().as_ptr() as usize;
        assert_eq!(address(&share(4)), address(&share(4)));
        assert_eq!(share(4)[0].quota().capacity(), 25);
        assert_eq!(share(5)[0].quota().capacity(), 20);
    }

    /// A decision on a share must refund under the whole policies.
    #[test]
    fn a_share_knows_its_whole() {
        let list = Policies::new([policy("one", 100), policy("two", 7)]).unwrap();
        let share = share_of(&list, NonZeroU32::new(4).unwrap());
        assert_ne!(share, list);
        assert_eq!((share.whole(), list.whole()), (&list, &list));
        let second = Duration::from_secs(1);
        let take = Check::take(Key::GLOBAL, &share, 1);
        let decision = take.decided(Source::Local, 1, |_| {
            Verdict::allowed().with_reset_after(second)
        });
        let back = decision.refund(Key::GLOBAL, 1, Duration::ZERO);
        assert!(back.is_some_and(|back| *back.policies() == list));
    }

    /// A pause holds for all instances.
    #[test]
    fn a_pause_is_not_shared() {
        let (same, instances) = (policy("p", 100), NonZeroU32::new(4).unwrap());
        let pause = policy("p", 100).of_pauses();
        assert_eq!(part_of(&pause, instances).quota(), pause.quota());
        assert_ne!(part_of(&same, instances).quota(), same.quota());
    }

    #[test]
    fn instance_shares_never_exceed_the_whole() {
        use crate::limit::Align;
        let part = |strategy, quota, instances| {
            let policy = Policy::new("p", strategy, quota).unwrap();
            part_of(&policy, NonZeroU32::new(instances).unwrap()).quota()
        };
        let window = Strategy::FixedWindow(Align::FirstHit);
        assert_eq!(
            part(window, Quota::per_minute(10), 4),
            Quota::per_minute(2).burst(2)
        );
        assert_eq!(
            part(window, Quota::per_minute(3), 4),
            Quota::per_minute(1).burst(1),
            "at least 1"
        );
        let four_seconds = Quota::per(10, Duration::from_secs(4));
        assert_eq!(
            part(Strategy::Gcra, Quota::per_second(10).burst(20), 4),
            four_seconds.burst(5),
            "a rate is exact"
        );
        assert_eq!(
            part(Strategy::Gcra, Quota::per_day(365), 1000).limit(),
            1,
            "periods are bounded"
        );
    }

    /// A share of a quota names the whole one, so another number of instances changes nothing.
    #[test]
    fn shares_are_no_other_quota() {
        let buckets = Strategy::ALL.iter().copied();
        for strategy in buckets.filter(|strategy| strategy.frees().has_burst()) {
            let policy = Policy::new("api", strategy, "1000/m burst 50").unwrap();
            let share = |instances| part_of(&policy, NonZeroU32::new(instances).unwrap());
            let mut state = State::fresh(strategy);
            let now = 1_790_000_000_000_000;
            Mode::Take.count(&share(2), &mut state, 20, now);
            let before = state.clone();
            for instances in [3, 7, 2, 50] {
                let share = share(instances);
                assert!(state.is_of(share.params()), "{strategy}");
                Mode::Refund.count(&share, &mut state, 0, now);
                assert_eq!(state, before, "{strategy}");
            }
        }
    }

    /// Two quotas in turn, each until it denies: all instances together are within the larger burst and the faster rate.
    #[test]
    fn shares_of_changing_quotas_stay_within_the_loosest() {
        const INSTANCES: u32 = 10;
        const PERIODS: u32 = 100;
        let buckets = Strategy::ALL.iter().copied();
        for strategy in buckets.filter(|strategy| strategy.frees().has_burst()) {
            let shares = ["100/10s burst 1000", "110/10s burst 1000"].map(|quota| {
                let policy = Policy::new("api", strategy, quota).unwrap();
                part_of(&policy, NonZeroU32::new(INSTANCES).unwrap())
            });
            let mut state = State::fresh(strategy);
            let (mut now, mut granted) = (1_790_000_000_000_000, 0);
            for share in shares.iter().cycle().take(PERIODS as usize) {
                granted += Mode::UpTo.count(share, &mut state, 1_000, now);
                now += 10_000_000;
            }
            let most = 100 + i64::from(PERIODS + 2) * 11;
            assert!(granted <= most, "{strategy}: {granted}, at most {most}");
        }
    }

    /// A share of one half of another quota continues one half of the units that the primary store has counted.
    #[tokio::test(start_paused = true)]
    async fn a_share_continues_the_units_of_another_quota() {
        for strategy in Strategy::ALL {
            let (there, here) = (LocalStore::default(), LocalStore::default());
            let [old, new] = ["100/d", "40/d"]
                .map(|quota| Policies::from(Policy::new("test", *strategy, quota).unwrap()));
            let used = there
                .check(Check::take(Key::GLOBAL, &old, 30))
                .await
                .unwrap();
            here.backend().warm(&Key::GLOBAL, &used);
            let share = Policies::from(part_of(&new[0], NonZeroU32::new(2).unwrap()));
            let most = here
                .check(Check::up_to(Key::GLOBAL, &share, 100))
                .await
                .unwrap();
            assert_eq!(most.granted(), 5, "{strategy}");
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
                let quota = any_quota(&mut rng, strategy);
                let strategy = vary(&mut rng, strategy, quota.period());
                let policies: Policies = Policy::new("p", strategy, quota).unwrap().into();
                let params = policies[0].params();
                let mut state = [State::fresh(strategy)];
                let mut now = 1_790_000_000_000_000 + rng.i64(0..1_000_000);
                for _ in 0..20 {
                    let cost = rng.u32(1..=quota.capacity());
                    let verdict = Check::up_to(Key::GLOBAL, &policies, cost)
                        .decide(&mut state, now)
                        .each[0];
                    let followed = Snapshot {
                        used: params.capacity - verdict.remaining,
                        until: now + verdict.reset,
                        writer: params.writer,
                    };
                    let resumed = State::resume(strategy.into(), params, now, followed);
                    let instances =
                        NonZeroU32::new(rng.u32(1..=quota.limit().min(quota.capacity()).min(20)))
                            .unwrap();
                    let whole = &policies[0];
                    let share = part_of(whole, instances);
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
                        |at| i64::from(instances.get()) * room(&part, share.params(), at);
                    // The reported time is rounded up to the microsecond, in which this much may
                    // refill.
                    let flows = if strategy.frees().is_gradual() {
                        1 + params.ticks / params.interval
                    } else {
                        0
                    };
                    let lost = verdict.remaining - room(&resumed, params, now);
                    assert!(
                        (0..=flows).contains(&lost),
                        "{:?} {followed:?}: {lost} lost",
                        policies[0]
                    );
                    for _ in 0..5 {
                        let later = now + rng.i64(0..=verdict.reset);
                        assert!(
                            room(&resumed, params, later) <= room(&state[0], params, later),
                            "{:?} {followed:?}",
                            policies[0]
                        );
                        let (all, most) = (room_of_all(later), room(&state[0], params, later));
                        assert!(
                            all <= most,
                            "{whole:?} {followed:?}: {all} and not {most} by {instances}"
                        );
                    }
                    let fresh = room(&resumed, params, followed.until);
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
}
