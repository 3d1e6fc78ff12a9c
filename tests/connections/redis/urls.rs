//! Parts of a URL: a socket, a user, a database, the protocol.

use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::redis::IntoConnectionInfo;
use tower_redis_ratelimit::store::{AnyStore, Servers, Store, StoreConfig};

use crate::support::{RedisServer, check};

/// Checks that a store counts in this database, connected as this user with this protocol.
async fn assert_counts(server: &RedisServer, url: &str, database: u32, expected: &str) {
    let store = RedisStore::connect(url).await.unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let keyspace: String = server.command("INFO keyspace").await;
    assert!(
        keyspace.contains(&format!("db{database}:keys=")),
        "{url}: {keyspace}"
    );
    let clients: String = server.command("CLIENT LIST TYPE normal").await;
    let ours = clients
        .lines()
        .find(|line| line.contains("cmd=eval"))
        .expect("our connection");
    for field in [&format!("db={database}"), expected] {
        // Redis 6.2 does not list the protocol.
        let is_listed = ours.contains(" resp=") || !field.starts_with("resp=");
        assert!(
            !is_listed || ours.split(' ').any(|part| part == field),
            "{url}: {ours} lacks {field}"
        );
    }
    drop(store);
    let _: String = server.command("FLUSHALL").await;
    let _: i64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
}

#[tokio::test]
async fn every_part_of_a_url_applies() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock").to_str().unwrap().to_owned();
    let server = RedisServer::start_with(&["--unixsocket", &socket]);
    let rights = "+evalsha +eval +time +mget +set +setrange +del +select";
    server.url_with_rights(rights).await;
    let host = format!("127.0.0.1:{}", server.port());
    for (url, database, expected) in [
        (format!("redis://{host}"), 0, "user=default"),
        (format!("redis://{host}/7"), 7, "user=default"),
        (
            format!("redis://limiter:hunter2@{host}/7"),
            7,
            "user=limiter",
        ),
        (
            format!("valkey://limiter:hunter2@{host}/7"),
            7,
            "user=limiter",
        ),
        (
            format!("redis://limiter:hunter2@{host}/7?protocol=resp3"),
            7,
            "resp=3",
        ),
        (format!("redis+unix://{socket}"), 0, "user=default"),
        (format!("unix://{socket}?db=5"), 5, "user=default"),
        (
            format!("redis+unix://{socket}?db=5&user=limiter&pass=hunter2"),
            5,
            "user=limiter",
        ),
        (
            format!("redis+unix://{socket}?user=limiter&pass=hunter2&protocol=resp3"),
            0,
            "resp=3",
        ),
    ] {
        assert_counts(&server, &url, database, expected).await;
    }
}

#[tokio::test]
async fn the_prefix_of_a_url_takes_precedence() {
    let server = RedisServer::start();
    let url = format!("{}?prefix=shop/eu", server.url());
    let mut config = StoreConfig::default();
    config.url = Some(url.clone());
    config.prefix = "other".to_owned();
    let stores: [AnyStore; 3] = [
        RedisStore::connect_lazy(&url).unwrap().into(),
        RedisStore::builder(&url)
            .prefix("other")
            .connect_lazy()
            .unwrap()
            .into(),
        AnyStore::from_config(&config).unwrap(),
    ];
    for store in stores {
        assert!(
            store
                .check(check("ann", "10/s"))
                .await
                .unwrap()
                .is_allowed()
        );
        let keys: Vec<String> = server.command("KEYS *").await;
        assert_eq!(keys, ["shop/eu:{ann}:test:g"], "{store:?}");
        let _: String = server.command("FLUSHALL").await;
    }
    for prefix in ["", "a%20b", "{a}"] {
        let error = RedisStore::connect_lazy(format!("redis://a/?prefix={prefix}"))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!(
                "{prefix:?} is not a valid key prefix: use 1 to 64"
            )),
            "{error}"
        );
    }
}

