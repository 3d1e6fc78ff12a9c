//! Whatever is wrong with the server or the URL: a typed error whose text says what to do.

use std::error::Error as _;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use tower_redis_ratelimit::{Check, ConfigError, Error, ErrorKind, Key, RedisStore, Store, Strategy};

use crate::support::{RedisServer, STRATEGIES, check, free_port, policy};

/// Its text names the remedy, does not repeat its cause, and has no secret.
fn assert_helpful(error: &Error, kind: ErrorKind, remedy: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    let text = error.to_string();
    assert!(text.contains(remedy), "{text:?} lacks {remedy:?}");
    if let Some(cause) = error.source() {
        assert!(!text.contains(&cause.to_string()), "{text:?} repeats its cause {cause}");
    }
    assert!(!format!("{error:?} {error}").contains("hunter2"), "{error:?} shows the password");
}

#[tokio::test]
async fn a_healthy_server_is_taken() {
    let server = RedisServer::start();
    RedisStore::connect(server.url()).await.unwrap();
}

#[tokio::test]
async fn a_url_that_is_none() {
    for url in ["", "not a url", "http://127.0.0.1/", "redis://:hunter2@127.0.0.1:port/", "redis://127.0.0.1/one"] {
        let lazy = RedisStore::connect_lazy(url).unwrap_err();
        assert!(matches!(lazy, ConfigError::RedisUrl(_)), "{url}: {lazy:?}");
        assert!(lazy.to_string().contains("write it like `redis://:password@host:6379/0`"), "{lazy}");
        assert!(!lazy.to_string().contains("hunter2"), "{lazy}");
        assert_helpful(&RedisStore::connect(url).await.unwrap_err(), ErrorKind::Configuration, "set up wrongly");
    }
}

#[tokio::test]
async fn settings_that_cannot_work() {
    let builder = || RedisStore::builder("redis://127.0.0.1/");
    assert!(matches!(builder().prefix("a b").connect_lazy(), Err(ConfigError::Prefix(_))));
    assert!(matches!(builder().prefix("").connect_lazy(), Err(ConfigError::Prefix(_))));
    assert!(matches!(builder().prefix("{x}").connect_lazy(), Err(ConfigError::Prefix(_))));
    assert!(matches!(builder().timeout(Duration::ZERO).connect_lazy(), Err(ConfigError::Zero(_))));
}

#[tokio::test]
async fn nobody_listens() {
    let url = format!("redis://127.0.0.1:{}/", free_port());
    assert_helpful(&RedisStore::connect(url).await.unwrap_err(), ErrorKind::Unreachable, "check the URL");
}

#[tokio::test]
async fn the_name_does_not_resolve() {
    let error =
        RedisStore::builder("redis://redis.invalid/").timeout(Duration::from_secs(20)).connect().await.unwrap_err();
    assert_helpful(&error, ErrorKind::Unreachable, "check the URL");
}

#[tokio::test]
async fn the_password_is_wrong_or_missing() {
    let server = RedisServer::start_with(&["--requirepass", "right"]);
    let with = |userinfo: &str| format!("redis://{userinfo}127.0.0.1:{}/", server.port());
    for url in [with(":hunter2@"), with("")] {
        let error = RedisStore::connect(url).await.unwrap_err();
        assert_helpful(&error, ErrorKind::Authentication, "check the user and password");
    }
    RedisStore::connect(with(":right@")).await.unwrap();
}

#[tokio::test]
async fn the_user_may_run_no_scripts() {
    let server = RedisServer::start();
    let _: String = server.command("ACL SETUSER reader on >hunter2 ~* +@all -eval -evalsha").await;
    let url = format!("redis://reader:hunter2@127.0.0.1:{}/", server.port());
    assert_helpful(
        &RedisStore::connect(url).await.unwrap_err(),
        ErrorKind::Permission,
        "+evalsha +eval +time +get +set",
    );
}

