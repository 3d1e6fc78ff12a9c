//! `cargo bench -p benches --bench server`
//!
//! The cost of every strategy in Redis, compared with the two classic scripts, in one run: server
//! time per check in batches of 32 (`usec_per_call` of the script call over its checks), and memory
//! per key.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark fails by panicking"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::num::NonZeroUsize;

use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use support::RedisServer;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, Policy, Quota, RedisStore, Strategy, redis};

const BATCH: usize = 32;
const ROUNDS: usize = 300;
const REPEATS: usize = 5;

/// The common recipe with a sorted set: one member per request.
const ZSET_LOG: &str = "
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - ARGV[2])
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[1]) then
  redis.call('ZADD', KEYS[1], now, ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2] / 1000)
  return 1
end
return 0";

/// The recipe with a hash: a count per second.
const HASH_LOG: &str = "
local t = redis.call('TIME')
local now, sum = tonumber(t[1]), 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if tonumber(all[i]) <= now - ARGV[2] / 1000000 then
    redis.call('HDEL', KEYS[1], all[i])
  else
    sum = sum + all[i + 1]
  end
end
if sum < tonumber(ARGV[1]) then
  redis.call('HINCRBY', KEYS[1], now, 1)
  redis.call('PEXPIRE', KEYS[1], ARGV[2] / 1000)
  return 1
end
return 0";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let empty = classic(&server, &mut connection, "return 0", None).await.0;
    println!("medians of {REPEATS}; an empty script call takes {empty:.2} us\n");
    println!(
        "{:<34}{:>12}{:>12}{:>14}",
        "", "us a check", "of Gcra's", "bytes a key"
    );

    let strategies = support::STRATEGIES;
    let mut costs = vec![vec![]; strategies.len()];
    for _ in 0..REPEATS {
        for (i, strategy) in strategies.into_iter().enumerate() {
            costs[i].push(ours(&server, strategy).await);
        }
    }
    let of_gcra = strategies
        .iter()
        .zip(&costs)
        .filter(|(strategy, _)| **strategy == Strategy::Gcra);
    let gcra = median(of_gcra.flat_map(|(_, costs)| costs).map(|cost| cost.0));
    for (strategy, costs) in strategies.iter().zip(&costs) {
        let time = median(costs.iter().map(|cost| cost.0));
        println!(
            "{:<34}{time:>12.2}{:>12.2}{:>14}",
            format!("{strategy:?}"),
            time / gcra,
            costs[0].1
        );
    }
    for entries in [10, 1_000, 10_000] {
        let (time, bytes) = full_log(&server, entries).await;
        println!(
            "{:<34}{time:>12.2}{:>12.2}{:>14}",
            format!("SlidingLog of {entries}"),
            time / gcra,
            bytes
        );
    }
    for (name, script, fill) in [
        ("classic ZSET log", ZSET_LOG, "ZADD"),
        ("classic hash of timestamps", HASH_LOG, "HSET"),
    ] {
        for entries in [10, 1_000] {
            let (time, bytes) =
                classic(&server, &mut connection, script, Some((fill, entries))).await;
            println!(
                "{:<34}{time:>12.2}{:>12.2}{bytes:>14}",
                format!("{name} of {entries}"),
                time / gcra
            );
        }
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn store(server: &RedisServer) -> RedisStore {
    RedisStore::builder(server.url())
        .connections(NonZeroUsize::MIN)
        .connect()
        .await
        .unwrap()
}

/// Microseconds that the server has spent in script calls.
async fn spent(server: &RedisServer) -> f64 {
    let stats: String = server.command("INFO commandstats").await;
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:"));
    let usec = line.and_then(|line| {
        line.split(',')
            .find_map(|field| field.strip_prefix("usec="))
    });
    usec.map_or(0.0, |usec| usec.parse().unwrap())
}

async fn bytes_of(server: &RedisServer, key: &str) -> u64 {
    server
        .command(&format!("MEMORY USAGE {key} SAMPLES 0"))
        .await
}

/// Each check has its own caller; two checks per caller, all granted.
async fn ours(server: &RedisServer, strategy: Strategy) -> (f64, u64) {
    let store = store(server).await;
    let policies: Policies = Policy::new("api", strategy, Quota::per_hour(1_000))
        .unwrap()
        .into();
    let callers =
        |round: usize| (0..BATCH).map(move |i| Key::new(format!("{:016}", round * BATCH + i)));
    let before = spent(server).await;
    for round in 0..ROUNDS {
        let checks = callers(round / 2).map(|key| store.check(Check::take(key, &policies, 1)));
        assert!(
            join_all(checks)
                .await
                .into_iter()
                .all(|decision| decision.unwrap().is_allowed())
        );
    }
    let time = (spent(server).await - before) / (ROUNDS * BATCH) as f64;
    let keys: Vec<String> = server.command("KEYS rl:{0000000000000000}:*").await;
    let bytes = bytes_of(server, &keys[0]).await;
    let _: String = server.command("FLUSHALL").await;
    (time, bytes)
}

/// Logs with this number of entries each.
async fn full_log(server: &RedisServer, entries: u32) -> (f64, u64) {
    let store = store(server).await;
    let policies: Policies = Policy::new(
        "api",
        Strategy::SlidingLog,
        Quota::per_hour(entries + ROUNDS as u32),
    )
    .unwrap()
    .into();
    // Checks of one caller in a batch would be decided as one, so each has its own caller.
    let round = || {
        join_all(
            (0..BATCH)
                .map(|i| store.check(Check::take(Key::new(format!("{i:016}")), &policies, 1))),
        )
    };
    for _ in 0..entries {
        round().await;
    }
    let bytes = bytes_of(server, "rl:{0000000000000000}:api:o:1h").await;
    let before = spent(server).await;
    for _ in 0..ROUNDS {
        round().await;
    }
    let time = (spent(server).await - before) / (ROUNDS * BATCH) as f64;
    let _: String = server.command("FLUSHALL").await;
    (time, bytes)
}

/// A script call per check, on a key with this number of entries of the last hour.
async fn classic(
    server: &RedisServer,
    connection: &mut MultiplexedConnection,
    script: &str,
    fill: Option<(&str, i64)>,
) -> (f64, u64) {
    let script = redis::Script::new(script);
    let key = "rl:{0000000000000000}:api:z";
    if let Some((command, entries)) = fill {
        let (now, _): (i64, i64) = server.command("TIME").await;
        for i in 0..entries {
            let mut cmd = redis::cmd(command);
            cmd.arg(key);
            match command {
                "ZADD" => cmd.arg((now - i) * 1_000_000).arg(i),
                _ => cmd.arg(now - i).arg(1),
            };
            let () = cmd.query_async(connection).await.unwrap();
        }
    }
    let bytes: Option<u64> = redis::cmd("MEMORY")
        .arg("USAGE")
        .arg(key)
        .query_async(connection)
        .await
        .unwrap();
    let before = spent(server).await;
    for i in 0..ROUNDS {
        let mut call = script.prepare_invoke();
        let call = call
            .key(key)
            .arg(1_000_000)
            .arg(3_600_000_000_u64)
            .arg(format!("x{i}"));
        let _: i64 = call.invoke_async(connection).await.unwrap();
    }
    let time = (spent(server).await - before) / ROUNDS as f64;
    let _: String = server.command("FLUSHALL").await;
    (time, bytes.unwrap_or(0))
}
