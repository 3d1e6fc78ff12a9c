//! Two quotas under one name, as in a rolling deploy or on two routes: who is asked under both gets about what one of
//! them gives.

use super::*;

const S: i64 = 1_000_000;
const NOW: i64 = 1_790_000_000 * S;

/// A take: when, under which of the policies, and of how much.
type Poll = (i64, usize, u32);

fn policies(strategy: Strategy, quota: Quota) -> Policies {
    Policy::new("p", strategy, quota).unwrap().into()
}

/// What a caller is granted who polls so.
fn granted(policies: &[Policies], polls: &[Poll]) -> i64 {
    let mut state = [State::fresh(policies[0][0].kind())];
    let take = |(now, which, cost): &Poll| {
        let policies: &Policies = &policies[*which];
        Check::take(Key::GLOBAL, policies, *cost).decide(&mut state, *now).granted
    };
    polls.iter().map(take).sum()
}

/// What each of the policies would grant alone, the least and the most; and what they grant together.
fn compare(policies: &[Policies], polls: &[Poll]) -> (i64, i64, i64) {
    let alone = |policies: &Policies| granted(&vec![policies.clone(); 3], polls);
    let alone: Vec<i64> = policies.iter().map(alone).collect();
    (alone.iter().copied().min().unwrap(), alone.iter().copied().max().unwrap(), granted(policies, polls))
}

/// At least nine tenths of what the tighter would grant, and at most a tenth more than the looser.
fn is_fair((tighter, looser, both): (i64, i64, i64)) -> bool {
    both * 10 >= tighter * 9 && both * 10 <= looser * 11
}

/// As above, where the borders of windows change now and then: each time one window lasts longer.
fn is_nearly_fair((tighter, looser, both): (i64, i64, i64)) -> bool {
    both * 4 >= tighter * 3 && both * 10 <= looser * 11
}

/// A rolling deploy, and two routes: polled in turn, twice a second, for 20 minutes.
#[test]
fn neighbouring_quotas_grant_no_more_together() {
    let mut rng = Rng::with_seed(0);
    let quotas = |one: &str, other: &str| [one, other].map(|text| text.parse::<Quota>().unwrap());
    let mut unfair = vec![];
    let mut pairs = Strategy::ALL.iter().map(|&strategy| [vary(&mut rng, strategy); 2]).collect::<Vec<_>>();
    pairs.push([Strategy::FixedWindow(Align::default()), Strategy::FixedWindow(Align::FirstHit)]);
    pairs.push([Strategy::TokenBucket(Refill::Greedy), Strategy::TokenBucket(Refill::Interval)]);
    for pair in pairs {
        for quotas in [quotas("10/m", "11/m"), quotas("10/60s", "10/61s")] {
            let policies = [0, 1].map(|i| policies(pair[i], quotas[i]));
            let polls: Vec<Poll> = (0..2_400).map(|i| (NOW + i * S / 2, i as usize % 2, 1)).collect();
            let seen = compare(&policies, &polls);
            println!("{policies:?}: {seen:?}");
            if !is_fair(seen) {
                unfair.push((policies, seen));
            }
        }
    }
    assert!(unfair.is_empty(), "alone the least, the most, and together: {unfair:#?}");
}

/// A quota whose limit, burst and period are no more than a tenth from these.
fn near(rng: &mut Rng, quota: Quota, has_burst: bool) -> Quota {
    let for_limit = rng.u64(0..=100);
    let for_period = 100 - for_limit;
    let limit = quota.limit() + (u64::from(quota.limit()) * for_limit / 1000) as u32;
    let period = quota.period().as_micros() as u64;
    let change = period * rng.u64(0..=for_period) / 1000;
    let period = if rng.bool() { period + change } else { period - change };
    let near = Quota::per(limit, Duration::from_micros(period));
    if !has_burst {
        return near;
    }
    near.burst(quota.capacity() + rng.u32(0..=quota.capacity().div_ceil(10)))
}

/// How a caller chooses under which quota to ask.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Manner {
    InTurn,
    AtRandom,
    /// Some times under the one, then some times under the other.
    InRuns,
}

