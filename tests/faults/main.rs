//! Every known failure of Redis, under load from four instances, and the promises that hold in
//! each.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "real servers fail in real time")]
#![allow(unreachable_pub, reason = "shared with a benchmark")]

#[path = "../support/mod.rs"]
mod support;
#[macro_use]
#[path = "../support/table.rs"]
mod table;

#[path = "../support/busy.rs"]
mod busy_service;
mod fault;
mod fleet;
#[path = "../support/load.rs"]
mod load;
#[macro_use]
mod matrix;
#[path = "../support/proxy.rs"]
mod proxy;
mod reconcile;

use std::process::Command;
use std::time::Duration;

use fault::Fault;
use proxy::Mode;

rows!(tests);

/// The rows with the highest risk for leased callers; `cargo bench -p benches --bench faults --
/// leased` runs all rows.
mod leased {
    use super::*;

    tests! {
        by matrix::leased;
        killed_and_restarted_empty: "killed, back empty" => Fault::KilledEmpty;
        frozen: "frozen" => Fault::Frozen;
        very_slow: "500 ms slower" => Fault::Path(Mode::Delay(Duration::from_millis(500)));
        charged_and_not_answered: "replies lost" => Fault::Path(Mode::Swallow);
    }
}

/// Rows with handlers that keep the threads of the runtimes; `cargo bench -p benches --bench faults -- busy` runs all
/// rows.
mod busy {
    use tower_redis_ratelimit::RedisStore;

    use super::*;
    use crate::busy_service::{self, Work};
    use crate::support::RedisServer;

    /// `cargo bench -p benches --bench busy` has processes, and more rows.
    fn keeps_the_limit(workers: usize, yields: bool, work: Work) {
        let server = RedisServer::start();
        let redis = || RedisStore::connect_lazy(server.url().as_str()).unwrap();
        busy_service::keeps_the_limit(workers, yields, work, redis);
    }

    #[test]
    fn one_worker_keeps_the_limit() {
        keeps_the_limit(1, true, Work::Sleep);
    }

    #[test]
    fn two_workers_keep_the_limit() {
        keeps_the_limit(2, false, Work::Sleep);
    }

    #[test]
    fn three_computing_workers_keep_the_limit() {
        keeps_the_limit(3, true, Work::Spin);
    }

    #[test]
    fn a_current_thread_runtime_keeps_the_limit() {
        keeps_the_limit(0, true, Work::Sleep);
    }

    tests! {
        by matrix::busy;
        killed_and_restarted_empty: "killed, back empty" => Fault::KilledEmpty;
        frozen: "frozen" => Fault::Frozen;
        connections_cut: "connections cut" => Fault::Cut;
        charged_and_not_answered: "replies lost" => Fault::Path(Mode::Swallow);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_deadline_alone_bounds_the_wait() {
    for mode in [
        Mode::Silent,
        Mode::BlackHole,
        Mode::Swallow,
        Mode::Delay(Duration::from_secs(5)),
    ] {
        matrix::deadline(mode).await;
    }
}

/// No other instance grants again the units that an instance has yet to charge.
#[tokio::test]
async fn others_wait_while_an_instance_reconciles() {
    let row = reconcile::run(Duration::from_millis(2), 20_000).await;
    println!("{row}");
    assert_eq!(row.beyond, 0, "{row}");
}

/// `cargo bench -p benches --bench faults -- fleet` has 1,000 instances, and how soon they are back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_comes_back_and_loses_little() {
    // A deadline that a busy machine meets.
    let (stopped, deadline) = (Duration::from_secs(4), Duration::from_millis(500));
    let row = fleet::run(200, 2_400, stopped, deadline).await;
    println!("{row}");
    assert_eq!(row.degraded, 200, "{row}");
    // After ten seconds no instance waits for others. So none has waited for an announcement that never ends.
    assert!(
        row.back
            .is_some_and(|[_, last]| last < Duration::from_secs(8)),
        "{row}"
    );
    assert!(row.dropped * 100 <= row.local, "{row}");
    // The rest was granted to checks that were in flight.
    assert!(row.charged * 10 >= row.local * 8, "{row}");
}

/// In a separate process, since memory is measured per process.
#[test]
fn fifty_outages_leave_nothing_behind() {
    const ALONE: &str = "FAULTS_ALONE";
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        return runtime.block_on(matrix::cycles(50));
    }
    let this = std::env::current_exe().unwrap();
    let mut alone = Command::new(this);
    alone
        .args([
            "fifty_outages_leave_nothing_behind",
            "--exact",
            "--nocapture",
        ])
        .env(ALONE, "1");
    let output = alone.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("1 passed"), "{text}");
    println!("{text}");
}
