//! Texts of errors and logs: they name the fix, once, and contain no key or password.

use std::error::Error as _;
use std::io::{self, Write};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::observe::{Event, Observer, TracingObserver};
use tower_redis_ratelimit::store::{AnyStore, ErrorKind, Store, StoreError};
use tower_redis_ratelimit::{Fallback, Key, LocalStore, RedisStore, Strategy};

use super::forbidden::ask_of_a_long_log;
use crate::support::{RedisServer, check, policy, until};

const SECRETS: [&str; 4] = ["telling-key", "telling-id", "hunter2", "telling-user:"];

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns all texts of an error, in every format.
fn texts(error: &StoreError) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        texts.push(error.to_string());
        source = error.source();
    }
    for (i, text) in texts.iter().enumerate() {
        for other in &texts[..i] {
            assert!(
                !other.contains(text.as_str()),
                "{text:?} is shown twice: {texts:?}"
            );
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let observer = TracingObserver::new();
        observer.notify(&Event::failed(None, error, false));
        observer.notify(&Event::degraded(error, NonZeroU32::MIN, false));
    });
    texts.extend([format!("{error:?}"), format!("{error:#?}")]);
    texts.push(String::from_utf8(log.0.lock().unwrap().clone()).unwrap());
    texts
}

/// Requires the server's name too, except for an invalid URL.
fn assert_tells_no_secret(error: &StoreError, what: &str) {
    let is_named = error.to_string().contains("the server 127.0.0.1:");
    assert!(
        is_named || error.kind() == ErrorKind::Configuration,
        "{what}: no server is named: {error}"
    );
    for text in texts(error) {
        for secret in SECRETS {
            assert!(
                !text.contains(secret),
                "{what}: {secret:?} is shown: {text}"
            );
        }
    }
}

/// Returns the failures of checks of every kind, with revealing keys.
async fn failures(store: &RedisStore) -> Vec<StoreError> {
    let key = || Key::new("telling-key");
    let mut failures = vec![];
    for strategy in [Strategy::Gcra, Strategy::SlidingLog] {
        let policies = policy(strategy, "10/d");
        for check in [
            Check::take(key(), &policies, 1).with_id("telling-id"),
            Check::take(key(), &policies, 1),
            Check::take(key(), &policies, 1),
            Check::peek(key(), &policies, 1),
            Check::reset(key(), &policies),
        ] {
            failures.extend(store.check(check).await.err());
        }
    }
    failures.extend(ask_of_a_long_log(store, key()).await);
    failures.extend(store.announce().err());
    failures
}

#[tokio::test]
async fn a_refused_command_shows_no_key() {
    for command in [
        "EVALSHA", "EVAL", "TIME", "MGET", "SET", "SETRANGE", "DEL", "RPUSH", "LRANGE", "LSET",
    ] {
        let server = RedisServer::start_with(&["--rename-command", command, ""]);
        let failed = failures(&RedisStore::connect_lazy(server.url()).unwrap()).await;
        assert!(!failed.is_empty(), "{command}");
        for error in &failed {
            assert_tells_no_secret(error, command);
        }
    }
}

/// Even if the server does not understand the greeting.
#[tokio::test]
async fn a_refused_user_shows_no_secret() {
    let server = RedisServer::start();
    for rights in [
        "-evalsha",
        "-eval",
        "-time",
        "-mget",
        "-set",
        "-setrange",
        "resetkeys ~other:*",
    ] {
        let _: String = server
            .command(&format!(
                "ACL SETUSER telling-user reset on >hunter2 ~* +@all {rights}"
            ))
            .await;
        let url = format!("redis://telling-user:hunter2@127.0.0.1:{}/", server.port());
        let failed = failures(&RedisStore::connect_lazy(url).unwrap()).await;
        assert!(!failed.is_empty(), "{rights}");
        for error in &failed {
            assert_tells_no_secret(error, rights);
        }
    }
    for command in ["AUTH", "SELECT"] {
        let server = RedisServer::start_with(&["--rename-command", command, ""]);
        let url = format!("redis://telling-user:hunter2@127.0.0.1:{}/3", server.port());
        for error in &failures(&RedisStore::connect_lazy(url).unwrap()).await {
            assert_tells_no_secret(error, command);
        }
    }
}

