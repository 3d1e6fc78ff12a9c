//! Leased quota that is charged in advance and spent later: never more than the original quota
//! allows.

use super::*;

/// Returns the maximum cost that may be spent between two times that are `time` microseconds apart,
/// by the strategy's definition.
pub(crate) fn most_spent(strategy: Strategy, quota: Quota, time: i64) -> i64 {
    let (limit, period) = (i64::from(quota.limit()), quota.period().as_micros() as i64);
    let (burst, periods) = (i64::from(quota.capacity()), time / period);
    match strategy {
        Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(Refill::Greedy) => {
            burst + limit * time / period
        }
        Strategy::TokenBucket(Refill::Interval) => burst + limit * (periods + 1),
        Strategy::SlidingLog | Strategy::SlidingWindow { .. } => limit * (periods + 1),
        // The previous window counts by the fraction that the sliding window overlaps.
        Strategy::SlidingCounter => limit + (limit * time.max(period) + period - 1) / period,
        // The number of windows that the interval can touch.
        Strategy::FixedWindow(_) => limit * (periods + 2),
    }
}

/// Charges blocks at random times, and spends each unit at a random time before its block expires.
/// Between any two spendings, no more is spent than the original quota allows.
#[test]
fn blocks_spent_late_stay_within_quota() {
    for (seed, &strategy) in Strategy::ALL.iter().enumerate() {
        let mut rng = Rng::with_seed(seed as u64);
        let mut tight = 0;
        for _ in 0..400 {
            let stated = Quota::per(
                rng.u32(2..60),
                Duration::from_micros(rng.u64(20_000..500_000)),
            );
            let stated = if strategy.frees().has_burst() {
                stated.burst(rng.u32(2..120))
            } else {
                stated
            };
            let strategy = vary(&mut rng, strategy, stated.period());
            let policy = Policy::new("p", strategy, stated).unwrap();
            let lease = Duration::from_micros(rng.u64(10_000..250_000));
            let Ok(policies) = policy.leased(lease).map(Policies::from) else {
                continue;
            };
            let lease = lease.as_micros() as i64;
            let (mut state, mut spent) = ([State::fresh(strategy)], vec![]);
            let mut now = 1_790_000_000_000_000 + rng.i64(0..1_000_000);
            for _ in 0..60 {
                now += [
                    0,
                    1,
                    lease,
                    rng.i64(0..lease),
                    rng.i64(0..=stated.period().as_micros() as i64),
                ][rng.usize(..5)];
                let block = Check::up_to(Key::GLOBAL, &policies, rng.u32(1..=stated.capacity()));
                let verdicts = block.decide(&mut state, now);
                let window =
                    matches!(strategy, Strategy::FixedWindow(_)).then(|| verdicts.each[0].reset);
                let lives = lease.min(window.unwrap_or(lease));
                // Often use the first or last moment, so that units of two blocks meet.
                let end = [0, lives - 1][rng.usize(..2)];
                for _ in 0..verdicts.granted {
                    spent.push(now + if rng.bool() { end } else { rng.i64(0..lives) });
                }
            }
            spent.sort_unstable();
            for (i, from) in spent.iter().enumerate() {
                for (j, to) in spent.iter().enumerate().skip(i) {
                    let (count, most) =
                        ((j - i + 1) as i64, most_spent(strategy, stated, to - from));
                    tight += i32::from(count == most);
                    assert!(
                        count <= most,
                        "{strategy:?} {stated} for {lease} us: {count}, not {most}, in {} us",
                        to - from
                    );
                }
            }
        }
        println!("{strategy:?}: {tight} times exactly the maximum");
    }
}
