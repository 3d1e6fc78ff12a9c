//! `cargo bench -p benches --bench waiting`
//!
//! Requests that wait, in instances at different distances from Redis: the used part of the quota, and the part of
//! the last instance. A proxy delays each direction. `-- TEXT...` runs only the rows whose name contains one of the
//! texts. `-- --save` writes the table into `benches/RESULTS.md`.

#![allow(
    missing_docs,
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a benchmark fails by panicking, reads the time, and uses a part of the tests' proxies"
)]

#[path = "../tests/support/devices.rs"]
mod devices;

use std::convert::Infallible;
use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use benches::page::Table;
use benches::support::{self, RedisServer};
use tokio::runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{CallLimitLayer, Key, Limiter, Policies, Policy, RedisStore, Strategy};

/// Instances whose requests wait for one quota.
struct Row {
    strategy: Strategy,
    quota: &'static str,
    /// For each instance, microseconds to Redis, one way. 0 is without a proxy.
    distances: &'static [u64],
    /// Number of requests of each instance that wait at a time.
    waiters: usize,
    seconds: u64,
}

const FIXED: Strategy = Strategy::FixedWindow(Align::Clock {
    offset: Duration::ZERO,
});
const FAR: &[u64] = &[0, 0, 25_000];
const ROWS: [Row; 7] = [
    row(Strategy::Gcra, "1000/s burst 1", &[2_500], 100, 10),
    row(Strategy::Gcra, "2000/s burst 10", &[5_000], 100, 10),
    row(Strategy::Gcra, "10000/s burst 10", &[1_000], 100, 5),
    row(Strategy::Gcra, "10000/s burst 10", &[1_000; 3], 100, 5),
    row(Strategy::Gcra, "100/s", FAR, 30, 30),
    row(FIXED, "100/s", FAR, 150, 30),
    row(Strategy::SlidingLog, "100/s", FAR, 150, 30),
];

const fn row(
    strategy: Strategy,
    quota: &'static str,
    distances: &'static [u64],
    waiters: usize,
    seconds: u64,
) -> Row {
    Row {
        strategy,
        quota,
        distances,
        waiters,
        seconds,
    }
}

/// Longer than the bench.
const LONG: Duration = Duration::from_secs(3_600);
/// Limit of requests in flight, and how much later than the first instance the second one starts.
const SLOTS: u32 = 10;
const LATER: Duration = Duration::from_secs(2);

fn main() {
    let (_, texts): (Vec<String>, Vec<String>) =
        env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let wants = |name: &str| texts.is_empty() || texts.iter().any(|text| name.contains(text));
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let mut table = Table::new(
        "| waiting requests of each instance | ms to Redis, one way | used of the quota | part of the last instance |\n\
         |---|--:|--:|--:|",
    );
    for row in ROWS {
        let name = format!("{} of `{}`, {}", row.waiters, row.strategy, row.quota);
        if wants(&name) {
            let granted = runtime.block_on(measure(&row));
            table.add(&format!("| {name} | {}", row.line(&granted)));
        }
    }
    let name = format!("50 in flight, limit {SLOTS}, calls of 80 to 120 ms");
    if wants(&name) {
        let calls = runtime.block_on(in_flight(Duration::from_secs(60)));
        let part = f64::from(calls[1]) / f64::from(calls[0] + calls[1]);
        table.add(&format!(
            "| {name}; the last one starts later | 0 / 0 | - | {part:.3} |"
        ));
    }
    table.save("waiting");
}

impl Row {
    /// The rest of the table's line, for the grants of each instance.
    fn line(&self, granted: &[u32]) -> String {
        let sum = f64::from(granted.iter().sum::<u32>());
        let policies = self.policies();
        let limit = f64::from(policies[0].quota().limit()) * self.seconds as f64;
        let distances: Vec<_> = self.distances.iter().map(|us| *us as f64 / 1e3).collect();
        let distances = distances.iter().map(f64::to_string).collect::<Vec<_>>();
        let last = f64::from(granted[granted.len() - 1]) / sum;
        let last = match granted {
            [_] => "-".to_owned(),
            _ => format!("{last:.3}"),
        };
        format!("{} | {:.3} | {last} |", distances.join(" / "), sum / limit)
    }

    fn policies(&self) -> Policies {
        support::policy(self.strategy, self.quota)
    }
}

/// Returns the number of grants of each instance.
async fn measure(row: &Row) -> Vec<u32> {
    let server = RedisServer::start();
    let mut tasks = JoinSet::new();
    let mut granted = vec![];
    let mut limiters = vec![];
    for us in row.distances {
        let url = match us {
            0 => server.url(),
            us => devices::far(server.port(), Duration::from_micros(*us)).await,
        };
        limiters.push(Limiter::new(store(&url), row.policies()));
    }
    let end = Instant::now() + Duration::from_secs(row.seconds);
    for limiter in limiters {
        let count = Arc::new(AtomicU32::new(0));
        granted.push(Arc::clone(&count));
        for _ in 0..row.waiters {
            let (limiter, count) = (limiter.clone(), Arc::clone(&count));
            tasks.spawn(async move {
                while limiter
                    .wait(Key::GLOBAL, 1, LONG)
                    .await
                    .unwrap()
                    .is_allowed()
                {
                    count.fetch_add(1, Relaxed);
                }
            });
        }
    }
    sleep_until(end).await;
    let granted = granted.iter().map(|count| count.load(Relaxed)).collect();
    tasks.shutdown().await;
    granted
}

/// Returns the number of calls of each instance, since the second one has started.
async fn in_flight(time: Duration) -> [u32; 2] {
    let server = RedisServer::start();
    let calls = Arc::new([const { AtomicU32::new(0) }; 2]);
    let mut tasks = JoinSet::new();
    let mut before = [0; 2];
    for instance in 0..2 {
        if instance == 1 {
            sleep(LATER).await;
            before = [calls[0].load(Relaxed), 0];
        }
        let counted = Arc::clone(&calls);
        let policy = Policy::in_flight("jobs", SLOTS).unwrap();
        let layer = CallLimitLayer::new(store(&server.url()), |_: &()| Some(Key::GLOBAL), policy);
        let service = layer.wait(LONG).layer(service_fn(move |()| {
            let counted = Arc::clone(&counted);
            async move {
                sleep(Duration::from_millis(80 + fastrand::u64(..40))).await;
                counted[instance].fetch_add(1, Relaxed);
                Ok::<_, Infallible>(())
            }
        }));
        for _ in 0..50 {
            let service = service.clone();
            tasks.spawn(async move {
                loop {
                    service.clone().oneshot(()).await.unwrap();
                }
            });
        }
    }
    sleep(time).await;
    let after = [0, 1].map(|instance| calls[instance].load(Relaxed) - before[instance]);
    tasks.shutdown().await;
    after
}

/// A stall of the machine must not count as an outage.
fn store(url: &str) -> RedisStore {
    let builder = RedisStore::builder(url).timeout(Duration::from_secs(60));
    builder.connect_lazy().unwrap()
}
