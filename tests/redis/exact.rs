//! Exactly the limit is granted, however many ask at once.

use std::env;
use std::process::{Command, Stdio};

use futures_util::future::join_all;
use tower_redis_ratelimit::{Check, Key, RedisStore, Store};

use crate::support::{RedisServer, STRATEGIES, policy};

const PROCESSES: usize = 4;
const TASKS: usize = 64;
const LIMIT: usize = 1_000;

/// 4 processes of 64 tasks, one key, a period in which nothing flows back: the test starts itself as the processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_processes_are_granted_exactly_the_limit() {
    if let Ok(url) = env::var("EXACT_WORKER_URL") {
        return worker(&url).await;
    }
    let server = RedisServer::start();
    let workers: Vec<_> = (0..PROCESSES)
        .map(|_| {
            Command::new(env::current_exe().unwrap())
                .args(["--exact", "exact::many_processes_are_granted_exactly_the_limit", "--nocapture"])
                .env("EXACT_WORKER_URL", server.url())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut granted = vec![0; STRATEGIES.len()];
    for worker in workers {
        let output = worker.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        for (i, total) in granted.iter_mut().enumerate() {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("granted {i}: "))).expect("a count");
            *total += line.parse::<usize>().unwrap();
        }
    }
    assert_eq!(granted, vec![LIMIT; STRATEGIES.len()], "{STRATEGIES:?}");
}

/// Asks for twice its share of the limit with every strategy, and prints what it was granted.
async fn worker(url: &str) {
    let store = RedisStore::connect(url).await.unwrap();
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        let policies = policy(strategy, "1000/100d");
        let tasks = (0..TASKS).map(|_| {
            let (store, policies) = (store.clone(), policies.clone());
            // Both alignments of a fixed window have keys alike.
            let key = Key::new(format!("everybody-{i}"));
            tokio::spawn(async move {
                let mut granted = 0;
                for _ in 0..2 * LIMIT / PROCESSES / TASKS + 1 {
                    let decision = store.check(Check::take(key, &policies, 1)).await.unwrap();
                    granted += usize::from(decision.is_allowed());
                }
                granted
            })
        });
        let granted: usize = join_all(tasks).await.into_iter().map(Result::unwrap).sum();
        // On a line of its own: the test runner prints too.
        println!("\ngranted {i}: {granted}");
    }
}

/// Several policies are charged together or not at all: what one denies, the others do not count.
#[tokio::test]
async fn several_policies_are_all_or_nothing() {
    use tower_redis_ratelimit::{Policies, Policy, Quota, Strategy};

    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    let policies = Policies::new([
        Policy::new("few", Strategy::Gcra, Quota::per_hour(5)).unwrap(),
        Policy::new("many", Strategy::FixedWindow(Default::default()), Quota::per_day(100)).unwrap(),
    ])
    .unwrap();
    let checks = (0..50).map(|_| store.check(Check::take(Key::new("ann"), &policies, 1)));
    let decisions: Vec<_> = join_all(checks).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(decisions.iter().filter(|decision| decision.is_allowed()).count(), 5);
    assert!(decisions.iter().all(|decision| decision.policy().name() == "few"));
    let left = store.check(Check::peek(Key::new("ann"), &policies, 1)).await.unwrap();
    let left: Vec<_> = left.each().map(|each| each.remaining()).collect();
    assert_eq!(left, [0, 95], "45 denials charged nothing");
}
