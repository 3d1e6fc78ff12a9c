//! `cargo bench --bench load`
//!
//! Decisions per second through the whole middleware, beside what others do with the same Redis, in one run: rounds of
//! all cases in turn, medians, ratios first. Client and server share the machine.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the time")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::ConnectInfo;
use fastrand::Rng;
use futures_util::future::join_all;
use http::{Request, Response};
use redis::aio::MultiplexedConnection;
use support::RedisServer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_redis_ratelimit::{LocalStore, PeerIp, Policy, RateLimitLayer, RedisStore, Store, Strategy, redis};

const KEYS: u32 = 100_000;
const ROUNDS: usize = 5;
const TIME: Duration = Duration::from_secs(1);

/// A GCRA script for one key, as limiters without batches call it.
const ONE_BY_ONE: &str = "
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local interval, burst, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local tat = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now)
local new = tat + cost * interval
local ahead = new - burst * interval - now
if ahead > 0 then
  return {0, 0, ahead, tat - now}
end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return {1, math.floor(-ahead / interval), 0, new - now}";

/// What a case measured in one round.
#[derive(Clone, Copy, Default)]
struct Measure {
    per_second: f64,
    p50: f64,
    p99: f64,
    /// Microseconds of Redis's processor for each decision.
    server: f64,
    /// Script calls for each decision.
    calls: f64,
}

struct Case {
    name: String,
    rounds: Vec<Measure>,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let server = RedisServer::start();
    let mut cases: Vec<Case> = vec![];
    for _ in 0..ROUNDS {
        let mut at = 0;
        let mut add = |name: &str, measure: Measure| {
            if cases.len() == at {
                cases.push(Case { name: name.to_owned(), rounds: vec![] });
            }
            cases[at].rounds.push(measure);
            at += 1;
        };
        add("redis-benchmark GET, c 64", redis_benchmark(&server));
        for concurrency in [1, 256] {
            let connection = server.connection().await;
            let measure = load(&server, concurrency, |mut meter| {
                let mut connection = connection.clone();
                async move {
                    while let Some(start) = meter.next() {
                        one_by_one(&mut connection, meter.rng.u32(..KEYS)).await;
                        meter.done(start);
                    }
                    meter
                }
            });
            add(&format!("a script call each, multiplexed, c {concurrency}"), measure.await);
        }
        let pool = pool(&server).await;
        let measure = load(&server, 256, |mut meter| {
            let pool = pool.clone();
            async move {
                while let Some(start) = meter.next() {
                    one_by_one(&mut pool.get().await.unwrap(), meter.rng.u32(..KEYS)).await;
                    meter.done(start);
                }
                meter
            }
        });
        add("a script call each, bb8 pool of 16, c 256", measure.await);

        let redis = RedisStore::connect(server.url()).await.unwrap();
        for concurrency in [1, 64, 256, 1024] {
            let measure = through(&server, redis.clone(), Strategy::Gcra, "1000000/s", concurrency, KEYS).await;
            add(&format!("RedisStore, 100k keys, c {concurrency}"), measure);
        }
        let measure = through(&server, redis.clone(), Strategy::Gcra, "4000000/s", 256, 1).await;
        add("RedisStore, hot key granted, c 256", measure);
        let measure = through(&server, redis.clone(), Strategy::Gcra, "1/h", 256, 1).await;
        add("RedisStore, hot key exhausted, c 256", measure);
        for strategy in support::STRATEGIES {
            let measure = through(&server, redis.clone(), strategy, "1000000/h", 256, KEYS).await;
            add(&format!("RedisStore, {strategy:?}, 100k keys, c 256"), measure);
            let _: String = server.command("FLUSHALL").await;
        }
        for concurrency in [1, 64] {
            let measure = through(&server, LocalStore::default(), Strategy::Gcra, "1000000/s", concurrency, KEYS).await;
            add(&format!("LocalStore, 100k keys, c {concurrency}"), measure);
            add(&format!("tower_governor, 100k keys, c {concurrency}"), governor(&server, concurrency).await);
        }
    }

    let base = median(&cases[0], |m| m.per_second);
    println!("| case | of GET | decisions/s | p50 us | p99 us | server us | calls |");
    println!("|---|---|---|---|---|---|---|");
    for case in &cases {
        let per_second = median(case, |m| m.per_second);
        println!(
            "| {} | {:.2} | {:.0} | {:.1} | {:.1} | {:.2} | {:.4} |",
            case.name,
            per_second / base,
            per_second,
            median(case, |m| m.p50),
            median(case, |m| m.p99),
            median(case, |m| m.server),
            median(case, |m| m.calls),
        );
    }
}

