//! `cargo bench -p benches --bench busy`
//!
//! Processes share one limit, while their handlers keep the worker threads of the runtime. Redis is healthy and idle, so
//! it should decide every check. `-- 4 2 60 8 1 sleep` runs one row: processes, worker threads of each, milliseconds for
//! which a handler keeps its thread after each check, clients of each process, share, and `sleep` or `spin`. `-- --save`
//! writes the table into `benches/RESULTS.md`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "handlers keep real threads")]
#![allow(unreachable_pub, reason = "shared with the tests")]

#[path = "../tests/support/busy.rs"]
mod busy;
#[path = "../tests/support/mod.rs"]
mod support;

use std::env;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use benches::page::Table;
use busy::{Busy, Late, Seen, Work};
use support::RedisServer;
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

const LIMIT: u32 = 400;
const TIME: Duration = Duration::from_secs(8);
/// Set in the processes that share the limit: the address of Redis.
const URL: &str = "BUSY_URL";
/// Set if handlers yield.
const YIELDS: &str = "BUSY_YIELDS";
/// Set if a process has no fallback.
const BARE: &str = "BUSY_BARE";

/// A row: processes, worker threads, milliseconds, clients, share, and what a handler does.
type Row = (usize, usize, u64, usize, u32, Work);

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (4, 2, 60, 8, 1, Work::Sleep),
    (8, 2, 60, 8, 1, Work::Sleep),
    (4, 2, 60, 8, 4, Work::Sleep),
    (4, 2, 20, 32, 1, Work::Sleep),
    (4, 2, 20, 32, 1, Work::Spin),
    (4, 1, 60, 8, 1, Work::Sleep),
    (4, 3, 60, 8, 1, Work::Sleep),
    (4, 1, 20, 32, 1, Work::Sleep),
    (4, 3, 20, 32, 1, Work::Sleep),
];

fn main() {
    let texts: Vec<String> = env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let one = match &texts[..] {
        [processes, workers, millis, clients, share, work] => Some((
            processes.parse().unwrap(),
            workers.parse().unwrap(),
            millis.parse().unwrap(),
            clients.parse().unwrap(),
            share.parse().unwrap(),
            if work == "spin" {
                Work::Spin
            } else {
                Work::Sleep
            },
        )),
        _ => None,
    };
    if let (Ok(url), Some(row)) = (env::var(URL), one) {
        return process(&url, row);
    }
    let mut table = Table::new(
        "| processes, workers | handler | clients, share | granted of 400 | checks | locally | late | longest wait | without a fallback |\n\
         |---|---|---|--:|--:|--:|--:|--:|--:|",
    );
    for row in one.as_ref().map_or(ROWS, std::slice::from_ref) {
        let (processes, workers, millis, clients, share, work) = *row;
        let (seen, bare) = (run(*row, false), run(*row, true));
        table.add(&format!(
            "| {processes}, {workers} | {millis} ms, {work} | {clients}, {share} | {} | {} | {} | {} ms | {} ms | {} ms |",
            seen.granted, seen.checks, seen.local, seen.late.as_millis(), seen.longest.as_millis(), bare.longest.as_millis(),
        ));
    }
    table.save("busy executors");
}

/// Runs the processes of a row over a new Redis.
fn run(row: Row, bare: bool) -> Seen {
    let server = RedisServer::start();
    let (processes, workers, millis, clients, share, work) = row;
    let start = || -> Child {
        let mut process = Command::new(env::current_exe().unwrap());
        let args = [processes, workers, millis as usize, clients, share as usize]
            .map(|arg| arg.to_string());
        process
            .args(args)
            .arg(work.to_string())
            .env(URL, server.url());
        if bare {
            process.env(BARE, "1");
        }
        process.stdout(Stdio::piped()).spawn().unwrap()
    };
    let all: Vec<Child> = (0..processes).map(|_| start()).collect();
    let mut sum = Seen::default();
    for process in all {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{row:?}");
        sum += String::from_utf8(output.stdout).unwrap().parse().unwrap();
    }
    sum
}

/// One of the processes. Prints what it has seen.
fn process(url: &str, (_, workers, millis, clients, share, work): Row) {
    let busy = Busy {
        workers,
        keeps: Duration::from_millis(millis),
        clients,
        work,
        yields: env::var_os(YIELDS).is_some(),
        limit: LIMIT,
    };
    let redis = RedisStore::connect_lazy(url).unwrap();
    let seen = if env::var_os(BARE).is_some() {
        busy.run(redis, || thread::sleep(TIME))
    } else {
        let late = Late::default();
        let store = Fallback::builder(redis, LocalStore::default())
            .share(share)
            .observer(late.clone())
            .build();
        let mut seen = busy.run(store, || thread::sleep(TIME));
        seen.late = late.longest();
        seen
    };
    print!("{seen}");
}
