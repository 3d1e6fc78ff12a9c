//! A store outlives its runtimes: no check fails because another runtime shuts down.

use std::future::pending;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{Limiter, RedisStore, Strategy};

use crate::support::{RedisServer, check, policy, until};

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn two_threads() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// One connection: a runtime that kept it would leave none to the next.
fn store(url: String) -> RedisStore {
    RedisStore::builder(url)
        .connections(NonZeroUsize::MIN)
        .timeout(Duration::from_secs(5))
        .connect_lazy()
        .unwrap()
}

/// Sends checks one after another. Returns the number of failures.
async fn failures(store: &RedisStore, checks: usize) -> usize {
    let mut failures = 0;
    for _ in 0..checks {
        failures += usize::from(store.check(check("ann", "1000000/s")).await.is_err());
    }
    failures
}

/// As with a store in a `static` and a separate runtime per test.
#[test]
fn successive_runtimes_share_a_store() {
    let server = RedisServer::start();
    let store = store(server.url());
    let mut failed = 0;
    for i in 0..20 {
        let runtime = if i % 2 == 0 {
            one_thread()
        } else {
            two_threads()
        };
        failed += runtime.block_on(failures(&store, 3));
    }
    assert_eq!(failed, 0, "of 60 checks on 20 runtimes");
    let clients = async || {
        server
            .command::<String>("CLIENT LIST TYPE normal")
            .await
            .lines()
            .count()
    };
    one_thread().block_on(until("no connection is left but this one", async || {
        clients().await == 1
    }));
}

/// As with a store in a `static` and concurrent tests.
#[test]
fn ending_runtimes_do_not_disturb_each_other() {
    let server = RedisServer::start();
    let store = store(server.url());
    let failed: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|i| {
                let store = &store;
                scope.spawn(move || {
                    let mut failed = 0;
                    for _ in 0..20 {
                        let runtime = if i % 2 == 0 {
                            one_thread()
                        } else {
                            two_threads()
                        };
                        failed += runtime.block_on(failures(store, 5));
                        // Shuts down with a check in flight.
                        let (other, guard) = (store.clone(), runtime.enter());
                        drop(tokio::spawn(async move {
                            other.check(check("bob", "10/s")).await
                        }));
                        drop(guard);
                    }
                    failed
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert_eq!(failed, 0, "of 400 checks on 80 runtimes");
}

/// Returns the next connection, which must arrive.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let accepted = one_thread().block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener.try_clone().unwrap()).unwrap();
        tokio::time::timeout(Duration::from_secs(20), listener.accept()).await
    });
    listener.set_nonblocking(false).unwrap();
    accepted
        .expect("a connection in time")
        .unwrap()
        .0
        .into_std()
        .unwrap()
}

/// Forwards all data between two connections, until one ends.
fn pipe(client: TcpStream, server: TcpStream) {
    for (mut from, mut to) in [
        (client.try_clone().unwrap(), server.try_clone().unwrap()),
        (server, client),
    ] {
        thread::spawn(move || io::copy(&mut from, &mut to));
    }
}

#[test]
fn runtimes_ending_while_connecting_leave_nothing() {
    let server = RedisServer::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = store(format!("redis://{}/", listener.local_addr().unwrap()));
    for _ in 0..3 {
        let runtime = two_threads();
        let store = store.clone();
        runtime.spawn(async move { store.check(check("ann", "10/s")).await });
        // It has connected, and waits for a reply to its greeting, which never arrives.
        let _connection = accept(&listener);
        drop(runtime);
    }
    let port = server.port();
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            pipe(client, TcpStream::connect(("127.0.0.1", port)).unwrap());
        }
    });
    assert_eq!(one_thread().block_on(failures(&store, 3)), 0, "of 3 checks");
}

/// A runtime that has shut down drives nothing: its own checks fail immediately.
#[test]
fn a_check_outlives_its_runtime() {
    let server = RedisServer::start();
    let store = store(server.url());
    let (ends, stays) = (two_threads(), two_threads());
    let _ = ends
        .block_on(async { store.check(check("ann", "10/s")).await })
        .unwrap();
    server.freeze();
    let guard = ends.enter();
    let checks = [
        store.check(check("ann", "10/s")),
        store.check(check("bob", "10/s")),
    ];
    drop(guard);
    drop(ends);
    for check in checks {
        assert_eq!(
            stays.block_on(check).unwrap_err().kind(),
            ErrorKind::NoRuntime
        );
    }
    server.thaw();
    assert_eq!(stays.block_on(failures(&store, 3)), 0);
}

/// Delays the calls that are about to be sent.
struct Holds {
    holding: mpsc::Sender<()>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl Observer for Holds {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Sent { .. } = *event {
            let _ = self.holding.send(());
            let _ = self.go_on.lock().unwrap().recv();
        }
    }
}

/// A runtime that shuts down drops waiting tasks, while a running task may be about to use a
/// connection. Over a unix socket, a separate task drives the connection, and it may be dropped
/// first.
#[test]
fn connections_ending_with_runtimes_are_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock").to_str().unwrap().to_owned();
    let server = RedisServer::start_with(&["--unixsocket", &socket]);
    for (url, has_task) in [(server.url(), false), (format!("unix://{socket}"), true)] {
        let store = store(url);
        let (ends, stays) = (two_threads(), two_threads());
        let _ = ends
            .block_on(async { store.check(check("ann", "10/s")).await })
            .unwrap();
        let ((holding, held), (release, go_on)) = (mpsc::channel(), mpsc::channel());
        // Sets the observer of the store.
        let _limiter =
            Limiter::new(store.clone(), policy(Strategy::Gcra, "10/s")).observer(Holds {
                holding,
                go_on: Mutex::new(go_on),
            });
        let (waits, waited) = mpsc::channel::<()>();
        ends.spawn(async move {
            let _waits = waits;
            pending::<()>().await;
        });
        let guard = ends.enter();
        let checked = store.check(check("ann", "10/s"));
        drop(guard);
        held.recv().unwrap();
        let ending = thread::spawn(move || drop(ends));
        assert!(waited.recv().is_err(), "what waits is dropped");
        let clients = async || {
            server
                .command::<String>("CLIENT LIST TYPE normal")
                .await
                .lines()
                .count()
        };
        if has_task {
            stays.block_on(until("no connection is left but this one", async || {
                clients().await == 1
            }));
        }
        drop(release);
        ending.join().unwrap();
        let error = stays.block_on(checked).unwrap_err();
        assert!(
            error.kind() == ErrorKind::NoRuntime && error.is_check_only(),
            "{error:?}"
        );
        assert_eq!(stays.block_on(failures(&store, 3)), 0);
        drop(stays);
        one_thread().block_on(until("all have ended with their runtimes", async || {
            clients().await == 1
        }));
    }
}

/// A handle outlives its runtime.
#[test]
fn an_ended_runtime_counts_as_none() {
    let server = RedisServer::start();
    let store = store(server.url());
    let runtime = two_threads();
    let handle = runtime.handle().clone();
    drop(runtime);
    let _guard = handle.enter();
    for _ in 0..3 {
        let answer = futures_util::FutureExt::now_or_never(store.check(check("ann", "10/s")));
        assert_eq!(
            answer.expect("an immediate answer").unwrap_err().kind(),
            ErrorKind::NoRuntime
        );
    }
}
