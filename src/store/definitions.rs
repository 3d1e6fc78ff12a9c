//! The definitions of all strategies, as the docs state them, against the stores of this process.
//!
//! A model of a policy is a list of charges, or a level with its time, in exact numbers. It shares no
//! code with the strategies. Random lists of one to three policies get random checks in all modes,
//! with ids and with refunds of old charges; each grant, `remaining`, wait and reset is compared to
//! the microsecond.
//!
//! Left out: turns taken ahead, which `limit/strategy/tests/turns.rs` covers; refunds of charges made
//! before a reset, and refunds that name no charge, which may be deducted from other charges; clocks
//! that go back; and quotas that change, which `limit/strategy/tests/changes.rs` covers.
//!
//! `MODEL_CHECKS=1000000 cargo test --lib definitions` runs more checks, and `MODEL_SEED=17` one seed.

use std::collections::HashMap;
use std::env;
use std::time::{Duration, SystemTime};

use fastrand::Rng;

use super::LocalStore;
use crate::limit::{
    Align, Check, Counts, Decision, Key, Mode, Policies, Policy, Quota, Refill, Source, Strategy,
    Verdict,
};

/// Default number of checks.
const CHECKS: u64 = 200_000;
const CHECKS_PER_SEED: u64 = 100;
const START: i64 = 1_790_000_000_000_000;

/// A charge as one policy counts it.
struct Counted {
    number: u64,
    /// The time from which it is counted: of the charge, of the start of its window, or of the end of
    /// its cell.
    since: i64,
    units: i64,
}

/// How a strategy counts.
enum Rule {
    /// Whole charges, each until its expiry.
    Charges(Vec<Counted>),
    /// A level that drains in each microsecond.
    Level {
        /// In units times the period: the limit drains in each microsecond.
        level: i128,
        at: i64,
    },
    /// A bucket that is refilled after each period.
    Batches {
        missing: i64,
        /// The time of the last refill or of the first charge.
        at: i64,
        refills: i64,
        /// The number of times at which the bucket was full.
        full_times: u64,
    },
}

/// The state of a bucket with batches when a charge was made.
struct Made {
    refills: i64,
    full_times: u64,
}

impl Rule {
    fn new(strategy: Strategy) -> Self {
        match strategy {
            Strategy::TokenBucket(Refill::Interval) => Self::Batches {
                missing: 0,
                at: 0,
                refills: 0,
                full_times: 0,
            },
            Strategy::TokenBucket(Refill::Greedy) | Strategy::LeakyBucket | Strategy::Gcra => {
                Self::Level { level: 0, at: 0 }
            }
            _ => Self::Charges(vec![]),
        }
    }
}

struct PolicyModel {
    strategy: Strategy,
    limit: i64,
    period: i64,
    capacity: i64,
    rule: Rule,
    /// By the charge's number, under batches.
    made: HashMap<u64, Made>,
}

fn div_ceil(a: i128, b: i128) -> i64 {
    (-((-a).div_euclid(b))) as i64
}

impl PolicyModel {
    fn new(policy: &Policy, strategy: Strategy) -> Self {
        let quota = policy.quota();
        Self {
            strategy,
            limit: quota.limit().into(),
            period: quota.period().as_micros() as i64,
            capacity: quota.capacity().into(),
            rule: Rule::new(strategy),
            made: HashMap::new(),
        }
    }

    fn clear(&mut self) {
        self.rule = Rule::new(self.strategy);
        self.made.clear();
    }

    /// The time from which a charge at `now` is counted.
    fn since(&self, now: i64) -> i64 {
        match (self.strategy, &self.rule) {
            (Strategy::FixedWindow(Align::Clock { offset }), _) => {
                let offset = offset.as_micros() as i64;
                now - (now - offset).rem_euclid(self.period)
            }
            // The window of the first charge that still counts.
            (Strategy::FixedWindow(_), Rule::Charges(charges)) => {
                charges.first().map_or(now, |first| first.since)
            }
            (Strategy::SlidingWindow { cells }, _) => {
                let cells = i64::from(cells);
                let width = (self.period + cells - 1) / cells;
                (now / width + 1) * width
            }
            (Strategy::SlidingCounter, _) => now - now % self.period,
            _ => now,
        }
    }

