//! Credentials that change: closures of the application.

use std::future::pending;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{Credentials, ErrorKind, RedisStoreBuilder, Store, StoreError};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore, redis};

use crate::rotation::Rotation;
use crate::support::{RedisServer, assert_helpful, check, until};

const PATIENT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);

/// Starts a server with a user who has the rights of the guide.
async fn server_with(password: &str) -> RedisServer {
    let server = RedisServer::start();
    let rights = "~rl:* -@all +evalsha +eval +time +mget +set +setrange +del +get";
    let user = format!("ACL SETUSER limiter on >{password} resetkeys {rights}");
    let _: String = server.command(&user).await;
    server
}

fn patient(server: &RedisServer) -> RedisStoreBuilder {
    RedisStore::builder(server.url()).timeout(PATIENT)
}

async fn decides(store: &RedisStore) -> bool {
    store.check(check("bob", "10000/s")).await.is_ok()
}

/// Returns the users of the connections, without that of this command.
async fn users(server: &RedisServer) -> Vec<String> {
    let clients: String = server.command("CLIENT LIST TYPE normal").await;
    let words = clients.split([' ', '\n']);
    let mut users: Vec<_> = words
        .filter_map(|word| word.strip_prefix("user="))
        .collect();
    let own = users.iter().position(|user| *user == "default");
    users.remove(own.expect("this command's"));
    users.into_iter().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_under_load_is_not_noticed() {
    let server = RedisServer::start();
    let rotation = Rotation::start(&[&server]).await;
    let builder = RedisStore::builder(server.url());
    rotation.is_not_noticed(&[&server], builder).await;
}

#[tokio::test]
async fn idle_connections_get_new_credentials() {
    let server = server_with("hunter2-0").await;
    idle_connection_gets_new_credentials(&server, server.url()).await;
}

#[tokio::test]
async fn idle_connections_get_new_credentials_by_resp3() {
    let server = server_with("hunter2-0").await;
    let url = format!("{}?protocol=resp3", server.url());
    idle_connection_gets_new_credentials(&server, url).await;
}

/// Over a Unix socket, as with TLS, a task of redis-rs drives the connection.
#[cfg(unix)]
#[tokio::test]
async fn idle_connections_get_new_credentials_by_a_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("redis").display().to_string();
    let server = RedisServer::start_with(&["--unixsocket", &path]);
    let user = "ACL SETUSER limiter on >hunter2-0 ~* +@all";
    let _: String = server.command(user).await;
    idle_connection_gets_new_credentials(&server, format!("redis+unix://{path}")).await;
}

async fn idle_connection_gets_new_credentials(server: &RedisServer, url: String) {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let _: String = server
        .command("ACL SETUSER other on >hunter2-1 ~* +@all")
        .await;
    let issue = move || {
        let number = count.fetch_add(1, SeqCst).min(1);
        let user = ["limiter", "other"][number];
        let validity = Duration::from_secs(1);
        async move { Ok(Credentials::new(user, format!("hunter2-{number}")).valid_for(validity)) }
    };
    let builder = RedisStore::builder(url).timeout(PATIENT);
    let store = builder.credentials(issue).connect().await.unwrap();
    until("the connection has the other user", async || {
        let users = users(server).await;
        !users.is_empty() && users.iter().all(|user| user == "other")
    })
    .await;
    let _: u32 = server.command("ACL DELUSER limiter").await;
    let here = server.info("stats", "total_connections_received").await;
    assert!(decides(&store).await);
    let after = server.info("stats", "total_connections_received").await;
    assert_eq!(after, here + 1, "only this test connects");
}