fn median(case: &Case, value: impl Fn(&Measure) -> f64) -> f64 {
    let mut values: Vec<f64> = case.rounds.iter().map(value).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What one task measures.
struct Meter {
    end: Instant,
    rng: Rng,
    count: u64,
    /// Of every eighth, in nanoseconds.
    times: Vec<u64>,
}

impl Meter {
    /// When the next one starts, unless the time is up.
    fn next(&mut self) -> Option<Instant> {
        let now = Instant::now();
        (now < self.end).then_some(now)
    }

    fn done(&mut self, start: Instant) {
        self.count += 1;
        if self.count.is_multiple_of(8) {
            self.times.push(start.elapsed().as_nanos() as u64);
        }
    }
}

/// Runs so many tasks for a while.
async fn load<F>(server: &RedisServer, tasks: u64, task: impl Fn(Meter) -> F) -> Measure
where
    F: Future<Output = Meter> + Send + 'static,
{
    let (cpu, calls) = (processor(server).await, server.calls("evalsha").await);
    let start = Instant::now();
    let meter = |seed| Meter { end: start + TIME, rng: Rng::with_seed(seed), count: 0, times: vec![] };
    let meters = join_all((0..tasks).map(|seed| tokio::spawn(task(meter(seed))))).await;
    let elapsed = start.elapsed().as_secs_f64();
    let meters: Vec<Meter> = meters.into_iter().map(Result::unwrap).collect();
    let count = meters.iter().map(|meter| meter.count).sum::<u64>() as f64;
    let mut times: Vec<u64> = meters.into_iter().flat_map(|meter| meter.times).collect();
    times.sort_unstable();
    let quantile = |share: f64| times.get((times.len() as f64 * share) as usize).map_or(0.0, |time| *time as f64 / 1e3);
    Measure {
        per_second: count / elapsed,
        p50: quantile(0.5),
        p99: quantile(0.99),
        server: (processor(server).await - cpu) / count,
        calls: (server.calls("evalsha").await - calls) as f64 / count,
    }
}

/// Microseconds of processor that the server has used.
async fn processor(server: &RedisServer) -> f64 {
    let info: String = server.command("INFO cpu").await;
    let of = |field: &str| -> f64 {
        info.lines().find_map(|line| line.strip_prefix(field)).expect(field).trim().parse().expect("seconds")
    };
    (of("used_cpu_user:") + of("used_cpu_sys:")) * 1e6
}

/// Through the whole middleware, with a trivial inner service.
async fn through<S: Store>(
    server: &RedisServer,
    store: S,
    strategy: Strategy,
    quota: &str,
    tasks: u64,
    keys: u32,
) -> Measure {
    let policy = Policy::new("api", strategy, quota.parse().unwrap()).unwrap();
    serve(server, RateLimitLayer::new(store, PeerIp, policy).layer(service_fn(inner)), tasks, keys).await
}

async fn governor(server: &RedisServer, tasks: u64) -> Measure {
    let mut config =
        GovernorConfigBuilder::default().const_period(Duration::from_micros(1)).const_burst_size(1_000_000);
    let config = config.key_extractor(PeerIpKeyExtractor).use_headers().finish().unwrap();
    serve(server, GovernorLayer::new(config).layer(service_fn(inner)), tasks, KEYS).await
}

async fn inner(_: Request<()>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::empty()))
}

async fn serve<S>(server: &RedisServer, service: S, tasks: u64, keys: u32) -> Measure
where
    S: Service<Request<()>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static,
{
    load(server, tasks, |mut meter| {
        let mut service = service.clone();
        async move {
            while let Some(start) = meter.next() {
                let address = IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + meter.rng.u32(..keys)));
                let mut request = Request::new(());
                request.extensions_mut().insert(ConnectInfo(SocketAddr::new(address, 1)));
                service.ready().await.unwrap().call(request).await.unwrap();
                meter.done(start);
                // Where nothing waits, tasks take turns as requests would.
                tokio::task::coop::consume_budget().await;
            }
            meter
        }
    })
    .await
}

async fn one_by_one(connection: &mut MultiplexedConnection, key: u32) {
    static SCRIPT: LazyLock<redis::Script> = LazyLock::new(|| redis::Script::new(ONE_BY_ONE));
    let mut call = SCRIPT.prepare_invoke();
    let _: Vec<i64> = call
        .key(format!("one:{{{}}}", Ipv4Addr::from_bits(0x0a00_0000 + key)))
        .arg(1)
        .arg(1_000_000)
        .arg(1)
        .invoke_async(connection)
        .await
        .unwrap();
}

/// 16 connections, each held for a call, without a ping at checkout.
async fn pool(server: &RedisServer) -> bb8::Pool<bb8_redis::RedisConnectionManager> {
    let manager = bb8_redis::RedisConnectionManager::new(server.url()).unwrap();
    bb8::Pool::builder().max_size(16).min_idle(16).test_on_check_out(false).build(manager).await.unwrap()
}

fn redis_benchmark(server: &RedisServer) -> Measure {
    let port = server.port().to_string();
    let args = ["-p", &port, "-t", "get", "-c", "64", "-n", "100000", "-q", "--csv"];
    let output =
        Command::new("redis-benchmark").args(args).output().expect("redis-benchmark, which comes with redis-server");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("\"GET\"")).expect("a line for GET");
    let fields: Vec<f64> = line.split(',').skip(1).map(|field| field.trim_matches('"').parse().unwrap()).collect();
    // rps, avg, min, p50, p95, p99, max; in milliseconds.
    Measure { per_second: fields[0], p50: fields[3] * 1e3, p99: fields[5] * 1e3, server: 0.0, calls: 0.0 }
}
