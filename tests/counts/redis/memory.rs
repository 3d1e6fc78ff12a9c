//! Redis's memory per caller: a few bytes, and none after the counts have expired.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::Instant;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, Policy, Strategy, redis};

use crate::support::{RedisServer, STRATEGIES, until};

/// 16 bytes, the size of a hashed key or a short id.
const CALLER: &str = "caller-of-16-byt";

fn policy(strategy: Strategy, quota: &str) -> Policies {
    Policy::new("api", strategy, quota).unwrap().into()
}

/// Returns the only key.
async fn only_key(server: &RedisServer) -> String {
    let keys: Vec<String> = server.command("KEYS *").await;
    let [key] = keys.as_slice() else {
        panic!("one key: {keys:?}")
    };
    assert!(key.starts_with("rl:{caller-of-16-byt}:api:"), "{key}");
    key.clone()
}

async fn bytes_of(server: &RedisServer, key: &str) -> u64 {
    server
        .command(&format!("MEMORY USAGE {key} SAMPLES 0"))
        .await
}

/// For any charges and any quota.
#[tokio::test]
async fn constant_strategies_take_at_most_136_bytes() {
    let server = RedisServer::start();
    let store = server.store();
    // Without jemalloc, Redis 6.2 allocates larger blocks, and sometimes includes a remainder that
    // is too small to split.
    let jemalloc = server
        .command::<String>("INFO memory")
        .await
        .contains("mem_allocator:jemalloc");
    let most = if jemalloc { 136 } else { 168 };
    let grows = |strategy: &Strategy| {
        matches!(
            strategy,
            Strategy::SlidingLog | Strategy::SlidingWindow { .. }
        )
    };
    for strategy in STRATEGIES.into_iter().filter(|strategy| !grows(strategy)) {
        for quota in ["3/h", "1000/d", "999983/30d", "4294967295/366d"] {
            let policies = policy(strategy, quota);
            let limit = policies[0].quota().limit();
            let charge = |cost| store.check(Check::charge(Key::new(CALLER), &policies, cost));
            let charges = (0..200).map(|i| charge(1 + limit / 200 * (i % 3)));
            assert!(join_all(charges).await.iter().all(Result::is_ok));
            // In debt up to the limit, the maximum debt.
            let _ = charge(u32::MAX).await.unwrap();
            let key = only_key(&server).await;
            let bytes = bytes_of(&server, &key).await;
            assert!(bytes <= most, "{strategy:?} of {quota}: {bytes} bytes");
            let _: String = server.command("FLUSHALL").await;
        }
    }
}

/// The value of a bucket names its quota: in a block of the allocator that it had anyway, or in 16 bytes more.
#[tokio::test]
async fn a_bucket_names_its_quota_in_few_bytes() {
    let server = RedisServer::start();
    let store = server.store();
    let info = server.command::<String>("INFO memory").await;
    if !info.contains("mem_allocator:jemalloc") {
        return;
    }
    let take = async |quota: &str| {
        let policies = policy(Strategy::Gcra, quota);
        // In full debt, so that the key does not expire before it is measured.
        let debt = policies[0].quota().capacity().saturating_mul(2);
        let charge = Check::charge(Key::new(CALLER), &policies, debt);
        let _ = store.check(charge).await.unwrap();
        bytes_of(&server, &only_key(&server).await).await
    };
    let mut least = u64::MAX;
    for quota in [
        "5/m",
        "100/s",
        "100/s burst 200",
        "1000/h",
        "3/d",
        "1000000/d",
    ] {
        let bytes = take(quota).await;
        println!("{quota}: {bytes} bytes");
        assert!(bytes <= 120, "{quota}: {bytes} bytes");
        least = least.min(bytes);
        let _: String = server.command("FLUSHALL").await;
    }
    for quota in ["4294967295/366d", "999983/30d", "70000/s burst 16777216"] {
        let bytes = take(quota).await;
        println!("{quota}: {bytes} bytes");
        assert!(bytes <= least + 16, "{quota}: {bytes} bytes");
        let _: String = server.command("FLUSHALL").await;
    }
    // After a change, it also names the fastest earlier one.
    let _ = take("5/m").await;
    let bytes = take("6/m").await;
    println!("changed: {bytes} bytes");
    assert!(bytes <= least + 16, "{bytes} bytes");
    let _: String = server.command("FLUSHALL").await;
    // Both in the long form.
    let _ = take("4294967295/366d").await;
    let bytes = take("4294967294/366d").await;
    println!("changed, with large numbers: {bytes} bytes");
    assert!(bytes <= 152, "{bytes} bytes");
}

#[tokio::test]
async fn logs_take_16_bytes_per_grant() {
    let server = RedisServer::start();
    let store = server.store();
    for grants in [1_000, 10_000] {
        let _: String = server.command("FLUSHALL").await;
        let policies = policy(Strategy::SlidingLog, &format!("{grants}/d"));
        let mut granted = 0;
        // Sequentially: concurrent takes would be one entry of a script call, and one charge.
        while granted < grants {
            assert!(
                store
                    .check(Check::take(Key::new(CALLER), &policies, 1))
                    .await
                    .unwrap()
                    .is_allowed()
            );
            granted += 1;
        }
        let key = only_key(&server).await;
        let bytes = bytes_of(&server, &key).await;
        println!("{grants} grants take {bytes} bytes");
        // A time and a sum per grant.
        assert!(
            (12 * grants..=16 * grants).contains(&bytes),
            "{grants} grants take {bytes} bytes"
        );
    }
}