#[tokio::test]
async fn the_user_may_not_write() {
    let server = RedisServer::start();
    let _: String = server.command("ACL SETUSER reader on >hunter2 ~* +@all -set").await;
    let store = RedisStore::connect(format!("redis://reader:hunter2@127.0.0.1:{}/", server.port())).await.unwrap();
    let error = store.check(check("ann", "10/s")).await.unwrap_err();
    assert_helpful(&error, ErrorKind::Permission, "+set");
}

/// The rights that the documentation asks for are all that it takes.
#[tokio::test]
async fn the_documented_rights_are_enough() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +get +set +del";
    let of_logs = "+llen +lrange +lindex +rpush +rpop +lset +ltrim +pexpireat";
    let _: String = server.command(&format!("ACL SETUSER limiter on >hunter2 resetkeys ~rl:* -@all {rights}")).await;
    let store = RedisStore::connect(format!("redis://limiter:hunter2@127.0.0.1:{}/", server.port())).await.unwrap();
    for strategy in STRATEGIES {
        if strategy == Strategy::SlidingLog {
            let _: String = server.command(&format!("ACL SETUSER limiter {of_logs}")).await;
        }
        let policies = policy(strategy, "10/100d");
        let key = Key::new(format!("{strategy:?}"));
        for check in [
            Check::take(key, &policies, 3).id("request-1"),
            Check::take(key, &policies, 3),
            Check::give_back(key, &policies, 4),
            Check::peek(key, &policies, 9),
            Check::reset(key, &policies),
        ] {
            store.check(check).await.unwrap();
        }
    }
}

/// Answers every command that it is sent with the same bytes.
fn impostor(reply: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    let commands = buffer[..length].iter().filter(|byte| **byte == b'*').count();
                    if stream.write_all(&reply.repeat(commands)).is_err() {
                        return;
                    }
                }
            });
        }
    });
    url
}

#[tokio::test]
async fn the_server_is_no_redis() {
    let web_server = impostor(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n");
    assert_helpful(
        &RedisStore::connect(web_server).await.unwrap_err(),
        ErrorKind::Protocol,
        "host and port are those of a Redis",
    );
}

#[tokio::test]
async fn the_reply_has_another_shape() {
    for reply in [&b"+OK\r\n"[..], b":7\r\n", b"$-1\r\n", b"*1\r\n:1\r\n"] {
        let error = RedisStore::connect(impostor(reply)).await.unwrap_err();
        assert_helpful(&error, ErrorKind::Protocol, "host and port are those of a Redis");
    }
}

#[tokio::test]
async fn the_server_never_answers() {
    let url = impostor(b"");
    let error = RedisStore::builder(url).timeout(Duration::from_millis(50)).connect().await.unwrap_err();
    assert_helpful(&error, ErrorKind::Timeout, "did not answer in time");
}

#[tokio::test]
async fn the_server_is_a_replica() {
    let master = RedisServer::start();
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &master.port().to_string()]);
    let store = RedisStore::connect_lazy(replica.url()).unwrap();
    // It refuses even to run scripts until it has synchronized.
    crate::support::until("the replica has synchronized", async || {
        let info: String = replica.command("INFO replication").await;
        info.contains("master_link_status:up")
    })
    .await;
    assert_helpful(
        &store.check(check("ann", "10/s")).await.unwrap_err(),
        ErrorKind::ReadOnly,
        "point the URL at its master",
    );
}

#[tokio::test]
async fn the_server_has_no_memory_left() {
    let server = RedisServer::start_with(&["--maxmemory", "1", "--maxmemory-policy", "noeviction"]);
    let store = RedisStore::connect(server.url()).await.unwrap();
    assert_helpful(&store.check(check("ann", "10/s")).await.unwrap_err(), ErrorKind::OutOfMemory, "raise `maxmemory`");
}

/// A store can be made anywhere; it says what it lacks when it is used.
#[test]
fn there_is_no_runtime() {
    let store = RedisStore::connect_lazy("redis://127.0.0.1/").unwrap();
    let error = futures_util::FutureExt::now_or_never(store.check(check("ann", "10/s"))).unwrap().unwrap_err();
    assert_helpful(&error, ErrorKind::NoRuntime, "tokio runtime");
}
