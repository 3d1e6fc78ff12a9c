//! `examples/takeover.rs` as it runs: grants of the old limiter are not granted again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "redis-cell counts by the time of day"
)]

#[path = "../../tests/support/mod.rs"]
mod support;

use std::env;
use std::env::consts::EXE_SUFFIX;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use redis::aio::MultiplexedConnection;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, Limiter, Policy, RedisStore, Strategy, redis};

use crate::support::{RedisServer, until};

const REDIS_RATE: &str = include_str!("../../tests/migrating/lua/redis_rate_v9.lua");
/// A quota that does not refill while the test runs.
const QUOTA: &str = "10/h";

/// The example.
fn program(server: &RedisServer) -> Command {
    let test = env::current_exe().unwrap();
    let example = test
        .ancestors()
        .nth(2)
        .unwrap()
        .join(format!("examples/takeover{EXE_SUFFIX}"));
    let mut command = Command::new(example);
    command.env("REDIS_URL", server.url());
    command
}

/// Returns the output of the example with these arguments, errors last, or the error if it fails.
fn take_over(server: &RedisServer, system: &str, prefix: &str) -> Result<String, String> {
    let args = [system, prefix, "api", QUOTA];
    let output = program(server).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() {
        Ok(text(output.stdout) + &text(output.stderr))
    } else {
        Err(text(output.stderr))
    }
}

async fn limiter(server: &RedisServer) -> Limiter<RedisStore> {
    limiter_by(server, Strategy::Gcra).await
}

async fn limiter_by(server: &RedisServer, strategy: Strategy) -> Limiter<RedisStore> {
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    Limiter::new(store, Policy::new("api", strategy, QUOTA).unwrap())
}

async fn remaining(limiter: &Limiter<RedisStore>, caller: &str) -> u32 {
    limiter.peek(Key::new(caller), 1).await.unwrap().remaining()
}

/// Sends requests to redis_rate. Returns the number of allowed ones.
async fn redis_rate(redis: &mut MultiplexedConnection, caller: &str, requests: u32) -> u32 {
    let mut passed = 0;
    for _ in 0..requests {
        let mut call = redis::cmd("EVAL");
        call.arg(REDIS_RATE)
            .arg(1)
            .arg(format!("rate:{caller}"))
            .arg(0)
            .arg(1)
            .arg(10)
            .arg(3_600)
            .arg(10);
        passed += call.query_async::<u32>(redis).await.unwrap();
    }
    passed
}

#[tokio::test]
async fn redis_rates_counts_are_taken_over() {
    let server = RedisServer::start();
    let mut redis = server.connection().await;
    let callers = [("ann", 7, 7), ("bob", 20, 10), ("eve", 0, 0)];
    for (caller, requests, passed) in callers {
        assert_eq!(redis_rate(&mut redis, caller, requests).await, passed);
    }
    // More than one step of SCAN returns.
    for number in 0..1_500 {
        redis_rate(&mut redis, &format!("user-{number}"), 1).await;
    }
    let limiter = limiter(&server).await;
    // Requests between the switch and the takeover become a debt.
    assert!(limiter.take(Key::new("bob"), 4).await.unwrap().is_allowed());
    for _ in 0..2 {
        let output = "1502 keys begin with \"rate:\"; took over the counts of 1502 callers, such as \"ann\"\n";
        assert_eq!(take_over(&server, "redis-rate", "rate:").unwrap(), output);
        for (caller, left) in [
            ("ann", 3),
            ("bob", 0),
            ("eve", 10),
            ("user-0", 9),
            ("user-1499", 9),
        ] {
            assert_eq!(remaining(&limiter, caller).await, left, "of {caller}");
        }
    }
    let denied = limiter.take(Key::new("bob"), 1).await.unwrap();
    let wait = denied.retry_after().unwrap();
    let interval = Duration::from_secs(360);
    assert!(
        wait > 4 * interval && wait <= 5 * interval,
        "the debt of 4 is paid off first: {wait:?}"
    );
}

/// redis-cell's keys hold the time in nanoseconds at which all grants will have expired.
#[tokio::test]
async fn redis_cells_counts_are_taken_over() {
    let server = RedisServer::start();
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let interval = Duration::from_secs(360);
    for (caller, granted) in [("ann", 7), ("bob", 10)] {
        let tat = (now + granted * interval).as_nanos();
        server
            .command::<()>(&format!("SET throttle/{caller} {tat}"))
            .await;
    }
    server.command::<()>("SET throttle/other something").await;
    server.command::<()>("HSET throttle/hash a 1").await;
    let limiter = limiter(&server).await;
    let output = "4 keys begin with \"throttle/\"; took over the counts of 2 callers, such as \"ann\"\n\
        skipped 2 keys that `redis-cell` cannot read or that never expire, such as \"throttle/hash\"\n";
    assert_eq!(
        take_over(&server, "redis-cell", "throttle/").unwrap(),
        output
    );
    for (caller, left) in [("ann", 3), ("bob", 0), ("other", 10), ("hash", 10)] {
        assert_eq!(remaining(&limiter, caller).await, left, "of {caller}");
    }
}