    /// The first time at which a charge does not count.
    fn expiry(&self, since: i64) -> i64 {
        match self.strategy {
            Strategy::SlidingCounter => since + 2 * self.period,
            _ => since + self.period,
        }
    }

    /// The first time at which an id that was charged at `now` is unknown.
    fn id_until(&self, now: i64) -> i64 {
        match (self.strategy, &self.rule) {
            // The window that has counted it.
            (Strategy::FixedWindow(_), Rule::Charges(charges)) => charges
                .first()
                .map_or(now, |first| self.expiry(first.since)),
            _ => now + self.period,
        }
        .max(now + 1)
    }

    /// Removes the charges that have expired or drained at `now`.
    fn pass_to(&mut self, now: i64) {
        let counts_for = self.expiry(0);
        match &mut self.rule {
            Rule::Charges(charges) => {
                charges.retain(|charge| charge.units > 0 && charge.since + counts_for > now);
            }
            Rule::Level { level, at } => {
                *level = 0.max(*level - i128::from(now - *at) * i128::from(self.limit));
                *at = now;
            }
            Rule::Batches {
                missing,
                at,
                refills,
                ..
            } => {
                while *missing > 0 && *at + self.period <= now {
                    *missing = 0.max(*missing - self.limit);
                    *at += self.period;
                    *refills += 1;
                }
            }
        }
    }

    /// The largest cost that would be allowed at a time, if nothing is charged until then; negative in
    /// debt.
    fn room(&self, at: i64) -> i64 {
        let limit = i128::from(self.limit);
        let period = i128::from(self.period);
        match &self.rule {
            Rule::Charges(charges) if self.strategy == Strategy::SlidingCounter => {
                // Each unit of the previous window counts for the part that the sliding window overlaps.
                let window = at - at % self.period;
                let current = units_of_window(charges, window);
                let previous = units_of_window(charges, window - self.period);
                let overlap = i128::from(window + self.period - at);
                let used = current * period + previous * overlap;
                ((i128::from(self.capacity) * period - used).div_euclid(period)) as i64
            }
            Rule::Charges(charges) => {
                let counted = charges
                    .iter()
                    .filter(|charge| self.expiry(charge.since) > at);
                self.capacity - counted.map(|charge| charge.units).sum::<i64>()
            }
            Rule::Level { level, at: since } => {
                let left = 0.max(level - i128::from(at - since) * limit);
                ((i128::from(self.capacity) * period - left).div_euclid(period)) as i64
            }
            Rule::Batches {
                missing, at: since, ..
            } => {
                let refills = (at - since) / self.period;
                self.capacity - 0.max(missing - refills.min(*missing) * self.limit)
            }
        }
    }

    /// The microseconds until `needs` units are free, which are not free now.
    fn wait(&self, needs: i64, now: i64) -> i64 {
        if needs > self.capacity {
            return Verdict::NEVER;
        }
        let is_free = |at: &i64| self.room(*at) >= needs;
        let period = i128::from(self.period);
        let free_at = match &self.rule {
            // The estimate never rises while nothing is charged.
            Rule::Charges(_) if self.strategy == Strategy::SlidingCounter => {
                let mut before = now;
                let mut after = now + 2 * self.period;
                while after - before > 1 {
                    let middle = before + (after - before) / 2;
                    match is_free(&middle) {
                        true => after = middle,
                        false => before = middle,
                    }
                }
                after
            }
            Rule::Charges(charges) => {
                let expiries = charges.iter().map(|charge| self.expiry(charge.since));
                expiries.filter(is_free).min().unwrap()
            }
            Rule::Level { level, .. } => {
                let over = level - i128::from(self.capacity - needs) * period;
                now + div_ceil(over, self.limit.into())
            }
            Rule::Batches { missing, at, .. } => {
                let over = missing - (self.capacity - needs);
                at + div_ceil(over.into(), self.limit.into()) * self.period
            }
        };
        free_at - now
    }

