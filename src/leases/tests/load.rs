//! How much of a quota is used, and how many checks the shared store gets.

use std::time::Duration;

use crate::limit::{Key, Policies, Policy, Quota, Strategy};
use crate::simulation::World;

#[derive(Debug)]
struct Used {
    sent: u64,
    granted: u64,
    denied: u64,
    /// Checks that the shared store received.
    checks: u64,
}

/// Simulates four instances for `seconds`. Together they send `per_second` checks, in the ratio
/// `parts`.
fn load(policies: &Policies, parts: [u32; 4], per_second: u32, seconds: u32) -> Used {
    let mut world = World::new(1, 4);
    world.shared(|shared| (shared.is_healthy, shared.delay_scale) = (true, 1_000));
    let (key, sum) = (Key::GLOBAL, parts.iter().sum::<u32>());
    let mut used = Used {
        sent: 0,
        granted: 0,
        denied: 0,
        checks: 0,
    };
    let mut due = [0; 4];
    for _ in 0..seconds * 1_000 {
        world.advance(1_000);
        for i in 0..4 {
            due[i] += per_second * parts[i];
            while due[i] >= 1_000 * sum {
                due[i] -= 1_000 * sum;
                used.sent += 1;
                used.granted += u64::from(world.take(i, key, policies, 1).is_some());
            }
            for answer in world.run(i) {
                match answer.unwrap().is_allowed() {
                    true => used.granted += 1,
                    false => used.denied += 1,
                }
            }
        }
    }
    used.checks = world.shared(|shared| shared.checks);
    used
}

fn policy(strategy: Strategy) -> Policy {
    Policy::new("p", strategy, Quota::per_second(2_000)).unwrap()
}

fn leased(strategy: Strategy, time: u64) -> Policies {
    policy(strategy)
        .leased(Duration::from_millis(time))
        .unwrap()
        .into()
}

/// Relative to the grants without leases. A sliding window of ten cells frees each charge a tenth of its period late.
#[test]
fn uneven_instances_use_up_a_quota() {
    for &strategy in Strategy::ALL {
        let all = load(&policy(strategy).into(), [8, 4, 2, 1], 3_000, 3);
        let used = load(&leased(strategy, 20), [8, 4, 2, 1], 3_000, 3);
        println!(
            "{strategy:?}: {used:?}, {:.3}",
            used.granted as f64 / all.granted as f64
        );
        assert!(
            used.granted * 100 >= all.granted * 95,
            "{strategy:?}: {used:?}, of {all:?}"
        );
    }
}

#[test]
fn half_of_the_quota_is_never_denied() {
    for &strategy in Strategy::ALL {
        for (time, parts) in [(100, [8, 4, 2, 1]), (400, [1, 1, 1, 1])] {
            let used = load(&leased(strategy, time), parts, 1_000, 2);
            println!("{strategy:?} {time}: {used:?}");
            assert!(used.denied == 0, "{strategy:?} for {time} ms: {used:?}");
        }
    }
}
