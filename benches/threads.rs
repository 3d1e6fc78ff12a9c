//! `cargo bench -p benches --bench threads`
//!
//! The cost of a check on threads with a current-thread runtime each: over one shared store, and over a store each;
//! compared with one multi-threaded runtime with the same number of threads. Rounds of all in turn, and medians.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a benchmark measures time, and fails by panicking"
)]

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use benches::page::median;
use benches::support::RedisServer;
use futures_util::future::join_all;
use tokio::runtime::{Builder, Runtime};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, Policy, Quota, RedisStore, Strategy};

const ROUNDS: usize = 5;
const TIME: Duration = Duration::from_secs(1);
const THREADS: [usize; 3] = [2, 4, 8];
/// Checks at the same time, over all threads.
const CHECKS: usize = 256;
const CALLERS: u64 = 10_000;
/// A machine that stalls is no outage.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy)]
enum Way {
    Shared,
    Each,
    MultiThread,
}

const WAYS: [(Way, &str); 3] = [
    (Way::Shared, "a runtime each, one store"),
    (Way::Each, "a runtime each, a store each"),
    (Way::MultiThread, "one multi-threaded runtime, one store"),
];

/// Connections, checks in a script call, processor time of a check here and in Redis in microseconds, and decisions
/// per second.
struct Row([Vec<f64>; 5]);

fn main() {
    let tools = Builder::new_multi_thread().enable_all().build().unwrap();
    let server = tools.block_on(async { RedisServer::start() });
    let cases: Vec<_> = THREADS
        .into_iter()
        .flat_map(|threads| WAYS.map(|(way, name)| (threads, way, name)))
        .collect();
    let mut rows: Vec<_> = cases.iter().map(|_| Row(Default::default())).collect();
    for _ in 0..ROUNDS {
        for ((threads, way, _), row) in cases.iter().zip(&mut rows) {
            let measured = measure(&tools, &server, *threads, *way);
            for (values, value) in row.0.iter_mut().zip(measured) {
                values.push(value);
            }
        }
    }
    println!("| threads | | connections | checks a call | here, us | in Redis, us | decisions/s |");
    println!("|--:|---|--:|--:|--:|--:|--:|");
    for ((threads, _, name), Row(values)) in cases.into_iter().zip(rows) {
        let [connections, batch, here, redis, decisions] = values.map(median);
        println!(
            "| {threads} | {name} | {connections} | {batch:.0} | {here:.2} | {redis:.2} | {decisions:.0} |"
        );
    }
}

/// Processor time of this process in seconds.
fn processor_time() -> f64 {
    /// Ticks of the kernel in a second.
    const TICKS: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let fields: Vec<f64> = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|ticks| ticks.parse().unwrap())
        .collect();
    fields.iter().sum::<f64>() / TICKS
}

/// Processor time of Redis in seconds.
async fn redis_time(server: &RedisServer) -> f64 {
    let info: String = server.command("INFO cpu").await;
    let times = ["used_cpu_user:", "used_cpu_sys:"].map(|field| {
        let line = info.lines().find_map(|line| line.strip_prefix(field));
        line.unwrap().trim().parse::<f64>().unwrap()
    });
    times.iter().sum()
}

fn measure(tools: &Runtime, server: &RedisServer, threads: usize, way: Way) -> [f64; 5] {
    let store = || {
        RedisStore::builder(server.url())
            .timeout(PATIENCE)
            .connect_lazy()
            .unwrap()
    };
    let quota = Quota::per_second(1_000_000_000);
    let policies: Policies = Policy::new("api", Strategy::Gcra, quota).unwrap().into();
    let calls_before = tools.block_on(server.calls("evalsha"));
    let (here_before, redis_before) = (processor_time(), tools.block_on(redis_time(server)));
    let (decisions, shared) = (Arc::new(AtomicU64::new(0)), store());
    let until = Instant::now() + TIME;
    let ask = |count: usize, seed: usize, store: RedisStore| {
        let (decisions, policies) = (Arc::clone(&decisions), policies.clone());
        join_all((0..count).map(move |i| {
            let mut rng = fastrand::Rng::with_seed((seed * CHECKS + i) as u64);
            let (store, policies) = (store.clone(), policies.clone());
            let decisions = Arc::clone(&decisions);
            async move {
                while Instant::now() < until {
                    let caller = Key::new(rng.u64(..CALLERS).to_string());
                    let _ = store
                        .check(Check::take(caller, &policies, 1))
                        .await
                        .unwrap();
                    decisions.fetch_add(1, Relaxed);
                }
            }
        }))
    };
    let connections = AtomicU64::new(0);
    thread::scope(|scope| {
        if let Way::MultiThread = way {
            let asks = (0..CHECKS).map(|i| ask(1, i, shared.clone()));
            let asks: Vec<_> = asks.collect();
            scope.spawn(move || {
                let runtime = Builder::new_multi_thread()
                    .worker_threads(threads)
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async { join_all(asks.into_iter().map(tokio::spawn)).await });
            });
        } else {
            for i in 0..threads {
                let store = match way {
                    Way::Each => store(),
                    _ => shared.clone(),
                };
                let asks = ask(CHECKS / threads, i, store);
                scope.spawn(move || {
                    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(asks);
                });
            }
        }
        thread::sleep(TIME / 2);
        let clients = tools.block_on(server.info("clients", "connected_clients"));
        connections.store(clients - 1, Relaxed);
    });
    let here = processor_time() - here_before;
    let redis = tools.block_on(redis_time(server)) - redis_before;
    let calls = tools.block_on(server.calls("evalsha")) - calls_before;
    let decisions = decisions.load(Relaxed) as f64;
    [
        connections.load(Relaxed) as f64,
        decisions / calls as f64,
        here * 1e6 / decisions,
        redis * 1e6 / decisions,
        decisions / TIME.as_secs_f64(),
    ]
}
