//! Logins, and misconfigured or broken sentinels: a typed error whose text names the fix.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::{ErrorKind, Servers, Store, StoreError};

use crate::nodes::{Fake, NAME, Sentinel, url};
use crate::support::{RedisServer, assert_helpful, check, unused_port};

async fn connect(servers: impl Into<Servers>) -> Result<RedisStore, StoreError> {
    RedisStore::builder(servers)
        .timeout(Duration::from_secs(20))
        .connect()
        .await
}

async fn refused(servers: impl Into<Servers>, kind: ErrorKind, remedy: &str) {
    assert_helpful(&connect(servers).await.unwrap_err(), kind, remedy);
}

/// The master and the sentinels require a login, and their users have only the documented rights.
#[tokio::test]
async fn the_documented_rights_are_enough() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del +role";
    let _: String = server
        .command(&format!(
            "ACL SETUSER limiter on >hunter2/ resetkeys ~rl:* -@all {rights}"
        ))
        .await;
    let _: String = server.command("ACL SETUSER default on >hunter22").await;
    let more = format!("sentinel auth-pass {NAME} hunter22\n");
    let sentinel = Sentinel::start(server.port(), 1, &more);
    let _: String = sentinel
        .command("ACL SETUSER asker on >hunter2@ -@all +sentinel|master")
        .await
        .unwrap();
    let _: String = sentinel.command("ACL SETUSER default off").await.unwrap();

    let master = format!("redis://limiter:hunter2%2F@{NAME}");
    let good = format!("redis://asker:hunter2%40@127.0.0.1:{}", sentinel.port);
    let store = connect(Servers::sentinel(&master, [good.as_str()]))
        .await
        .unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let of_url = |password: &str| {
        let port = sentinel.port;
        format!(
            "redis+sentinel://limiter:hunter2%2F@127.0.0.1:{port}/{NAME}?sentinel_user=asker&sentinel_password={password}"
        )
    };
    connect(of_url("hunter2@")).await.unwrap();
    connect(of_url("hunter2%40")).await.unwrap();

    let advice = "check the user and password";
    refused(of_url("wrong"), ErrorKind::Authentication, advice).await;
    let missing = "requires a password: add it to the URL";
    refused(url(&[sentinel.port]), ErrorKind::Authentication, missing).await;
    refused(
        Servers::sentinel(NAME, [good.as_str()]),
        ErrorKind::Authentication,
        missing,
    )
    .await;
    let wrong = format!("redis://limiter:hunter2wrong@{NAME}");
    refused(
        Servers::sentinel(&wrong, [good.as_str()]),
        ErrorKind::Authentication,
        advice,
    )
    .await;
}

/// Without the right to run `ROLE`, the first script call distinguishes a replica from a master.
#[tokio::test]
async fn masters_are_recognized_without_the_role_command() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del";
    server.url_with_rights(rights).await;
    let sentinel = Fake::start(server.port(), 1);
    let servers = Servers::sentinel(
        &format!("redis://limiter:hunter2@{NAME}"),
        [format!("redis://127.0.0.1:{}", sentinel.port)],
    );
    connect(servers).await.unwrap();
}

#[tokio::test]
async fn the_sentinel_user_lacks_a_right() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "");
    let _: String = sentinel
        .command("ACL SETUSER default -sentinel")
        .await
        .unwrap();
    refused(
        url(&[sentinel.port]),
        ErrorKind::Permission,
        "+sentinel|master",
    )
    .await;
}

#[tokio::test]
async fn the_sentinels_know_no_such_master() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "");
    let servers = Servers::sentinel("other", [format!("redis://127.0.0.1:{}", sentinel.port)]);
    refused(
        servers,
        ErrorKind::Configuration,
        "no master named \"other\"",
    )
    .await;
}

#[tokio::test]
async fn the_server_is_not_a_sentinel() {
    let server = RedisServer::start();
    refused(
        url(&[server.port()]),
        ErrorKind::Configuration,
        "is not a Redis Sentinel",
    )
    .await;
}

#[tokio::test]
async fn a_sentinel_is_not_a_server() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "");
    let address = format!("127.0.0.1:{}", sentinel.port);
    for url in [
        format!("redis://{address}"),
        format!("redis+cluster://{address}"),
    ] {
        refused(
            url,
            ErrorKind::Refused,
            "for a Redis Sentinel, use `redis+sentinel://HOST:PORT/MASTER`",
        )
        .await;
    }
}

/// While there is no master, most checks fail without querying the sentinels.
#[tokio::test]
async fn failing_checks_rarely_query_sentinels() {
    let sentinel = Fake::start(unused_port(), 1);
    let store = RedisStore::builder(url(&[sentinel.port]))
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap();
    let since = Instant::now();
    for _ in 0..200 {
        assert_eq!(
            store.check(check("ann", "10/s")).await.unwrap_err().kind(),
            ErrorKind::Unreachable
        );
    }
    // The first three checks query the sentinels freely, and the background watch queries them too.
    let passed = since.elapsed().as_millis() as u64;
    let (queries, most) = (
        sentinel.queries.load(SeqCst),
        5 + passed / 50 + passed / 200,
    );
    assert!(
        queries <= most,
        "{queries} queries for 200 checks, more than {most}"
    );
}

#[tokio::test]
async fn no_sentinel_can_be_reached() {
    refused(
        url(&[unused_port(), unused_port()]),
        ErrorKind::Unreachable,
        "check the URL",
    )
    .await;
}

/// The sentinels still report a former master, which is a replica now.
#[tokio::test]
async fn the_server_is_not_a_master() {
    let server = RedisServer::start();
    let replica =
        RedisServer::start_with(&["--replicaof", "127.0.0.1", &server.port().to_string()]);
    let sentinel = Fake::start(replica.port(), 1);
    refused(
        url(&[sentinel.port]),
        ErrorKind::NotReady,
        "no master has been elected",
    )
    .await;
}

#[test]
fn invalid_sentinel_addresses_are_refused() {
    let none: [&str; 0] = [];
    for servers in [
        Servers::sentinel(NAME, none),
        Servers::sentinel("", ["redis://a:26379"]),
        Servers::sentinel("my master", ["redis://a:26379"]),
        Servers::sentinel(NAME, ["redis+unix:///tmp/sentinel"]),
        Servers::sentinel(NAME, ["redis://a:26379/2"]),
        Servers::from("redis+sentinel://a:26379"),
        Servers::from("redis+sentinel://a:26379,/mymaster"),
        Servers::from("redis+sentinel:///mymaster"),
        Servers::from("redis+sentinel://:hunter2@a:26379/mymaster/one"),
    ] {
        let error = RedisStore::connect_lazy(servers).unwrap_err().to_string();
        assert!(
            error.starts_with("the Redis URL cannot be used: ") && !error.contains("hunter2"),
            "{error}"
        );
    }
}
