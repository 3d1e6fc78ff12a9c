//! Never more than the quota as it was stated, whatever happens to checks, answers, clocks and processes.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use fastrand::Rng;

use super::world::World;
use crate::limit::{Align, Key, Policies, Policy, Quota, Refill, Source, Strategy};

/// What may be spent from one time to another, as the strategies are defined.
fn most(strategy: Strategy, quota: Quota, from: i64, to: i64) -> i64 {
    let (limit, period) = (i64::from(quota.limit()), quota.period().as_micros() as i64);
    let (burst, periods) = (i64::from(quota.capacity()), (to - from) / period);
    match strategy {
        Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(Refill::Greedy) => {
            burst + limit * (to - from) / period
        }
        Strategy::TokenBucket(Refill::Interval) => burst + limit * (periods + 1),
        Strategy::SlidingLog | Strategy::SlidingWindow { .. } => limit * (periods + 1),
        Strategy::SlidingCounter | Strategy::FixedWindow(_) => limit * (periods + 2),
    }
}

/// Panics if more was spent between any two times than may be, or in a window of the clock. Returns how often it was just as
/// much.
fn check_spent(strategy: Strategy, quota: Quota, spent: &[(i64, u32)]) -> u32 {
    let mut sums: Vec<(i64, i64)> = vec![];
    for &(at, cost) in spent {
        match sums.last_mut() {
            Some((last, sum)) if *last == at => *sum += i64::from(cost),
            _ => sums.push((at, i64::from(cost))),
        }
    }
    let mut tight = 0;
    for (i, (from, _)) in sums.iter().enumerate() {
        let mut sum = 0;
        for (to, more) in &sums[i..] {
            sum += more;
            let most = most(strategy, quota, *from, *to);
            tight += u32::from(sum == most);
            assert!(sum <= most, "{strategy:?} {quota}: {sum}, not {most}, from {from} in {} us", to - from);
        }
    }
    if let Strategy::FixedWindow(Align::Clock { offset }) = strategy {
        let (period, offset) = (quota.period().as_micros() as i64, offset.as_micros() as i64);
        for window in sums.chunk_by(|one, two| (one.0 - offset) / period == (two.0 - offset) / period) {
            let sum: i64 = window.iter().map(|(_, sum)| sum).sum();
            assert!(sum <= i64::from(quota.limit()), "{strategy:?} {quota}: {sum} in a window");
        }
    }
    tight
}

#[derive(Debug, Default)]
struct Seen {
    leased: u64,
    single: u64,
    tight: u32,
    refunded: u64,
    expired: u64,
}

fn run(seed: u64, strategy: Strategy, seen: &mut Seen) {
    let mut rng = Rng::with_seed(seed);
    let instances = rng.u32(1..=4);
    let mut world = World::new(rng.u64(..), instances);
    let period = rng.u64(40..1_500) * 1_000;
    // Small ones are often used up at once.
    let limit = [rng.u32(40..400), rng.u32(400..3_000)][rng.usize(..2)];
    let stated = Quota::per(limit, Duration::from_micros(period));
    let stated =
        if strategy.frees().has_burst() && rng.bool() { stated.burst(stated.limit() * rng.u32(1..4)) } else { stated };
    let lease = Duration::from_micros(rng.u64(10_000..period.max(20_002) / 2));
    let Ok(policy) = Policy::new("p", strategy, stated).and_then(|policy| policy.leased(lease)) else { return };
    let policies = Policies::from(policy);
    let key = Key::new("ann");
    let lease = lease.as_micros() as i64;
    // How often each instance asks, in a step.
    let rates: Vec<u32> = (0..instances).map(|_| rng.u32(1..20)).collect();
    let mut frozen = vec![0; instances as usize];
    let mut spent = vec![];
    for _ in 0..400 {
        let flood = if limit < 400 && rng.u8(..24) == 0 { stated.capacity().min(600) } else { 0 };
        let time = match rng.u8(..40) {
            0 => rng.i64(0..2 * lease),
            1 => rng.i64(0..=period as i64),
            2..4 => lease * 3 / 8,
            _ => rng.i64(0..=lease / 12),
        };
        world.pass(time);
        for i in 0..instances as usize {
            if frozen[i] > world.now {
                continue;
            }
            // A process that wakes up may decide before any of its timers has run.
            let first = rng.bool();
            if first {
                drop(world.run(i));
            }
            let count = if rng.u8(..6) == 0 { 0 } else { rng.u32(..=rates[i]) } + flood;
            for _ in 0..count {
                let cost = if rng.u8(..8) == 0 { rng.u32(1..4) } else { 1 };
                let Some(decision) = world.take(i, key, &policies, cost) else { continue };
                assert!(decision.source() == Source::Leased && decision.is_allowed());
                let clock = world.shared(|shared| shared.clock());
                seen.leased += 1;
                // A request that is not served is refunded.
                if rng.u8(..16) == 0 {
                    let age = Duration::from_micros(rng.u64(..2_000));
                    for back in decision.refund(key, cost, age) {
                        world.on(i, |instance| drop(crate::store::Store::check(&instance.store, back)));
                    }
                } else {
                    spent.push((clock, cost));
                }
            }
            if !first {
                drop(world.run(i));
            }
            match rng.u16(..1_000) {
                0..20 => frozen[i] = world.now + rng.i64(0..3 * lease),
                20..24 => world.kill(i),
                24..28 => world.replace(i),
                _ => {}
            }
        }
    }
    world.shared(|shared| {
        seen.single += shared.spent.len() as u64;
        spent.append(&mut shared.spent);
    });
    spent.sort_unstable();
    seen.tight += check_spent(strategy, stated, &spent);
    seen.refunded += world.blocks.refunded.load(Relaxed);
    seen.expired += world.blocks.expired.load(Relaxed);
}

/// A block is charged before it is spent, and is not spent a lease time after that: see `docs/leases.md`.
#[test]
fn leases_never_exceed_the_quota() {
    let seeds: u64 = std::env::var("LEASE_SEEDS").ok().map_or(24, |seeds| seeds.parse().unwrap());
    for &strategy in Strategy::ALL {
        let mut seen = Seen::default();
        for seed in 0..seeds {
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed, strategy, &mut seen))).is_err() {
                panic!("{strategy:?}, seed {seed}");
            }
        }
        println!("{strategy:?}: {seen:?}");
        assert!(
            8 * seen.leased > seen.single && seen.leased > 500 * seeds && seen.refunded > 0 && seen.expired > 0,
            "{strategy:?}: {seen:?}"
        );
    }
}
