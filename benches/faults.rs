//! `cargo bench -p benches --bench faults`
//!
//! Runs every fault of `tests/faults`, also those of a cluster, sequentially, with the same
//! assertions, and prints them as tables. `-- server` runs only the first table, `-- leased` the
//! same faults with leased callers, `-- busy` with handlers that keep the threads of the runtimes, and `-- cluster` the faults of a cluster. `-- --save` also
//! writes the first and the last of these into `benches/RESULTS.md`. `-- reconcile`
//! measures the time to charge many callers after an outage, and `-- fleet` the time until up to
//! 1,000 instances share their counts again.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "real servers fail in real time")]
#![allow(unreachable_pub, reason = "shared with the tests")]

#[macro_use]
#[path = "../tests/support/table.rs"]
mod table;

#[path = "../tests/faults/cluster/matrix.rs"]
mod cluster;
#[path = "../tests/faults/fault.rs"]
mod fault;
#[path = "../tests/faults/fleet.rs"]
mod fleet;
#[path = "../tests/support/load.rs"]
mod load;
#[path = "../tests/faults/matrix.rs"]
mod matrix;
#[path = "../tests/support/cluster.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod nodes;
#[path = "../tests/support/proxy.rs"]
mod proxy;
#[path = "../tests/faults/reconcile.rs"]
mod reconcile;
#[path = "../tests/support/mod.rs"]
mod support;

use std::env;
use std::time::Duration;

use benches::page::Table;
use table::Outcome;

fn main() {
    let texts: Vec<String> = env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let wants = |table: &str| texts.is_empty() || texts.iter().any(|text| text == table);
    if wants("server") {
        one_server(matrix::run).save("faults");
    }
    if wants("leased") {
        one_server(matrix::leased);
    }
    if wants("busy") {
        one_server(matrix::busy);
    }
    if wants("cluster") {
        let mut table = Table::new(&format!(
            "{HEAD} | Of other masters: by Redis, locally |\n{LINE}|--:|"
        ));
        for (name, fault) in cluster::ROWS {
            let row = run(name, cluster::run(*fault));
            let (redis, local) = row.others.expect("callers of other masters");
            table.add(&format!("{} | {redis}, {local} |", line(name, &row)));
        }
        table.save("faults of a cluster");
    }
    if wants("reconcile") {
        for (away, others) in [(2, 20_000), (5, 95_000), (0, 95_000)] {
            let row = run(
                "reconcile",
                reconcile::run(Duration::from_millis(away), others),
            );
            println!("{others} callers, Redis {away} ms away: {row}");
        }
    }
    if wants("fleet") {
        const STOPPED: Duration = Duration::from_secs(4);
        for count in [100, 300, 1_000] {
            let deadline = Duration::from_millis(100);
            let row = run("fleet", fleet::run(count, 12_000, STOPPED, deadline));
            println!("{count} instances, Redis stopped for {STOPPED:?}: {row}");
        }
    }
}

const HEAD: &str = "| Fault | Requests | Failed | Worst wait | Granted / allowed | Not answered | Reconciled | Recovery | p99 before | p99 once open";
const LINE: &str = "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:";

fn one_server<T: Future<Output = Outcome> + Send + 'static>(
    fault: impl Fn(fault::Fault) -> T,
) -> Table {
    let mut table = Table::new(&format!("{HEAD} |\n{LINE}|"));
    for (name, which) in matrix::ROWS {
        let row = run(name, fault(*which));
        table.add(&format!("{} |", line(name, &row)));
    }
    table
}

/// Formats the columns that both tables have.
fn line(name: &str, row: &Outcome) -> String {
    let Outcome {
        requests,
        errors,
        granted,
        allowed,
        unanswered,
        reconciled,
        ..
    } = row;
    let times = [Some(row.worst), row.recovery, row.healthy_p99, row.open_p99];
    let [worst, recovery, before, open] = times.map(millis);
    format!(
        "| {name} | {requests} | {errors} | {worst} | {granted} / {allowed} | {unanswered} | {reconciled} | {recovery} | {before} | {open}"
    )
}

/// Runs a row on a separate runtime, so that no task affects another row.
fn run<T: Send + 'static>(name: &str, row: impl Future<Output = T> + Send + 'static) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime
        .block_on(async move { tokio::spawn(row).await })
        .expect(name)
}

fn millis(time: Option<Duration>) -> String {
    time.map_or("-".to_owned(), |time| {
        match time.as_micros() as f64 / 1000.0 {
            millis if millis < 10.0 => format!("{millis:.2} ms"),
            millis => format!("{millis:.0} ms"),
        }
    })
}