    /// The microseconds until the state equals that of a new caller.
    fn reset(&self, now: i64) -> i64 {
        match &self.rule {
            Rule::Charges(charges) => {
                let counted = charges.iter().filter(|charge| charge.units > 0);
                let expiries = counted.map(|charge| self.expiry(charge.since) - now);
                expiries.max().unwrap_or(0)
            }
            Rule::Level { level, .. } => div_ceil(*level, self.limit.into()),
            Rule::Batches { missing: 0, .. } => 0,
            Rule::Batches { missing, at, .. } => {
                at + div_ceil((*missing).into(), self.limit.into()) * self.period - now
            }
        }
    }

    fn numbers(&self, wait: i64, now: i64) -> Numbers {
        Numbers {
            remaining: self.room(now).max(0),
            wait,
            reset: self.reset(now),
        }
    }

    fn charge(&mut self, number: u64, units: i64, now: i64) {
        if units <= 0 {
            return;
        }
        let since = self.since(now);
        match &mut self.rule {
            Rule::Charges(charges) => charges.push(Counted {
                number,
                since,
                units,
            }),
            Rule::Level { level, .. } => *level += i128::from(units) * i128::from(self.period),
            Rule::Batches {
                missing,
                at,
                refills,
                full_times,
            } => {
                if *missing == 0 {
                    *at = now;
                    *full_times += 1;
                }
                *missing += units;
                let made = Made {
                    refills: *refills,
                    full_times: *full_times,
                };
                self.made.insert(number, made);
            }
        }
    }

    /// Refunds a part of a charge of this cost, as far as that still counts. Returns the refunded
    /// units, where a part of one counts as one.
    fn refund(&mut self, charge: &Charged, part: i64, now: i64) -> i64 {
        let period = i128::from(self.period);
        match &mut self.rule {
            Rule::Charges(charges) => {
                let counted = charges.iter_mut().find(|each| each.number == charge.number);
                let Some(counted) = counted else {
                    return 0;
                };
                counted.units -= part;
                part
            }
            Rule::Level { level, .. } => {
                // The drained part is not refunded.
                let drained = i128::from(now - charge.at) * i128::from(self.limit);
                let left = i128::from(charge.cost) * period - drained;
                let refunded = left.min(i128::from(part) * period).min(*level).max(0);
                *level -= refunded;
                div_ceil(refunded, period)
            }
            Rule::Batches {
                missing,
                refills,
                full_times,
                ..
            } => {
                let left = match self.made.get(&charge.number) {
                    // Since then, the bucket was never full.
                    Some(made) if made.full_times == *full_times => {
                        charge.cost - (*refills - made.refills) * self.limit
                    }
                    _ => 0,
                };
                let refunded = left.min(part).min(*missing).max(0);
                *missing -= refunded;
                refunded
            }
        }
    }
}

/// Returns the units that were charged in the window with this start.
fn units_of_window(charges: &[Counted], start: i64) -> i128 {
    let mut units = 0;
    for charge in charges {
        if charge.since == start {
            units += i128::from(charge.units);
        }
    }
    units
}

/// A charge that may be refunded once.
struct Charged {
    number: u64,
    at: i64,
    /// The granted cost.
    cost: i64,
    decision: Decision,
}

/// The expected answer, with the numbers of each policy.
#[derive(Debug, Clone, PartialEq)]
struct Expected {
    granted: i64,
    each: Vec<Numbers>,
}

/// The numbers of a verdict.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Numbers {
    remaining: i64,
    wait: i64,
    reset: i64,
}

/// A caller under a list of policies.
struct Model {
    each: Vec<PolicyModel>,
    /// The answers by id, until a time.
    answers: HashMap<u8, (i64, Expected)>,
    last_number: u64,
}

