//! Exactly the limit is granted, however many ask at once. Of what is leased no more is granted, and what is not is left.

use std::env;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, RedisStore, Strategy};

use crate::leases::instance;
use crate::support::{RedisServer, STRATEGIES, is_gradual, leased, policy};

const PROCESSES: usize = 4;
const TASKS: usize = 64;
const LIMIT: usize = 1_000;

/// Runs the test of this name in 4 processes, each with a store of its own, and adds up what they print: lines of what
/// was granted where, of so many places. A test that does so finds the URL in the environment when it is run as one of
/// them.
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

/// A store that is given time, however busy the machine is.
async fn store(url: &str) -> RedisStore {
    RedisStore::builder(url)
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap()
}

/// The same policy, and one that is leased.
fn policies(strategy: Strategy, limit: u32, is_leased: bool) -> Policies {
    match is_leased {
        true => leased(strategy, limit, Duration::from_millis(400)),
        false => policy(strategy, &format!("{limit}/100d")),
    }
}

/// Whether this worker leases.
fn is_leased() -> bool {
    env::var("EXACT_WORKER_LEASED").is_ok_and(|is_leased| is_leased == "true")
}

/// Prints what was granted in each place, on lines of their own: the test runner prints too.
fn print(granted: &[usize]) {
    for (place, granted) in granted.iter().enumerate() {
        println!("\ngranted {place}: {granted}");
    }
}

/// 4 processes of 64 tasks, one key, a period in which nothing flows back: the test starts itself as the processes.
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
    let test = "exact::many_processes_are_granted_exactly_the_limit";
    let server = RedisServer::start();
    let granted = granted_by_processes(test, &server, STRATEGIES.len(), false);
    assert_eq!(granted, vec![LIMIT; STRATEGIES.len()], "{STRATEGIES:?}");
    // What one process refunds in the end may come too late for the others.
    let server = RedisServer::start();
    let granted = granted_by_processes(test, &server, STRATEGIES.len(), true);
    let store = store(&server.url()).await;
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        let check = Check::peek(everybody(i), &policies(strategy, LIMIT as u32, true), 1);
        let left = store.check(check).await.unwrap().remaining() as usize;
        println!("{strategy:?}: {} granted, {left} left", granted[i]);
        // A bucket refunds a block less what has drained since: here far less than a unit of all blocks together, and what
        // is left is whole units.
        let lost = usize::from(is_gradual(strategy));
        assert!(
            (LIMIT - lost..=LIMIT).contains(&(granted[i] + left)),
            "{strategy:?}: {} granted, {left} left",
            granted[i]
        );
        assert!(left < LIMIT / 4, "{strategy:?}: {left} are left");
    }
}

/// Both alignments of a fixed window have keys alike.
fn everybody(i: usize) -> Key {
    Key::new(format!("everybody-{i}"))
}

/// Asks for twice its share of the limit with every strategy.
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

/// 4 processes, 50 keys of each strategy for costs of 1, and 50 for random ones, all at once: the first are granted the
/// limit, the others never more, and in the end Redis has counted what was granted, neither more nor less.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_count_exactly() {
    if let Ok(url) = env::var("EXACT_WORKER_URL") {
        return many_keys(&url).await;
    }
    let server = RedisServer::start();
    let test = "exact::many_keys_count_exactly";
    let granted = granted_by_processes(test, &server, 2 * STRATEGIES.len() * KEYS, false);

    let store = store(&server.url()).await;
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

/// The strategy of a place, and what is asked there.
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

/// Asks in all places, in an order of its own: for costs of 1, more than its share.
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

/// Several policies are charged together or not at all: what one denies, the others do not count.
#[tokio::test]
async fn several_policies_are_all_or_nothing() {
    use tower_redis_ratelimit::{Policies, Policy, Quota, Strategy};

    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
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
