//! Simulations: a seed determines a run, in paused time on one thread, and the rules must hold
//! after each step.
//!
//! | simulation | subject |
//! |---|---|
//! | [`fallback`] | instances whose primary store fails in all known ways |
//! | [`requests`] | requests that wait, settle afterwards or are in flight, and runtimes that shut down or stall |
//! | [`leases`] | quota charged ahead by instances that stall, restart and are killed, under every strategy |
//!
//! They share the log, the runner, and, where a simulation moves the time of several runtimes, the
//! [`network`] and the [`Clocked`] runtimes. Each has its own plan and rules.
//!
//! A seed that breaks a rule is replayed with its log:
//!
//! ```sh
//! cargo xtask simulate requests --seed 17
//! ```

mod clocked;
mod fallback;
mod leases;
mod log;
mod network;
mod requests;

use std::collections::BTreeMap;
use std::env;
use std::fmt::{self, Write as _};
use std::ops::Range;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use fastrand::Rng;

use crate::limit::{Check, Decision, Frees, Key, Policy, Source};

pub(crate) use self::leases::{BlockTotals, World, check_spent};
use self::log::{Log, shown, verdict};

/// Default number of seeds per test run.
const SEEDS: u64 = 500;

/// Minimum share of the seeds that must check each rule on a case that may break it, in percent.
const MIN_CHECKED: f64 = 1.0;

/// A rule that must hold.
pub(crate) trait Rule: fmt::Debug + Copy + Ord + Send + 'static {
    /// All rules except [`PANIC`](Self::PANIC).
    const ALL: &[Self];
    /// The rule that nothing panics.
    const PANIC: Self;
}

/// A broken rule.
#[derive(Debug, Clone)]
pub(crate) struct Broken<R> {
    pub(crate) rule: R,
    /// The caller concerned, if it is a single one.
    pub(crate) caller: Option<usize>,
    pub(crate) problem: String,
}

impl<R: Rule> fmt::Display for Broken<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rule,
            problem,
            caller,
        } = self;
        let whose = caller.map_or(String::new(), |caller| format!(" of c{caller}"));
        write!(f, "broken: {rule:?}{whose}: {problem}")
    }
}

/// The result of a run.
pub(crate) struct Outcome<R> {
    pub(crate) plan: String,
    pub(crate) log: Log<R>,
}

/// A simulation.
pub(crate) struct Simulation<R> {
    pub(crate) name: &'static str,
    /// Runs a seed. The outcome contains the log only if `kept`.
    pub(crate) run: fn(seed: u64, kept: bool) -> Outcome<R>,
}

impl<R: Rule> Simulation<R> {
    /// Runs some seeds. `SIMULATE_SEED` replays a single seed instead. `SIMULATE_SEEDS` sets the
    /// number of seeds, and `SIMULATE_FROM` the first one.
    pub(crate) fn explore(&self) {
        if let Some(seed) = number("SIMULATE_SEED") {
            println!("{}", self.story(seed));
            assert!(
                (self.run)(seed, false).log.broken.is_empty(),
                "seed {seed} breaks a rule"
            );
            return;
        }
        let from = number("SIMULATE_FROM").unwrap_or(0);
        let seeds = number("SIMULATE_SEEDS").unwrap_or(SEEDS);
        let report = self.report(from..from + seeds);
        for (rule, share) in report.checked(seeds) {
            println!("{rule:?}: checked in {share:.1} % of the seeds");
            // A few seeds need not reach all rules.
            assert!(
                share >= MIN_CHECKED || seeds < SEEDS,
                "{rule:?} is checked in fewer than {MIN_CHECKED} % of the seeds: make the plans of {} reach it",
                self.name
            );
        }
        let mut text = String::new();
        for (
            rule,
            Found {
                seeds,
                first,
                shortest: (steps, seed),
            },
        ) in &report.broken
        {
            let _ = writeln!(
                text,
                "{rule:?}: {seeds} seeds, first {first}, shortest {seed} with {steps} steps"
            );
        }
        println!("{text}");
        if let Some(Found {
            shortest: (_, seed),
            ..
        }) = report.broken.values().min_by_key(|found| found.shortest)
        {
            let (name, story) = (self.name, self.story(*seed));
            panic!("{story}\n{text}\nreplay one: cargo xtask simulate {name} --seed {seed}");
        }
    }

    /// Asserts that two runs of a seed are equal.
    pub(crate) fn replays(&self, seeds: Range<u64>) {
        for seed in seeds {
            let [one, other] = [(); 2].map(|()| (self.run)(seed, true).log);
            assert!(!one.lines.is_empty() && one.lines.len() == one.count);
            for (one, other) in one.lines.iter().zip(&other.lines) {
                assert_eq!(one.to_string(), other.to_string(), "seed {seed}");
            }
            assert_eq!(one.count, other.count, "seed {seed}");
        }
    }

