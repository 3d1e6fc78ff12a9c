//! Every problem with the server or the URL is a typed error whose text names the fix.

use std::error::Error as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{ErrorKind, Store, StoreError};
use tower_redis_ratelimit::{Fallback, Key, LocalStore, RedisStore, Strategy};

use super::forbidden::{ask_of_a_long_log, ask_of_slots};
use crate::support::{RedisServer, STRATEGIES, assert_helpful, check, policy, until, unused_port};

#[tokio::test]
async fn a_healthy_server_is_taken() {
    let server = RedisServer::start();
    RedisStore::connect(server.url()).await.unwrap();
}

#[tokio::test]
async fn an_invalid_url() {
    for url in [
        "",
        "not a url",
        "http://127.0.0.1/",
        "redis://:hunter2@127.0.0.1:port/",
        "redis://127.0.0.1/one",
    ] {
        let lazy = RedisStore::connect_lazy(url).unwrap_err();
        assert!(
            lazy.to_string()
                .starts_with("the Redis URL cannot be used: "),
            "{url}: {lazy}"
        );
        assert!(lazy.to_string().contains(" `redis://"), "{lazy}");
        assert!(!lazy.to_string().contains("hunter2"), "{lazy}");
        assert_helpful(
            &RedisStore::connect(url).await.unwrap_err(),
            ErrorKind::Configuration,
            "invalid store configuration",
        );
    }
}

#[tokio::test]
async fn settings_that_cannot_work() {
    let builder = || RedisStore::builder("redis://127.0.0.1/");
    for prefix in ["a b", "", "{x}"] {
        let error = builder()
            .prefix(prefix)
            .connect_lazy()
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("{prefix:?} is not a valid key prefix: use")),
            "{error}"
        );
    }
    let error = builder()
        .timeout(Duration::ZERO)
        .connect_lazy()
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("a timeout of 0 for Redis: "), "{error}");
}

#[tokio::test]
async fn refused_connections_are_reported() {
    let url = format!("redis://127.0.0.1:{}/", unused_port());
    assert_helpful(
        &RedisStore::connect(url).await.unwrap_err(),
        ErrorKind::Unreachable,
        "check the URL",
    );
}

#[tokio::test]
async fn the_name_does_not_resolve() {
    let error = RedisStore::builder("redis://redis.invalid/")
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap_err();
    assert_helpful(&error, ErrorKind::Unreachable, "check the URL");
}

#[tokio::test]
async fn the_password_is_wrong_or_missing() {
    let server = RedisServer::start_with(&["--requirepass", "right"]);
    let with = |userinfo: &str| format!("redis://{userinfo}127.0.0.1:{}/", server.port());
    for (url, advice) in [
        (
            with(":hunter2@"),
            "rejected the credentials: check the user and password",
        ),
        (
            with(""),
            "requires a password: add it to the URL, as in `redis://:password@host/`, or `redis://user:password@host/`",
        ),
    ] {
        let error = RedisStore::connect(url).await.unwrap_err();
        assert_helpful(&error, ErrorKind::Authentication, advice);
    }
    RedisStore::connect(with(":right@")).await.unwrap();
}

#[tokio::test]
async fn the_user_may_run_no_scripts() {
    let server = RedisServer::start();
    let _: String = server
        .command("ACL SETUSER reader on >hunter2 ~* +@all -eval -evalsha")
        .await;
    let url = format!("redis://reader:hunter2@127.0.0.1:{}/", server.port());
    assert_helpful(
        &RedisStore::connect(url).await.unwrap_err(),
        ErrorKind::Permission,
        "+evalsha +eval +time +mget +set",
    );
}

/// No permission that a check needs may be missing: a store that cannot read would never count
/// anything.
#[tokio::test]
async fn the_user_may_not_read_or_write() {
    let server = RedisServer::start();
    for right in ["-set", "-mget -get", "-time"] {
        let _: String = server
            .command(&format!(
                "ACL SETUSER reader reset on >hunter2 ~* +@all {right}"
            ))
            .await;
        let url = format!("redis://reader:hunter2@127.0.0.1:{}/", server.port());
        assert_helpful(
            &RedisStore::connect(url.clone()).await.unwrap_err(),
            ErrorKind::Permission,
            "+mget +set",
        );
        let lazy = RedisStore::connect_lazy(url).unwrap();
        assert_eq!(
            lazy.check(check("ann", "10/s")).await.unwrap_err().kind(),
            ErrorKind::Permission,
            "{right}"
        );
    }
}

