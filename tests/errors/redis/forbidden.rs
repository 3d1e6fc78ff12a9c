//! Missing commands: renamed by the server, as managed services do, or forbidden to the user.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::{ErrorKind, Store, StoreError};
use tower_redis_ratelimit::{Key, Policy, RedisStore, Strategy};

use crate::support::{RedisServer, STRATEGIES, assert_helpful, check, policy, until};

/// Commands that managed services disable, and some that other clients use.
const NOT_NEEDED: [&str; 30] = [
    "ACL",
    "BGREWRITEAOF",
    "BGSAVE",
    "CLIENT",
    "CLUSTER",
    "COMMAND",
    "CONFIG",
    "DEBUG",
    "ECHO",
    "EXEC",
    "EXISTS",
    "EXPIRE",
    "FLUSHALL",
    "FLUSHDB",
    "GET",
    "HELLO",
    "HGETALL",
    "INCR",
    "KEYS",
    "MIGRATE",
    "MONITOR",
    "MULTI",
    "PING",
    "REPLICAOF",
    "SAVE",
    "SCAN",
    "SCRIPT",
    "SELECT",
    "SHUTDOWN",
    "WAIT",
];

/// Commands that all strategies need, and commands that only logs need.
pub(crate) const NEEDED: [&str; 7] = ["evalsha", "eval", "time", "mget", "set", "setrange", "del"];
pub(crate) const OF_LOGS: [&str; 6] = ["lrange", "rpush", "lset", "ltrim", "lrem", "pexpireat"];
/// Commands of requests in flight.
pub(crate) const OF_SLOTS: [&str; 7] = [
    "zrange",
    "zremrangebyscore",
    "zcard",
    "zadd",
    "zscore",
    "zrem",
    "pexpireat",
];

/// A server without these commands.
fn without(commands: &[&str]) -> RedisServer {
    let args: Vec<&str> = commands
        .iter()
        .flat_map(|command| ["--rename-command", command, ""])
        .collect();
    RedisServer::start_with(&args)
}

/// A store that waits for a busy machine.
pub(crate) fn store(url: String) -> RedisStore {
    RedisStore::builder(url)
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap()
}

/// Sends checks in every mode. Returns the failures.
async fn ask(store: &RedisStore, strategy: Strategy) -> Vec<StoreError> {
    let policies = policy(strategy, "10/100d");
    let key = Key::new(format!("{strategy:?}"));
    let mut failed = vec![];
    for check in [
        Check::take(key, &policies, 3).with_id("request-1"),
        Check::take(key, &policies, 3),
        Check::refund(key, &policies, 4),
        Check::peek(key, &policies, 9),
        Check::charge(key, &policies, 1),
        Check::up_to(key, &policies, 20),
        Check::reset(key, &policies),
    ] {
        failed.extend(store.check(check).await.err());
    }
    failed
}

/// Creates a log of several blocks, and refunds the oldest and newest charges until some are
/// dropped. Returns failures.
pub(crate) async fn ask_of_a_long_log(store: &RedisStore, key: Key) -> Vec<StoreError> {
    let policies = policy(Strategy::SlidingLog, "100/100d");
    let (mut taken, mut failed) = (vec![], vec![]);
    for _ in 0..100 {
        let asked_at = Instant::now();
        match store.check(Check::take(key, &policies, 1)).await {
            Ok(decision) => taken.push((decision, asked_at)),
            Err(error) => failed.push(error),
        }
    }
    for (decision, asked_at) in taken.iter().take(20) {
        if let Some(back) = decision.refund(key, 1, asked_at.elapsed()) {
            failed.extend(store.check(back).await.err());
        }
    }
    failed.extend(store.check(Check::refund(key, &policies, 40)).await.err());
    failed
}

/// Takes slots up to the limit, renews them and releases them. Returns failures.
pub(crate) async fn ask_of_slots(store: &RedisStore, key: Key) -> Vec<StoreError> {
    let policies = Policy::in_flight("streams", 2).unwrap().into();
    let (mut slots, mut failed) = (vec![], vec![]);
    for _ in 0..3 {
        let take = Check::take(key, &policies, 1);
        slots.extend(take.slot());
        failed.extend(store.check(take).await.err());
    }
    for slot in slots {
        failed.extend(store.check(Check::renew(key, &policies, slot)).await.err());
        failed.extend(
            store
                .check(Check::release(key, &policies, slot))
                .await
                .err(),
        );
    }
    failed
}

