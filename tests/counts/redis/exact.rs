//! Exactly the limit is granted, with any number of concurrent callers. Leased policies never grant
//! more; they may grant less.

use std::env;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, RedisStore, Strategy};

use crate::leases::redis::instance;
use crate::support::{RedisServer, STRATEGIES, is_gradual, leased, policy};

const PROCESSES: usize = 4;
const TASKS: usize = 64;
const LIMIT: usize = 1_000;

/// Runs the test of this name in 4 processes, each with its own store, and adds up the grants per
/// place that they print. The test finds the URL in its environment when it runs as one of the
/// processes.
fn granted_by_processes(
    test: &str,
    server: &RedisServer,
    places: usize,
    is_leased: bool,
) -> Vec<usize> {
    let start = |number: usize| -> Child {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env("EXACT_WORKER_URL", server.url())
            .env("EXACT_WORKER_NUMBER", number.to_string())
            .env("EXACT_WORKER_LEASED", is_leased.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let workers: Vec<_> = (0..PROCESSES).map(start).collect();
    let mut granted = vec![0; places];
    for worker in workers {
        let output = worker.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text
            .lines()
            .filter_map(|line| line.strip_prefix("granted ")?.split_once(": "));
        let counts: Vec<(usize, usize)> = lines
            .map(|(place, n)| (place.parse().unwrap(), n.parse().unwrap()))
            .collect();
        assert_eq!(counts.len(), places, "a line for each place");
        for (place, count) in counts {
            granted[place] += count;
        }
    }
    granted
}

/// A store with a long timeout, for busy machines.
async fn store(url: &str) -> RedisStore {
    RedisStore::builder(url)
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap()
}

/// The policy, leased or not.
fn policies(strategy: Strategy, limit: u32, is_leased: bool) -> Policies {
    match is_leased {
        true => leased(strategy, limit, Duration::from_millis(400)),
        false => policy(strategy, &format!("{limit}/100d")),
    }
}

/// Returns `true` if this worker leases.
fn is_leased() -> bool {
    env::var("EXACT_WORKER_LEASED").is_ok_and(|is_leased| is_leased == "true")
}

/// Prints the grants per place, each on a separate line, since the test runner prints too.
fn print(granted: &[usize]) {
    for (place, granted) in granted.iter().enumerate() {
        println!("\ngranted {place}: {granted}");
    }
}

/// 4 processes of 64 tasks, one key, and a period in which no charge expires. The test starts
/// itself as the processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_processes_are_granted_exactly_the_limit() {
    match env::var("EXACT_WORKER_URL") {
        Ok(url) if is_leased() => {
            let store = instance(&url, PROCESSES as u32).await;
            one_key(store.clone(), true).await;
            return store.shutdown().await;
        }
        Ok(url) => return one_key(store(&url).await, false).await,
        Err(_) => {}
    }
    let test = "counts::redis::exact::many_processes_are_granted_exactly_the_limit";
    let server = RedisServer::start();
    let granted = granted_by_processes(test, &server, STRATEGIES.len(), false);
    assert_eq!(granted, vec![LIMIT; STRATEGIES.len()], "{STRATEGIES:?}");
    // The final refund of one process may come too late for the others.
    let server = RedisServer::start();
    let granted = granted_by_processes(test, &server, STRATEGIES.len(), true);
    let store = server.store();
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        let check = Check::peek(everybody(i), &policies(strategy, LIMIT as u32, true), 1);
        let left = store.check(check).await.unwrap().remaining() as usize;
        println!("{strategy:?}: {} granted, {left} left", granted[i]);
        // A bucket refunds a block minus its drain since then: here far less than a unit in total,
        // which costs at most one whole unit.
        let lost = usize::from(is_gradual(strategy));
        assert!(
            (LIMIT - lost..=LIMIT).contains(&(granted[i] + left)),
            "{strategy:?}: {} granted, {left} left",
            granted[i]
        );
        assert!(left < LIMIT / 4, "{strategy:?}: {left} are left");
    }
}

/// The key of a strategy; the two alignments of a fixed window would otherwise share one.
fn everybody(i: usize) -> Key {
    Key::new(format!("everybody-{i}"))
}

/// Requests twice its share of the limit with every strategy.
async fn one_key(store: impl Store, is_leased: bool) {
    let mut granted = vec![];
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        let policies = policies(strategy, LIMIT as u32, is_leased);
        let tasks = (0..TASKS).map(|_| {
            let (store, policies) = (store.clone(), policies.clone());
            let key = everybody(i);
            tokio::spawn(async move {
                let mut granted = 0;
                for _ in 0..2 * LIMIT / PROCESSES / TASKS + 1 {
                    let decision = store.check(Check::take(key, &policies, 1)).await.unwrap();
                    granted += usize::from(decision.is_allowed());
                }
                granted
            })
        });
        granted.push(join_all(tasks).await.into_iter().map(Result::unwrap).sum());
    }
    print(&granted);
}