/// Near quotas of any kind, polled in any manner. The limits are at least 10: with a lower one and few polls, all depends
/// on which poll comes first after a window ends.
#[test]
fn near_quotas_grant_no_more_together() {
    let mut unfair = vec![];
    for (seed, &strategy) in Strategy::ALL.iter().enumerate() {
        let mut rng = Rng::with_seed(seed as u64);
        let (mut least, mut most) = (f64::MAX, 0.0f64);
        for _ in 0..100 {
            let first = vary(&mut rng, strategy);
            let limit = rng.u32(10..=40);
            let period = [1_000, 1_000_000, 60_000_000, rng.u64(1_000..1_000_000_000)][rng.usize(..4)];
            let mut quota = Quota::per(limit, Duration::from_micros(period));
            if first.frees().has_burst() && rng.bool() {
                quota = quota.burst(rng.u32(1..=2 * limit));
            }
            let mut all = vec![(first, quota)];
            for _ in 0..rng.usize(1..=2) {
                all.push((kin(&mut rng, first), near(&mut rng, quota, first.frees().has_burst())));
            }
            let lists: Vec<Policies> = all.iter().map(|(strategy, quota)| policies(*strategy, *quota)).collect();
            // From a quarter of what the quota lets pass to ten times as much.
            let cost = rng.u32(1..=3);
            let demand = [0.25, 0.7, 1.3, 2.0, 5.0, 10.0][rng.usize(..6)];
            let gap = period as f64 / (f64::from(limit) * demand) * f64::from(cost + 1) / 2.0;
            let manner = [Manner::InTurn, Manner::AtRandom, Manner::InRuns][rng.usize(..3)];
            let regular = rng.bool();
            let mut polls: Vec<Poll> = vec![];
            let (mut now, mut which) = (0.0, 0);
            while now < 50.0 * period as f64 {
                which = match manner {
                    Manner::AtRandom => rng.usize(..all.len()),
                    Manner::InRuns if rng.u8(..5) > 0 => which,
                    Manner::InRuns | Manner::InTurn => (which + 1) % all.len(),
                };
                polls.push((NOW + now as i64, which, rng.u32(1..=cost)));
                now += if regular { gap } else { gap * 2.0 * rng.f64() };
            }
            let mut seen = compare(&lists, &polls);
            if let Strategy::SlidingWindow { .. } = first {
                // The borders of two may fall better than those of one, the more so the fewer cells there are: the log has none.
                let logs: Vec<_> = all.iter().map(|(_, quota)| policies(Strategy::SlidingLog, *quota)).collect();
                seen.1 = seen.1.max(compare(&logs, &polls).1);
            }
            least = least.min(seen.2 as f64 / seen.0 as f64);
            most = most.max(seen.2 as f64 / seen.1 as f64);
            let fair = if has_borders(first) && manner == Manner::InRuns { is_nearly_fair } else { is_fair };
            if !fair(seen) {
                let all: Vec<_> = all.iter().map(|(strategy, quota)| format!("{strategy:?} {quota}")).collect();
                unfair.push(format!("{all:?} {manner:?}, demand {demand} of costs up to {cost}: {seen:?}"));
            }
        }
        println!("{strategy:?}: from {least:.3} of the tighter to {most:.3} of the looser");
    }
    assert!(unfair.is_empty(), "alone the least, the most, and together: {unfair:#?}");
}

/// A denial and a peek write nothing, whatever the quota, and the wait that they tell is exact under it.
#[test]
fn uncharged_checks_write_nothing() {
    let mut wrong = vec![];
    for (seed, &strategy) in Strategy::ALL.iter().enumerate() {
        let mut rng = Rng::with_seed(seed as u64);
        let (mut denied, mut written, mut inexact) = (0, 0, 0);
        for _ in 0..200 {
            let first = vary(&mut rng, strategy);
            let all: Vec<Policies> = (0..4)
                .map(|_| {
                    let quota = Quota::per(rng.u32(1..=1_000), Duration::from_micros(rng.u64(1..100_000_000)));
                    policies(kin(&mut rng, first), quota)
                })
                .collect();
            let mut state = [State::fresh(first)];
            let mut now = NOW;
            for _ in 0..100 {
                let policies = &all[rng.usize(..all.len())];
                let cost = rng.u32(1..=policies[0].quota().capacity() + 1);
                let ask = [Check::take, Check::take, Check::up_to, Check::peek][rng.usize(..4)];
                let before = state.clone();
                let check = ask(Key::GLOBAL, policies, cost);
                let verdicts = check.decide(&mut state, now);
                if verdicts.granted == 0 {
                    denied += 1;
                    written += u32::from(state != before);
                    // The wait is exact, whatever quota has charged before.
                    let wait = verdicts.first().wait;
                    let passes = |at: i64| check.decide(&mut state.clone(), at).first().wait == 0;
                    inexact += u32::from(wait > 0 && (!passes(now + wait) || passes(now + wait - 1)));
                }
                now += [0, 1, rng.i64(0..=1_000_000), rng.i64(0..=100_000_000)][rng.usize(..4)];
            }
        }
        assert!(denied > 1_000, "seed {seed}: only {denied} denials");
        if written + inexact > 0 {
            wrong.push(format!("{strategy:?}: {written} wrote, {inexact} waits are wrong, of {denied}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
