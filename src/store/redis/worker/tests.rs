//! Workers against servers that reply, fail or stay silent.

use std::io::{Read, Write};
use std::mem;
use std::net::TcpListener;
use std::num::{NonZeroU64, NonZeroUsize};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::timeout;

use super::queues::{Job, JobId, RedisFuture};
use super::task::Worker;
use crate::error::ErrorKind;
use crate::limit::{Check, Key, Policies, Policy, SentBy};
use crate::store::redis::link::Times;
use crate::store::{RedisStore, Store};
use crate::support::{RedisServer, check, until, unused_port};

const PATIENCE: Duration = Duration::from_secs(20);
const TIMES: Times = Times {
    connect: PATIENCE,
    ping: PATIENCE,
};

fn store(url: String, timeout: Duration) -> RedisStore {
    let one = NonZeroUsize::MIN;
    RedisStore::builder(url)
        .connections(one)
        .batch(one)
        .timeout(timeout)
        .connect_lazy()
        .unwrap()
}

/// Starts a server that replies until it receives `word`, reports that to the channel, and then stays silent.
fn falls_silent_at(word: &'static str) -> (String, mpsc::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            let asked = &buffer[..length];
            if asked
                .windows(word.len())
                .any(|part| part == word.as_bytes())
            {
                let _ = tell.send(());
            } else {
                let commands = asked.iter().filter(|byte| **byte == b'*').count();
                stream.write_all(&b"+OK\r\n".repeat(commands)).unwrap();
            }
        }
    });
    (url, told)
}

/// Only checks that were written to a connection may have been charged.
#[tokio::test]
async fn a_check_without_connection_was_not_sent() {
    let (silent, _told) = falls_silent_at("CLIENT");
    let short = Duration::from_millis(50);
    for (url, kind) in [
        (
            format!("redis://127.0.0.1:{}/", unused_port()),
            ErrorKind::Unreachable,
        ),
        (silent, ErrorKind::Timeout),
    ] {
        let store = store(url, short);
        // The first check is sent in a call, and the others are queued behind it.
        for answer in join_all((0..4).map(|_| store.check(check("ann", "10/s")))).await {
            let error = answer.unwrap_err();
            assert!(error.kind() == kind && error.is_not_sent(), "{error:?}");
        }
    }
    let (hears, _told) = falls_silent_at("EVALSHA");
    let store = store(hears, Duration::from_millis(500));
    let answers = join_all((0..2).map(|_| store.check(check("ann", "10/s")))).await;
    let errors = answers
        .into_iter()
        .map(Result::unwrap_err)
        .map(|error| (error.kind(), error.is_not_sent()));
    assert!(errors.eq([(ErrorKind::Timeout, false), (ErrorKind::Timeout, true)]));
}

/// Starts a server that sends `reply` to every command except the greeting. Counts its connections.
fn answers(reply: &'static str) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            counted.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(move || {
                let mut buffer = [0; 65_536];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    let asked = &buffer[..length];
                    let greets = asked.windows(6).any(|part| part == b"CLIENT");
                    let commands = if greets {
                        asked.iter().filter(|byte| **byte == b'*').count()
                    } else {
                        1
                    };
                    let reply = if greets { "+OK\r\n" } else { reply };
                    stream
                        .write_all(&reply.as_bytes().repeat(commands))
                        .unwrap();
                }
            });
        }
    });
    (url, connections)
}