#[tokio::test]
async fn keys_that_are_no_text_are_skipped() {
    let server = RedisServer::start();
    let mut redis = server.connection().await;
    assert_eq!(redis_rate(&mut redis, "ann", 7).await, 7);
    for (key, value) in [
        (&b"rate:\xffbob"[..], &b"1"[..]),
        (b"rate:carol", b"\xfe\xff"),
        (b"rate:dave", b"not a number"),
    ] {
        let mut set = redis::cmd("SET");
        set.arg(key).arg(value);
        set.query_async::<()>(&mut redis).await.unwrap();
    }
    let output = "4 keys begin with \"rate:\"; took over the counts of 1 callers, such as \"ann\"\n\
        skipped 3 keys that `redis-rate` cannot read or that never expire, such as \"rate:carol\"\n";
    assert_eq!(take_over(&server, "redis-rate", "rate:").unwrap(), output);
    let limiter = limiter(&server).await;
    for (caller, left) in [("ann", 3), ("carol", 10), ("dave", 10)] {
        assert_eq!(remaining(&limiter, caller).await, left, "of {caller}");
    }
}

/// The limiter that most write by hand: `INCR`, and `EXPIRE` at the first request of a window.
#[tokio::test]
async fn counters_are_taken_over_with_their_age() {
    let server = RedisServer::start();
    let mut redis = server.connection().await;
    // Windows of an hour, with the seconds until they end. Ten per hour refill one in 360 s.
    for (caller, count, left) in [
        ("new", 10, 3_600),
        ("denied", 30, 3_600),
        ("ann", 10, 720),
        ("old", 3, 60),
        ("longer", 4, 7_200),
    ] {
        for _ in 0..count {
            let mut incr = redis::cmd("INCR");
            incr.arg(format!("old:{caller}"))
                .query_async::<()>(&mut redis)
                .await
                .unwrap();
        }
        server
            .command::<()>(&format!("EXPIRE old:{caller} {left}"))
            .await;
    }
    server.command::<()>("SET old:forever 10").await;
    let output = "6 keys begin with \"old:\"; took over the counts of 4 callers, such as \"ann\"\n\
        skipped 1 keys that `incr` cannot read or that never expire, such as \"old:forever\"\n";
    let limiter = limiter(&server).await;
    for _ in 0..2 {
        assert_eq!(take_over(&server, "incr", "old:*").unwrap(), output);
        for (caller, left) in [
            ("new", 0),
            ("denied", 0),
            ("ann", 8),
            ("old", 10),
            ("longer", 6),
            ("forever", 10),
        ] {
            assert_eq!(remaining(&limiter, caller).await, left, "of {caller}");
        }
    }
    // All is free when the old window ends, and not a period later. A denied request is no debt.
    for (caller, least, most) in [("ann", 600, 720), ("denied", 3_500, 3_600)] {
        let free = limiter
            .peek(Key::new(caller), 1)
            .await
            .unwrap()
            .reset_after();
        let expected = Duration::from_secs(least)..=Duration::from_secs(most);
        assert!(expected.contains(&free), "of {caller}: {free:?}");
    }
}

