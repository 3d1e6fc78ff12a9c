//! Where the decisions agree and where they differ: the table of `README.md`. `SAVE=1 cargo test --package migrating-tests`
//! writes it.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;
use std::{env, fs};

use governor::clock::{Clock, DefaultClock};
use tokio::runtime;
use tokio::time::{Instant, advance};
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::GlobalKeyExtractor;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::{Align, Refill};
use tower_redis_ratelimit::{Key, LocalStore, Policies, Policy, Quota, Strategy, redis};

use crate::replay::{Ask, MILLISECOND, Request, SECOND, asked, at, most, ours, trace};
use crate::support::RedisServer;
use crate::theirs::{
    COUNTERS, HASH, ISTIO_FIXED, ISTIO_ROLLING, REDIS_RATE, REDISSON, SPRING, Theirs, ZSET,
    bucket4j, funnel, governor, redis_cell,
};

/// Traces of each quota, and requests of each trace.
const SEEDS: u64 = 4;
const REQUESTS: usize = 750;

const WINDOWS: &[&str] = &["1/s", "10/10s", "60/m", "100/10s"];
const BUCKETS: &[&str] = &["1/s burst 5", "10/10s", "60/m burst 20", "100/s burst 10"];
const CLOCK: Strategy = Strategy::FixedWindow(Align::Clock {
    offset: Duration::ZERO,
});
const CELLS: u16 = 10;

/// How they differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Differ {
    /// Not in one decision.
    Never,
    /// They grant some that we do not, and we none that they do not.
    TheyGrant,
    WeGrant,
    Both,
}
use Differ::{Both, Never, TheyGrant, WeGrant};

struct Case {
    theirs: &'static str,
    ours: &'static str,
    quotas: &'static [&'static str],
    /// The times of requests are multiples of it, in microseconds.
    grain: fn(Quota) -> i64,
    max_cost: u32,
    make_theirs: fn(Quota) -> Theirs,
    make_ours: fn(Quota) -> Policies,
    ask: Ask,
    differ: Differ,
    /// Whether theirs grants more in a period than ours does.
    exceeds: bool,
}

impl Case {
    /// Requests of a cost of one, on any millisecond.
    fn new(
        theirs: &'static str,
        ours: &'static str,
        make_theirs: fn(Quota) -> Theirs,
        make_ours: fn(Quota) -> Policies,
    ) -> Self {
        let quotas = WINDOWS;
        Self {
            theirs,
            ours,
            quotas,
            grain: |_| MILLISECOND,
            max_cost: 1,
            make_theirs,
            make_ours,
            ask: Check::take,
            differ: Never,
            exceeds: false,
        }
    }

    fn costs(self) -> Self {
        Self {
            max_cost: 5,
            ..self
        }
    }

    fn ask(self, ask: Ask) -> Self {
        Self { ask, ..self }
    }

    fn quotas(self, quotas: &'static [&'static str]) -> Self {
        Self { quotas, ..self }
    }

    fn grain(self, grain: fn(Quota) -> i64) -> Self {
        Self { grain, ..self }
    }

    fn differ(self, differ: Differ) -> Self {
        Self { differ, ..self }
    }

    fn exceeds(self) -> Self {
        Self {
            exceeds: true,
            ..self
        }
    }
}

fn policy(strategy: Strategy, quota: Quota) -> Policies {
    Policy::new("test", strategy, quota).unwrap().into()
}

fn seconds(quota: Quota) -> u64 {
    quota.period().as_secs()
}

fn millis(quota: Quota) -> u128 {
    quota.period().as_millis()
}

fn micros(quota: Quota) -> u128 {
    quota.period().as_micros()
}

/// The sliding window with one cell less, over a period that is shorter by it.
fn fewer_cells(quota: Quota) -> Policies {
    let shorter = Quota::per(
        quota.limit(),
        quota.period() / u32::from(CELLS) * u32::from(CELLS - 1),
    );
    policy(Strategy::SlidingWindow { cells: CELLS - 1 }, shorter)
}

/// The time in which one unit refills.
fn interval(quota: Quota) -> i64 {
    micros(quota) as i64 / i64::from(quota.limit())
}

fn counters(quota: Quota) -> Theirs {
    Theirs::lua(COUNTERS, &[&quota.limit(), &seconds(quota)])
}

/// The quota, and a tenth of it in a second.
fn two_counters(quota: Quota) -> Theirs {
    Theirs::lua(
        COUNTERS,
        &[&quota.limit(), &seconds(quota), &(quota.limit() / 10), &1],
    )
}

fn two_windows(quota: Quota) -> Policies {
    let second = Policy::new("second", CLOCK, Quota::per_second(quota.limit() / 10)).unwrap();
    Policies::new([Policy::new("long", CLOCK, quota).unwrap(), second]).unwrap()
}