impl Model {
    /// The expected answer to a check that is not a refund.
    fn check(&mut self, check: &Check, id: Option<u8>, now: i64) -> Expected {
        if let Some(id) = id
            && let Some((until, answer)) = self.answers.get(&id)
            && now < *until
        {
            let mut repeated = answer.clone();
            for numbers in &mut repeated.each {
                numbers.wait = 0;
            }
            return repeated;
        }
        self.last_number += 1;
        let mode = check.mode();
        let cost = i64::from(check.cost());
        for model in &mut self.each {
            model.pass_to(now);
        }
        let rooms: Vec<i64> = self.each.iter().map(|model| model.room(now)).collect();
        let least = rooms.iter().copied().min().unwrap();
        let mut each = vec![];
        let mut grants = vec![];
        for (model, room) in self.each.iter_mut().zip(rooms) {
            let (needs, grant) = match mode {
                Mode::Take => (cost, if cost <= least { cost } else { 0 }),
                Mode::UpTo => (cost.min(1), cost.min(least).max(0)),
                Mode::Peek => (cost, 0),
                // Each policy separately allows a debt of one capacity.
                Mode::Charge => (
                    cost.min(1) - model.capacity,
                    cost.min(room + model.capacity).max(0),
                ),
                Mode::Reset => (i64::MIN, model.capacity - room),
                _ => unreachable!(),
            };
            let wait = if room >= needs {
                0
            } else {
                model.wait(needs, now)
            };
            if mode == Mode::Reset {
                model.clear();
            } else {
                model.charge(self.last_number, grant, now);
            }
            grants.push(grant);
            each.push(model.numbers(wait, now));
        }
        let granted = match mode {
            Mode::Charge => grants.into_iter().min(),
            _ => grants.into_iter().max(),
        };
        let expected = Expected {
            granted: granted.unwrap(),
            each,
        };
        if let Some(id) = id
            && (expected.granted > 0 || mode == Mode::Charge)
        {
            let until = self
                .each
                .iter()
                .map(|model| model.id_until(now))
                .max()
                .unwrap();
            self.answers.insert(id, (until, expected.clone()));
        }
        expected
    }

    fn refund(&mut self, charge: &Charged, part: i64, now: i64) -> Expected {
        let mut granted = 0;
        let mut each = vec![];
        for model in &mut self.each {
            model.pass_to(now);
            granted = granted.max(model.refund(charge, part, now));
            model.pass_to(now);
            each.push(model.numbers(0, now));
        }
        Expected { granted, each }
    }
}

fn quota(rng: &mut Rng, strategy: Strategy) -> Quota {
    let period = match rng.u8(..4) {
        0 => 1_000_000,
        1 => rng.u64(1..50),
        _ => rng.u64(1..10_000_000),
    };
    let quota = Quota::per(rng.u32(1..=40), Duration::from_micros(period));
    match strategy.frees().has_burst() && rng.bool() {
        true => quota.burst(rng.u32(1..=80)),
        false => quota,
    }
}

fn vary(rng: &mut Rng, strategy: Strategy, period: Duration) -> Strategy {
    match strategy {
        Strategy::FixedWindow(Align::Clock { .. }) => Strategy::FixedWindow(Align::Clock {
            offset: Duration::from_micros(rng.u64(..period.as_micros() as u64)),
        }),
        Strategy::SlidingWindow { .. } => Strategy::SlidingWindow {
            cells: rng.u16(1..=20),
        },
        same => same,
    }
}

/// Numbers of checks, by kind.
#[derive(Debug, Default)]
struct Coverage {
    checks: u64,
    denied: u64,
    repeated: u64,
    refunded: u64,
    in_part: u64,
}

struct Run {
    rng: Rng,
    seed: u64,
    key: Key,
    policies: Policies,
    model: Model,
    local: LocalStore,
    counts: Counts,
    now: i64,
    open: Vec<Charged>,
    /// Waits and resets that were reported.
    times: Vec<i64>,
}