/// Under windows from the first hit, a caller is free when the old window ends, and not a period after the takeover.
#[tokio::test]
async fn old_windows_end_in_time() {
    let server = RedisServer::start();
    let limiter = limiter_by(&server, Strategy::FixedWindow(Align::FirstHit)).await;
    // Its window ends before the old one.
    assert!(
        limiter
            .take(Key::new("early"), 1)
            .await
            .unwrap()
            .is_allowed()
    );
    // Windows of an hour, with the milliseconds until they end.
    for (caller, count, left) in [
        ("ann", 10, 1_500),
        ("bob", 4, 2_000),
        ("early", 3, 3_600_000),
        ("longer", 4, 7_200_000),
    ] {
        server
            .command::<()>(&format!("SET old:{caller} {count} PX {left}"))
            .await;
    }
    let mut running = program(&server)
        .args(["incr", "old:*", "api", QUOTA, "fixed-window(first-hit)"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(running.stdout.take().unwrap()).lines();
    let mut line = || lines.next().unwrap().unwrap();
    assert_eq!(
        line(),
        "4 keys begin with \"old:\"; took over the counts of 4 callers, such as \"ann\""
    );
    assert!(line().starts_with(
        "keep this running: it resets each caller when the old window ends, the last one in "
    ));
    let left = |caller| remaining(&limiter, caller);
    assert_eq!(left("early").await, 6);
    assert_eq!(left("longer").await, 6);
    for (caller, before) in [("ann", 0), ("bob", 6)] {
        while server
            .command::<bool>(&format!("EXISTS old:{caller}"))
            .await
        {
            let still = left(caller).await;
            let is_over = !server
                .command::<bool>(&format!("EXISTS old:{caller}"))
                .await;
            assert!(still == before || is_over, "{still} of {caller}");
        }
        until("the caller is free", || async { left(caller).await == 10 }).await;
    }
    assert_eq!(line(), "all old windows have ended");
    assert!(running.wait().unwrap().success());
    assert_eq!(left("early").await, 6);
    assert_eq!(left("longer").await, 6);
}

/// A value of another system, or of none, is no debt.
#[tokio::test]
async fn values_that_a_system_does_not_write_are_skipped() {
    let server = RedisServer::start();
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let of_rate = now.as_secs() - 1_483_228_800 + 3_600;
    for (caller, value) in [
        (
            "cell",
            (now + Duration::from_secs(3_600)).as_nanos().to_string(),
        ),
        ("count", "7".to_owned()),
        ("inf", "inf".to_owned()),
        ("large", "1e300".to_owned()),
        ("nan", "nan".to_owned()),
        ("text", "hello".to_owned()),
        ("empty", String::new()),
        ("rate", of_rate.to_string()),
    ] {
        let mut set = redis::cmd("SET");
        set.arg(format!("old:{caller}"))
            .arg(value)
            .arg("EX")
            .arg(3_600);
        set.query_async::<()>(&mut server.connection().await)
            .await
            .unwrap();
    }
    let limiter = limiter(&server).await;
    for (system, passes, caller) in [
        ("redis-rate", "rate", "cell"),
        ("redis-cell", "cell", "count"),
    ] {
        let output = format!(
            "8 keys begin with \"old:\"; took over the counts of 1 callers, such as \"{passes}\"\n\
            skipped 7 keys that `{system}` cannot read or that never expire, such as \"old:{caller}\"\n"
        );
        assert_eq!(take_over(&server, system, "old:").unwrap(), output);
        assert_eq!(remaining(&limiter, passes).await, 0, "of {passes}");
    }
    for caller in ["count", "inf", "large", "nan", "text", "empty"] {
        assert_eq!(remaining(&limiter, caller).await, 10, "of {caller}");
    }
}

/// The characters of Redis's patterns are part of a prefix like others.
#[tokio::test]
async fn a_prefix_is_no_pattern() {
    let server = RedisServer::start();
    let prefixes = ["app[1]:", "q\\:", "a*b:", "a?b:", "{x}^-:"];
    for prefix in prefixes.into_iter().chain(["app1:", "q:", "acb:", "q"]) {
        server
            .command::<()>(&format!("SET {prefix}ann 4 EX 3600"))
            .await;
    }
    for prefix in prefixes {
        let output = format!(
            "1 keys begin with {prefix:?}; took over the counts of 1 callers, such as \"ann\"\n"
        );
        assert_eq!(take_over(&server, "incr", prefix).unwrap(), output);
    }
}

/// A typing error must not look like a takeover of nothing.
#[tokio::test]
async fn a_takeover_of_nothing_fails() {
    let server = RedisServer::start();
    server.command::<()>("SET rate:ann hello").await;
    for (prefix, output) in [
        ("rates:", "0 keys begin with"),
        ("rate:", "1 keys begin with"),
    ] {
        let problem = take_over(&server, "redis-rate", prefix).unwrap_err();
        assert!(problem.contains("took over nothing: "), "{problem}");
        assert!(problem.contains(output), "{problem}");
    }
    let args = [
        "redis-rate",
        "rate:",
        "api",
        QUOTA,
        "fixed-window(first-hit)",
    ];
    let output = program(&server).args(args).output().unwrap();
    let problem = String::from_utf8(output.stderr).unwrap();
    assert!(
        problem.contains(
            "counts of `redis-rate` cannot become counts of `fixed-window(first-hit)`: write `gcra`"
        ),
        "{problem}"
    );
    let problem = take_over(&server, "redis_rate", "rate:").unwrap_err();
    assert!(
        problem.contains("unknown limiter `redis_rate`: use `redis-rate`, `redis-cell` or `incr`"),
        "{problem}"
    );
}