#[tokio::test]
async fn unneeded_commands_may_be_forbidden() {
    let server = without(&NOT_NEEDED);
    let store = store(server.url());
    for strategy in STRATEGIES {
        assert!(ask(&store, strategy).await.is_empty(), "{strategy:?}");
        assert!(ask_of_a_long_log(&store, Key::new("ann")).await.is_empty());
        assert!(ask_of_slots(&store, Key::new("ann")).await.is_empty());
        // Idle connections are pinged.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(30)).await;
        tokio::time::resume();
    }
    let _instances = store.announce().unwrap();
    until("it is announced", async || {
        server.command::<u32>("ZCARD rl:instances").await == 1
    })
    .await;
}

/// No check is decided, and the cause names the command.
#[tokio::test]
async fn needed_commands_are_named() {
    for command in ["EVALSHA", "EVAL"] {
        let server = without(&[command]);
        for error in [RedisStore::connect(server.url()).await.unwrap_err()]
            .into_iter()
            .chain(ask(&store(server.url()), Strategy::Gcra).await)
        {
            assert_eq!(error.kind(), ErrorKind::Refused, "{command}: {error:?}");
            let cause = error.to_string();
            assert!(
                cause.starts_with(&format!("the server 127.0.0.1:{} rejected", server.port())),
                "{cause}"
            );
            // Redis 6.2 uses other quotation marks.
            assert!(
                ["'", "`"]
                    .iter()
                    .any(|mark| cause.contains(&format!("{mark}{command}{mark}"))),
                "{cause}"
            );
        }
    }
    for command in ["TIME", "MGET", "SET"] {
        let server = without(&[command]);
        let error = RedisStore::connect(server.url()).await.unwrap_err();
        assert_helpful(&error, ErrorKind::Permission, &format!("`{command}`"));
        assert!(
            ask(&store(server.url()), Strategy::Gcra).await.len() > 2,
            "{command}"
        );
    }
}

/// As with rights, each command that some check needs is named by that check's error, and no other one is.
#[tokio::test]
async fn renamed_commands_are_named() {
    for command in NEEDED.into_iter().chain(OF_LOGS).chain(OF_SLOTS).skip(2) {
        let command = command.to_uppercase();
        let server = without(&[&command]);
        let store = store(server.url());
        let mut failed = ask_of_a_long_log(&store, Key::new("ann")).await;
        failed.extend(ask_of_slots(&store, Key::new("ann")).await);
        for strategy in STRATEGIES {
            failed.extend(ask(&store, strategy).await);
            // In a call of their own, takes are decided by other scripts.
            for _ in 0..3 {
                let take = Check::take(Key::new("bob"), &policy(strategy, "10/100d"), 1);
                failed.extend(store.check(take).await.err());
            }
        }
        let both = [check("ann", "9/h"), check("bob", "9/h")].map(|check| store.check(check));
        failed.extend(join_all(both).await.into_iter().filter_map(Result::err));
        assert!(!failed.is_empty(), "{command}");
        for error in failed {
            let fix = "which the script calls: do not rename or disable it";
            assert_helpful(&error, ErrorKind::Permission, fix);
            let text = error.to_string();
            assert!(
                text.contains(&format!("has no command `{command}`")),
                "{text}"
            );
        }
    }
}

/// A database other than 0 is selected with SELECT.
#[tokio::test]
async fn a_database_needs_one_right_more() {
    let server = RedisServer::start();
    let rights: Vec<String> = NEEDED.iter().map(|right| format!("+{right}")).collect();
    let rule = format!(
        "ACL SETUSER limiter reset on >word ~rl:* -@all {}",
        rights.join(" ")
    );
    let _: String = server.command(&rule).await;
    let store = || {
        store(format!(
            "redis://limiter:word@127.0.0.1:{}/3",
            server.port()
        ))
    };
    assert!(!ask(&store(), Strategy::Gcra).await.is_empty());
    let _: String = server.command("ACL SETUSER limiter +select").await;
    assert!(ask(&store(), Strategy::Gcra).await.is_empty());
}

