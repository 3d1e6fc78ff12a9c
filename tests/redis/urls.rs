//! What a URL may say: a socket, a user, a database, the protocol.

use tower_redis_ratelimit::{RedisStore, Store};

use crate::support::{RedisServer, check};

/// Counts in a database, and is there as this user with this protocol.
async fn assert_counts(server: &RedisServer, url: &str, database: u32, expected: &str) {
    let store = RedisStore::connect(url).await.unwrap();
    assert!(store.check(check("ann", "10/s")).await.unwrap().is_allowed());
    let keyspace: String = server.command("INFO keyspace").await;
    assert!(keyspace.contains(&format!("db{database}:keys=")), "{url}: {keyspace}");
    let clients: String = server.command("CLIENT LIST TYPE normal").await;
    let ours = clients.lines().find(|line| line.contains("cmd=evalsha")).expect("our connection");
    for field in [&format!("db={database}"), expected] {
        // Redis 6.2 does not list the protocol.
        let is_listed = ours.contains(" resp=") || !field.starts_with("resp=");
        assert!(!is_listed || ours.split(' ').any(|part| part == field), "{url}: {ours} lacks {field}");
    }
    drop(store);
    let _: String = server.command("FLUSHALL").await;
    let _: i64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
}

#[tokio::test]
async fn all_that_a_url_says_is_heeded() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock").to_str().unwrap().to_owned();
    let server = RedisServer::start_with(&["--unixsocket", &socket]);
    let rights = "+evalsha +eval +time +mget +set +del +select";
    let _: String = server.command(&format!("ACL SETUSER limiter on >hunter2 resetkeys ~rl:* -@all {rights}")).await;
    let host = format!("127.0.0.1:{}", server.port());
    for (url, database, expected) in [
        (format!("redis://{host}"), 0, "user=default"),
        (format!("redis://{host}/7"), 7, "user=default"),
        (format!("redis://limiter:hunter2@{host}/7"), 7, "user=limiter"),
        (format!("valkey://limiter:hunter2@{host}/7"), 7, "user=limiter"),
        (format!("redis://limiter:hunter2@{host}/7?protocol=resp3"), 7, "resp=3"),
        (format!("redis+unix://{socket}"), 0, "user=default"),
        (format!("unix://{socket}?db=5"), 5, "user=default"),
        (format!("redis+unix://{socket}?db=5&user=limiter&pass=hunter2"), 5, "user=limiter"),
        (format!("redis+unix://{socket}?user=limiter&pass=hunter2&protocol=resp3"), 0, "resp=3"),
    ] {
        assert_counts(&server, &url, database, expected).await;
    }
}
