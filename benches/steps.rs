//! `cargo bench -p benches --bench steps`
//!
//! The pure step of each strategy, without a store: one check decided on one state, granted and denied.

#![allow(missing_docs, clippy::panic, reason = "a benchmark fails by panicking")]
#![allow(
    dead_code,
    unexpected_cfgs,
    unused_imports,
    unused_macros,
    unreachable_pub,
    reason = "the ring is made for the crate; this needs a part of it"
)]

#[path = "../src/error.rs"]
mod error;
#[path = "../src/limit/mod.rs"]
mod limit;

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use limit::{Check, Key, Policies, Policy, Quota, State, Strategy, Verdicts};

const DAY: u64 = 24 * 3_600;

/// The period of a quota that is never used up. Buckets drain slower than they are charged, so that
/// a step has a drain to compute; windows sometimes end; a log holds [`CHARGES`] charges.
fn period(strategy: Strategy) -> Duration {
    match strategy {
        Strategy::SlidingLog => Duration::from_micros(CHARGES * STEP as u64),
        bucket if bucket.frees().has_burst() => Duration::from_secs(366 * DAY),
        _ => Duration::from_secs(1),
    }
}

/// Units that a caller is charged before the measurement.
const CHARGES: u64 = 1_000;

/// The time from one check to the next, in microseconds.
const STEP: i64 = 3;

/// A full second of the clock, half a year into a window of 366 days, in microseconds.
const START: i64 = 1_789_999_200_000_000;

/// One caller and its state.
struct Caller {
    key: Key,
    policies: Policies,
    state: [State; 1],
    now: i64,
}

impl Caller {
    fn new(strategy: Strategy, limit: u32, period: Duration) -> Self {
        let policy = Policy::new("api", strategy, Quota::per(limit, period))
            .unwrap_or_else(|error| panic!("{error}"));
        let state = [State::fresh(strategy)];
        let mut caller = Self {
            key: Key::new("user-42"),
            policies: policy.into(),
            state,
            now: START,
        };
        (0..CHARGES).for_each(|_| assert_eq!(caller.step().granted, 1));
        caller
    }

    fn step(&mut self) -> Verdicts {
        self.now += STEP;
        Check::take(self.key, &self.policies, black_box(1)).decide(&mut self.state, self.now)
    }
}

fn grant(group: &mut BenchmarkGroup<'_, WallTime>) {
    for &strategy in Strategy::ALL {
        let name = &format!("{strategy:?}");
        // The longest possible log.
        let limit = if strategy == Strategy::SlidingLog {
            100_000
        } else {
            u32::MAX
        };
        let mut caller = Caller::new(strategy, limit, period(strategy));
        group.bench_function(name, |bencher| bencher.iter(|| caller.step()));
        let verdicts = caller.step();
        assert_eq!(verdicts.granted, 1, "{name}");
        let charged = i64::from(limit) - verdicts.each[0].remaining;
        assert!(
            charged > 1,
            "{name} has forgotten all charges before the last"
        );
    }
}

fn denial(group: &mut BenchmarkGroup<'_, WallTime>) {
    for &strategy in Strategy::ALL {
        let name = &format!("{strategy:?}");
        // No charge expires during the bench.
        let mut caller = Caller::new(strategy, CHARGES as u32, Duration::from_secs(366 * DAY));
        group.bench_function(name, |bencher| bencher.iter(|| caller.step()));
        assert_eq!(caller.step().granted, 0, "{name}");
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(50)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let mut group = criterion.benchmark_group("grant");
    grant(&mut group);
    group.finish();
    let mut group = criterion.benchmark_group("denial");
    denial(&mut group);
    group.finish();
    criterion.final_summary();
}