/// The deadline belongs to a fallback, which is independent of any server.
#[tokio::test]
async fn a_missed_deadline_names_the_server() {
    struct Tells(mpsc::UnboundedSender<String>);

    impl Observer for Tells {
        fn notify(&self, event: &Event<'_>) {
            match *event {
                Event::Failed { error, .. } | Event::Degraded { error, .. } => {
                    let _ = self.0.send(error.to_string());
                }
                _ => {}
            }
        }
    }

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    for url in [
        format!("redis://telling-user:hunter2@{address}/"),
        format!("redis+cluster://telling-user:hunter2@{address}"),
        format!("redis+sentinel://telling-user:hunter2@{address}/mymaster"),
    ] {
        let (tell, mut told) = mpsc::unbounded_channel();
        let redis = RedisStore::builder(url.as_str())
            .timeout(Duration::from_secs(20))
            .connect_lazy()
            .unwrap();
        let store = Fallback::builder(redis, LocalStore::default())
            .observer(Tells(tell))
            .build();
        let any = AnyStore::from(store);
        let error = loop {
            let _ = any.check(check("ann", "10/s")).await.unwrap();
            // A deadline that a busy runtime notices late is not reported: a probe then opens the breaker. After that, no
            // check waits, so that this loop would keep the only thread.
            if let Ok(error) = told.try_recv() {
                break error;
            }
        };
        let server = if url.contains("sentinel") {
            "\"mymaster\" of the sentinels "
        } else {
            ""
        };
        let text = format!("the store is still connecting to the server {server}{address}: ");
        assert!(error.starts_with(&text), "{url}: {error}");
    }
}

/// A `Result<_, Error>` from `main` is printed as `Debug`.
#[tokio::test]
async fn debug_says_what_to_do() {
    let error = RedisStore::connect("redis://127.0.0.1:1/")
        .await
        .unwrap_err();
    let text = format!("{error:?}");
    for part in ["Unreachable", "check the URL", "refused"] {
        assert!(text.contains(part), "{text} lacks {part:?}");
    }
    let error = RedisStore::connect("http://127.0.0.1/").await.unwrap_err();
    for text in [format!("{error:?}"), error.to_string()] {
        assert!(text.contains(": use `redis://host:6379`"), "{text}");
    }
    assert_tells_no_secret(&error, "a wrong URL");
}

/// With RESP3, the greeting contains the password, and a server may repeat it in its error.
#[tokio::test]
async fn a_repeated_greeting_shows_no_secret() {
    for (words, kind) in [
        (
            "-ERR no `HELLO 3 AUTH telling-user hunter2` here",
            ErrorKind::Refused,
        ),
        ("-hunter2 is what you said", ErrorKind::Refused),
        (
            "-WRONGPASS telling-user has not hunter2",
            ErrorKind::Authentication,
        ),
    ] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!(
            "redis://telling-user:hunter2@{}/?protocol=resp3",
            listener.local_addr().unwrap()
        );
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut asked = [0; 4096];
                let Ok(length) = stream.read(&mut asked).await else {
                    continue;
                };
                let commands = asked[..length].iter().filter(|byte| **byte == b'*').count();
                let _ = stream
                    .write_all(format!("{words}\r\n").repeat(commands).as_bytes())
                    .await;
            }
        });
        let error = RedisStore::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{words}: {error:?}");
        assert_tells_no_secret(&error, words);
    }
}

/// A proxy may reply to a command with anything, including the command.
#[tokio::test]
async fn an_echo_shows_no_secret() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!(
        "redis://telling-user:hunter2@{}/",
        listener.local_addr().unwrap()
    );
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    let store = RedisStore::connect_lazy(url).unwrap();
    until("it failed", async || {
        let failed = failures(&store).await;
        failed
            .iter()
            .for_each(|error| assert_tells_no_secret(error, "echo"));
        !failed.is_empty()
    })
    .await;
}