impl Run {
    fn new(seed: u64, local: &LocalStore) -> Self {
        let mut rng = Rng::with_seed(seed);
        let names = ["one", "two", "three"];
        let mut policies = vec![];
        let mut each = vec![];
        for name in &names[..rng.usize(1..=3)] {
            let strategy = *rng.choice(Strategy::ALL).unwrap();
            let quota = quota(&mut rng, strategy);
            let strategy = vary(&mut rng, strategy, quota.period());
            let policy = Policy::new(name, strategy, quota).unwrap();
            each.push(PolicyModel::new(&policy, strategy));
            policies.push(policy);
        }
        let model = Model {
            each,
            answers: HashMap::new(),
            last_number: 0,
        };
        Self {
            now: START + rng.i64(0..100_000_000),
            key: Key::new(seed.to_string()),
            rng,
            seed,
            policies: Policies::new(policies).unwrap(),
            model,
            local: local.clone(),
            counts: Counts::default(),
            open: vec![],
            times: vec![1],
        }
    }

    /// Sends a check to both stores, and compares their answers with the expected one.
    fn compare(&mut self, check: Check, expected: &Expected, coverage: &mut Coverage) -> Decision {
        let verdicts = self.local.verdicts(&check, || self.now);
        let each = verdicts.each.iter().map(|verdict| Numbers {
            remaining: verdict.remaining,
            wait: verdict.wait,
            reset: verdict.reset,
        });
        let found = Expected {
            granted: verdicts.granted,
            each: each.collect(),
        };
        assert_eq!(
            (&found, self.now),
            (expected, self.now),
            "seed {}: {check:?} of {:?}",
            self.seed,
            self.open
                .iter()
                .map(|charge| (charge.at, charge.cost))
                .collect::<Vec<_>>()
        );
        let time = SystemTime::UNIX_EPOCH + Duration::from_micros(self.now as u64);
        let counted = self.counts.decide(&check, time, Source::Local);
        let decision = check.answer(verdicts, Source::Local);
        assert_eq!(counted, decision, "seed {}", self.seed);
        coverage.checks += 1;
        coverage.denied += u64::from(expected.each.iter().any(|numbers| numbers.wait > 0));
        for numbers in &expected.each {
            for time in [numbers.wait, numbers.reset] {
                if time > 0 {
                    self.times.push(time);
                }
            }
        }
        self.times = self.times.split_off(self.times.len().saturating_sub(12));
        decision
    }

    fn refund(&mut self, coverage: &mut Coverage) {
        let index = self.rng.usize(..self.open.len());
        let charge = self.open.swap_remove(index);
        let part = self.rng.i64(1..=charge.cost);
        let refund = charge
            .decision
            .refund(self.key, part as u32, Duration::ZERO);
        let expected = self.model.refund(&charge, part, self.now);
        match refund {
            Some(check) => {
                let _ = self.compare(check, &expected, coverage);
                coverage.refunded += u64::from(expected.granted == part);
                coverage.in_part += u64::from((1..part).contains(&expected.granted));
            }
            None => assert_eq!(
                expected.granted, 0,
                "seed {}: {:?}",
                self.seed, charge.decision
            ),
        }
    }

    fn step(&mut self, coverage: &mut Coverage) {
        let time = *self.rng.choice(&self.times).unwrap();
        self.now += match self.rng.u8(..8) {
            0 | 1 => 0,
            2 => 1,
            3 => time,
            4 => time - 1,
            5 => self.rng.i64(0..=time),
            _ => self.rng.i64(0..=time / 8),
        };
        if self.rng.u8(..3) == 0 && !self.open.is_empty() {
            return self.refund(coverage);
        }
        let rng = &mut self.rng;
        let capacity = self.policies[rng.usize(..self.policies.iter().len())]
            .quota()
            .capacity();
        let cost = match rng.u8(..6) {
            0 => capacity,
            1 => rng.u32(..=capacity + 1),
            2 | 3 => rng.u32(..=capacity) / 4,
            _ => 1,
        };
        let key = self.key;
        let policies = &self.policies;
        let plain = match rng.u8(..16) {
            0 | 1 => Check::peek(key, policies, cost),
            2..=4 => Check::up_to(key, policies, cost),
            5 => Check::charge(key, policies, cost),
            6 if rng.u8(..4) == 0 => Check::reset(key, policies),
            _ => Check::take(key, policies, cost),
        };
        let has_id = rng.u8(..4) == 0 && !matches!(plain.mode(), Mode::Peek | Mode::Reset);
        let id = has_id.then(|| rng.u8(..6));
        let expected = self.model.check(&plain, id, self.now);
        let check = match id {
            Some(id) => plain.with_id([id]),
            None => plain,
        };
        let mode = check.mode();
        let decision = self.compare(check, &expected, coverage);
        coverage.repeated += u64::from(decision.is_repeated());
        if mode == Mode::Reset {
            self.open.clear();
        } else if expected.granted > 0 && !decision.is_repeated() {
            self.open.push(Charged {
                number: self.model.last_number,
                at: self.now,
                cost: expected.granted,
                decision,
            });
        }
    }
}

