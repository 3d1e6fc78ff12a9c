//! Leased quota, in real time: several instances over one Redis, and processes that are stopped and killed.

use std::collections::HashMap;
use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tower_redis_ratelimit::check::{Check, Decision, Source};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{Answer, Store};
use tower_redis_ratelimit::strategy::Refill;
use tower_redis_ratelimit::{
    Fallback, Key, Leased, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
};

use crate::support::{RedisServer, STRATEGIES, leased, until};

type Instance = Leased<Fallback<RedisStore, LocalStore>>;

pub(crate) async fn instance(url: &str, of: u32) -> Instance {
    let redis = RedisStore::builder(url)
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let store = Fallback::builder(redis, LocalStore::default())
        .deadline(Duration::from_secs(20))
        .unwrap()
        .build();
    Leased::builder(store).share(of).build()
}

async fn take(store: &impl Store, key: Key, policies: &Policies) -> Decision {
    store.check(Check::take(key, policies, 1)).await.unwrap()
}

/// Returns the maximum grants within this time, from the first check to the last reply.
fn most(strategy: Strategy, quota: Quota, time: Duration) -> u32 {
    let periods = (time.as_micros() / quota.period().as_micros()) as u32;
    match strategy {
        Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(Refill::Greedy) => {
            quota.capacity()
                + (time.as_secs_f64() * f64::from(quota.limit()) / quota.period().as_secs_f64())
                    as u32
        }
        Strategy::TokenBucket(Refill::Interval) => quota.capacity() + quota.limit() * (periods + 1),
        Strategy::SlidingLog | Strategy::SlidingWindow { .. } => quota.limit() * (periods + 1),
        _ => quota.limit() * (periods + 2),
    }
}

/// Four instances request one and a half times the quota, in parts of 8, 4, 2 and 1, with leases
/// and without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uneven_instances_use_up_a_leased_quota() {
    const TICK: Duration = Duration::from_millis(20);
    let server = RedisServer::start();
    let url = server.url();
    let instances = join_all((0..4).map(|_| instance(&url, 4))).await;
    let cases: Vec<(Strategy, Quota, [Policies; 2])> = STRATEGIES
        .into_iter()
        .map(|strategy| {
            let quota = Quota::per(1_200, Duration::from_secs(4));
            let quota = if quota_has_burst(strategy) {
                quota.burst(450)
            } else {
                quota
            };
            let plain = Policy::new("plain", strategy, quota).unwrap();
            let leased = Policy::new("leased", strategy, quota)
                .unwrap()
                .leased(Duration::from_millis(80))
                .unwrap();
            (strategy, quota, [plain.into(), leased.into()])
        })
        .collect();
    let start = Instant::now();
    let tasks = cases
        .iter()
        .enumerate()
        .flat_map(|(number, (_, _, policies))| {
            instances
                .iter()
                .zip([8, 4, 2, 1])
                .map(move |(store, part)| async move {
                    let key = Key::from(number as u64);
                    let (mut granted, mut leased, mut due) = ([0; 2], 0, 0);
                    let mut ticks = tokio::time::interval(TICK);
                    for _ in 0..250 {
                        ticks.tick().await;
                        // 450 per second in total.
                        due += 9 * part;
                        let asks = (0..due / 15)
                            .flat_map(|_| policies)
                            .map(|policies| take(store, key, policies));
                        due %= 15;
                        for (i, decision) in join_all(asks).await.into_iter().enumerate() {
                            granted[i % 2] += u32::from(decision.is_allowed());
                            leased += u32::from(decision.source() == Source::Leased);
                        }
                    }
                    (number, granted, leased)
                })
        });
    let results = join_all(tasks).await;
    let time = start.elapsed();
    for (number, (strategy, quota, _)) in cases.iter().enumerate() {
        let sum = |of: fn(&(usize, [u32; 2], u32)) -> u32| {
            results
                .iter()
                .filter(|r| r.0 == number)
                .map(of)
                .sum::<u32>()
        };
        let (plain, leased, saved) = (sum(|r| r.1[0]), sum(|r| r.1[1]), sum(|r| r.2));
        println!("{strategy:?}: {leased} of {plain}, {saved} from memory, in {time:?}");
        assert!(
            leased <= most(*strategy, *quota, time),
            "{strategy:?}: {leased} in {time:?}"
        );
        // A busy machine sends fewer requests. Windows of two lengths turn at different moments,
        // and one may grant two limits by the end: expect no more than the rate.
        // `leases::tests::load` controls the clock instead.
        let wanted = plain.min(
            (time.as_secs_f64() / quota.period().as_secs_f64() * f64::from(quota.limit())) as u32,
        );
        assert!(
            leased * 100 >= wanted * 80,
            "{strategy:?}: {leased}, and without leases {plain}"
        );
        assert!(saved > 0, "{strategy:?}");
    }
}

