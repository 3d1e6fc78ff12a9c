//! Buckets whose quota changes, and several quotas under one name: together they grant at most what the largest burst
//! and the fastest rate of them give.

use std::time::SystemTime;

use super::*;
use crate::limit::{Counts, Decision, Source};

const START: u64 = 1_790_000_000_000_000;
const SECOND: u64 = 1_000_000;

/// A caller of a store that keeps its counts.
struct ChangedCaller {
    counts: Counts,
    now: u64,
    granted: u64,
}

impl ChangedCaller {
    fn new() -> Self {
        Self {
            counts: Counts::default(),
            now: START,
            granted: 0,
        }
    }

    fn decide(&mut self, check: &Check) -> Decision {
        let now = SystemTime::UNIX_EPOCH + Duration::from_micros(self.now);
        self.counts.decide(check, now, Source::Local)
    }

    fn take(&mut self, policies: &Policies, cost: u32) -> Decision {
        let decision = self.decide(&Check::take(Key::GLOBAL, policies, cost));
        self.granted += u64::from(decision.granted());
        decision
    }

    /// Takes units until one is denied.
    fn exhaust(&mut self, policies: &Policies) {
        while self.take(policies, 1).is_allowed() {}
    }
}

fn policies(strategy: Strategy, quota: &str) -> Policies {
    Policy::new("api", strategy, quota).unwrap().into()
}

fn buckets() -> impl Iterator<Item = Strategy> {
    let all = Strategy::ALL.iter().copied();
    all.filter(|strategy| strategy.frees().has_burst())
}

fn gradual() -> impl Iterator<Item = Strategy> {
    buckets().filter(|strategy| strategy.frees().is_gradual())
}

/// Takes with one quota until it denies, then once with the other, and so on for 60 seconds.
fn beside(strategy: Strategy, one: &str, other: &str) -> u64 {
    let [one, other] = [one, other].map(|quota| policies(strategy, quota));
    let mut caller = ChangedCaller::new();
    while caller.now < START + 60 * SECOND {
        caller.exhaust(&one);
        let _ = caller.take(&other, 1);
        caller.now += 10_000;
    }
    caller.granted
}