/// A log that cannot be written completely is not left without an expiry, and does not affect other
/// checks.
#[tokio::test]
async fn a_right_of_logs_is_missing() {
    let server = RedisServer::start();
    for right in [
        "-lrange",
        "-rpush",
        "-lset",
        "-ltrim",
        "-lrem",
        "-pexpireat",
    ] {
        let _: String = server
            .command(&format!(
                "ACL SETUSER logger reset on >hunter2 ~* +@all {right}"
            ))
            .await;
        let url = format!("redis://logger:hunter2@127.0.0.1:{}/", server.port());
        let store = RedisStore::connect(url).await.unwrap();
        let refused = async |caller: &str| {
            let refused = ask_of_a_long_log(&store, Key::new(caller)).await;
            assert!(!refused.is_empty(), "{right}");
            assert!(
                refused
                    .iter()
                    .all(|error| error.kind() == ErrorKind::Permission),
                "{right}: {refused:?}"
            );
        };
        let others = async {
            for _ in 0..100 {
                assert!(
                    store
                        .check(check("bob", "1000/s"))
                        .await
                        .unwrap()
                        .is_allowed(),
                    "{right}"
                );
            }
        };
        tokio::join!(refused("ann"), others, refused("cid"));
        let keys: Vec<String> = server.command("KEYS rl:*:o").await;
        for key in keys {
            assert!(
                server.command::<i64>(&format!("PTTL {key}")).await > 0,
                "{right}: {key} stays for ever"
            );
        }
        let _: String = server.command("FLUSHALL").await;
    }
}

/// The error names the permissions for requests in flight, and with these they are counted.
#[tokio::test]
async fn the_documented_rights_for_slots_are_enough() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del";
    let of_slots = "+zrange +zremrangebyscore +zcard +zadd +zscore +zrem +pexpireat";
    let url = server.url_with_rights(rights).await;
    let store = RedisStore::connect(url).await.unwrap();
    let refused = ask_of_slots(&store, Key::new("ann")).await;
    assert!(!refused.is_empty());
    refused
        .iter()
        .for_each(|error| assert_helpful(error, ErrorKind::Permission, of_slots));
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
    let _: String = server
        .command(&format!("ACL SETUSER limiter {of_slots}"))
        .await;
    assert!(ask_of_slots(&store, Key::new("ann")).await.is_empty());
}

#[tokio::test]
async fn the_documented_rights_are_enough() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del";
    let of_logs = "+lrange +rpush +lset +ltrim +lrem +pexpireat";
    let url = server.url_with_rights(rights).await;
    let store = RedisStore::connect(url).await.unwrap();
    for strategy in STRATEGIES {
        if strategy == Strategy::SlidingLog {
            let _: String = server
                .command(&format!("ACL SETUSER limiter {of_logs}"))
                .await;
            assert!(ask_of_a_long_log(&store, Key::new("ann")).await.is_empty());
        }
        let policies = policy(strategy, "10/100d");
        let key = Key::new(format!("{strategy:?}"));
        for check in [
            Check::take(key, &policies, 3).with_id("request-1"),
            Check::take(key, &policies, 3),
            Check::refund(key, &policies, 4),
            Check::peek(key, &policies, 9),
            Check::reset(key, &policies),
        ] {
            let _ = store.check(check).await.unwrap();
        }
    }
}

/// Idle connections are pinged. The documented permissions do not include PING, but the error reply also shows that the
/// server responds.
#[tokio::test]
async fn the_user_may_not_ping() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del";
    let url = server.url_with_rights(rights).await;
    let store = RedisStore::builder(url)
        .connections(std::num::NonZeroUsize::MIN)
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap();
    let decision = store.check(check("ann", "10/s")).await;
    assert!(decision.unwrap().is_allowed());
    let connections = async || {
        let clients: String = server.command("CLIENT LIST TYPE normal").await;
        clients.lines().count()
    };
    let before = connections().await;
    for least in [1, 2] {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(30)).await;
        tokio::time::resume();
        until("a ping is rejected", async || {
            rejected_pings(&server).await >= least
        })
        .await;
        let decision = store.check(check("ann", "10/s")).await;
        assert!(decision.unwrap().is_allowed());
    }
    assert_eq!(connections().await, before);
}