fn quota_has_burst(strategy: Strategy) -> bool {
    Policy::new("p", strategy, Quota::per_second(1).burst(2)).is_ok()
}

/// Upper bound of the units that were charged for blocks and cannot be spent.
#[derive(Clone, Default)]
struct Lost(Arc<AtomicU64>);

impl Observer for Lost {
    fn notify(&self, event: &Event<'_>) {
        if let Event::LeasedBlockEnded { lost, .. } = *event {
            self.0.fetch_add(lost, Relaxed);
        }
    }
}

/// Redis pauses repeatedly for longer than the fallback's deadline. Every charge was granted, is still left, or is
/// reported as lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_pauses_lose_nothing() {
    const LIMIT: u32 = 20_000;
    let pause = Duration::from_millis(150);
    for strategy in [Strategy::SlidingLog, Strategy::Gcra] {
        let (server, lost) = (RedisServer::start(), Lost::default());
        let redis = RedisStore::builder(server.url())
            .timeout(Duration::from_secs(20))
            .connect()
            .await
            .unwrap();
        let fallback = Fallback::builder(redis.clone(), LocalStore::default())
            .deadline(Duration::from_millis(50))
            .unwrap()
            .build();
        let store = Leased::builder(fallback).observer(lost.clone()).build();
        let policies = leased(strategy, LIMIT, Duration::from_millis(100));
        let mut ticks = tokio::time::interval(Duration::from_millis(2));
        let (mut checks, mut by_source) = (vec![], HashMap::new());
        for tick in 0..15 * 150 {
            if tick % 150 == 100 {
                let millis = pause.as_millis();
                let _: () = server.command(&format!("CLIENT PAUSE {millis}")).await;
            }
            ticks.tick().await;
            checks.extend((0..3).map(|_| {
                let (store, policies) = (store.clone(), policies.clone());
                tokio::spawn(async move { take(&store, Key::GLOBAL, &policies).await })
            }));
        }
        for decision in join_all(checks).await.into_iter().map(Result::unwrap) {
            *by_source.entry(decision.source()).or_insert(0) += decision.granted();
        }
        store.shutdown().await;
        let granted: u32 = by_source.values().sum();
        // Grants of the fallback are charged when Redis is back. A bucket refunds a block minus the drained part.
        let may_drain = u32::from(strategy == Strategy::Gcra);
        let lost = || lost.0.load(Relaxed) as u32;
        until("all of it is accounted for", async || {
            let peek = Check::peek(Key::GLOBAL, &policies, 1);
            let left = redis.check(peek).await.unwrap().remaining();
            let missing = LIMIT.checked_sub(granted + left);
            println!(
                "{strategy:?}: {by_source:?}, {left} left, {missing:?} missing, {} lost",
                lost()
            );
            missing.is_some_and(|missing| missing <= lost() + may_drain)
        })
        .await;
        // Redis is paused half of the time, and each pause is an outage for a fallback with this deadline.
        assert!(by_source[&Source::Leased] > granted / 10, "{by_source:?}");
    }
}

const LEASE: Duration = Duration::from_millis(400);
const LIMIT: u32 = 100_000;

/// A log whose charges do not expire during the test.
fn log() -> Policies {
    let quota = Quota::per(LIMIT, Duration::from_secs(86_400));
    Policy::new("p", Strategy::SlidingLog, quota)
        .unwrap()
        .leased(LEASE)
        .unwrap()
        .into()
}

/// Sends checks until it is killed. Prints its grants so far, and whether it has just slept for
/// longer than a lease.
async fn worker(url: &str) {
    let (store, policies) = (instance(url, 2).await, log());
    let (mut granted, mut leased, mut last) = (0, 0, Instant::now());
    loop {
        let now = Instant::now();
        let has_slept = now - last > LEASE;
        last = now;
        for i in 0..4 {
            let decision = take(&store, Key::GLOBAL, &policies).await;
            granted += u32::from(decision.is_allowed());
            let from_memory = decision.source() == Source::Leased;
            leased += u32::from(from_memory);
            if has_slept && i == 0 {
                println!("\nslept {from_memory}");
            }
        }
        println!("\nsum {granted} {leased}");
        sleep(Duration::from_millis(1)).await;
    }
}