/// Parts that would be ignored are rejected.
#[test]
fn mistakes_in_a_url_are_named() {
    let info = "redis://a/-1".into_connection_info().unwrap();
    let mut mistakes: Vec<(Servers, &str)> =
        vec![(info.into(), "its database is -1, and the first one is 0")];
    let of_text = [
        (
            "redis+cluster://app:hunter2@a:1,app:hunter2@b:2",
            "more than one `@`: write user and password once",
        ),
        (
            "redis+sentinel://app:hunter2@a:1,app:hunter2@b:2/mymaster",
            "more than one `@`: write",
        ),
        (
            "redis+cluster://app:hunter@2@a:1",
            "and an `@` in them as `%40`",
        ),
        (
            "redis://a/?protocl=resp3",
            "parameter `protocl` is unknown: write `prefix`, `share`, `protocol`",
        ),
        ("redis://a/?db=3", "parameter `db` is unknown"),
        (
            "redis://a/?timeout=5",
            "all else is set on the builder, or in `StoreConfig`",
        ),
        (
            "redis+cluster://a/3",
            "a cluster has no database but 0: write none",
        ),
        (
            "redis+cluster://a:1?sentinel_user=app",
            "parameter `sentinel_user` is unknown",
        ),
        (
            "redis+sentinel://a/mymaster?sentinel_pasword=hunter2",
            "`sentinel_pasword` is unknown: write `prefix`, `share`, `protocol`, `password_file`, `sentinel_user`",
        ),
        (
            "redis+unix:///tmp/redis?password=hunter2",
            "parameter `password` is unknown: write `db`, `user`, `pass`",
        ),
        (
            "redis://a/?prefx=shop",
            "parameter `prefx` is unknown: write `prefix`",
        ),
        (
            "redis+cluster://a?prefix=shop&prefix=x",
            "parameter `prefix` appears more than once",
        ),
        (
            "redis://a/?protocol=resp2&protocol=resp3",
            "parameter `protocol` appears more than once",
        ),
        (
            "redis://app:1234?hunter2@a/",
            "its parameter is unknown: write `prefix`, `share`, `protocol`, `password_file`, and in a password a `?` as `%3F` and an `&` as `%26`",
        ),
        ("redis://a/-1", "its database is -1"),
        ("redis+unix:///tmp/redis?db=-1", "its database is -1"),
        ("redis+sentinel://a/mymaster/-1", "its database is -1"),
        (
            "redis+sentinel://a/",
            "it names no master: write its name after the sentinels",
        ),
        ("redis+sentinel://a:26379,b:26379", "it names no master"),
        (
            "redis-cluster://app:hunter2@a:6379",
            "its scheme is unknown: for a cluster, use `redis+cluster://`",
        ),
        (
            "rediss-cluster://app:hunter2@a:6379",
            "for a cluster, use `rediss+cluster://`",
        ),
        (
            "redis-sentinel://app:hunter2@a:26379",
            "for a master of Redis Sentinel, use `redis+sentinel://host:26379/mymaster`",
        ),
        (
            "redis://app:hunter2@a:6379,b:6379/0",
            "it names several hosts: use `redis+cluster://` for the nodes of a cluster, `redis+sentinel://`",
        ),
        ("rediss://a,b", "several hosts: use `rediss+cluster://`"),
        (
            "http://app:hunter2@a:6379",
            "its scheme is unknown: use `redis://host:6379`, `rediss://` for TLS",
        ),
        ("Redis+hunter2://a", "its scheme is unknown: use `redis://"),
        (
            "app:hunter2@a:6379",
            "it has no scheme: start it with `redis://`",
        ),
        ("localhost:6379", "it has no scheme: start"),
        ("", "it has no scheme: start"),
    ];
    mistakes.extend(of_text.map(|(url, problem)| (url.into(), problem)));
    for (servers, problem) in mistakes {
        match RedisStore::connect_lazy(servers) {
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.starts_with("the Redis URL cannot be used: "),
                    "{text:?}"
                );
                assert!(
                    text.contains(problem) && !text.contains("hunter2"),
                    "{text:?} lacks {problem:?}"
                );
                assert!(!text.contains("write it like"), "a second fix: {text:?}");
            }
            Ok(store) => panic!("{store:?}, where {problem:?}"),
        }
    }
}