fn redis_rate(quota: Quota) -> Theirs {
    Theirs::lua(
        REDIS_RATE,
        &[
            &quota.limit(),
            &quota.period().as_secs_f64(),
            &quota.capacity(),
        ],
    )
}

/// With a clock of this unit.
fn spring(quota: Quota, unit: i64) -> Theirs {
    Theirs::lua(SPRING, &[&quota.limit(), &quota.capacity(), &unit])
}

fn zset(quota: Quota, member: &str, added: &str) -> Theirs {
    Theirs::lua(ZSET, &[&quota.limit(), &millis(quota), &member, &added])
}

fn cell(quota: Quota) -> u128 {
    micros(quota) / u128::from(CELLS)
}

fn rolling(quota: Quota) -> Theirs {
    Theirs::lua(
        ISTIO_ROLLING,
        &[&quota.limit(), &micros(quota), &cell(quota)],
    )
}

fn hash(quota: Quota) -> Theirs {
    Theirs::lua(
        HASH,
        &[&quota.limit(), &millis(quota), &(cell(quota) / 1_000)],
    )
}

#[rustfmt::skip]
fn cases() -> Vec<Case> {
    let log: fn(Quota) -> Policies = |quota| policy(Strategy::SlidingLog, quota);
    let window: fn(Quota) -> Policies = |quota| policy(Strategy::SlidingWindow { cells: CELLS }, quota);
    let clock: fn(Quota) -> Policies = |quota| policy(CLOCK, quota);
    let gcra: fn(Quota) -> Policies = |quota| policy(Strategy::Gcra, quota);
    let greedy: fn(Quota) -> Policies = |quota| policy(Strategy::TokenBucket(Refill::Greedy), quota);
    let by_interval: fn(Quota) -> Policies = |quota| policy(Strategy::TokenBucket(Refill::Interval), quota);
    let leaky: fn(Quota) -> Policies = |quota| policy(Strategy::LeakyBucket, quota);
    let first_hit: fn(Quota) -> Policies = |quota| policy(Strategy::FixedWindow(Align::FirstHit), quota);
    let spring_quotas = &["1/s burst 5", "10/s", "100/s burst 200"];
    vec![
        Case::new("redis_rate v6, v7", "`FixedWindow(Align::Clock)`", counters, clock),
        Case::new("the same, costs of 1 to 5", "the same", counters, clock).costs().differ(WeGrant),
        Case::new("redis_rate v9, v10", "`Gcra`", redis_rate, gcra).quotas(BUCKETS).costs(),
        Case::new("the same, 3 and 7 per second", "the same", redis_rate, gcra)
            .quotas(&["3/s", "7/s burst 20"]).costs().differ(Both),
        Case::new("redis-cell", "`Gcra`", redis_cell, gcra).quotas(BUCKETS).costs(),
        Case::new("the same, 3 and 7 per second", "the same", redis_cell, gcra).quotas(&["3/s", "7/s burst 20"]).costs(),
        Case::new("Redisson", "`SlidingLog`", |quota| Theirs::lua(REDISSON, &[&quota.limit(), &millis(quota)]), log).costs(),
        Case::new("Spring Cloud Gateway", "`TokenBucket(Refill::Greedy)`", |quota| spring(quota, SECOND), greedy)
            .quotas(spring_quotas).costs().differ(Both).exceeds(),
        Case::new("the same, requests at whole seconds", "the same", |quota| spring(quota, SECOND), greedy)
            .quotas(spring_quotas).costs().grain(|_| SECOND),
        Case::new("the same, a burst below half the rate", "the same", |quota| spring(quota, SECOND), greedy)
            .quotas(&["10/s burst 4"]).differ(TheyGrant).exceeds(),
        Case::new("Istio, `FIXED_WINDOW`", "`FixedWindow(Align::FirstHit)`",
            |quota| Theirs::lua(ISTIO_FIXED, &[&quota.limit(), &micros(quota)]), first_hit).costs(),
        Case::new("Istio, `ROLLING_WINDOW`", "`SlidingWindow`, 10 cells", rolling, window).costs().differ(Both).exceeds(),
        Case::new("the same, requests at whole buckets", "9 cells, 9/10 of the period", rolling, fewer_cells)
            .costs().grain(|quota| cell(quota) as i64),
        Case::new("bucket4j, `refillGreedy`", "`TokenBucket(Refill::Greedy)`", |quota| bucket4j(quota, false), greedy)
            .quotas(BUCKETS).costs(),
        Case::new("bucket4j, `refillIntervally`", "`TokenBucket(Refill::Interval)`", |quota| bucket4j(quota, true), by_interval)
            .quotas(BUCKETS).costs().differ(Both).exceeds(),
        Case::new("the same, requests at whole periods", "the same", |quota| bucket4j(quota, true), by_interval)
            .quotas(BUCKETS).costs().grain(|quota| micros(quota) as i64),
        Case::new("Envoy", "`FixedWindow(Align::Clock)`", counters, clock).quotas(&["1/s", "60/m", "600/h"]),
        Case::new("the same, `hits_addend` of 1 to 5", "the same", counters, clock).quotas(&["1/s", "60/m", "600/h"]).costs().differ(WeGrant),
        Case::new("the same", "the same, by `Check::up_to`", counters, clock).quotas(&["1/s", "60/m", "600/h"]).costs().ask(Check::up_to),
        Case::new("Envoy, two descriptors", "two policies", two_counters, two_windows).quotas(&["60/m"]).differ(WeGrant),
        Case::new("tower_governor", "`Gcra`", governor, gcra).quotas(BUCKETS),
        Case::new("governor, 3 and 7 per second", "the same", governor, gcra).quotas(&["3/s", "7/s burst 20"]).costs(),
        Case::new("ZSET, members are times", "`SlidingLog`", |quota| zset(quota, "time", "after"), log).differ(Both).exceeds(),
        Case::new("ZSET, members are unique", "the same", |quota| zset(quota, "unique", "after"), log),
        Case::new("the same, added before they are counted", "the same", |quota| zset(quota, "unique", "before"), log).differ(WeGrant),
        Case::new("a hash of 10 fields", "`SlidingWindow`, 10 cells", hash, window).costs().differ(Both).exceeds(),
        Case::new("the same", "9 cells, 9/10 of the period", hash, fewer_cells).costs(),
        Case::new("a funnel in Java", "`LeakyBucket`", funnel, leaky).quotas(BUCKETS).costs().differ(Both),
        Case::new("the same, requests at whole units", "the same", funnel, leaky).quotas(BUCKETS).costs().grain(interval),
    ]
}

