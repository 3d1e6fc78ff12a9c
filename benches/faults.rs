//! `cargo bench --bench faults`
//!
//! Runs every fault of `tests/faults` one after the other, with the same assertions, and prints them as a table.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "real servers fail in real time")]
#![allow(unreachable_pub, reason = "shared with the tests")]

#[path = "../tests/faults/load.rs"]
mod load;
#[path = "../tests/faults/matrix.rs"]
mod matrix;
#[path = "../tests/faults/proxy.rs"]
mod proxy;
#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Duration;

fn main() {
    println!(
        "| Fault | Requests | Failed | Worst wait | Granted / allowed | Not answered | Settled | Recovery | p99 before | p99 once open |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    for (name, fault) in matrix::ROWS {
        // One of its own for each row, so that no task of one is in the way of another.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let row = runtime.block_on(async move { tokio::spawn(matrix::run(*fault)).await.expect(name) });
        println!(
            "| {name} | {} | {} | {} | {} / {} | {} | {} | {} | {} | {} |",
            row.requests,
            row.errors,
            millis(Some(row.worst)),
            row.granted,
            row.allowed,
            row.unanswered,
            row.settled,
            millis(row.recovery),
            millis(row.healthy_p99),
            millis(row.open_p99),
        );
    }
}

fn millis(time: Option<Duration>) -> String {
    time.map_or("-".to_owned(), |time| match time.as_micros() as f64 / 1000.0 {
        millis if millis < 10.0 => format!("{millis:.2} ms"),
        millis => format!("{millis:.0} ms"),
    })
}
