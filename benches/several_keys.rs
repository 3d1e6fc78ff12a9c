//! `cargo bench -p benches --bench several_keys`
//!
//! Checks over several keys. On one server: the time of a check of three keys, compared with one key under three policies, one
//! at a time. On a cluster of three masters: how long a denied check holds the units of another key, by the log of that
//! key's master, and the part of a limit that concurrent checks of three masters get. `-- --save` writes the table into
//! `benches/RESULTS.md`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a benchmark measures time, and fails by panicking"
)]

use std::collections::HashMap;
use std::time::Duration;

use benches::nodes::{Cluster, MASTERS};
use benches::page::{Table, median};
use benches::support::RedisServer;
use futures_util::future::join_all;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::time::Instant;
use tower_redis_ratelimit::check::{Check, JointCheck};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, Policy, RedisStore, Strategy};

/// Rounds of all rows in turn. The table has the medians.
const ROUNDS: usize = 5;
/// Number of checks of a row in a round.
const CHECKS: u64 = 20_000;
const CALLERS: u64 = 1_000;
/// Number of denied checks over the cluster.
const DENIED: usize = 2_000;
/// Concurrent checks over the cluster, and the limit of which they take.
const CONCURRENT: usize = 600;
const LIMIT: u32 = 200;
/// A machine that stalls is no outage.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy)]
enum Row {
    OnePolicy,
    ThreePolicies,
    ThreeKeys,
}

const ROWS: [(Row, &str); 3] = [
    (Row::OnePolicy, "one key, one policy"),
    (Row::ThreePolicies, "one key, three policies"),
    (Row::ThreeKeys, "three keys, a policy each"),
];

fn main() {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let mut table = Table::new("| checks | p50 us | |\n|---|--:|---|");
    runtime.block_on(one_server(&mut table));
    runtime.block_on(three_masters(&mut table));
    table.save("several keys");
}

fn lists(strategy: Strategy, quotas: [&str; 3]) -> [Policies; 3] {
    let names = ["user", "org", "all"];
    std::array::from_fn(|i| Policy::new(names[i], strategy, quotas[i]).unwrap().into())
}

/// Adds the rows of one server, each with its ratio to one key under three policies.
async fn one_server(table: &mut Table) {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(PATIENCE)
        .connect_lazy()
        .unwrap();
    let lists = lists(Strategy::Gcra, ["1000000/s"; 3]);
    let all = Policies::new(lists.iter().flat_map(|list| list.clone())).unwrap();
    let mut medians: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for ((row, _), medians) in ROWS.iter().zip(&mut medians) {
            let mut times = vec![];
            for number in 0..CHECKS {
                let user = Key::from(number % CALLERS);
                let start = Instant::now();
                let is_allowed = match row {
                    Row::OnePolicy => take(&store, user, &lists[0]).await,
                    Row::ThreePolicies => take(&store, user, &all).await,
                    Row::ThreeKeys => {
                        let keys = [user, Key::new("acme"), Key::GLOBAL];
                        let joint = JointCheck::take(keys.into_iter().zip(&lists), 1).unwrap();
                        store
                            .check_all(joint)
                            .await
                            .unwrap()
                            .decision()
                            .is_allowed()
                    }
                };
                times.push(start.elapsed().as_nanos() as f64 / 1e3);
                assert!(is_allowed);
            }
            medians.push(median(times));
        }
    }
    let medians = medians.map(median);
    let [_, compared, _] = medians;
    for ((_, name), p50) in ROWS.iter().zip(medians) {
        let ratio = p50 / compared;
        table.add(&format!(
            "| on one server: {name} | {p50:.0} | {ratio:.2} of one key under three policies |"
        ));
    }
}

async fn take(store: &RedisStore, key: Key, list: &Policies) -> bool {
    let check = Check::take(key, list, 1);
    store.check(check).await.unwrap().is_allowed()
}