/// A call that Redis rejects before it runs the script charges nothing and can be sent again. An error of the
/// running script may follow a charge.
#[tokio::test]
async fn refused_calls_are_known_to_be_uncharged() {
    for (reply, kind, unsent) in [
        (
            "-LOADING Redis is loading the dataset in memory\r\n",
            ErrorKind::NotReady,
            true,
        ),
        (
            "-MASTERDOWN Link with MASTER is down\r\n",
            ErrorKind::NotReady,
            true,
        ),
        (
            "-NOAUTH Authentication required.\r\n",
            ErrorKind::Authentication,
            true,
        ),
        (
            "-NOPERM User a has no permissions to run the 'evalsha' command\r\n",
            ErrorKind::Permission,
            true,
        ),
        (
            "-ERR ACL failure in script: User a has no permissions\r\n",
            ErrorKind::Permission,
            true,
        ),
        (
            "-CLUSTERDOWN Hash slot not served\r\n",
            ErrorKind::ClusterNode,
            true,
        ),
        (
            "-MOVED 3999 127.0.0.1:6381\r\n",
            ErrorKind::ClusterNode,
            true,
        ),
        ("-ASK 3999 127.0.0.1:6381\r\n", ErrorKind::ClusterNode, true),
        (
            "-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
            ErrorKind::ClusterNode,
            true,
        ),
        (
            "-CROSSSLOT Keys in request don't hash to the same slot\r\n",
            ErrorKind::ClusterNode,
            true,
        ),
        (
            "-READONLY You can't write against a read only replica.\r\n",
            ErrorKind::ReadOnly,
            true,
        ),
        (
            "-OOM command not allowed when used memory > 'maxmemory'.\r\n",
            ErrorKind::OutOfMemory,
            true,
        ),
        (
            "-BUSY Redis is busy running a script.\r\n",
            ErrorKind::Refused,
            true,
        ),
        (
            "-MISCONF Redis is configured to save RDB snapshots\r\n",
            ErrorKind::Refused,
            true,
        ),
        (
            "-NOREPLICAS Not enough good replicas to write.\r\n",
            ErrorKind::Refused,
            true,
        ),
        (
            "-ERR user_script:7: attempt to index a nil value\r\n",
            ErrorKind::Refused,
            false,
        ),
        (
            "-ERR Error running script: Script killed by user with SCRIPT KILL\r\n",
            ErrorKind::Refused,
            false,
        ),
        (
            "-EXECABORT Transaction discarded\r\n",
            ErrorKind::Refused,
            false,
        ),
        ("-UNKNOWN to us\r\n", ErrorKind::Refused, false),
        ("+OK\r\n", ErrorKind::Protocol, false),
    ] {
        let (url, _) = answers(reply);
        let store = store(url, Duration::from_secs(20));
        let error = store.check(check("ann", "10/s")).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.is_not_sent()),
            (kind, unsent),
            "{reply}"
        );
    }
}

/// Any reply to a ping proves that the server responds.
#[tokio::test]
async fn a_refused_ping_proves_a_live_connection() {
    let (url, connections) = answers("-LOADING Redis is loading the dataset in memory\r\n");
    let store = store(url, Duration::from_secs(20));
    let topology = &store.inner.topology;
    let pool = topology.pool(topology.node(0).unwrap(), 1, TIMES);
    for _ in 0..3 {
        drop(pool.checkout(PATIENCE).await.unwrap());
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(30)).await;
        tokio::time::resume();
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

/// The last reply and the end of the connection arrive together: the connection is not used again.
#[tokio::test]
async fn a_connection_that_ends_with_a_reply_is_replaced() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let (closed, is_closed) = mpsc::channel();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut buffer = [0; 65_536];
            while let Ok(length @ 1..) = stream.read(&mut buffer) {
                let asked = &buffer[..length];
                if asked.windows(4).any(|part| part == b"PING") {
                    stream.write_all(b"+PONG\r\n").unwrap();
                    break;
                }
                let commands = asked.iter().filter(|byte| **byte == b'*').count();
                stream.write_all(&b"+OK\r\n".repeat(commands)).unwrap();
            }
            drop(stream);
            let _ = closed.send(());
        }
    });
    let store = store(url, Duration::from_secs(20));
    let topology = &store.inner.topology;
    let pool = topology.pool(topology.node(0).unwrap(), 1, TIMES);
    for _ in 0..3 {
        let mut connection = pool.checkout(PATIENCE).await.unwrap();
        let mut ping = Box::pin(connection.ask(redis::cmd("PING"), Duration::from_secs(20)));
        assert!((&mut ping).now_or_never().is_none());
        // The runtime sees neither until both have arrived.
        is_closed.recv().unwrap();
        ping.await.unwrap();
        pool.give_back(connection);
    }
}