/// Without an overlap, the instance decides until the closure returns the new password.
#[tokio::test]
async fn killed_connections_are_back_within_a_second_of_the_answer() {
    let server = server_with("hunter2-0").await;
    let password = Arc::new(Mutex::new("hunter2-0"));
    let answered = Arc::new(Mutex::new(None));
    let (current, at) = (Arc::clone(&password), Arc::clone(&answered));
    let redis = patient(&server).credentials(move || {
        let password = *current.lock().unwrap();
        if password == "hunter2-1" {
            at.lock().unwrap().get_or_insert_with(Instant::now);
        }
        async move { Ok(Credentials::new("limiter", password)) }
    });
    let store = Fallback::builder(redis.connect().await.unwrap(), LocalStore::default())
        .deadline(PATIENT / 3)
        .unwrap()
        .build();
    let source = async || {
        sleep(Duration::from_millis(1)).await;
        let decision = store.check(check("ann", "10000/s")).await;
        decision.unwrap().source()
    };
    assert_eq!(source().await, Source::Redis);
    let change = "ACL SETUSER limiter resetpass >hunter2-1";
    let _: String = server.command(change).await;
    assert_eq!(source().await, Source::Redis, "the connection stays");
    let _: u32 = server.command("CLIENT KILL USER limiter").await;
    for _ in 0..200 {
        assert_eq!(source().await, Source::Local);
    }
    let changed = Instant::now();
    *password.lock().unwrap() = "hunter2-1";
    until("Redis decides", async || source().await == Source::Redis).await;
    let answer = answered.lock().unwrap().expect("it was asked");
    let (called, back) = (answer - changed, answer.elapsed());
    println!("called after {called:?}, and back {back:?} after the answer");
    const SECOND: Duration = Duration::from_secs(1);
    assert!(called < SECOND + SECOND / 2, "called after {called:?}");
    assert!(back < SECOND, "back {back:?} after the answer");
}

/// Each way in which a closure may fail, and the text of its error.
const FAILURES: [(&str, &str); 4] = [
    ("hangs", "make it faster, or raise `connect_timeout`"),
    ("fails", "has failed for the server"),
    ("panics", "has failed for the server"),
    ("is empty", "has failed for the server"),
];

async fn misbehave(how: &str) -> Result<Credentials, Box<dyn std::error::Error + Send + Sync>> {
    match how {
        "hangs" => pending().await,
        "fails" => Err("the vault is sealed".into()),
        "panics" => panic!("a mistake in the closure"),
        _ => Ok(Credentials::new("limiter", "")),
    }
}

#[tokio::test]
async fn a_closure_that_fails_is_named_in_time() {
    let server = server_with("hunter2").await;
    for (how, remedy) in FAILURES {
        let builder = || {
            RedisStore::builder(server.url())
                .timeout(SHORT)
                .connect_timeout(4 * SHORT)
                .credentials(move || misbehave(how))
        };
        until("connecting names it", async || {
            let error = builder().connect().await.unwrap_err();
            // On a machine that stalls, the connection may take too long first.
            error.kind() == ErrorKind::Authentication && error.to_string().contains(remedy)
        })
        .await;
        let store = builder().connect_lazy().unwrap();
        until("the first checks name it", async || {
            let error = store.check(check("ann", "10/s")).await.unwrap_err();
            assert!(error.is_not_sent(), "{error:?}");
            error.kind() == ErrorKind::Authentication
        })
        .await;
    }
    assert!(users(&server).await.is_empty(), "nothing has connected");
}

/// Records the errors that no check returned.
#[derive(Clone, Default)]
struct Failures(Arc<Mutex<Vec<StoreError>>>);

impl Observer for Failures {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { error, .. } = *event {
            self.0.lock().unwrap().push(error.clone());
        }
    }
}

#[tokio::test]
async fn connections_outlive_a_closure_that_fails() {
    let server = server_with("hunter2").await;
    for (how, remedy) in FAILURES {
        let failures = Failures::default();
        let calls = AtomicUsize::new(0);
        let store = RedisStore::builder(server.url())
            .timeout(SHORT)
            .connect_timeout(4 * SHORT)
            .observer(failures.clone())
            .credentials(move || {
                let is_first = calls.fetch_add(1, SeqCst) == 0;
                let validity = Duration::from_secs(1);
                async move {
                    if is_first {
                        return Ok(Credentials::new("limiter", "hunter2").valid_for(validity));
                    }
                    misbehave(how).await
                }
            })
            .connect()
            .await
            .unwrap();
        until("the failure is reported", async || {
            assert!(decides(&store).await, "{how}");
            !failures.0.lock().unwrap().is_empty()
        })
        .await;
        let error = failures.0.lock().unwrap()[0].clone();
        assert_eq!(error.kind(), ErrorKind::Authentication);
        assert!(error.to_string().contains(remedy), "{error}");
        // A new connection uses the last credentials.
        let _: u32 = server.command("CLIENT KILL USER limiter").await;
        until("it decides", async || decides(&store).await).await;
    }
}