/// The counts of a case.
#[derive(Default)]
struct Counts {
    requests: usize,
    they_alone: usize,
    we_alone: usize,
    /// The most in a period, of them and of us, as a multiple of the limit.
    most: [f64; 2],
}

impl Counts {
    fn of(case: &Case, number: usize, redis: &mut redis::Connection) -> Self {
        let mut counts = Self::default();
        for (quota, text) in case
            .quotas
            .iter()
            .map(|text| (text.parse::<Quota>().unwrap(), text))
        {
            for seed in 0..SEEDS {
                let requests = trace(seed, REQUESTS, quota, (case.grain)(quota), case.max_cost);
                let key = format!("{number}-{text}-{seed}");
                let theirs = (case.make_theirs)(quota).decide(redis, &key, &requests);
                let ours = asked(case.ask, &(case.make_ours)(quota), &requests);
                counts.add(quota, &requests, [&theirs, &ours]);
            }
        }
        counts
    }

    fn add(&mut self, quota: Quota, requests: &[Request], [theirs, ours]: [&[bool]; 2]) {
        self.requests += requests.len();
        self.they_alone += theirs
            .iter()
            .zip(ours)
            .filter(|(they, we)| **they && !**we)
            .count();
        self.we_alone += theirs
            .iter()
            .zip(ours)
            .filter(|(they, we)| !**they && **we)
            .count();
        for (most_of, granted) in self.most.iter_mut().zip([theirs, ours]) {
            *most_of = most_of
                .max(f64::from(most(quota.period(), requests, granted)) / f64::from(quota.limit()));
        }
    }

    fn differ(&self) -> Differ {
        match (self.they_alone, self.we_alone) {
            (0, 0) => Never,
            (_, 0) => TheyGrant,
            (0, _) => WeGrant,
            _ => Both,
        }
    }
}

#[test]
fn decisions_agree_as_the_guide_says() {
    let server = RedisServer::start();
    let mut redis = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    let mut table =
        "| theirs | ours | decided alike | they alone grant | we alone grant | most in a period: they | we |\n"
            .to_owned();
    table += "|---|---|---|---|---|---|---|\n";
    let mut wrong = vec![];
    for (number, case) in cases().iter().enumerate() {
        let counts = Counts::of(case, number, &mut redis);
        let [they, we] = counts.most;
        let alike = counts.requests - counts.they_alone - counts.we_alone;
        let _ = writeln!(
            table,
            "| {} | {} | {:.1} % | {} | {} | {they:.1} L | {we:.1} L |",
            case.theirs,
            case.ours,
            // Rounded down, so that 100 means all.
            (1_000 * alike / counts.requests) as f64 / 10.0,
            counts.they_alone,
            counts.we_alone,
        );
        if (counts.differ(), they > we) != (case.differ, case.exceeds) {
            wrong.push(format!(
                "{}: {:?}, exceeds: {}",
                case.theirs,
                counts.differ(),
                they > we
            ));
        }
    }
    println!("{table}");
    assert!(
        wrong.is_empty(),
        "otherwise than `docs/migrating.md` says: {wrong:#?}"
    );
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let saved = fs::read_to_string(&page).unwrap();
    let (head, rest) = saved.split_once("<!-- agreement -->\n").unwrap();
    let (_, tail) = rest.split_once("<!-- end of agreement -->").unwrap();
    let text = format!("{head}<!-- agreement -->\n{table}<!-- end of agreement -->{tail}");
    if env::var_os("SAVE").is_some() {
        fs::write(&page, text).unwrap();
    } else {
        assert!(
            saved == text,
            "{page:?} is out of date: run `SAVE=1 cargo test --package migrating-tests`"
        );
    }
}

