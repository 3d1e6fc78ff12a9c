//! `examples/reqwest.rs` as it runs: after each denial, all instances pause until the API accepts calls again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

use std::env;
use std::env::consts::EXE_SUFFIX;
use std::process::Command;
use std::time::Instant;

#[test]
fn a_denied_instance_pauses_both() {
    let test = env::current_exe().unwrap();
    let example = test
        .ancestors()
        .nth(2)
        .unwrap()
        .join(format!("examples/reqwest{EXE_SUFFIX}"));
    assert!(
        example.exists(),
        "it is not built: `cargo build --package examples --examples --all-features`"
    );
    let start = Instant::now();
    let output = Command::new(example)
        .env_remove("REDIS_URL")
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let last: Vec<&str> = text.lines().last().unwrap().split(' ').collect();
    let (made, denied): (usize, usize) = (last[0].parse().unwrap(), last[2].parse().unwrap());
    // When one instance gets the denial, each may have one call in flight and one permit in advance.
    assert!(
        made == 60 + denied && (1..=4 * 4).contains(&denied),
        "{text}"
    );
    // 60 calls take three windows of the API, and the last window may be short.
    assert!(start.elapsed().as_secs() >= 2, "{text}");
}