fn number(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    Some(value.parse().expect("a number"))
}

#[test]
fn stores_decide_as_the_docs_define() {
    let checks = number("MODEL_CHECKS").unwrap_or(CHECKS);
    let seeds = match number("MODEL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..checks.div_ceil(CHECKS_PER_SEED),
    };
    let is_one = seeds.end - seeds.start == 1;
    let local = LocalStore::default();
    let mut coverage = Coverage::default();
    for seed in seeds {
        let mut run = Run::new(seed, &local);
        for _ in 0..CHECKS_PER_SEED {
            run.step(&mut coverage);
        }
    }
    println!("{coverage:?}");
    let Coverage {
        denied,
        repeated,
        refunded,
        in_part,
        ..
    } = coverage;
    let least = denied.min(repeated).min(refunded).min(in_part);
    assert!(is_one || least > checks / 500, "{coverage:?}");
}

/// Several quotas of one name: both stores of this process keep the same counts.
#[test]
fn stores_agree_on_changed_quotas() {
    let mut refunded = 0;
    for seed in 0..2_000 {
        let mut rng = Rng::with_seed(seed);
        let strategy = *rng.choice(Strategy::ALL).unwrap();
        let quotas: Vec<Policies> = (0..3)
            .map(|_| {
                let quota = quota(&mut rng, strategy);
                Policy::new("p", strategy, quota).unwrap().into()
            })
            .collect();
        let local = LocalStore::default();
        let mut counts = Counts::default();
        let key = Key::new(seed.to_string());
        let mut now = START;
        let mut open: Vec<Decision> = vec![];
        let mut times = vec![1];
        for _ in 0..60 {
            let policies = rng.choice(&quotas).unwrap();
            let cost = rng.u32(0..=policies[0].quota().capacity());
            let check = match rng.u8(..8) {
                0 if !open.is_empty() => {
                    let granted = open.swap_remove(rng.usize(..open.len()));
                    let part = rng.u32(1..=granted.granted());
                    match granted.refund(key, part, Duration::ZERO) {
                        Some(refund) => refund,
                        None => continue,
                    }
                }
                1 => Check::peek(key, policies, cost),
                2 => Check::up_to(key, policies, cost),
                3 => Check::charge(key, policies, cost),
                4 => Check::take_ahead(key, policies, cost, Duration::from_secs(5)),
                _ => Check::take(key, policies, cost),
            };
            let verdicts = local.verdicts(&check, || now);
            let mode = check.mode();
            let time = SystemTime::UNIX_EPOCH + Duration::from_micros(now as u64);
            let counted = counts.decide(&check, time, Source::Local);
            let decision = check.answer(verdicts, Source::Local);
            assert_eq!(counted, decision, "seed {seed}: {quotas:?}");
            times.push(decision.reset_after().as_micros() as i64 + 1);
            if mode == Mode::Refund {
                refunded += decision.granted();
            } else if decision.granted() > 0 {
                open.push(decision);
            }
            now += match rng.u8(..4) {
                0 => 0,
                1 => *rng.choice(&times).unwrap(),
                _ => rng.i64(0..=times[times.len() - 1] / 4),
            };
            let bytes = counts.to_bytes();
            counts = Counts::from_bytes(&bytes).unwrap();
        }
    }
    assert!(refunded > 5_000, "{refunded}");
}