fn signal(child: &Child, signal: &str) {
    let status = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

/// A stopped process does not spend a block after its lease time, and the block of a killed process
/// is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_and_killed_processes_spend_nothing_late() {
    if let Ok(url) = env::var("LEASE_WORKER_URL") {
        return worker(&url).await;
    }
    let server = RedisServer::start();
    let test = "leases::redis::stopped_and_killed_processes_spend_nothing_late";
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("LEASE_WORKER_URL", server.url())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let reader = std::thread::spawn(move || lines.map_while(Result::ok).collect::<Vec<String>>());
    for _ in 0..3 {
        sleep(Duration::from_millis(900)).await;
        signal(&child, "-STOP");
        sleep(LEASE * 2).await;
        signal(&child, "-CONT");
    }
    sleep(Duration::from_millis(900)).await;
    signal(&child, "-KILL");
    child.wait().unwrap();
    let lines = reader.join().unwrap();
    let slept: Vec<&str> = lines
        .iter()
        .filter_map(|line| line.strip_prefix("slept "))
        .collect();
    assert!(
        !slept.is_empty() && slept.iter().all(|leased| *leased == "false"),
        "{slept:?}"
    );
    let sum = lines
        .iter()
        .rev()
        .find_map(|line| line.strip_prefix("sum "))
        .unwrap();
    let (granted, leased) = sum.split_once(' ').unwrap();
    let (granted, leased): (u32, u32) = (granted.parse().unwrap(), leased.parse().unwrap());
    let store = server.store();
    let charged = LIMIT
        - store
            .check(Check::peek(Key::GLOBAL, &log(), 1))
            .await
            .unwrap()
            .remaining();
    // The units that it was about to print, and one and a half blocks of half a lease time each.
    let most = granted + 4 + 4 * LEASE.as_millis() as u32;
    println!("{granted} granted, {leased} of that from memory; {charged} charged");
    assert!(
        leased > granted / 2 && (granted..=most).contains(&charged),
        "{granted}, {leased}, {charged}"
    );
}

/// Sends checks one after the other, each a millisecond after the last reply. Returns the times of all replies.
async fn time_checks(store: &impl Store, policies: &Policies, time: Duration) -> Vec<Duration> {
    let (mut times, start) = (vec![], Instant::now());
    while start.elapsed() < time {
        let sent_at = Instant::now();
        let _ = timeout(time, take(store, Key::GLOBAL, policies)).await;
        times.push(sent_at.elapsed());
        sleep(Duration::from_millis(1)).await;
    }
    times
}

/// Two threads with a runtime each share a store. The thread of the task that charges the blocks is blocked while it
/// charges one.
#[test]
fn a_blocked_thread_delays_no_other() {
    const BLOCKED: Duration = Duration::from_secs(2);
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let server = RedisServer::start();
    let redis = RedisStore::connect_lazy(server.url()).unwrap();
    let store = Leased::new(Fallback::new(redis, LocalStore::default()));
    let quota = Quota::per_second(100_000).burst(400_000);
    let policies = Policy::new("all", Strategy::Gcra, quota)
        .and_then(|policy| policy.leased(Duration::from_millis(100)))
        .unwrap()
        .into();
    let time_others = || {
        runtime().block_on(async {
            let tasks = (0..4).map(|_| time_checks(&store, &policies, BLOCKED));
            join_all(tasks).await.concat()
        })
    };
    let blocking = runtime();
    let mut times = vec![];
    for _ in 0..2 {
        blocking.block_on(async {
            until("a block decides", async || {
                let decision = take(&store, Key::GLOBAL, &policies).await;
                decision.source() == Source::Leased
            })
            .await;
            let spend = || store.check(Check::take(Key::GLOBAL, &policies, 1));
            while let Answer::Ready { .. } = spend() {}
            let others = std::thread::scope(|scope| scope.spawn(time_others).join());
            times.extend(others.unwrap());
        });
    }
    let late = times.iter().filter(|time| time.as_millis() > 225).count();
    let longest = times.iter().max().unwrap();
    println!(
        "{late} of {} took more than 225 ms, the longest {longest:?}",
        times.len()
    );
    assert!(*longest < BLOCKED / 2, "{longest:?}");
}