async fn rejected_pings(server: &RedisServer) -> u32 {
    let stats: String = server.command("INFO commandstats").await;
    let Some(line) = stats.lines().find(|line| line.starts_with("cmdstat_ping:")) else {
        return 0;
    };
    let (_, rejected) = line.split_once("rejected_calls=").unwrap();
    let count = rejected.split(',').next().unwrap();
    count.parse().unwrap()
}

/// Collects reported failures that no check returned.
struct Failures(tokio::sync::mpsc::UnboundedSender<StoreError>);

impl Observer for Failures {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { error, .. } = *event {
            let _ = self.0.send(error.clone());
        }
    }
}

/// The documented permissions suffice, and a missing one is reported.
#[tokio::test]
async fn the_documented_rights_to_announce_are_enough() {
    let server = RedisServer::start();
    let rights = "+evalsha +eval +time +mget +set +setrange +del";
    let to_announce = "+zremrangebyscore +zadd +zcard +pexpire";
    let url = server.url_with_rights(rights).await;
    let (sender, mut failures) = tokio::sync::mpsc::unbounded_channel();
    let store = RedisStore::builder(url)
        .observer(Failures(sender))
        .connect()
        .await
        .unwrap();

    // Without `+pexpire`, an announced instance would stay for ever.
    for granted in ["+zremrangebyscore +zadd +zcard", to_announce] {
        let instances = store.announce().unwrap();
        let failed = tokio::time::timeout(Duration::from_secs(20), failures.recv())
            .await
            .unwrap()
            .unwrap();
        assert_helpful(&failed, ErrorKind::Permission, to_announce);
        assert_eq!(server.command::<u32>("ZCARD rl:instances").await, 0);
        drop(instances);
        let _: String = server
            .command(&format!("ACL SETUSER limiter {granted}"))
            .await;
    }
    let _instances = store.announce().unwrap();
    until("it is announced", async || {
        server.command::<u32>("ZCARD rl:instances").await == 1
    })
    .await;
}

/// A server that replies to every command with the same bytes.
fn impostor(reply: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    let commands = buffer[..length]
                        .iter()
                        .filter(|byte| **byte == b'*')
                        .count();
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
async fn the_server_is_not_redis() {
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
        assert_helpful(
            &error,
            ErrorKind::Protocol,
            "host and port are those of a Redis",
        );
    }
}

#[tokio::test]
async fn the_server_never_answers() {
    let url = impostor(b"");
    let error = RedisStore::builder(url)
        .timeout(Duration::from_millis(50))
        .connect_timeout(Duration::from_millis(100))
        .connect()
        .await
        .unwrap_err();
    assert_helpful(&error, ErrorKind::Timeout, "raise `connect_timeout`");
}

#[tokio::test]
async fn the_database_does_not_exist() {
    let advice = "has no database 16: use one below its `databases`, which are 0 to 15 by default, or a `prefix` in database 0";
    for password in [&["--requirepass", "hunter2"][..], &[]] {
        let server = RedisServer::start_with(password);
        let login = if password.is_empty() { "" } else { ":hunter2@" };
        let url = format!("redis://{login}127.0.0.1:{}/16", server.port());
        let error = RedisStore::connect(url).await.unwrap_err();
        assert_helpful(&error, ErrorKind::Refused, advice);
    }
}

#[tokio::test]
async fn a_node_of_a_cluster_has_one_database() {
    let node = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let url = format!("redis://127.0.0.1:{}/3", node.port());
    let error = RedisStore::connect(url).await.unwrap_err();
    assert_helpful(&error, ErrorKind::ClusterNode, "use `redis+cluster://`");
}