/// Adds the rows of a cluster.
async fn three_masters(table: &mut Table) {
    let cluster = Cluster::start(false).await;
    // Without a memory of denials, each check goes to all three masters.
    let builder = cluster.builder().denials(0).timeout(PATIENCE);
    let store = builder.connect_lazy().unwrap();
    let keys = key_of_each_master(&cluster, &store).await;

    let used_up = lists(Strategy::SlidingLog, ["90000/100d", "1/100d", "90000/100d"]);
    assert!(take(&store, keys[1], &used_up[1]).await);
    // Both scripts are known before the log begins.
    let joint = JointCheck::take(keys.into_iter().zip(&used_up), 1).unwrap();
    drop(store.check_all(joint).await.unwrap());
    assert!(store.flush().await);
    let mut monitor = Monitor::of(&cluster.nodes[0].server).await;
    let mut round_trips = vec![];
    let mut held = vec![];
    for _ in 0..DENIED {
        let joint = JointCheck::take(keys.into_iter().zip(&used_up), 1).unwrap();
        let start = Instant::now();
        let decided = store.check_all(joint).await.unwrap();
        round_trips.push(start.elapsed().as_nanos() as f64 / 1e3);
        assert!(!decided.decision().is_allowed());
        let charged_at = monitor.next_script().await;
        held.push(monitor.next_script().await - charged_at);
    }
    held.sort_by(f64::total_cmp);
    let (p50, p99) = (held[DENIED / 2], held[DENIED * 99 / 100]);
    let reply = median(round_trips);
    table.add(&format!(
        "| on three masters: a denied check holds the units of the other keys | {p50:.0} | p99 {p99:.0} us; its reply takes {reply:.0} us |"
    ));

    let mut parts = vec![];
    for round in 0..ROUNDS {
        let name = |i: usize| format!("round{round}-{i}");
        let lists: [Policies; 3] = std::array::from_fn(|i| {
            let limit = [90_000, LIMIT, 90_000][i];
            let quota = format!("{limit}/100d");
            Policy::new(&name(i), Strategy::SlidingLog, &*quota)
                .unwrap()
                .into()
        });
        let takes = (0..CONCURRENT).map(|_| {
            let joint = JointCheck::take(keys.into_iter().zip(&lists), 1).unwrap();
            store.check_all(joint)
        });
        let mut granted = 0;
        for decided in join_all(takes).await {
            granted += decided.unwrap().decision().granted();
        }
        assert!(granted <= LIMIT && store.flush().await);
        parts.push(f64::from(granted) / f64::from(LIMIT));
    }
    let part = median(parts);
    table.add(&format!(
        "| on three masters: {CONCURRENT} concurrent checks | - | they get {part:.2} of a limit of {LIMIT} |"
    ));
}

/// Returns a key of each master, in the order of the nodes.
async fn key_of_each_master(cluster: &Cluster, store: &RedisStore) -> [Key; 3] {
    let [list, ..] = lists(Strategy::SlidingLog, ["1/d"; 3]);
    let mut found: HashMap<usize, Key> = HashMap::new();
    for number in 0.. {
        let name = format!("caller-{number}");
        let key = Key::new(&name);
        assert!(take(store, key, &list).await);
        for (node, master) in cluster.nodes.iter().take(MASTERS).enumerate() {
            let stored: Vec<String> = master.server.command(&format!("KEYS *{{{name}}}*")).await;
            if !stored.is_empty() {
                found.insert(node, key);
            }
        }
        if found.len() == MASTERS {
            break;
        }
    }
    [0, 1, 2].map(|node| found[&node])
}

/// The log of the commands that a server executes.
struct Monitor(Lines<BufReader<TcpStream>>);

impl Monitor {
    async fn of(server: &RedisServer) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port()))
            .await
            .unwrap();
        stream.write_all(b"MONITOR\r\n").await.unwrap();
        let mut lines = BufReader::new(stream).lines();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "+OK");
        Self(lines)
    }

    /// Returns the time in microseconds of the next call of a script.
    async fn next_script(&mut self) -> f64 {
        loop {
            let line = self.0.next_line().await.unwrap().unwrap();
            // Such as `+1790000000.123456 [0 127.0.0.1:50000] "EVALSHA" ..`.
            let is_script = line.to_ascii_lowercase().contains("] \"evalsha\"");
            if let Some((seconds, _)) = line.trim_start_matches('+').split_once(' ')
                && is_script
            {
                return seconds.parse::<f64>().unwrap() * 1e6;
            }
        }
    }
}
