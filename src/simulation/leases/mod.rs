//! A simulation of instances over one shared count. Checks and replies are delayed, lost or never sent; clocks differ;
//! instances are stopped, killed, shut down, started and replaced at any moment. Callers send in bursts, steadily or
//! not at all, are reset, refund parts of their grants early and late, and change their quota. The instances together
//! must never grant more than the stated quota.

mod world;

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use fastrand::Rng;

pub(crate) use self::world::{BlockTotals, World};
use super::{Log, Outcome, Simulation};
use crate::limit::{
    Align, Check, Decision, Frees, Key, Policies, Policy, Quota, Source, Strategy, most_spent,
};

/// The invariants that every run checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rule {
    /// Nothing panics.
    Panic,
    /// Between any two times by the shared store's clock, no more is spent than the definition of the strategy allows.
    NeverAbove,
    /// Every unit spent from memory was charged in advance, exactly once. Every charged unit is spent, refunded, or
    /// lost with a process or a reply.
    ChargedOnce,
    /// Some time after the last check, no instance holds a block, and all refunds that were reported have been sent.
    Returned,
}

impl crate::simulation::Rule for Rule {
    const ALL: &[Self] = &[Self::NeverAbove, Self::ChargedOnce, Self::Returned];
    const PANIC: Self = Self::Panic;
}

const LEASES: Simulation<Rule> = Simulation {
    name: "leases",
    run: |seed, kept| run(seed, kept).0,
};

/// Checks that no more was spent between any two times, or in one clock-aligned window, than the quota allows. A block
/// is spent or refunded within `outlives`, so for that time after a reset, charges from before the reset may be spent
/// in addition.
///
/// # Errors
///
/// Returns a description of the excess.
pub(crate) fn check_spent(
    strategy: Strategy,
    quota: Quota,
    spent: &[(i64, u32)],
    resets: &[i64],
    outlives: i64,
) -> Result<(), String> {
    // Total spent up to each time.
    let mut sums: Vec<(i64, i64)> = vec![];
    for &(at, cost) in spent {
        let sum = sums.last().map_or(0, |(_, sum)| *sum) + i64::from(cost);
        match sums.last_mut() {
            Some(last) if last.0 == at => last.1 = sum,
            _ => sums.push((at, sum)),
        }
    }
    let mut before = 0;
    for (from, sum) in &sums {
        let reset = |to| {
            resets
                .iter()
                .filter(|at| (*from - outlives..=to).contains(*at))
                .count() as i64
        };
        let max_from = |to| {
            most_spent(strategy, quota, to - *from) + reset(to) * most_spent(strategy, quota, 0)
        };
        let mut bound = max_from(*from);
        // The allowance grows with time, so skip all times at which it cannot be exceeded.
        while let Some((to, sum)) = sums.get(sums.partition_point(|(_, sum)| sum - before <= bound))
        {
            bound = max_from(*to);
            if sum - before > bound {
                return Err(format!(
                    "{} were spent from {from} on in {} us, and not {bound}",
                    sum - before,
                    to - from
                ));
            }
        }
        before = *sum;
    }
    if let Strategy::FixedWindow(Align::Clock { offset }) = strategy {
        let (period, offset) = (quota.period().as_micros() as i64, offset.as_micros() as i64);
        for window in
            spent.chunk_by(|one, two| (one.0 - offset) / period == (two.0 - offset) / period)
        {
            let sum: i64 = window.iter().map(|(_, cost)| i64::from(*cost)).sum();
            if resets.is_empty() && sum > i64::from(quota.limit()) {
                return Err(format!("{sum} were spent in the window of {}", window[0].0));
            }
        }
    }
    Ok(())
}

/// Where decisions were made.
#[derive(Debug, Default)]
struct Decided {
    leased: u64,
    single: usize,
    refunded: u64,
    expired: u64,
}

/// A part of a decision, to be refunded later.
struct LaterRefund {
    i: usize,
    decision: Decision,
    part: u32,
    from: i64,
    until: i64,
}