#[tokio::test]
async fn the_server_is_a_replica() {
    let master = RedisServer::start();
    let replica =
        RedisServer::start_with(&["--replicaof", "127.0.0.1", &master.port().to_string()]);
    let store = RedisStore::connect_lazy(replica.url()).unwrap();
    // Until it has synchronized, a replica rejects even scripts.
    until("the replica has synchronized", async || {
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
    assert_helpful(
        &RedisStore::connect(server.url()).await.unwrap_err(),
        ErrorKind::OutOfMemory,
        "has reached `maxmemory`: raise it",
    );
}

/// The server closes idle connections, as a device in between may: no check notices.
#[tokio::test]
async fn closed_idle_connections_are_replaced() {
    let server = RedisServer::start_with(&["--timeout", "1"]);
    let store = RedisStore::connect(server.url()).await.unwrap();
    for _ in 0..2 {
        assert!(
            store
                .check(check("ann", "10/s"))
                .await
                .unwrap()
                .is_allowed()
        );
        until("the server has closed them all", async || {
            let clients: String = server.command("CLIENT LIST TYPE normal").await;
            clients.lines().count() == 1
        })
        .await;
    }
}

#[tokio::test]
async fn extreme_timeouts_are_accepted() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::MAX)
        .connect()
        .await
        .unwrap();
    assert!(
        store
            .check(check("ann", "10/s"))
            .await
            .unwrap()
            .is_allowed()
    );
}

/// The timeout covers the connect too, even a long one.
#[tokio::test]
async fn a_late_greeting_is_waited_for() {
    let server = RedisServer::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let ((accept, accepted), (go, may_go)) =
        (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let port = server.port();
    std::thread::spawn(move || {
        let client = listener.accept().unwrap().0;
        accept.send(()).unwrap();
        may_go.recv().unwrap();
        let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
        for (mut from, mut to) in [
            (client.try_clone().unwrap(), server.try_clone().unwrap()),
            (server, client),
        ] {
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        }
    });
    let store = RedisStore::builder(url)
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap();
    let asked = tokio::spawn(async move { store.check(check("ann", "10/s")).await });
    tokio::task::spawn_blocking(move || accepted.recv().unwrap())
        .await
        .unwrap();
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(10)).await;
    tokio::time::resume();
    go.send(()).unwrap();
    assert!(asked.await.unwrap().unwrap().is_allowed());
}

/// Checks queued behind a worker on another runtime fail when that runtime shuts down; the store
/// continues.
#[test]
fn the_runtime_of_a_worker_ends() {
    let server = RedisServer::start();
    let builder = RedisStore::builder(server.url()).connections(std::num::NonZeroUsize::MIN);
    let store = builder
        .timeout(Duration::from_millis(500))
        .connect_lazy()
        .unwrap();
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let _ = first
        .block_on(async { store.check(check("ann", "10/s")).await })
        .unwrap();
    server.freeze();
    let lost = store.clone();
    let running = first.spawn(async move { lost.check(check("ann", "10/s")).await });
    let waiting = second.spawn({
        let store = store.clone();
        async move { store.check(check("ann", "10/s")).await }
    });
    first.shutdown_background();
    let answer =
        second.block_on(async { tokio::time::timeout(Duration::from_secs(20), waiting).await });
    assert!(answer.expect("an answer in time").unwrap().is_err());
    drop(running);
    server.thaw();
    second.block_on(until("it decides again", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    }));
}

/// A store can be created without a runtime; the error names the missing runtime on use.
#[test]
fn a_missing_runtime_is_reported() {
    let store = RedisStore::connect_lazy("redis://127.0.0.1/").unwrap();
    let error = futures_util::FutureExt::now_or_never(store.check(check("ann", "10/s")))
        .unwrap()
        .unwrap_err();
    assert_helpful(&error, ErrorKind::NoRuntime, "Tokio runtime");
}

/// A server that greets, replies with these bytes, and closes the connection.
fn hangs_up_after(reply: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut buffer = [0; 65_536];
            while let Ok(length @ 1..) = stream.read(&mut buffer) {
                let asked = &buffer[..length];
                let greets = asked.windows(6).any(|part| part == b"CLIENT");
                let commands = asked.iter().filter(|byte| **byte == b'*').count();
                let answer = if greets {
                    b"+OK\r\n".repeat(commands)
                } else {
                    reply.clone()
                };
                if stream.write_all(&answer).is_err() || !greets {
                    break;
                }
            }
        }
    });
    url
}