/// Most charges are refunded, at any position of the log: only the rest takes memory.
#[tokio::test]
async fn refunded_charges_take_no_log_memory() {
    let server = RedisServer::start();
    let store = server.store();
    let (key, policies) = (Key::new(CALLER), policy(Strategy::SlidingLog, "100000/d"));
    let (mut open, mut kept) = (VecDeque::new(), 0);
    for i in 0..6_000 {
        let asked_at = Instant::now();
        open.push_back((
            store.check(Check::take(key, &policies, 1)).await.unwrap(),
            asked_at,
        ));
        if open.len() > 700
            && let Some((decision, asked_at)) = open.pop_front()
        {
            if i % 20 == 0 {
                kept += 1;
                continue;
            }
            if let Some(check) = decision.refund(key, 1, asked_at.elapsed()) {
                assert_eq!(store.check(check).await.unwrap().granted(), 1);
            }
        }
    }
    let (live, bytes) = (
        kept + open.len() as u64,
        bytes_of(&server, &only_key(&server).await).await,
    );
    println!("{live} of 6000 take {bytes} bytes");
    assert!(bytes <= 20 * live, "{live} live charges take {bytes} bytes");
}

/// Expired cells are dropped, so a permanently active caller takes no more memory than its cells.
#[tokio::test]
async fn windows_take_24_bytes_per_live_cell() {
    let server = RedisServer::start();
    let store = server.store();
    for (cells, period, enough) in [(10, "500ms", 8), (100, "2s", 60)] {
        let policies = policy(
            Strategy::SlidingWindow { cells },
            &format!("1000000/{period}"),
        );
        let key = format!("rl:{{{CALLER}}}:api:w:{period}/{cells}");
        let connection = server.connection().await;
        let first = Cell::new(None);
        until(
            "enough cells are live, and the first has left",
            async || {
                assert!(
                    store
                        .check(Check::take(Key::new(CALLER), &policies, 1))
                        .await
                        .unwrap()
                        .is_allowed()
                );
                let mut both = redis::pipe();
                both.atomic()
                    .cmd("GET")
                    .arg(&key)
                    .cmd("MEMORY")
                    .arg("USAGE")
                    .arg(&key)
                    .arg("SAMPLES")
                    .arg(0);
                let both = both.query_async(&mut connection.clone()).await.unwrap();
                // If the machine stalled for a period, there is nothing to measure.
                let (Some(value), Some(bytes)): (Option<Vec<u8>>, Option<usize>) = both else {
                    return false;
                };
                // A time and a sum, and per cell its end and the running sum.
                let (cell, live) = (&value[12..19], (value.len() - 12) / 12);
                assert!(
                    live <= usize::from(cells) + 1,
                    "{live} of {cells} cells are live"
                );
                assert!(bytes <= 24 * live + 150, "{live} cells take {bytes} bytes");
                let oldest = <[u8; 7]>::try_from(cell).unwrap();
                let has_left = first.get().is_some_and(|first| first != oldest);
                first.set(first.get().or(Some(oldest)));
                has_left && live >= enough
            },
        )
        .await;
        let _: String = server.command("FLUSHALL").await;
    }
}

/// 100,000 callers: no key is ever without an expiry, and at the end no key is left.
#[tokio::test]
async fn nothing_stays_behind() {
    const CALLERS: usize = 100_000;
    let server = RedisServer::start();
    let store = server.store();
    let policies = STRATEGIES.map(|strategy| policy(strategy, "1/s"));
    let mut most = 0;
    for first in (0..CALLERS).step_by(1_000) {
        let takes = (first..first + 1_000).map(|i| {
            store.check(Check::take(
                Key::new(format!("caller-{i}")),
                &policies[i % STRATEGIES.len()],
                1,
            ))
        });
        assert!(
            join_all(takes)
                .await
                .into_iter()
                .all(|decision| decision.unwrap().is_allowed())
        );
        let (keys, expires) = keys_and_expires(&server).await;
        assert_eq!(keys, expires, "keys without an expiry, after {first}");
        most = most.max(keys);
    }
    assert!(most >= 1_000, "{most} keys at most");
    until("all keys have expired", async || {
        server.command::<i64>("DBSIZE").await == 0
    })
    .await;
    assert_eq!(server.info("stats", "expired_keys").await, CALLERS as u64);
}

/// Returns the number of keys, and of keys with an expiry.
async fn keys_and_expires(server: &RedisServer) -> (u64, u64) {
    let info: String = server.command("INFO keyspace").await;
    let Some(line) = info.lines().find_map(|line| line.strip_prefix("db0:")) else {
        return (0, 0);
    };
    let field = |name: &str| {
        let value = line
            .split(',')
            .find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        value.expect(name).parse().expect("a number")
    };
    (field("keys"), field("expires"))
}