/// At random stops, kills or shuts down an instance, or starts another one.
fn inject_fault(world: &mut World, i: usize, lease: i64, is_frozen: bool, log: &mut Log<Rule>) {
    let what = match world.rng.u16(..1_000) {
        what if what < 20 || is_frozen && what >= 900 => {
            let time = match world.rng.u8(..4) {
                0 => world.rng.i64(0..16 * lease),
                // Stop it until shortly before or after a block expires.
                1 | 2 if is_frozen => lease * world.rng.i64(8..20) / 16,
                _ => world.rng.i64(0..3 * lease),
            };
            world.instances[i].stopped_until = world.now + time;
            "stopped"
        }
        20..23 => {
            world.kill(i);
            "killed"
        }
        23..26 => {
            world.shut_down(i);
            "ended"
        }
        26..28 => {
            world.shut_down(i);
            world.instances[i].stopped_until = i64::MAX;
            "ended for good"
        }
        28..30 if world.instances.len() < 6 => {
            world.start_another();
            "joined by another"
        }
        _ => return,
    };
    log.say(world.now as u64 / 1_000, None, || {
        format!("instance {i} is {what}")
    });
}

/// The quota that two buckets grant together: the sum of their rates and bursts.
fn sum_of(one: Quota, other: Quota) -> Quota {
    Quota::per(one.limit() + other.limit(), one.period()).burst(one.capacity() + other.capacity())
}