/// Without any one of the documented permissions, some check is rejected: all are necessary.
#[tokio::test]
async fn every_documented_right_is_needed() {
    let server = RedisServer::start();
    let all = NEEDED.into_iter().chain(OF_LOGS).chain(OF_SLOTS);
    for (place, missing) in all.clone().enumerate() {
        let rights: Vec<String> = all
            .clone()
            .filter(|right| *right != missing)
            .map(|right| format!("+{right}"))
            .collect();
        let rule = format!(
            "ACL SETUSER limiter reset on >word ~rl:* -@all {}",
            rights.join(" ")
        );
        let _: String = server.command(&rule).await;
        let _: String = server.command("FLUSHALL").await;
        let _: String = server.command("SCRIPT FLUSH").await;
        let store = store(format!("redis://limiter:word@127.0.0.1:{}/", server.port()));
        let failed = match place {
            ..7 => ask(&store, Strategy::Gcra).await,
            7..13 => ask_of_a_long_log(&store, Key::new("ann")).await,
            _ => ask_of_slots(&store, Key::new("ann")).await,
        };
        assert!(!failed.is_empty(), "{missing}");
        assert!(
            failed
                .iter()
                .all(|error| error.kind() == ErrorKind::Permission),
            "{missing}: {failed:?}"
        );
        let keys: Vec<String> = server.command("KEYS rl:*").await;
        for key in keys {
            assert!(
                server.command::<i64>(&format!("PTTL {key}")).await > 0,
                "{missing}: {key} stays for ever"
            );
        }
    }
}

/// Each take fails with the right in its error, and is charged once the right is there.
#[tokio::test]
async fn takes_name_the_missing_right() {
    let server = RedisServer::start();
    let policies = policy(Strategy::Gcra, "10/100d");
    for missing in ["time", "mget", "set", "setrange"] {
        let rights = NEEDED.iter().filter(|right| **right != missing);
        let rights: Vec<String> = rights.map(|right| format!("+{right}")).collect();
        let rule = format!(
            "ACL SETUSER limiter reset on >word ~rl:* -@all {}",
            rights.join(" ")
        );
        let _: String = server.command(&rule).await;
        let store = store(format!("redis://limiter:word@127.0.0.1:{}/", server.port()));
        let key = |caller: &str| Key::new(format!("{missing} {caller}"));
        let take = |caller: &str| store.check(Check::take(key(caller), &policies, 1));
        if missing == "setrange" {
            // A third charge is written in place.
            for _ in 0..2 {
                let decisions = join_all(["ann", "bob"].map(take)).await;
                assert!(decisions.iter().all(Result::is_ok), "{decisions:?}");
            }
        }
        let decisions = join_all(["ann", "bob"].map(take)).await;
        for error in decisions.into_iter().map(Result::unwrap_err) {
            assert_eq!(error.kind(), ErrorKind::Permission, "{missing}: {error:?}");
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            assert!(
                missing == "time" || cause == Some(format!("the right `+{missing}` is missing")),
                "{missing}: {cause:?}"
            );
        }
        let granted: String = server
            .command(&format!("ACL SETUSER limiter +{missing}"))
            .await;
        assert_eq!(granted, "OK");
        let left = take("ann").await.unwrap().remaining();
        assert_eq!(left, if missing == "setrange" { 7 } else { 9 }, "{missing}");
    }
}

/// The same for a take that is alone in its call. It reads with GET, or with MGET if that is forbidden.
#[tokio::test]
async fn a_take_alone_names_the_missing_right() {
    let server = RedisServer::start();
    let policies = policy(Strategy::Gcra, "10/100d");
    for (missing, of_get) in ["time", "mget", "set", "setrange"]
        .into_iter()
        .flat_map(|missing| [(missing, "-get"), (missing, "+get")])
    {
        let rights = NEEDED.iter().filter(|right| **right != missing);
        let rights: Vec<String> = rights.map(|right| format!("+{right}")).collect();
        let rule = format!(
            "ACL SETUSER limiter reset on >word ~rl:* -@all {} {of_get}",
            rights.join(" ")
        );
        let _: String = server.command(&rule).await;
        let store = store(format!("redis://limiter:word@127.0.0.1:{}/", server.port()));
        let key = Key::new(format!("{missing} {of_get}"));
        let take = || store.check(Check::take(key, &policies, 1));
        let context = format!("{missing}, {of_get}");
        // A third charge is written in place.
        let allowed = match (missing, of_get) {
            ("setrange", _) => 2,
            ("mget", "+get") => 3,
            _ => 0,
        };
        for charged in 1..=allowed {
            let decision = take().await.unwrap();
            assert_eq!(decision.remaining(), 10 - charged, "{context}");
        }
        if allowed < 3 {
            let error = take().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Permission, "{context}: {error:?}");
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            assert!(
                missing == "time" || cause == Some(format!("the right `+{missing}` is missing")),
                "{context}: {cause:?}"
            );
        }
        let _: String = server
            .command(&format!("ACL SETUSER limiter +{missing}"))
            .await;
        let left = take().await.unwrap().remaining();
        assert_eq!(left, 9 - allowed, "{context}");
    }
}
