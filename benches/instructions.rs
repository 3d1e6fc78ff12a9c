//! `cargo bench -p benches --bench instructions`
//!
//! Instructions per request through the whole middleware without Redis, with `tower_governor` beside it, counted by Valgrind's
//! `callgrind`, which must be installed. They include those that make the request and drop the response. `-- TEXT...` counts only in the cases whose name contains one of the texts.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a benchmark fails by panicking"
)]

use std::env;
use std::process::Command;

use benches::cases::{self, Case, Servers, Subject};
use benches::meter::Amount;
use tokio::runtime;

/// Requests of the smaller run.
const FEW: u64 = 1_000;
const MORE: u64 = 11_000;
/// Set in the process that Valgrind runs: the number of requests.
const REQUESTS: &str = "INSTRUCTIONS_REQUESTS";

fn main() {
    let texts: Vec<String> = env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let cases = cases::named(&texts);
    let local = |case: &Case| {
        matches!(
            case.0,
            Subject::Local(..) | Subject::LocalUnread(..) | Subject::Governor(..)
        )
    };
    let cases: Vec<Case> = cases.into_iter().filter(local).collect();
    if let Ok(requests) = env::var(REQUESTS) {
        assert_eq!(cases.len(), 1, "{texts:?}");
        return run(cases[0], requests.parse().unwrap());
    }
    for case in cases {
        let name = case.full_name();
        let more = instructions(&name, MORE);
        let few = instructions(&name, FEW);
        println!("{name}: {}", (more - few) / (MORE - FEW));
    }
}

fn run(case: Case, requests: u64) {
    let servers = Servers::start();
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(case.run(&servers, Amount::Count(requests)));
}

/// Returns the instructions of a process that sends this number of requests.
fn instructions(case: &str, requests: u64) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe().unwrap())
        .arg(case)
        .env(REQUESTS, requests.to_string())
        .output()
        .expect("valgrind is installed");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let line = text.lines().find(|line| line.contains("Collected"));
    let count = line.and_then(|line| line.rsplit(' ').next()).expect(&text);
    count.parse().expect(&text)
}