const KEYS: usize = 50;
/// The limit of each of these keys.
const FEW: u32 = 30;

/// 4 processes, with 50 keys per strategy for costs of 1, and 50 for random costs, concurrently.
/// The first are granted the limit, the others never more, and at the end Redis has counted exactly
/// the grants.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_count_exactly() {
    if let Ok(url) = env::var("EXACT_WORKER_URL") {
        return many_keys(&url).await;
    }
    let server = RedisServer::start();
    let test = "counts::redis::exact::many_keys_count_exactly";
    let granted = granted_by_processes(test, &server, 2 * STRATEGIES.len() * KEYS, false);

    let store = server.store();
    let policies = STRATEGIES.map(|strategy| policy(strategy, &format!("{FEW}/100d")));
    let mut random = 0;
    for (place, granted) in granted.into_iter().enumerate() {
        let (strategy, costs) = of(place);
        let context = format!("{:?}, key {place}, {costs:?}", STRATEGIES[strategy]);
        match costs {
            Costs::One => assert_eq!(granted, FEW as usize, "{context}"),
            Costs::Random => assert!(granted <= FEW as usize, "{context}: {granted}"),
        }
        random += usize::from(costs == Costs::Random) * granted;
        let left = store
            .check(Check::peek(key(place), &policies[strategy], 1))
            .await
            .unwrap()
            .remaining();
        assert_eq!(
            left as usize,
            FEW as usize - granted,
            "{context}: {granted} granted"
        );
    }
    assert!(
        random > STRATEGIES.len() * KEYS * FEW as usize / 2,
        "only {random} were granted at random"
    );
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Costs {
    One,
    Random,
}

/// Returns the strategy of a place, and the costs that are requested there.
fn of(place: usize) -> (usize, Costs) {
    let costs = if place < STRATEGIES.len() * KEYS {
        Costs::One
    } else {
        Costs::Random
    };
    (place % STRATEGIES.len(), costs)
}

fn key(place: usize) -> Key {
    Key::new(format!("key-{place}"))
}

/// Sends checks in all places, in random order: for costs of 1, more than its share.
async fn many_keys(url: &str) {
    let number: u64 = env::var("EXACT_WORKER_NUMBER").unwrap().parse().unwrap();
    let mut rng = Rng::with_seed(number);
    let store = store(url).await;
    let policies = STRATEGIES.map(|strategy| policy(strategy, &format!("{FEW}/100d")));
    let places = 2 * STRATEGIES.len() * KEYS;
    let mut asks: Vec<(usize, Check)> = vec![];
    for place in 0..places {
        let (strategy, costs) = of(place);
        for _ in 0..FEW as usize / PROCESSES + 2 {
            let policies = &policies[strategy];
            let check = match (costs, rng.bool()) {
                (Costs::One, _) => Check::take(key(place), policies, 1),
                (Costs::Random, true) => Check::take(key(place), policies, rng.u32(1..=FEW / 2)),
                (Costs::Random, false) => Check::up_to(key(place), policies, rng.u32(1..=FEW / 2)),
            };
            asks.push((place, check));
        }
    }
    rng.shuffle(&mut asks);
    let tasks = asks.chunks(asks.len().div_ceil(TASKS)).map(|asks| {
        let (store, asks) = (store.clone(), asks.to_vec());
        tokio::spawn(async move {
            let mut granted = Vec::with_capacity(asks.len());
            for (place, check) in asks {
                granted.push((place, store.check(check).await.unwrap().granted() as usize));
            }
            granted
        })
    });
    let mut granted = vec![0; places];
    for (place, count) in join_all(tasks).await.into_iter().flat_map(Result::unwrap) {
        granted[place] += count;
    }
    print(&granted);
}

/// Several policies are charged together or not at all: a denial by one charges no other.
#[tokio::test]
async fn several_policies_are_all_or_nothing() {
    use tower_redis_ratelimit::{Policies, Policy, Quota, Strategy};

    let server = RedisServer::start();
    let store = server.store();
    let policies = Policies::new([
        Policy::new("few", Strategy::Gcra, Quota::per_hour(5)).unwrap(),
        Policy::new(
            "many",
            Strategy::FixedWindow(Default::default()),
            Quota::per_day(100),
        )
        .unwrap(),
    ])
    .unwrap();
    let checks = (0..50).map(|_| store.check(Check::take(Key::new("ann"), &policies, 1)));
    let decisions: Vec<_> = join_all(checks)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert_eq!(
        decisions
            .iter()
            .filter(|decision| decision.is_allowed())
            .count(),
        5
    );
    assert!(
        decisions
            .iter()
            .all(|decision| decision.policy().name() == "few")
    );
    let left = store
        .check(Check::peek(Key::new("ann"), &policies, 1))
        .await
        .unwrap();
    let left: Vec<_> = left.each().map(|each| each.remaining()).collect();
    assert_eq!(left, [0, 95], "45 denials charged nothing");
}