fn run(seed: u64, kept: bool) -> (Outcome<Rule>, Decided) {
    let (mut log, mut decided) = (Log::new(kept), Decided::default());
    let mut rng = Rng::with_seed(seed);
    let strategy = Strategy::ALL[seed as usize % Strategy::ALL.len()];
    let period = rng.u64(40..1_500) * 1_000;
    // Small limits are often exhausted.
    let limit = [rng.u32(40..400), rng.u32(400..3_000)][rng.usize(..2)];
    let stated = Quota::per(limit, Duration::from_micros(period));
    let stated = if strategy.frees().has_burst() && rng.bool() {
        stated.burst(limit * rng.u32(1..4))
    } else {
        stated
    };
    // The first instance is stopped repeatedly, each time for many lease times, while the others take the rest of the quota.
    let is_frozen = rng.u8(..4) == 0;
    // A burst below the limit refills faster, but no burst is that small here.
    let longest = period as i64 / if is_frozen { 16 } else { 2 };
    let lease = rng.i64(10_000..=longest.max(10_000));
    // The new quota is larger, and instances adopt it one by one. A window keeps its count, a bucket starts again.
    let replaced = Quota::per(limit + limit / 2, stated.period());
    let replaced = if strategy.frees().has_burst() {
        replaced.burst(stated.capacity() * 2)
    } else {
        replaced
    };
    let quotas = [stated, replaced];
    let leased = |quota| {
        let policy = Policy::new("p", strategy, quota)
            .and_then(|p| p.leased(Duration::from_micros(lease as u64)));
        Policies::from(policy.unwrap())
    };
    let policies = quotas.map(leased);
    let replaced_at = if rng.u8(..4) == 0 {
        rng.u32(..160)
    } else {
        u32::MAX
    };
    let has_resets = rng.u8(..4) == 0;
    let instances = rng.u32(1..=4);
    let plan = format!("{strategy:?} {stated} for {lease} us on {instances} instances");
    let mut world = World::new(rng.u64(..), instances);
    if is_frozen {
        let (is_healthy, rejected_refunds) = (rng.bool(), [0, 20][rng.usize(..2)]);
        world.shared(|shared| {
            (shared.is_healthy, shared.rejected_refunds) = (is_healthy, rejected_refunds)
        });
    }
    let key = Key::new("ann");
    // Maximum number of checks of each instance in a step, apart from bursts.
    let rates: Vec<u32> = (0..6).map(|_| rng.u32(1..20)).collect();
    let (mut spent, mut held): (Vec<_>, Vec<LaterRefund>) = (vec![], vec![]);
    for step in 0..160 {
        // Occasionally adds a burst of checks of one cost.
        let (flood, flood_cost) = match rng.u8(..48) {
            0 | 1 if limit < 400 => (stated.capacity().min(400), 1),
            n if n >= if is_frozen { 40 } else { 47 } => (20, (stated.capacity() / 16).max(1)),
            _ => (0, 0),
        };
        let before = world.now;
        let time = match rng.u8(..40) {
            0 => rng.i64(0..2 * lease),
            1 => rng.i64(0..=period as i64),
            2..4 => lease * 3 / 8,
            _ => rng.i64(0..=lease / 12),
        };
        world.advance(time);
        // When it continues, it spends the rest of its blocks, and the others spend all their grants.
        let continues =
            is_frozen && (before + 1..=world.now).contains(&world.instances[0].stopped_until);
        for i in 0..world.instances.len() {
            if world.instances[i].stopped_until > world.now {
                continue;
            }
            // A process that continues may decide checks before any of its timers has run.
            let timers_first = rng.bool();
            if timers_first {
                world.run(i);
            }
            // Instances change the quota one by one.
            let policies = &policies[usize::from(step >= replaced_at.saturating_add(4 * i as u32))];
            if has_resets && rng.u8(..200) == 0 {
                world.send(i, Check::reset(key, policies));
                log.say(world.now as u64 / 1_000, None, || {
                    format!("instance {i} resets")
                });
            }
            let now = world.now;
            let few = if rng.u8(..6) == 0 {
                0
            } else {
                rng.u32(..=rates[i])
            };
            let (flood, flood_cost) = match i {
                0 if continues => (64, (stated.capacity() / 256).max(1)),
                0 if is_frozen => (0, 0),
                _ if continues => (20, (stated.capacity() / 16).max(1)),
                _ => (flood, flood_cost),
            };
            let count = few + flood;
            let (at, before) = (world.now as u64 / 1_000, decided.leased);
            for n in 0..count {
                // Large checks are refunded, so that little is left of a block that was charged as a whole.
                let is_large = n < few && rng.u8(..32) == 0;
                let cost = match rng.u8(..8) {
                    _ if n >= few => flood_cost,
                    _ if is_large => rng.u32(1..=stated.capacity() / 4),
                    0 => rng.u32(1..4),
                    _ => 1,
                };
                let Some(decision) = world.take(i, key, policies, cost) else {
                    continue;
                };
                assert!(decision.source() == Source::Leased && decision.is_allowed());
                decided.leased += u64::from(cost);
                // The grant of a failed request is refunded in full or in part, immediately or later.
                let part = match rng.u8(..16) {
                    0..10 if is_large => cost,
                    _ if is_large => rng.u32(1..=cost),
                    0 => cost,
                    _ => 0,
                };
                spent.push((world.clock(), cost - part));
                if part > 0 {
                    let until = now
                        + if is_frozen || rng.bool() {
                            0
                        } else {
                            rng.i64(0..4 * lease)
                        };
                    held.push(LaterRefund {
                        i,
                        decision,
                        part,
                        from: now,
                        until,
                    });
                }
            }
            for LaterRefund {
                decision,
                part,
                from,
                ..
            } in held.extract_if(.., |held| held.i == i && held.until <= now)
            {
                if let Some(back) =
                    decision.refund(key, part, Duration::from_micros((now - from) as u64))
                {
                    world.send(i, back);
                }
            }
            log.say(at, None, || {
                format!(
                    "instance {i}: {count} checks, {} from memory",
                    decided.leased - before
                )
            });
            if !timers_first {
                world.run(i);
            }
            inject_fault(&mut world, i, lease, is_frozen && i == 0, &mut log);
        }
    }
    // Wait until all replies have arrived and all blocks have expired.
    for _ in 0..40 {
        world.advance(2 * lease / 10 + world.max_round_trip() / 10);
        (0..world.instances.len()).for_each(|i| drop(world.run(i)));
    }
    let at = world.now as u64 / 1_000;
    decided.leased += world
        .from_memory
        .iter()
        .map(|(_, cost)| u64::from(*cost))
        .sum::<u64>();
    spent.append(&mut world.from_memory);
    check_blocks(&world, strategy, &decided, &mut log);
    let [refunded, expired] =
        [&world.blocks.refunded, &world.blocks.expired].map(|sum| sum.load(Relaxed));
    let (mut single, resets) = world.shared(|shared| {
        (
            std::mem::take(&mut shared.spent),
            std::mem::take(&mut shared.resets),
        )
    });
    decided = Decided {
        single: single.len(),
        refunded,
        expired,
        ..decided
    };
    spent.append(&mut single);
    spent.sort_unstable();
    // No instance stalls for longer than its stop and until the next step.
    let outlives = 16 * lease + period as i64 + world.max_round_trip();
    let is_quota_replaced = replaced_at < u32::MAX;
    let quota = match strategy.frees().has_burst() && is_quota_replaced {
        true => sum_of(stated, replaced),
        false => quotas[usize::from(is_quota_replaced)],
    };
    if decided.leased > 0
        && spent.iter().map(|(_, cost)| u64::from(*cost)).sum::<u64>() >= u64::from(limit)
    {
        log.checks(Rule::NeverAbove);
    }
    if let Err(problem) = check_spent(strategy, quota, &spent, &resets, outlives) {
        log.breaks(Rule::NeverAbove, None, problem);
    }
    log.say_broken(at);
    (Outcome { plan, log }, decided)
}