/// A connection is kept outside of bb8 for the next checkout, but not while a checkout waits for bb8.
#[tokio::test]
async fn a_returned_connection_goes_to_the_checkout_that_waits() {
    let server = RedisServer::start();
    let store = store(server.url(), Duration::from_secs(20));
    let topology = &store.inner.topology;
    let pool = topology.pool(topology.node(0).unwrap(), 1, TIMES);
    for waits in [false, true, true, false, true] {
        let mut connection = pool.checkout(PATIENCE).await.unwrap();
        let _ = connection
            .ask(redis::cmd("PING"), Duration::from_secs(20))
            .await
            .unwrap();
        let mut next = Box::pin(pool.checkout(PATIENCE));
        if waits {
            assert!((&mut next).now_or_never().is_none());
        }
        pool.give_back(connection);
        let next = next.now_or_never().expect("a connection").unwrap();
        pool.give_back(next);
    }
    let connected: String = server.command("INFO clients").await;
    assert!(connected.contains("connected_clients:2"), "{connected}");
}

/// A runtime that is shutting down may still receive a check and create its queue again, while workers of the
/// removed queue end.
#[tokio::test]
async fn a_worker_leaves_other_queues_alone() {
    let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
    let (inner, runtime) = (&store.inner, Handle::current());
    let queue = || inner.with_queue(&runtime, inner.topology.node(0), |queue| queue.number);
    let former = queue();
    assert_eq!(queue(), former);
    let worker = Worker::new(inner, former);
    drop(mem::take(&mut inner.queues().each));
    let newer = queue();
    drop(worker);
    let mut queues = inner.queues();
    assert!(queues.of(former).is_none() && queues.of(newer).is_some());
}

/// A job is moved several times. Rust moves a larger value by calling `memcpy`.
#[test]
fn a_queued_check_is_small() {
    assert!(mem::size_of::<Job>() <= 128, "{}", mem::size_of::<Job>());
}

/// Each call copies a part of the worker's future, so a small future is faster.
#[tokio::test]
async fn the_future_of_a_worker_is_small() {
    let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
    let (inner, runtime) = (&store.inner, Handle::current());
    let number = inner.with_queue(&runtime, inner.topology.node(0), |queue| queue.number);
    let run = Worker::new(inner, number).run(None);
    assert!(mem::size_of_val(&run) < 4_096, "{}", mem::size_of_val(&run));
    // Skip the drop: it would subtract a worker that the queue has never counted.
    mem::forget(run);
}

/// The task of an ended worker runs the next one, so that a call spawns nothing. It keeps neither the store nor
/// itself alive.
#[tokio::test]
async fn a_task_runs_all_workers_and_ends_with_the_store() {
    let server = RedisServer::start();
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let store = store(server.url(), Duration::from_secs(20));
    for _ in 0..3 {
        let _ = store.check(check("ann", "10/s")).await.unwrap();
        // The watch of the runtime, and the worker's task.
        until("the task waits", async || {
            tasks() == before + 2 && store.inner.queues().each[0].idle.len() == 1
        })
        .await;
    }
    let last = store.check(check("ann", "10/s"));
    drop(store);
    assert_eq!(last.await.unwrap().remaining(), 6);
    until("no task is left", async || tasks() == before).await;
}

/// When a runtime shuts down, it may drop the waiting task long before the queue.
#[tokio::test]
async fn a_dropped_task_gets_no_worker() {
    let server = RedisServer::start();
    let store = store(server.url(), Duration::from_secs(20));
    let runtime = Handle::current();
    let node = store.inner.topology.node(0);
    store.inner.with_queue(&runtime, node, |queue| {
        queue.idle.push(oneshot::channel().0)
    });
    let decision = store.check(check("ann", "10/s")).await.unwrap();
    assert!(decision.is_allowed());
}

