//! Keys in Redis: they are short, they expire, and no caller can access another's.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, RedisStore, Strategy, redis};

use crate::support::{RedisServer, STRATEGIES, policy, until};

#[tokio::test]
async fn a_key_reads_prefix_caller_policy_span() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .prefix("shop:rl")
        .connect_lazy()
        .unwrap();
    let _ = store
        .check(Check::take(
            Key::new("ann"),
            &policy(Strategy::Gcra, "10/h"),
            1,
        ))
        .await
        .unwrap();
    let keys: Vec<String> = server.command("KEYS *").await;
    assert_eq!(keys, ["shop:rl:{ann}:test:g"]);
}

/// Braces, separators and all bytes stay within the hash tag.
#[tokio::test]
async fn no_caller_leaves_its_hash_tag() {
    let server = RedisServer::start();
    let store = server.store();
    let policies = policy(Strategy::Gcra, "10/h");
    let long = vec![b'x'; 10_240];
    let callers: [&[u8]; 7] = [
        b"}:other:g",
        b"{a}",
        b"a:b",
        b"\xff\xfe",
        b"a b\r\n",
        &long,
        b"",
    ];
    for caller in callers {
        assert_eq!(
            store
                .check(Check::take(Key::new(caller), &policies, 1))
                .await
                .unwrap()
                .remaining(),
            9
        );
    }
    let keys: Vec<String> = server.command("KEYS *").await;
    assert_eq!(keys.len(), callers.len());
    for key in keys {
        let caller = key
            .strip_prefix("rl:{~")
            .and_then(|rest| rest.strip_suffix("}:test:g"))
            .expect(&key);
        assert!(
            caller.len() == 32 && caller.bytes().all(|b| b.is_ascii_hexdigit()),
            "{key}"
        );
    }
}

/// A key expires when its state is fresh, within a millisecond, the resolution of Redis.
#[tokio::test]
async fn every_key_expires_when_it_is_fresh() {
    let server = RedisServer::start();
    let store = server.store();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "1000/h");
        let decision = store
            .check(Check::take(Key::new("ann"), &policies, 7))
            .await
            .unwrap();
        let key: Vec<String> = server.command("KEYS *").await;
        let left: i64 = server.command(&format!("PTTL {}", key[0])).await;
        let reset = decision.reset_after().as_millis() as i64;
        assert!(
            left > 0 && left <= reset + 1,
            "{strategy:?}: {left} ms for a reset in {reset} ms"
        );
        let _: String = server.command("FLUSHALL").await;
    }
}

/// The strategies whose states are written in place.
fn constant() -> impl Iterator<Item = Strategy> {
    let grows = |strategy: &Strategy| {
        matches!(
            strategy,
            Strategy::SlidingLog | Strategy::SlidingWindow { .. }
        )
    };
    STRATEGIES
        .into_iter()
        .filter(move |strategy| !grows(strategy))
}

/// The state of a returning caller is usually written in place. To allow this, the key of a quota
/// that refills may live up to twice as long as its state; a window's key expires with the window.
#[tokio::test]
async fn most_charges_leave_the_expiry_alone() {
    const CHARGES: u64 = 40;
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap();
    for strategy in constant() {
        let policies = policy(strategy, "1000/h");
        let refills = !matches!(
            strategy,
            Strategy::FixedWindow(_) | Strategy::SlidingCounter
        );
        let before = [server.calls("set").await, server.calls("setrange").await];
        for _ in 0..CHARGES {
            let decision = store
                .check(Check::take(Key::new("ann"), &policies, 1))
                .await
                .unwrap();
            let keys: Vec<String> = server.command("KEYS *").await;
            let left: i64 = server.command(&format!("PTTL {}", keys[0])).await;
            let reset = decision.reset_after().as_millis() as i64;
            let most = if refills { 2 * reset } else { reset };
            // Some time may pass between the two replies.
            assert!(
                (reset - 500..=most + 500).contains(&left),
                "{strategy:?}: {left} ms for a reset in {reset} ms"
            );
        }
        let [set, in_place] = [
            server.calls("set").await - before[0],
            server.calls("setrange").await - before[1],
        ];
        assert_eq!(set + in_place, CHARGES, "{strategy:?}");
        assert!(
            set <= 8,
            "{strategy:?}: {set} of {CHARGES} charges have set an expiry"
        );
        let _: String = server.command("FLUSHALL").await;
    }
}