    /// Runs the seeds on all processors.
    fn report(&self, seeds: Range<u64>) -> Report<R> {
        let next = AtomicU64::new(seeds.start);
        let run = self.run;
        let work = || {
            let mut report = Report::new();
            loop {
                let seed = next.fetch_add(1, Relaxed);
                if seed >= seeds.end {
                    return report;
                }
                match catch_unwind(|| run(seed, false)) {
                    Ok(outcome) => report.add(seed, &outcome.log),
                    Err(_) => report.panicked(seed),
                }
            }
        };
        thread::scope(|scope| {
            let count = thread::available_parallelism().map_or(1, usize::from);
            let workers: Vec<_> = (0..count).map(|_| scope.spawn(work)).collect();
            let mut report = Report::new();
            workers
                .into_iter()
                .for_each(|worker| report.merge(worker.join().unwrap()));
            report
        })
    }

    /// Returns the plan, the log and the breaks of a seed.
    fn story(&self, seed: u64) -> String {
        let Outcome { plan, log } = (self.run)(seed, true);
        let mut text = format!("seed {seed}: {plan}");
        // If the breaks concern a single caller, omit the lines about others.
        let mut callers: Vec<_> = log.broken.iter().map(|broken| broken.caller).collect();
        callers.dedup();
        let caller = if let [caller] = callers[..] {
            caller
        } else {
            None
        };
        for line in log.lines.iter().filter(|line| line.concerns(caller)) {
            let _ = writeln!(text, "{line}");
        }
        for broken in &log.broken {
            let _ = writeln!(text, "{broken}");
        }
        text
    }
}

/// The results of many runs.
struct Report<R> {
    /// Per broken rule the number of seeds, the first seed, and the seed with the shortest log.
    broken: BTreeMap<R, Found>,
    /// Number of seeds that checked each rule.
    checked: BTreeMap<R, u64>,
}

struct Found {
    seeds: u64,
    first: u64,
    shortest: (usize, u64),
}

impl<R: Rule> Report<R> {
    fn new() -> Self {
        Self {
            broken: BTreeMap::new(),
            checked: BTreeMap::new(),
        }
    }

    fn add(&mut self, seed: u64, log: &Log<R>) {
        log.broken
            .iter()
            .for_each(|broken| self.breaks(broken.rule, seed, log.count));
        for rule in &log.checked {
            *self.checked.entry(*rule).or_default() += 1;
        }
    }

    /// Returns the share of the seeds that checked each rule, in percent.
    fn checked(&self, seeds: u64) -> impl Iterator<Item = (R, f64)> {
        R::ALL.iter().map(move |rule| {
            let count = self.checked.get(rule).copied().unwrap_or_default();
            (*rule, 100.0 * count as f64 / seeds as f64)
        })
    }

    /// Records a panic, whose log is lost.
    fn panicked(&mut self, seed: u64) {
        self.breaks(R::PANIC, seed, 0);
    }

    fn breaks(&mut self, rule: R, seed: u64, steps: usize) {
        let this = (steps, seed);
        let found = self.broken.entry(rule).or_insert(Found {
            seeds: 0,
            first: seed,
            shortest: this,
        });
        found.seeds += 1;
        found.first = found.first.min(seed);
        found.shortest = found.shortest.min(this);
    }

    fn merge(&mut self, other: Self) {
        for (rule, theirs) in other.checked {
            *self.checked.entry(rule).or_default() += theirs;
        }
        for (rule, theirs) in other.broken {
            match self.broken.get_mut(&rule) {
                None => drop(self.broken.insert(rule, theirs)),
                Some(ours) => {
                    ours.seeds += theirs.seeds;
                    ours.first = ours.first.min(theirs.first);
                    ours.shortest = ours.shortest.min(theirs.shortest);
                }
            }
        }
    }
}

/// Returns how much a store may grant in the first `now` milliseconds: the capacity, and the amount
/// that refills.
pub(crate) fn flows(policy: &Policy, now: u64) -> i64 {
    let (capacity, period, elapsed) = (
        policy.params().capacity,
        policy.params().period,
        now as i64 * 1000,
    );
    match policy.frees() {
        Frees::Gradually => capacity + capacity * elapsed / period + 1,
        Frees::InBatches
        | Frees::WithWindow
        | Frees::WithCell
        | Frees::OneByOne
        | Frees::Fading
        | Frees::OnRelease => capacity * (elapsed / period + 2),
    }
}

/// Returns a decision as Redis would have made it at the same time.
pub(crate) fn in_redis(decision: Decision) -> Decision {
    let check = Check::peek(Key::GLOBAL, decision.policies(), 0);
    check.answer(decision.verdicts().clone(), Source::Redis)
}

pub(crate) fn pick<'a, T>(rng: &mut Rng, of: &'a [T]) -> &'a T {
    &of[rng.usize(..of.len())]
}

fn number(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is {value:?}, and not a number")),
    )
}