#[test]
fn an_ended_runtime_reports_unsent_checks() {
    let runtime = || -> Runtime {
        Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    for (word, sent) in [("CLIENT", false), ("EVALSHA", true)] {
        let (url, told) = falls_silent_at(word);
        let store = store(url, Duration::from_secs(60));
        let ends = runtime();
        let guard = ends.enter();
        let checks = [
            store.check(check("ann", "10/s")),
            store.check(check("bob", "10/s")),
        ];
        drop(guard);
        told.recv().unwrap();
        drop(ends);
        let errors = checks.map(|check| {
            check
                .now_or_never()
                .expect("an immediate answer")
                .unwrap_err()
        });
        assert!(
            errors
                .iter()
                .all(|error| error.kind() == ErrorKind::NoRuntime && error.is_check_only())
        );
        assert_eq!(errors.map(|error| error.is_not_sent()), [!sent, true]);
        assert!(
            store.inner.queues().each.is_empty(),
            "the runtime's connections are dropped"
        );
    }
}

/// A check outside of a runtime is an error of that check alone.
#[test]
fn a_check_outside_runtimes_is_not_sent() {
    let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
    let error = store
        .check(check("ann", "10/s"))
        .now_or_never()
        .unwrap()
        .unwrap_err();
    assert!(
        error.kind() == ErrorKind::NoRuntime && error.is_check_only() && error.is_not_sent(),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("`runtime.block_on(async { "),
        "{error}"
    );
}

#[tokio::test]
#[should_panic = "`RedisFuture` polled after completion"]
async fn an_answer_is_returned_once() {
    let server = RedisServer::start();
    let mut answer = store(server.url(), Duration::from_secs(20)).check(check("ann", "10/s"));
    let _ = (&mut answer).await.unwrap();
    let _ = (&mut answer).await;
}

#[test]
fn an_immediate_answer_can_be_polled_again() {
    let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
    let mut answer = store.check(check("ann", "10/s"));
    for _ in 0..2 {
        assert_eq!(
            (&mut answer).now_or_never().unwrap().unwrap_err().kind(),
            ErrorKind::NoRuntime
        );
    }
}

/// Withdrawing works as for a check in its first queue, so that a fallback may decide the check instead.
#[tokio::test]
async fn a_redirected_check_can_be_withdrawn() {
    let store = RedisStore::cluster(["redis://127.0.0.1:1"]).unwrap();
    let id = JobId {
        queue: NonZeroU64::MAX,
        number: 7,
    };
    let (mut job, answer) = Job::new(check("ann", "10/s"), 0);
    job.id = Some(id);
    store.inner.requeue(vec![(None, job)]);
    let mut future = RedisFuture::new(answer, id);
    assert!(store.backend().withdraw(Pin::new(&mut future)));
    assert!(store.inner.queues().have_redirected(id));
    until("a worker has dropped it", async || {
        !store.inner.queues().have_redirected(id)
    })
    .await;
}

/// Release 2 of a caller is held, since release 1 has no reply yet, and no other check follows.
#[tokio::test]
async fn a_held_release_is_sent_without_another_check() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .connections(NonZeroUsize::new(4).unwrap())
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap();
    let slots = Policies::from(Policy::in_flight("slots", 9).unwrap());
    let release = || {
        let caller = Key::new("ann");
        let id = Check::take(caller, &slots, 1).slot().unwrap();
        let mut release = Check::release(caller, &slots, id);
        release.sending_mut().by = SentBy::Background;
        store.check(release).into_future().boxed()
    };
    for _ in 0..30 {
        join_all((0..4).map(|_| store.check(check("bob", "1000/s")).into_future())).await;
        let mut first = release();
        assert!((&mut first).now_or_never().is_none());
        // A worker takes it.
        for _ in 0..2 {
            yield_now().await;
        }
        let other = store.check(check("bob", "1000/s")).into_future();
        let second = release();
        let all = join_all([first, other.boxed(), second]);
        let all = timeout(Duration::from_secs(20), all).await;
        assert!(all.is_ok(), "the second release hangs");
    }
}