/// The connection was lost; it is not another protocol.
#[tokio::test]
async fn a_reply_cut_off_is_a_lost_connection() {
    for reply in ["$40\r\n0123", "$4", "*3\r\n:1\r\n", ":12"] {
        let store =
            RedisStore::builder(hangs_up_after(reply.into())).timeout(Duration::from_secs(20));
        let error = store
            .connect_lazy()
            .unwrap()
            .check(check("ann", "10/s"))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{reply:?}: {error:?}");
        assert!(!error.is_not_sent(), "{reply:?}: it may have been charged");
    }
}

#[tokio::test]
async fn long_errors_are_cut() {
    let reply = format!("-ERR {}\r\n", "\u{e9}".repeat(500_000));
    let store =
        RedisStore::builder(hangs_up_after(reply.into_bytes())).timeout(Duration::from_secs(20));
    let error = store
        .connect_lazy()
        .unwrap()
        .check(check("ann", "10/s"))
        .await
        .unwrap_err();
    let text = format!("{error}{error:?}");
    assert!(
        error.kind() == ErrorKind::Refused && text.len() < 2_000,
        "{} bytes",
        text.len()
    );
}

/// An error of a server may try to change a terminal, or to forge a line of a log.
#[tokio::test]
async fn errors_are_printable() {
    let reply = b"-ERR \x1b[31m\x07\x0bin red\nanother line\r\n".to_vec();
    let store = RedisStore::builder(hangs_up_after(reply)).timeout(Duration::from_secs(20));
    let store = store.connect_lazy().unwrap();
    let error = store.check(check("ann", "10/s")).await.unwrap_err();
    let text = error.to_string();
    let shown = "\\u{1b}[31m\\u{7}\\u{b}in red\\nanother line";
    assert!(text.contains(shown), "{text}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

/// A take of 1 is granted at most 1.
#[tokio::test]
async fn a_grant_above_the_cost_is_invalid() {
    for granted in [2, i64::MAX] {
        let numbers = [granted, 9, 0, 100, 1_790].map(i64::to_le_bytes).concat();
        let reply = [
            format!("${}\r\n", numbers.len()).as_bytes(),
            &numbers,
            b"\r\n",
        ]
        .concat();
        let store = RedisStore::builder(hangs_up_after(reply)).timeout(Duration::from_secs(20));
        let error = store
            .connect_lazy()
            .unwrap()
            .check(check("ann", "10/s"))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{granted}: {error:?}");
    }
}

/// The instances then decide locally, so the missing permission is reported.
#[tokio::test]
async fn a_missing_right_is_named() {
    let server = RedisServer::start();
    let _: String = server
        .command("ACL SETUSER limiter reset on >hunter2 ~* +@all -setrange")
        .await;
    let url = format!("redis://limiter:hunter2@127.0.0.1:{}/", server.port());
    let error = RedisStore::connect(url.clone()).await.unwrap_err();
    assert_helpful(&error, ErrorKind::Permission, "+setrange");
    assert_eq!(
        error.source().unwrap().to_string(),
        "the right `+setrange` is missing"
    );

    let reports = Reports::default();
    let redis = RedisStore::builder(url)
        .timeout(Duration::from_secs(20))
        .observer(reports.clone());
    let store = Fallback::new(redis.connect_lazy().unwrap(), LocalStore::default());
    let source = async || store.check(check("ann", "10/d")).await.unwrap().source();
    assert_eq!(source().await, Source::Redis);
    until("Redis writes in place", async || {
        source().await == Source::Local
    })
    .await;
    for _ in 0..3 {
        assert_eq!(source().await, Source::Local);
    }
    let reports = reports.0.lock().unwrap();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(
        reports[0].contains("`+setrange` is missing") && reports[0].contains("missing-right"),
        "{reports:?}"
    );
}

/// The reported misconfigurations.
#[derive(Clone, Default)]
struct Reports(Arc<Mutex<Vec<String>>>);

impl Observer for Reports {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Misconfigured { problem, .. } = *event {
            self.0.lock().unwrap().push(problem.to_owned());
        }
    }
}