#[test]
fn two_quotas_grant_no_more_than_the_loosest() {
    let mut wrong = vec![];
    for strategy in gradual() {
        for (other, most) in [
            ("100/10s", 700),
            ("100/10s burst 10", 700),
            ("10/10s", 700),
            ("2/s", 700),
            ("20/s", 1_300),
        ] {
            let granted = beside(strategy, "100/10s", other);
            println!("{strategy}: 100/10s and {other}: {granted}, at most {most}");
            if !(600..=most).contains(&granted) {
                wrong.push((strategy, other, granted));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// A quota around 60 per minute, which changes at this pace: in 6 seconds it grants its burst and 6 units.
#[test]
fn an_adapting_quota_keeps_its_count() {
    let mut wrong = vec![];
    for strategy in buckets() {
        // Each lasts for one step: a service adapts to what it measures, so no two are the same.
        let quotas = |step: usize| policies(strategy, &format!("{}/m", 30 + (step * 7) % 31));
        for pace in [1, 10, 50, 200, 1_000] {
            let mut caller = ChangedCaller::new();
            let mut current = quotas(30);
            for step in 0..6_000 {
                if step % pace == 0 {
                    current = quotas(step / pace + 30);
                }
                caller.exhaust(&current);
                caller.now += 1_000;
            }
            println!("{strategy}, changed every {pace} ms: {}", caller.granted);
            // A bucket by the interval has no refill in this time.
            if !(30..=66).contains(&caller.granted) {
                wrong.push((strategy, pace, caller.granted));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// A plan is raised and lowered within an hour.
#[test]
fn a_changed_plan_is_no_fresh_start() {
    let mut granted = vec![];
    for strategy in buckets() {
        let mut caller = ChangedCaller::new();
        for quota in ["10/h", "20/h", "12/h"] {
            caller.exhaust(&policies(strategy, quota));
        }
        println!("{strategy}: {} of 20", caller.granted);
        granted.push(caller.granted);
    }
    assert_eq!(granted, [20; 4]);
}

/// A unit in exact numbers: each period of [`any_quota`] divides it.
const UNIT: i128 = 60_000_000;

/// A quota whose rate is a whole number of parts of a [`UNIT`] in a microsecond.
fn any_quota(rng: &mut Rng) -> Quota {
    let period = *rng.choice(&[1, 2, 5, 10, 60]).unwrap();
    let quota = Quota::per(rng.u32(1..40), Duration::from_secs(period));
    if rng.bool() {
        quota.burst(rng.u32(1..60))
    } else {
        quota
    }
}

fn rate(quota: Quota) -> i128 {
    i128::from(quota.limit()) * UNIT / quota.period().as_micros() as i128
}

/// The definition of a gradual bucket under several quotas, in exact numbers.
#[derive(Clone)]
struct UsedUnits {
    /// In parts of a unit.
    units: i128,
    at: u64,
    writer: Option<Quota>,
}

impl UsedUnits {
    fn new() -> Self {
        Self {
            units: 0,
            at: START,
            writer: None,
        }
    }

    fn pass_to(&mut self, now: u64) {
        let drained = self.writer.map_or(0, rate) * i128::from(now - self.at);
        self.units = (self.units - drained).max(0);
        self.at = now;
    }

    fn room(&self, quota: Quota) -> i128 {
        (i128::from(quota.capacity()) * UNIT - self.units).div_euclid(UNIT)
    }

    /// Microseconds until no more than these parts are used, under a quota.
    fn wait(&self, quota: Quota, left: i128) -> i128 {
        let faster = rate(quota).max(self.writer.map_or(0, rate));
        -(-(self.units - left)).div_euclid(faster)
    }
}

/// A grant under one of several quotas, and the part of it that was not refunded.
struct Grant {
    decision: Decision,
    at: u64,
    quota: Quota,
    real: i64,
}

/// Random checks of a caller under several quotas, and the definition of their count.
struct ChangedRun {
    rng: Rng,
    strategy: Strategy,
    quotas: Vec<Quota>,
    caller: ChangedCaller,
    used: UsedUnits,
    /// Number of changed writers: each rounds up.
    changes: i128,
    grants: Vec<Grant>,
    open: Vec<usize>,
    /// The writers, each from its time on.
    writers: Vec<(u64, Quota)>,
    has_refunded: bool,
    refunded: i64,
    kept: u32,
}

impl ChangedRun {
    fn new(seed: u64, strategy: Strategy) -> Self {
        let mut rng = Rng::with_seed(seed);
        let quotas = (0..rng.usize(2..=3)).map(|_| any_quota(&mut rng)).collect();
        Self {
            rng,
            strategy,
            quotas,
            caller: ChangedCaller::new(),
            used: UsedUnits::new(),
            changes: 0,
            grants: vec![],
            open: vec![],
            writers: vec![],
            has_refunded: false,
            refunded: 0,
            kept: 0,
        }
    }

    fn policies(&self, quota: Quota) -> Policies {
        Policy::new("api", self.strategy, quota).unwrap().into()
    }

    fn write(&mut self, quota: Quota) {
        if self.used.writer != Some(quota) {
            self.changes += 1;
            self.used.writer = Some(quota);
            self.writers.push((self.caller.now, quota));
        }
    }

    /// The maximum rounding of all changes, in parts: a millionth of a unit and a microsecond's drain each.
    fn slack(&self) -> i128 {
        let fastest = self.quotas.iter().map(|quota| rate(*quota)).max().unwrap();
        self.changes * (UNIT / 500_000 + fastest)
    }

    fn check(&mut self, mode: Mode, quota: Quota, cost: u32) -> (Decision, i128) {
        let policies = self.policies(quota);
        let check = match mode {
            Mode::Take => Check::take(Key::GLOBAL, &policies, cost),
            Mode::UpTo => Check::up_to(Key::GLOBAL, &policies, cost),
            Mode::Peek => Check::peek(Key::GLOBAL, &policies, cost),
            _ => Check::charge(Key::GLOBAL, &policies, cost),
        };
        let now = self.caller.now;
        self.used.pass_to(now);
        let room = self.used.room(quota);
        let decision = self.caller.decide(&check);
        (decision, room)
    }

    fn step(&mut self, refunds: bool) {
        let context = format!("{:?} of {:?}", self.strategy, self.quotas);
        if refunds && !self.open.is_empty() && self.rng.u8(..3) == 0 {
            return self.refund(&context);
        }
        let quota = *self.rng.choice(&self.quotas).unwrap();
        let mode = *self
            .rng
            .choice(&[Mode::Take, Mode::Take, Mode::UpTo, Mode::Peek, Mode::Charge])
            .unwrap();
        let cost = self.rng.u32(0..=quota.capacity());
        let before = self.used.clone();
        let (decision, room) = self.check(mode, quota, cost);
        let (cost, granted) = (i128::from(cost), i128::from(decision.granted()));
        let least = {
            let mut used = self.used.clone();
            used.units += self.slack();
            used.room(quota)
        };
        let capacity = i128::from(quota.capacity());
        let expected = |room: i128| match mode {
            Mode::Take if cost <= room => cost,
            Mode::Take | Mode::Peek => 0,
            Mode::UpTo => cost.min(room).max(0),
            _ => cost.min(room + capacity).max(0),
        };
        if !self.has_refunded {
            assert!(
                (expected(least)..=expected(room)).contains(&granted),
                "{context}: {mode:?} of {cost} under {quota}: {granted}, room {least} to {room}"
            );
            let remaining = i128::from(decision.remaining());
            let most = (room - granted).max(0);
            let fewest = (least - granted).max(0);
            assert!((fewest..=most).contains(&remaining), "{context}");
            if let Some(wait) = decision.retry_after()
                && cost <= capacity
                && mode != Mode::Charge
            {
                let needs = if mode == Mode::UpTo {
                    cost.min(1)
                } else {
                    cost
                };
                let exact = self.used.wait(quota, (capacity - needs) * UNIT);
                let wait = wait.as_micros() as i128;
                // Rounded up by less than the slack, at the slowest rate.
                let slowest = self.quotas.iter().map(|quota| rate(*quota)).min().unwrap();
                assert!(
                    (exact..=exact + 1 + self.slack() / slowest).contains(&wait),
                    "{context}: {wait} and not {exact}"
                );
            }
        }
        self.used.units += granted * UNIT;
        if granted > 0 {
            self.write(quota);
            self.open.push(self.grants.len());
            self.grants.push(Grant {
                at: self.caller.now,
                quota,
                real: granted as i64,
                decision,
            });
        } else if !decision.is_allowed()
            && matches!(mode, Mode::Take | Mode::UpTo)
            && self.used.units > 0
            && before
                .writer
                .is_none_or(|writer| rate(quota) > rate(writer))
        {
            self.write(quota);
        }
    }

    /// Gives a part of a grant back. The level is not below that of a caller who was charged the rest only.
    fn refund(&mut self, context: &str) {
        let index = self.open.swap_remove(self.rng.usize(..self.open.len()));
        let part = self.rng.u32(1..=self.grants[index].decision.granted());
        let refund = self.grants[index]
            .decision
            .refund(Key::GLOBAL, part, Duration::ZERO);
        self.used.pass_to(self.caller.now);
        self.has_refunded = true;
        self.grants[index].real -= i64::from(part);
        match refund {
            Some(refund) => self.refunded += i64::from(self.caller.decide(&refund).granted()),
            None => self.kept += 1,
        }
        let least = self.counterfactual();
        for &quota in &self.quotas.clone() {
            let (peek, _) = self.check(Mode::Peek, quota, 1);
            let most = least.room(quota).max(0);
            assert!(
                i128::from(peek.remaining()) <= most,
                "{context}: {} remain of {quota}, not {most}",
                peek.remaining()
            );
        }
    }

    /// Returns the count of a caller who was charged only what was not refunded, drained by the same writers.
    fn counterfactual(&self) -> UsedUnits {
        let mut used = UsedUnits::new();
        let mut writers = self.writers.iter().peekable();
        let mut write_until = |used: &mut UsedUnits, now: u64| {
            while let Some((at, quota)) = writers.next_if(|(at, _)| *at <= now) {
                used.pass_to(*at);
                used.writer = Some(*quota);
            }
            used.pass_to(now);
        };
        for grant in &self.grants {
            let _ = grant.quota;
            write_until(&mut used, grant.at);
            used.units += i128::from(grant.real) * UNIT;
        }
        write_until(&mut used, self.caller.now);
        used
    }

    fn wait(&mut self) {
        let longest = self.used.units / rate(self.quotas[0]).max(1);
        let longest = (longest as u64).clamp(1, 100_000_000);
        let time = match self.rng.u8(..6) {
            0 | 1 => 0,
            2 => 1,
            3 => self.rng.u64(0..=longest),
            _ => self.rng.u64(0..=longest / 8),
        };
        self.caller.now += time;
    }
}

/// Random checks under two or three quotas of one name, against the definition.
#[test]
fn changed_buckets_count_as_defined() {
    let mut changes = 0;
    for seed in 0..1_500 {
        for strategy in gradual() {
            let mut run = ChangedRun::new(seed, strategy);
            for _ in 0..40 {
                run.step(false);
                run.wait();
            }
            changes += run.changes;
        }
    }
    assert!(changes > 20_000, "{changes}");
}

/// Reservations that are held across changes of the quota, and refunded.
#[test]
fn a_refund_across_changes_frees_no_more_than_counts() {
    let (mut refunded, mut kept) = (0, 0);
    for seed in 0..3_000 {
        for strategy in gradual() {
            let mut run = ChangedRun::new(seed, strategy);
            for _ in 0..40 {
                run.step(true);
                run.wait();
            }
            refunded += run.refunded;
            kept += run.kept;
        }
    }
    println!("{refunded} units refunded, {kept} refunds too late");
    assert!(refunded > 20_000, "{refunded}");
}

/// Adversarial choices of quotas and moments.
#[test]
fn all_quotas_grant_at_most_the_largest_burst_and_the_fastest_rate() {
    let (mut most, mut total) = (0.0_f64, 0);
    for seed in 0..3_000 {
        for strategy in buckets() {
            let mut rng = Rng::with_seed(seed);
            let quotas: Vec<Quota> = (0..rng.usize(2..=4)).map(|_| any_quota(&mut rng)).collect();
            let lists: Vec<Policies> = quotas
                .iter()
                .map(|quota| Policy::new("api", strategy, *quota).unwrap().into())
                .collect();
            let capacity = |quota: &Quota| i128::from(quota.capacity());
            let burst = quotas.iter().map(capacity).max().unwrap();
            let fastest = quotas.iter().map(|quota| rate(*quota)).max().unwrap();
            let batch = quotas.iter().map(|quota| i128::from(quota.limit())).max();
            let batches = if strategy.frees().is_gradual() { 0 } else { 2 };
            let mut caller = ChangedCaller::new();
            for _ in 0..60 {
                let list = rng.choice(&lists).unwrap();
                if rng.bool() {
                    caller.exhaust(list);
                } else {
                    let _ = caller.take(list, rng.u32(1..60));
                }
                let elapsed = i128::from(caller.now - START);
                let bound = (burst + batches * batch.unwrap()) * UNIT + fastest * elapsed;
                let granted = i128::from(caller.granted) * UNIT;
                assert!(
                    granted <= bound,
                    "seed {seed}, {strategy} of {quotas:?}: {} after {elapsed} us",
                    caller.granted
                );
                most = most.max(granted as f64 / bound as f64);
                total += 1;
                caller.now += [0, 1, rng.u64(0..100_000), rng.u64(0..3_000_000)][rng.usize(..4)];
            }
        }
    }
    println!("{total} choices, at most {most:.3} of the bound");
    assert!(most > 0.95, "{most}");
}

/// After a change to a faster quota, the caller does not wait for the old one. After a change to a slower one, the old
/// rate drains the old grants.
#[test]
fn the_faster_rate_drains_what_was_used() {
    for strategy in gradual() {
        let mut caller = ChangedCaller::new();
        let slow = policies(strategy, "1/d");
        let _ = caller.take(&slow, 1);
        let fast = policies(strategy, "100/s burst 1");
        let denied = caller.take(&fast, 1);
        assert_eq!(denied.retry_after(), Some(Duration::from_millis(10)));
        caller.now += 10_000;
        assert!(caller.take(&fast, 1).is_allowed(), "{strategy}");

        let mut caller = ChangedCaller::new();
        let large = policies(strategy, "1000000/d burst 1000000");
        let _ = caller.take(&large, 1_000_000);
        let denied = caller.take(&slow, 1);
        let wait = denied.retry_after().unwrap();
        let day = Duration::from_secs(86_400);
        assert_eq!(wait, day, "{strategy}: all of it drains at the old rate");
        caller.now += wait.as_micros() as u64;
        assert!(caller.take(&slow, 1).is_allowed());
    }
}

/// Peeks, refunds and checks of no cost never change the writer.
#[test]
fn only_grants_and_faster_denials_write() {
    for strategy in gradual() {
        let [slow, fast] = ["60/h", "60/s"].map(|quota| policies(strategy, quota));
        let all: [fn(&Policies) -> Check; 5] = [
            |fast| Check::peek(Key::GLOBAL, fast, 60),
            |fast| Check::take(Key::GLOBAL, fast, 0),
            |fast| Check::charge(Key::GLOBAL, fast, 0),
            |fast| Check::refund(Key::GLOBAL, fast, 1),
            |fast| Check::up_to(Key::GLOBAL, fast, 0),
        ];
        for check in all {
            let mut caller = ChangedCaller::new();
            caller.exhaust(&slow);
            let check = check(&fast);
            let _ = caller.decide(&check);
            caller.now += 10 * SECOND;
            let left = u32::from(check.mode() == Mode::Refund);
            let peek = caller.decide(&Check::peek(Key::GLOBAL, &fast, 1));
            assert_eq!(peek.remaining(), left, "{strategy}: {check:?}");
        }
        let mut caller = ChangedCaller::new();
        caller.exhaust(&slow);
        let _ = caller.take(&fast, 1);
        caller.now += 10 * SECOND;
        let peek = caller.decide(&Check::peek(Key::GLOBAL, &fast, 1));
        assert_eq!(
            peek.remaining(),
            60,
            "{strategy}: a denied take of a faster quota"
        );
    }
}

/// A reservation under a slow quota, which a faster one drains before the refund.
#[test]
fn a_third_quota_leaves_nothing_to_refund() {
    for strategy in gradual() {
        let slow = policies(strategy, "1/m burst 10");
        let fast = policies(strategy, "10/s");
        let mut caller = ChangedCaller::new();
        let reserved = caller.take(&slow, 10);
        caller.now += 100_000;
        assert!(!caller.take(&fast, 1).is_allowed(), "{strategy}");
        caller.now += 2 * SECOND;
        assert!(caller.take(&slow, 10).is_allowed(), "{strategy}");
        let refund = reserved.refund(Key::GLOBAL, 10, Duration::ZERO);
        let refunded = caller.decide(&refund.unwrap()).granted();
        assert_eq!(refunded, 0, "{strategy}: others' charges");
    }
}

/// Rounding of a changed level.
#[test]
fn changes_lose_at_most_a_hundredth() {
    let quotas = ["60/m", "61/m", "997/h", "7/10s", "100000/d"];
    for strategy in gradual() {
        let lists = quotas.map(|quota| policies(strategy, quota));
        let mut caller = ChangedCaller::new();
        let mut level = 0_i128;
        let mut rng = Rng::with_seed(3);
        let mut writer = 0;
        for _ in 0..10_000 {
            let next = rng.usize(..lists.len());
            let quota: Quota = quotas[writer].parse().unwrap();
            level = 0.max(level - rate_of(quota));
            let granted = caller.take(&lists[next], 1).granted();
            level += i128::from(granted) * LARGE_UNIT;
            let is_faster = rate_of(quotas[next].parse().unwrap()) > rate_of(quota);
            if granted > 0 || is_faster {
                writer = next;
            }
            caller.now += 100_000;
        }
        let last: Quota = quotas[writer].parse().unwrap();
        level = 0.max(level - rate_of(last));
        let peek = caller.decide(&Check::peek(Key::GLOBAL, &lists[4], 1));
        let exact = 100_000.0 - level as f64 / LARGE_UNIT as f64;
        let lost = exact - f64::from(peek.remaining());
        println!("{strategy}: {lost:.3} of {:.0} lost", caller.granted as f64);
        assert!((-0.01..1.01).contains(&lost), "{strategy}: {lost}");
    }
}

const LARGE_UNIT: i128 = 864_000_000_000 * 1_000;

/// Parts of a [`LARGE_UNIT`] that drain in 100 ms.
fn rate_of(quota: Quota) -> i128 {
    i128::from(quota.limit()) * LARGE_UNIT * 100_000 / quota.period().as_micros() as i128
}

/// A level that cannot be represented under another quota is neither lost nor stored, and that quota denies.
#[test]
fn extreme_quotas_keep_the_level() {
    for strategy in gradual() {
        let extremes = [
            "1/us burst 1",
            "4294967295/us",
            "4294967295/us burst 1",
            "1/366d",
            "4294967295/366d",
            "1000003/s burst 4294967295",
            "999983/30d",
            "999983/30d burst 1",
            "100000/366d burst 100000",
        ];
        for (one, other) in extremes
            .iter()
            .flat_map(|one| extremes.map(|other| (*one, other)))
        {
            let [one, other] = [one, other].map(|quota| policies(strategy, quota));
            let mut caller = ChangedCaller::new();
            let used = caller.take(&one, one[0].quota().capacity()).granted();
            let left = other[0].quota().capacity().saturating_sub(used);
            let most = caller.take(&other, left.saturating_add(1));
            assert!(!most.is_allowed(), "{strategy}: {one:?}, {other:?}");
            let peek = caller.decide(&Check::peek(Key::GLOBAL, &other, 1));
            assert_eq!(peek.remaining(), left, "{strategy}: {one:?}, {other:?}");
            let back = caller.decide(&Check::peek(Key::GLOBAL, &one, 1));
            assert!(back.remaining() == 0, "{strategy}: {one:?}, {other:?}");
        }
    }
}

/// The level is above 2^52 ticks of the faster quota. A level lowered to that would let the old quota grant the rest again.
#[test]
fn a_denial_stores_no_lowered_level() {
    for strategy in gradual() {
        let slow = policies(strategy, "100000/366d burst 100000");
        let fast = policies(strategy, "999983/30d burst 1");
        let mut caller = ChangedCaller::new();
        assert!(caller.take(&slow, 100_000).is_allowed());
        assert!(!caller.take(&fast, 1).is_allowed(), "{strategy}");
        let again = caller.decide(&Check::up_to(Key::GLOBAL, &slow, 100_000));
        assert_eq!(again.granted(), 0, "{strategy}");
    }
}

/// A caller has used more than the new quota allows even as a debt. After `retry_after`, a take is allowed.
#[test]
fn a_raised_quota_drains_any_level() {
    for strategy in buckets() {
        let slow = policies(strategy, "100/d burst 3000");
        let fast = policies(strategy, "1000/d");
        let mut caller = ChangedCaller::new();
        assert!(caller.take(&slow, 3_000).is_allowed());
        let denied = caller.take(&fast, 1);
        let wait = denied.retry_after().unwrap();
        let days = wait.as_secs_f64() / 86_400.0;
        assert!((2.0..=3.0).contains(&days), "{strategy}: {wait:?}");
        caller.now += wait.as_micros() as u64;
        assert!(caller.take(&fast, 1).is_allowed(), "{strategy}");
    }
}