/// Which of the requests at these times pass.
fn decide(theirs: Theirs, times: impl IntoIterator<Item = i64>) -> Vec<bool> {
    let server = RedisServer::start();
    let mut redis = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    theirs.decide(&mut redis, "key", &at(times))
}

#[test]
fn zset_of_times_grants_a_whole_burst() {
    let (burst, quota) = ([0; 100], "10/10s".parse().unwrap());
    assert_eq!(decide(zset(quota, "time", "after"), burst), [true; 100]);
    let unique = decide(zset(quota, "unique", "after"), burst);
    assert_eq!(unique.iter().filter(|granted| **granted).count(), 10);
    assert_eq!(
        unique,
        ours(&policy(Strategy::SlidingLog, quota), &at(burst))
    );
}

/// One per second, with two requests per second.
#[test]
fn zset_that_adds_first_locks_out() {
    let (times, quota) = (
        [0, 1, 2, 3, 4].map(|half| half * SECOND / 2),
        "1/s".parse().unwrap(),
    );
    assert_eq!(
        decide(zset(quota, "unique", "before"), times),
        [true, false, false, false, false]
    );
    assert_eq!(
        ours(&policy(Strategy::SlidingLog, quota), &at(times)),
        [true, false, true, false, true]
    );
}

/// Two in 10 s. An id that is charged at 9 s is repeated in the second window, where both charge it again.
#[test]
fn an_id_ends_with_its_window_as_in_istio() {
    let requests = [
        (0, "first"),
        (9, "again"),
        (9, "again"),
        (11, "again"),
        (12, "third"),
        (13, "fourth"),
    ];
    let server = RedisServer::start();
    let mut redis = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    let theirs = requests.map(|(second, id)| {
        let istio = Theirs::lua(ISTIO_FIXED, &[&2, &(10 * SECOND), &id]);
        istio.decide(&mut redis, "key", &at([second * SECOND]))[0]
    });
    assert_eq!(theirs, [true, true, true, true, true, false]);

    let policies = policy(
        Strategy::FixedWindow(Align::FirstHit),
        "2/10s".parse().unwrap(),
    );
    let runtime = runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let (store, start) = (LocalStore::default(), Instant::now());
        for ((second, id), expected) in requests.into_iter().zip(theirs) {
            advance(start + Duration::from_secs(second as u64) - Instant::now()).await;
            let take = Check::take(Key::GLOBAL, &policies, 1).with_id(id);
            let decision = store.check(take).await.unwrap();
            assert_eq!(decision.is_allowed(), expected, "{id} at {second} s");
        }
    });
}

/// With a capacity of 1, the funnel is full from 1 s on. At 5 s it records the time, although it denies the request of
/// 2. At 6 s it therefore adds a unit for the second since then, during most of which it was full.
#[test]
fn funnel_credits_time_while_full() {
    let quota = "1/s".parse().unwrap();
    let mut requests = at([0, 5 * SECOND, 5_900_000, 6 * SECOND]);
    requests[1].cost = 2;
    assert_eq!(
        ours(&policy(Strategy::LeakyBucket, quota), &requests),
        [true, false, true, false]
    );
    let Theirs::Rust(mut decide) = funnel(quota) else {
        panic!("a model")
    };
    let theirs: Vec<bool> = requests
        .iter()
        .map(|request| decide(request.at, request.cost))
        .collect();
    assert_eq!(theirs, [true, false, true, true]);
}

#[test]
fn tower_governors_per_second_is_an_interval() {
    let mut builder = GovernorConfigBuilder::default().key_extractor(GlobalKeyExtractor);
    let config = builder.per_second(60).burst_size(1).finish().unwrap();
    assert!(config.limiter().check_key(&()).is_ok());
    let denied = config.limiter().check_key(&()).unwrap_err();
    let wait = denied.wait_time_from(DefaultClock::default().now());
    assert!(wait > Duration::from_secs(59), "{wait:?}");
}
