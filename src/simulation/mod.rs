//! Simulations: what a seed stands for is run in paused time on one thread, and the rules must hold after each step.
//!
//! | simulation | of |
//! |---|---|
//! | `store::fallback::simulation` | instances whose primary store fails in every way that we know of |
//! | [`requests`] | requests that wait, are settled afterwards or are in flight, and runtimes that end or stand still |
//!
//! A seed that breaks a rule is replayed with its log:
//!
//! ```sh
//! cargo xtask simulate requests --seed 17
//! ```

mod log;
mod requests;

use std::collections::BTreeMap;
use std::env;
use std::fmt::{self, Write as _};
use std::mem;
use std::ops::Range;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use fastrand::Rng;

use crate::limit::{Frees, Policy};

pub(crate) use log::{Line, Log, shown, verdict};

/// How many seeds a test run takes.
const SEEDS: u64 = 500;

/// What must hold.
pub(crate) trait Rule: fmt::Debug + Copy + Ord + Send {
    /// Nothing panics.
    const PANIC: Self;
}

/// A rule that was broken.
#[derive(Debug, Clone)]
pub(crate) struct Broken<R> {
    pub(crate) rule: R,
    /// Whom it is about, if it is one.
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

/// The rules that a run has broken.
#[derive(Debug)]
pub(crate) struct Breaks<R> {
    /// The first break of each.
    each: Vec<Broken<R>>,
    /// How many of them are in the log.
    said: usize,
}

impl<R: Rule> Breaks<R> {
    /// The first break of each rule counts.
    pub(crate) fn add(&mut self, rule: R, caller: Option<usize>, problem: String) {
        if self.each.iter().all(|broken| broken.rule != rule) {
            self.each.push(Broken {
                rule,
                caller,
                problem,
            });
        }
    }

    /// What has just been broken stands in the log where it was.
    pub(crate) fn say(&mut self, log: &mut Log, at: u64) {
        for broken in &self.each[self.said..] {
            log.say(at, broken.caller, || format!("*** {broken}"));
        }
        self.said = self.each.len();
    }
}

impl<R> Default for Breaks<R> {
    fn default() -> Self {
        Self {
            each: vec![],
            said: 0,
        }
    }
}

/// How a run went.
pub(crate) struct Outcome<R> {
    /// How many lines its log has.
    pub(crate) steps: usize,
    /// The first break of each rule.
    pub(crate) broken: Vec<Broken<R>>,
    pub(crate) log: Vec<Line>,
    pub(crate) plan: String,
}

impl<R> Outcome<R> {
    /// Takes what a run has left.
    pub(crate) fn of(plan: String, log: &mut Log, broken: &mut Breaks<R>) -> Self {
        Self {
            steps: log.count,
            broken: mem::take(&mut broken.each),
            log: mem::take(&mut log.lines),
            plan,
        }
    }
}

/// A simulation.
pub(crate) struct Simulation<R> {
    pub(crate) name: &'static str,
    /// Runs what a seed stands for. With a log if it is kept.
    pub(crate) run: fn(seed: u64, kept: bool) -> Outcome<R>,
}

impl<R: Rule> Simulation<R> {
    /// Runs some seeds. `SIMULATE_SEED` replays one seed instead. `SIMULATE_SEEDS` sets how many are run,
    /// `SIMULATE_FROM` the first of them.
    pub(crate) fn explore(&self) {
        if let Some(seed) = number("SIMULATE_SEED") {
            println!("{}", self.story(seed));
            assert!(
                (self.run)(seed, false).broken.is_empty(),
                "seed {seed} breaks a rule"
            );
            return;
        }
        let from = number("SIMULATE_FROM").unwrap_or(0);
        let report = self.report(from..from + number("SIMULATE_SEEDS").unwrap_or(SEEDS));
        let mut text = String::new();
        for (
            rule,
            Found {
                seeds,
                first,
                shortest: (steps, seed),
            },
        ) in &report.0
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
        }) = report.0.values().min_by_key(|found| found.shortest)
        {
            let (name, story) = (self.name, self.story(*seed));
            panic!("{story}\n{text}\nreplay one: cargo xtask simulate {name} --seed {seed}");
        }
    }

    /// A seed is the same run every time.
    pub(crate) fn replays(&self, seeds: Range<u64>) {
        for seed in seeds {
            let (one, other) = ((self.run)(seed, true), (self.run)(seed, true));
            assert!(!one.log.is_empty() && one.log.len() == one.steps);
            for (one, other) in one.log.iter().zip(&other.log) {
                assert_eq!(one.to_string(), other.to_string(), "seed {seed}");
            }
            assert_eq!(one.steps, other.steps, "seed {seed}");
        }
    }

    /// Runs these seeds on all processors.
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
                    Ok(outcome) => report.add(seed, &outcome),
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

    /// All that is known of a seed.
    fn story(&self, seed: u64) -> String {
        let outcome = (self.run)(seed, true);
        let mut text = format!("seed {seed}: {}", outcome.plan);
        // Only what concerns the caller, if it is the only one that something happened to.
        let mut callers: Vec<_> = outcome.broken.iter().map(|broken| broken.caller).collect();
        callers.dedup();
        let caller = if let [caller] = callers[..] {
            caller
        } else {
            None
        };
        for line in outcome.log.iter().filter(|line| line.concerns(caller)) {
            let _ = writeln!(text, "{line}");
        }
        for broken in &outcome.broken {
            let _ = writeln!(text, "{broken}");
        }
        text
    }
}

/// What many runs broke, by the rule: in how many seeds, and the seed with the shortest log.
struct Report<R>(BTreeMap<R, Found>);

struct Found {
    seeds: u64,
    first: u64,
    shortest: (usize, u64),
}

impl<R: Rule> Report<R> {
    fn new() -> Self {
        Self(BTreeMap::new())
    }

    fn add(&mut self, seed: u64, outcome: &Outcome<R>) {
        outcome
            .broken
            .iter()
            .for_each(|broken| self.breaks(broken.rule, seed, outcome.steps));
    }

    /// Its log is lost.
    fn panicked(&mut self, seed: u64) {
        self.breaks(R::PANIC, seed, 0);
    }

    fn breaks(&mut self, rule: R, seed: u64, steps: usize) {
        let this = (steps, seed);
        let found = self.0.entry(rule).or_insert(Found {
            seeds: 0,
            first: seed,
            shortest: this,
        });
        found.seeds += 1;
        found.first = found.first.min(seed);
        found.shortest = found.shortest.min(this);
    }

    fn merge(&mut self, other: Self) {
        for (rule, theirs) in other.0 {
            match self.0.get_mut(&rule) {
                None => drop(self.0.insert(rule, theirs)),
                Some(ours) => {
                    ours.seeds += theirs.seeds;
                    ours.first = ours.first.min(theirs.first);
                    ours.shortest = ours.shortest.min(theirs.shortest);
                }
            }
        }
    }
}

/// What a store on its own may let pass within so many milliseconds: what a policy holds, and what flows back.
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
        | Frees::OneByOne
        | Frees::Fading
        | Frees::OnRelease => capacity * (elapsed / period + 2),
    }
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