/// Regardless of events since the last charge, the next charge leaves no key without an
/// expiry. If another client has removed the expiry, this is restored by a charge that needs a
/// later expiry than the stored one.
#[tokio::test]
async fn no_charge_leaves_a_key_without_an_expiry() {
    let server = RedisServer::start();
    // Send each denial to Redis.
    let builder = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .denials(0);
    let store = builder.connect_lazy().unwrap();
    for strategy in constant() {
        let take_of = async |policies: &Policies| {
            assert!(
                store
                    .check(Check::take(Key::new("ann"), policies, 1))
                    .await
                    .is_ok()
            );
        };
        let policies = policy(strategy, "1000/h");
        let take = async || take_of(&policies).await;
        take().await;
        let keys: Vec<String> = server.command("KEYS *").await;
        let key = &keys[0];
        let length: usize = server.command(&format!("STRLEN {key}")).await;
        for change in [
            format!("DEL {key}"),
            format!("RENAME {key} other"),
            format!("PEXPIRE {key} 0"),
            format!("SET {key} garbage"),
            format!("SET {key} {}", "0".repeat(length)),
            format!("SET {key} {}", "0".repeat(length + 1)),
        ] {
            take().await;
            take().await;
            let _: redis::Value = server.command(&change).await;
            take().await;
            assert!(
                server.command::<i64>(&format!("PTTL {key}")).await > 0,
                "{strategy:?}: {change}"
            );
        }
        let _: String = server.command("FLUSHALL").await;
        let soon = policy(strategy, "10/1s");
        take_of(&soon).await;
        take_of(&soon).await;
        let keys: Vec<String> = server.command("KEYS *").await;
        let key = &keys[0];
        assert_eq!(server.command::<i64>(&format!("PERSIST {key}")).await, 1);
        until("the key has an expiry", async || {
            take_of(&soon).await;
            server.command::<i64>(&format!("PTTL {key}")).await > 0
        })
        .await;
        let _: String = server.command("FLUSHALL").await;
    }
}

/// Returning and new callers, in the same script calls.
#[tokio::test]
async fn new_callers_beside_others_get_an_expiry() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap();
    for strategy in constant() {
        let policies = policy(strategy, "1000/h");
        let take =
            |i: usize| store.check(Check::take(Key::new(format!("caller-{i}")), &policies, 1));
        for callers in [(0..60).step_by(3).collect::<Vec<_>>(), (0..60).collect()] {
            assert!(
                join_all(callers.into_iter().map(take))
                    .await
                    .iter()
                    .all(Result::is_ok)
            );
        }
        let keys: Vec<String> = server.command("KEYS *").await;
        assert_eq!(keys.len(), 60);
        for key in keys {
            assert!(
                server.command::<i64>(&format!("PTTL {key}")).await > 0,
                "{strategy:?}: {key}"
            );
        }
        let _: String = server.command("FLUSHALL").await;
    }
}

/// The script relies on this when it writes in place.
#[tokio::test]
async fn no_key_expires_while_a_script_runs() {
    let server = RedisServer::start();
    let script = "local read = redis.call('MGET', KEYS[1])[1] \
                  for i = 1, 3e7 do end \
                  return { #read, redis.call('SETRANGE', KEYS[1], 0, 'new'), redis.call('PTTL', KEYS[1]) }";
    let mut connection = server.connection().await;
    let () = redis::cmd("SET")
        .arg("k")
        .arg("value")
        .arg("PX")
        .arg(20)
        .query_async(&mut connection)
        .await
        .unwrap();
    let eval = redis::cmd("EVAL")
        .arg(script)
        .arg(1)
        .arg("k")
        .query_async(&mut connection)
        .await;
    let [read, written, left]: [i64; 3] = eval.unwrap();
    assert_eq!([read, written], [5, 5]);
    assert!(left >= 0, "{left} ms");
    until("it has expired", async || {
        server.command::<i64>("DBSIZE").await == 0
    })
    .await;
}

#[tokio::test]
async fn denials_and_peeks_write_nothing() {
    let server = RedisServer::start();
    let store = server.store();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "1000/h");
        for check in [
            Check::take(Key::new("ann"), &policies, 1_001),
            Check::peek(Key::new("ann"), &policies, 1),
            Check::take(Key::new("ann"), &policies, 0),
        ] {
            let _ = store.check(check).await.unwrap();
        }
    }
    let writes = [
        server.calls("set").await,
        server.calls("setrange").await,
        server.calls("del").await,
    ];
    assert_eq!(writes, [0; 3]);
    let keys: i64 = server.command("DBSIZE").await;
    assert_eq!(keys, 0);
}

/// An id is remembered for the period of its policy, under a key that expires.
#[tokio::test]
async fn ids_are_forgotten_after_the_period() {
    let server = RedisServer::start();
    let store = server.store();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "10/2s");
        let take = || store.check(Check::take(Key::new("ann"), &policies, 1).with_id("request-1"));
        let _ = take().await.unwrap();
        let keys: Vec<String> = server.command("KEYS *:request-1").await;
        let left: i64 = server.command(&format!("PTTL {}", keys[0])).await;
        assert!((1..=2_001).contains(&left), "{strategy:?}: {left}");
        let _: String = server.command("FLUSHALL").await;
    }
}