/// The second connection waits for the call that the first one has begun.
#[tokio::test]
async fn credentials_may_take_for_ever() {
    let server = server_with("hunter2").await;
    let builder = RedisStore::builder(server.url()).timeout(Duration::MAX);
    let store = builder
        .batch(NonZeroUsize::MIN)
        .credentials(|| async {
            sleep(SHORT).await;
            Ok(Credentials::new("limiter", "hunter2").valid_for(Duration::MAX))
        })
        .connect_lazy()
        .unwrap();
    until("both are connected", async || {
        let checks = (0..8).map(|_| store.check(check("bob", "10000/s")));
        let decisions = timeout(PATIENT, join_all(checks)).await;
        for decision in decisions.expect("they are decided") {
            assert!(decision.unwrap().is_allowed());
        }
        users(&server).await.len() == 2
    })
    .await;
}

/// A server that does not know the new user keeps the connection until its next check is decided.
#[tokio::test]
async fn rejected_credentials_lose_no_check() {
    let server = server_with("hunter2").await;
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let store = patient(&server).credentials(move || {
        let user = match count.fetch_add(1, SeqCst) {
            1 => "unknown",
            _ => "limiter",
        };
        async move { Ok(Credentials::new(user, "hunter2").valid_for(Duration::from_secs(1))) }
    });
    let store = store.connect().await.unwrap();
    let mut charged = 0;
    while calls.load(SeqCst) < 3 {
        match store.check(check("ann", "1000000/100d")).await {
            Ok(_) => charged += 1,
            Err(error) => {
                assert_helpful(&error, ErrorKind::Authentication, "check what the closure");
                assert!(error.is_not_sent(), "{error:?}");
            }
        }
    }
    let log: Vec<redis::Value> = server.command("ACL LOG").await;
    assert!(!log.is_empty(), "the server has rejected it");
    until("it decides", async || decides(&store).await).await;
    let last = store.check(check("ann", "1000000/100d")).await.unwrap();
    assert_eq!(last.remaining(), 999_999 - charged);
}

#[tokio::test]
async fn wrong_credentials_name_their_source() {
    let server = server_with("hunter2-1").await;
    for protocol in ["", "?protocol=resp3"] {
        let builder = RedisStore::builder(format!("{}{protocol}", server.url()));
        let builder = builder.credentials(|| async { Ok(Credentials::new("limiter", "hunter2")) });
        assert!(!format!("{builder:?}").contains("hunter2"), "{builder:?}");
        let error = builder.connect().await.unwrap_err();
        assert_helpful(&error, ErrorKind::Authentication, "check what the closure");
    }
}

/// An empty user is the default one.
#[tokio::test]
async fn a_password_alone_is_enough() {
    let server = RedisServer::start_with(&["--requirepass", "hunter2"]);
    let closure = || async { Ok(Credentials::new("", "hunter2")) };
    let builder = patient(&server).credentials(closure);
    assert!(decides(&builder.connect().await.unwrap()).await);
}

#[test]
fn credentials_beside_those_of_the_url_are_refused() {
    let closure = || async { Ok(Credentials::new("limiter", "hunter2")) };
    for (url, problem) in [
        ("redis://:hunter2@a", "remove the login from the URL"),
        ("redis://limiter@a", "remove the login from the URL"),
        (
            "redis+cluster://limiter:hunter2@a,b",
            "remove the login from the URL",
        ),
        (
            "redis+sentinel://limiter:hunter2@a/m",
            "remove the login from the URL",
        ),
        (
            "redis://limiter@a/?password_file=/run/hunter",
            "use one closure",
        ),
    ] {
        let builder = RedisStore::builder(url).credentials(closure);
        let error = builder.connect_lazy().unwrap_err().to_string();
        assert!(error.contains(problem), "{url}: {error}");
        assert!(!error.contains("hunter2"), "{url}: {error}");
    }
    let builder = RedisStore::builder("redis://a").sentinel_credentials(closure);
    let error = builder.connect_lazy().unwrap_err().to_string();
    assert!(error.contains("use `redis+sentinel://`"), "{error}");
    let with_password = "redis+sentinel://a/m?sentinel_password=hunter2";
    let builder = RedisStore::builder(with_password).sentinel_credentials(closure);
    let error = builder.connect_lazy().unwrap_err().to_string();
    assert!(error.contains("remove the login from the URL"), "{error}");
    let builder = RedisStore::builder(with_password).credentials(closure);
    builder.connect_lazy().unwrap();
}
