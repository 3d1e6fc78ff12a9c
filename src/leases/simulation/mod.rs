//! A simulation: instances over one shared count, whose checks and answers are late, lost or never sent, whose clocks differ,
//! and which are stopped, killed and ended at any moment. Never more than the quota as it was stated is spent.

pub(super) mod world;

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use fastrand::Rng;

use self::world::World;
use crate::limit::{Align, Key, Policies, Policy, Quota, Refill, Source, Strategy};
use crate::simulation::{Breaks, Log, Outcome, Simulation};
use crate::store::Store;

/// What holds in every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rule {
    /// Nothing panics.
    Panic,
    /// Between any two times no more is spent than the strategy's definition allows, by the clock of the shared store.
    NeverAbove,
    /// What is spent from memory was charged ahead, once; and all that was charged is spent, or refunded, or is lost with a
    /// process or an answer.
    ChargedOnce,
    /// A while after the last check no instance holds anything.
    Returned,
}

impl crate::simulation::Rule for Rule {
    const PANIC: Self = Self::Panic;
}

const LEASES: Simulation<Rule> = Simulation { name: "leases", run: |seed, kept| run(seed, kept).0 };

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

/// Whether more was spent between any two times than may be, or in a window of the clock.
///
/// # Errors
///
/// What was too much.
fn check_spent(strategy: Strategy, quota: Quota, spent: &[(i64, u32)]) -> Result<(), String> {
    let mut sums: Vec<(i64, i64)> = vec![];
    for &(at, cost) in spent {
        match sums.last_mut() {
            Some((last, sum)) if *last == at => *sum += i64::from(cost),
            _ => sums.push((at, i64::from(cost))),
        }
    }
    for (i, (from, _)) in sums.iter().enumerate() {
        let mut sum = 0;
        for (to, more) in &sums[i..] {
            sum += more;
            let most = most(strategy, quota, *from, *to);
            if sum > most {
                return Err(format!("{sum} were spent from {from} on in {} us, and not {most}", to - from));
            }
        }
    }
    if let Strategy::FixedWindow(Align::Clock { offset }) = strategy {
        let (period, offset) = (quota.period().as_micros() as i64, offset.as_micros() as i64);
        for window in sums.chunk_by(|one, two| (one.0 - offset) / period == (two.0 - offset) / period) {
            let sum: i64 = window.iter().map(|(_, sum)| sum).sum();
            if sum > i64::from(quota.limit()) {
                return Err(format!("{sum} were spent in the window of {}", window[0].0));
            }
        }
    }
    Ok(())
}

/// How much was decided where.
#[derive(Debug, Default)]
struct Decided {
    leased: u64,
    single: usize,
    refunded: u64,
    expired: u64,
}

/// A process is stopped, killed or ended at random.
fn harm(world: &mut World, i: usize, lease: i64, log: &mut Log) {
    let what = match world.rng.u16(..1_000) {
        0..20 => {
            world.instances[i].stopped_until = world.now + world.rng.i64(0..3 * lease);
            "stopped"
        }
        20..24 => {
            world.kill(i);
            "killed"
        }
        24..28 => {
            world.end(i);
            "ended"
        }
        _ => return,
    };
    log.say(world.now as u64 / 1_000, None, || format!("instance {i} is {what}"));
}

