//! `examples/tonic.rs` as it runs: the replies that its client gets.
//!
//! Cargo builds examples before the tests of their package, unless only one test is built.

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
use std::time::{Duration, Instant};

/// Runs the example with these settings. Returns whether it succeeded, and its output.
fn run(settings: &[(&str, &str)]) -> (bool, String, String) {
    let test = env::current_exe().unwrap();
    let example = test
        .ancestors()
        .nth(2)
        .unwrap()
        .join(format!("examples/tonic{EXE_SUFFIX}"));
    assert!(
        example.exists(),
        "it is not built: `cargo build --package examples --examples --all-features`"
    );
    let output = Command::new(example)
        .env_remove("REDIS_URL")
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.success(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn a_denied_client_passes_after_retry_after() {
    let start = Instant::now();
    // Long enough for a slow machine to make the third call before the quota refills.
    let (success, printed, problem) = run(&[("RATE_LIMIT", "2/10s")]);
    assert!(success, "{problem}");
    let lines: Vec<&str> = printed.lines().collect();
    let [
        head,
        first,
        second,
        denied,
        retry_info,
        quota_failure,
        pushback,
        third,
    ] = lines[..]
    else {
        panic!("{printed}");
    };
    assert!(
        head.ends_with(
            ": 2/10s per address, counted in this process; set REDIS_URL to share the count"
        ),
        "{head}"
    );
    assert_eq!(first, "call 1: granted, ratelimit: \"example\";r=1;t=5");
    assert!(
        second.starts_with("call 2: granted, ratelimit: \"example\";r=0;t="),
        "{second}"
    );
    assert!(
        denied.starts_with(
            "ResourceExhausted: The quota of 2 per 10 seconds is used up. Try again in "
        ),
        "{denied}"
    );
    assert!(retry_info.starts_with("  RetryInfo: "), "{retry_info}");
    assert!(
        quota_failure
            .starts_with("  QuotaFailure: example: The quota of 2 per 10 seconds is used up."),
        "{quota_failure}"
    );
    let millis = pushback
        .strip_prefix("  grpc-retry-pushback-ms: ")
        .and_then(|rest| rest.split_once(','))
        .expect(pushback);
    let waited = Duration::from_millis(millis.0.parse().unwrap());
    assert!(
        waited <= Duration::from_secs(5) && waited <= start.elapsed(),
        "{pushback}"
    );
    assert!(third.starts_with("call 3: granted"), "{third}");
}

#[test]
fn an_invalid_quota_is_reported_at_startup() {
    let (success, _, problem) = run(&[("RATE_LIMIT", "often")]);
    assert!(!success && problem.contains("often"), "{problem}");
}
