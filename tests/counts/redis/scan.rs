//! Iteration over the counts under a prefix.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::{ErrorKind, Store, StoredCount};
use tower_redis_ratelimit::{Key, Policy, RedisStore, Strategy};

use crate::support::{RedisServer, check, policy};

async fn found(store: &RedisStore) -> (BTreeSet<(String, String, &'static str)>, usize) {
    let (mut all, mut steps, mut scan) = (BTreeSet::new(), 0, store.scan());
    while let Some(counts) = scan.next().await.unwrap() {
        steps += 1;
        all.extend(counts.into_iter().map(
            |StoredCount {
                 key,
                 policy,
                 strategy,
                 ..
             }| (key.reveal().to_owned(), policy, strategy),
        ));
    }
    assert!(scan.next().await.unwrap().is_none(), "it has ended");
    (all, steps)
}

#[tokio::test]
async fn every_count_is_found_and_nothing_else() {
    let server = RedisServer::start();
    let builder = || {
        RedisStore::builder(server.url())
            .prefix("shop")
            .timeout(Duration::from_secs(20))
    };
    let store = builder().connect().await.unwrap();
    assert_eq!(found(&store).await, (BTreeSet::new(), 1));

    let take = |key| Check::take(key, &policy(Strategy::Gcra, "10/h"), 1);
    let keys = (0..2_500).map(|number| Key::new(format!("user-{number}")));
    let keys = keys.chain([
        Key::GLOBAL,
        Key::secret("sk-1"),
        Key::tuple(&[Key::new("a"), Key::new("b")]),
    ]);
    let keys: Vec<Key> = keys
        .chain([Key::ip("2001:db8::1".parse().unwrap())])
        .collect();
    let mut expected = BTreeSet::new();
    for answer in join_all(
        keys.iter()
            .map(|key| store.check(take(*key).with_id("once"))),
    )
    .await
    {
        assert!(answer.unwrap().is_allowed());
    }
    expected.extend(
        keys.iter()
            .map(|key| (key.reveal().to_owned(), "test".to_owned(), "gcra")),
    );
    for strategy in Strategy::ALL {
        let take = Check::take(Key::new("ann"), &policy(*strategy, "10/h"), 1);
        assert!(store.check(take).await.unwrap().is_allowed());
        let text = strategy.to_string();
        let name = ["gcra", "sliding-window", "fixed-window", "token-bucket"]
            .into_iter()
            .find(|name| text.starts_with(name));
        let names = ["leaky-bucket", "sliding-log", "sliding-counter"]
            .into_iter()
            .find(|name| text.starts_with(name));
        expected.insert(("ann".to_owned(), "test".to_owned(), name.or(names).unwrap()));
    }
    let upload = Check::take(
        Key::new("ann"),
        &Policy::in_flight("up", 2).unwrap().into(),
        1,
    );
    assert!(store.check(upload).await.unwrap().is_allowed());
    expected.insert(("ann".to_owned(), "up".to_owned(), "in-flight"));

    // Keys of others: under a longer prefix, under none, and under this one.
    let other = RedisStore::builder(server.url())
        .prefix("shop:eu")
        .connect()
        .await
        .unwrap();
    assert!(
        other
            .check(check("bob", "10/h"))
            .await
            .unwrap()
            .is_allowed()
    );
    for key in [
        "shop:{bob}:test:g:x",
        "shop:{bob}:test",
        "shop:{}:test:g",
        "shop:{b",
        "shop:{bob}:test:?",
        "shop:x",
    ] {
        let _: String = server.command(&format!("SET {key} 1")).await;
    }
    let mut connection = server.connection().await;
    // These bytes are not printable in a terminal.
    for key in [
        &b"shop:{\xff}:test:g"[..],
        b"shop:{bob}:\x1b[2Jtest:g",
        b"shop:{bob}::g",
    ] {
        let mut set = tower_redis_ratelimit::redis::cmd("SET");
        let _: () = set
            .arg(key)
            .arg(1)
            .query_async(&mut connection)
            .await
            .unwrap();
    }

    let (all, steps) = found(&store).await;
    assert_eq!(all, expected);
    assert!(steps >= 5, "{steps} steps for 5,000 keys");
}

#[tokio::test]
async fn a_scan_needs_its_right() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del";
    let url = server.url_with_rights(rights).await;
    let store = RedisStore::connect(url).await.unwrap();
    let mut scan = store.scan();
    let error = scan.next().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permission);
    assert!(
        error
            .to_string()
            .contains(&format!("the server 127.0.0.1:{} ", server.port())),
        "{error}"
    );
    let _: String = server.command("ACL SETUSER limiter +scan").await;
    assert_eq!(scan.next().await.unwrap(), Some(vec![]));
}

/// The counts of a failed step are not lost.
#[tokio::test]
async fn a_failed_step_is_repeated() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del +scan";
    let url = server.url_with_rights(rights).await;
    let store = RedisStore::connect(url).await.unwrap();
    let bucket = policy(Strategy::Gcra, "10/h");
    let take = Check::take(Key::new("ann"), &bucket, 1);
    assert!(store.check(take).await.unwrap().is_allowed());
    let mut scan = store.scan();
    // Its value cannot be read.
    let _: String = server.command("ACL SETUSER limiter -mget").await;
    assert_eq!(scan.next().await.unwrap_err().kind(), ErrorKind::Permission);
    let _: String = server.command("ACL SETUSER limiter +mget").await;
    assert_eq!(scan.next().await.unwrap().unwrap().len(), 1);
}