fn run(seed: u64, kept: bool) -> (Outcome<Rule>, Decided) {
    let mut log = Log { kept, ..Log::default() };
    let (mut broken, mut decided) = (Breaks::default(), Decided::default());
    let mut rng = Rng::with_seed(seed);
    let strategy = Strategy::ALL[seed as usize % Strategy::ALL.len()];
    let period = rng.u64(40..1_500) * 1_000;
    // Small ones are often used up at once.
    let limit = [rng.u32(40..400), rng.u32(400..3_000)][rng.usize(..2)];
    let stated = Quota::per(limit, Duration::from_micros(period));
    let stated = if strategy.frees().has_burst() && rng.bool() { stated.burst(limit * rng.u32(1..4)) } else { stated };
    // A burst below the limit refills in less time, but none of these does.
    let lease = rng.i64(10_000..=period as i64 / 2);
    let leased = Policy::new("p", strategy, stated).and_then(|p| p.leased(Duration::from_micros(lease as u64)));
    let policies = Policies::from(leased.unwrap());
    let instances = rng.u32(1..=4);
    let plan = format!("{strategy:?} {stated} for {lease} us on {instances} instances");
    let mut world = World::new(rng.u64(..), instances);
    let key = Key::new("ann");
    // How often each instance asks, in a step.
    let rates: Vec<u32> = (0..instances).map(|_| rng.u32(1..20)).collect();
    let mut spent = vec![];
    for _ in 0..160 {
        let flood = if limit < 400 && rng.u8(..24) == 0 { stated.capacity().min(400) } else { 0 };
        let time = match rng.u8(..40) {
            0 => rng.i64(0..2 * lease),
            1 => rng.i64(0..=period as i64),
            2..4 => lease * 3 / 8,
            _ => rng.i64(0..=lease / 12),
        };
        world.pass(time);
        for (i, rate) in rates.iter().enumerate() {
            if world.instances[i].stopped_until > world.now {
                continue;
            }
            // A process that goes on may decide before any of its timers has run.
            let timers_first = rng.bool();
            if timers_first {
                world.run(i);
            }
            let count = if rng.u8(..6) == 0 { 0 } else { rng.u32(..=*rate) } + flood;
            let (at, before) = (world.now as u64 / 1_000, decided.leased);
            for _ in 0..count {
                // Large ones are refunded, so that little is left of a block that was charged as a whole.
                let is_large = rng.u8(..32) == 0;
                let cost = match rng.u8(..8) {
                    _ if is_large => rng.u32(1..=stated.capacity() / 4),
                    0 => rng.u32(1..4),
                    _ => 1,
                };
                let Some(decision) = world.take(i, key, &policies, cost) else { continue };
                assert!(decision.source() == Source::Leased && decision.is_allowed());
                decided.leased += u64::from(cost);
                // A request that is not served is refunded.
                if is_large || rng.u8(..16) == 0 {
                    for back in decision.refund(key, cost, Duration::from_micros(rng.u64(..2_000))) {
                        world.on(i, |instance| drop(instance.store.check(back)));
                    }
                } else {
                    spent.push((world.clock(), cost));
                }
            }
            log.say(at, None, || format!("instance {i}: {count} checks, {} from memory", decided.leased - before));
            if !timers_first {
                world.run(i);
            }
            harm(&mut world, i, lease, &mut log);
        }
    }
    // Until all answers are there, and all blocks are too old.
    for _ in 0..40 {
        world.pass(2 * lease / 10 + world.longest_way() / 10);
        (0..instances as usize).for_each(|i| drop(world.run(i)));
    }
    let held: usize = world.instances.iter().map(|instance| instance.store.inner.callers()).sum();
    let at = world.now as u64 / 1_000;
    if held > 0 {
        broken.add(Rule::Returned, None, format!("{held} callers are held"));
    }
    let [charged, refunded, expired] =
        [&world.blocks.charged, &world.blocks.refunded, &world.blocks.expired].map(|sum| sum.load(Relaxed));
    let ahead = world.shared(|shared| shared.ahead);
    if decided.leased > ahead || charged > ahead {
        broken.add(Rule::ChargedOnce, None, format!("{charged}, and {} spent, of {ahead}", decided.leased));
    }
    if !world.is_killed && charged != decided.leased + refunded + expired {
        let problem = format!("{charged} charged, {} spent, {refunded} refunded, {expired} expired", decided.leased);
        broken.add(Rule::ChargedOnce, None, problem);
    }
    spent.append(&mut world.shared(|shared| std::mem::take(&mut shared.spent)));
    decided = Decided { single: spent.len(), refunded, expired, ..decided };
    spent.sort_unstable();
    if let Err(problem) = check_spent(strategy, stated, &spent) {
        broken.add(Rule::NeverAbove, None, problem);
    }
    broken.say(&mut log, at);
    (Outcome::of(plan, &mut log, &mut broken), decided)
}

#[test]
fn every_seed_keeps_the_rules() {
    LEASES.explore();
}

#[test]
fn seeds_replay_exactly() {
    LEASES.replays(0..9);
}

/// Or the rules would say little.
#[test]
fn blocks_are_spent_refunded_and_expire() {
    for seed in 0..Strategy::ALL.len() as u64 {
        let mut sum = Decided::default();
        for seed in (seed..90).step_by(Strategy::ALL.len()) {
            let Decided { leased, single, refunded, expired } = run(seed, false).1;
            sum.leased += leased;
            sum.single += single;
            sum.refunded += refunded;
            sum.expired += expired;
        }
        let strategy = Strategy::ALL[seed as usize];
        assert!(sum.leased > 500 && sum.refunded > 50 && sum.expired > 250, "{strategy:?}: {sum:?}");
    }
}