/// Checks the balance of all blocks.
fn check_blocks(world: &World, strategy: Strategy, decided: &Decided, log: &mut Log<Rule>) {
    let held: usize = world
        .instances
        .iter()
        .map(|instance| instance.store.callers())
        .sum();
    if held > 0 {
        log.breaks(Rule::Returned, None, format!("{held} callers are held"));
    }
    let [charged, refunded, expired] = [
        &world.blocks.charged,
        &world.blocks.refunded,
        &world.blocks.expired,
    ]
    .map(|sum| sum.load(Relaxed));
    let (leased, is_killed) = (decided.leased, !world.killed.is_empty());
    world.shared(|shared| {
        let leased_units = shared.leased_units;
        if leased > leased_units || charged > leased_units {
            log.breaks(
                Rule::ChargedOnce,
                None,
                format!("{charged}, and {leased} spent, of {leased_units}"),
            );
        }
        if !is_killed && charged > 0 {
            log.checks(Rule::ChargedOnce);
        }
        if !is_killed && charged != leased + refunded + expired {
            let problem = format!(
                "{charged} charged, {leased} spent, {refunded} refunded, {expired} expired"
            );
            log.breaks(Rule::ChargedOnce, None, problem);
        }
        // A charge may be lost if its caller is reset or its process ends before the reply.
        if !is_killed && !world.is_ended && !shared.has_reset && charged != shared.reported_units {
            log.breaks(
                Rule::Returned,
                None,
                format!(
                    "{} were reported as charged, and {charged} ended",
                    shared.reported_units
                ),
            );
        }
        // In a bucket, the whole rest may have drained; a fixed window may have ended.
        let may_be_nothing =
            strategy.frees().has_burst() || matches!(strategy, Strategy::FixedWindow(_));
        // A process that shuts down may end before it has sent its refunds.
        let is_sent = !shared.has_unsent_refund && !may_be_nothing && !world.is_ended;
        let (sent, max) = (shared.refunded_units, refunded + expired);
        if !is_killed && is_sent && max > 0 {
            log.checks(Rule::Returned);
        }
        if !is_killed && is_sent && !(refunded..=max).contains(&sent) {
            log.breaks(
                Rule::Returned,
                None,
                format!("{sent} units were sent as refunds, not {refunded} to {max}"),
            );
        }
    });
}

#[test]
fn every_seed_keeps_the_rules() {
    LEASES.explore();
}

#[test]
fn seeds_replay_exactly() {
    LEASES.replays(0..9);
}

/// Without these events the invariants would be trivial.
#[test]
fn blocks_are_spent_refunded_and_expire() {
    for (first, strategy) in (0..).zip(Strategy::ALL) {
        let mut sum = Decided::default();
        // By the interval, nothing is refunded across a changed quota.
        let least = if strategy.frees() == Frees::InBatches {
            10
        } else {
            30
        };
        let is_enough =
            |sum: &Decided| sum.leased > 500 && sum.refunded > least && sum.expired > 250;
        // Each strategy has every ninth seed; the rarest event needs about thirty of them.
        for seed in (first..270).step_by(Strategy::ALL.len()) {
            let Decided {
                leased,
                single,
                refunded,
                expired,
            } = run(seed, false).1;
            sum.leased += leased;
            sum.single += single;
            sum.refunded += refunded;
            sum.expired += expired;
            if is_enough(&sum) {
                break;
            }
        }
        assert!(is_enough(&sum), "{strategy:?}: {sum:?}");
    }
}
