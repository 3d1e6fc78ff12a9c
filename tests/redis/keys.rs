//! What stands in Redis: short keys that expire, and callers who cannot reach each other's.

use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, RedisStore, Strategy};

use crate::support::{RedisServer, STRATEGIES, policy};

#[tokio::test]
async fn a_key_reads_prefix_caller_policy_strategy() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url()).prefix("shop:rl").connect_lazy().unwrap();
    let _ = store.check(Check::take(Key::new("ann"), &policy(Strategy::Gcra, "10/h"), 1)).await.unwrap();
    let keys: Vec<String> = server.command("KEYS *").await;
    assert_eq!(keys, ["shop:rl:{ann}:test:g"]);
}

/// Braces, separators and bytes of any kind stay within the hash tag.
#[tokio::test]
async fn no_caller_leaves_its_hash_tag() {
    let server = RedisServer::start();
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    let policies = policy(Strategy::Gcra, "10/h");
    let long = vec![b'x'; 10_240];
    let callers: [&[u8]; 7] = [b"}:other:g", b"{a}", b"a:b", b"\xff\xfe", b"a b\r\n", &long, b""];
    for caller in callers {
        assert_eq!(store.check(Check::take(Key::new(caller), &policies, 1)).await.unwrap().remaining(), 9);
    }
    let keys: Vec<String> = server.command("KEYS *").await;
    assert_eq!(keys.len(), callers.len());
    for key in keys {
        let caller = key.strip_prefix("rl:{~").and_then(|rest| rest.strip_suffix("}:test:g")).expect(&key);
        assert!(caller.len() == 32 && caller.bytes().all(|b| b.is_ascii_hexdigit()), "{key}");
    }
}

/// A key goes when it says nothing any more, within the millisecond that Redis reckons in.
#[tokio::test]
async fn every_key_expires_when_it_is_fresh() {
    let server = RedisServer::start();
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "1000/h");
        let decision = store.check(Check::take(Key::new("ann"), &policies, 7)).await.unwrap();
        let key: Vec<String> = server.command("KEYS *").await;
        let left: i64 = server.command(&format!("PTTL {}", key[0])).await;
        let reset = decision.reset_after().as_millis() as i64;
        assert!(left > 0 && left <= reset + 1, "{strategy:?}: {left} ms for a reset in {reset} ms");
        let _: String = server.command("FLUSHALL").await;
    }
}

#[tokio::test]
async fn denials_and_peeks_write_nothing() {
    let server = RedisServer::start();
    let store = RedisStore::connect_lazy(server.url()).unwrap();
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
    assert_eq!((server.calls("set").await, server.calls("del").await), (0, 0));
    let keys: i64 = server.command("DBSIZE").await;
    assert_eq!(keys, 0);
}

/// An id is remembered for the period of its policy, and under a key that expires.
#[tokio::test]
async fn ids_are_forgotten_after_the_period() {
    let server = RedisServer::start();
    let store = RedisStore::connect_lazy(server.url()).unwrap();
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
