//! Clients that send one request after the other, below their limit, over TCP: none is denied.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::routing::get;
use axum::serve::ListenerExt;
use futures_util::future::join_all;
use futures_util::stream;
use http::StatusCode;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::settle::Settlement;
use tower_redis_ratelimit::store::{AnyStore, Store};
use tower_redis_ratelimit::{
    Fallback, LocalStore, Policies, Policy, RateLimitLayer, RedisStore, Strategy,
};

use crate::support::RedisServer;

/// Number of requests of a client.
const REQUESTS: usize = 300;
/// Number of other clients, which send requests all the time.
const BUSY: usize = 64;

fn user() -> HeaderKey {
    HeaderKey::new("x-user").unwrap()
}

/// A store with a timeout that a busy machine does not exceed.
fn store(server: &RedisServer, connections: usize) -> RedisStore {
    RedisStore::builder(server.url())
        .connections(NonZeroUsize::new(connections).unwrap())
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap()
}

fn in_flight(name: &str, limit: u32) -> Policy {
    Policy::in_flight(name, limit).unwrap()
}

fn attempts(limit: u32) -> Policy {
    let quota = format!("{limit} per 15m");
    Policy::new("attempts", Strategy::SlidingLog, &quota).unwrap()
}

/// An app with a body of a known length, one of an unknown length, and none.
fn routes() -> Router {
    let stream = async || {
        let parts = ["hel", "lo"].map(|part| Ok::<_, std::io::Error>(Bytes::from(part)));
        Body::from_stream(stream::iter(parts))
    };
    Router::new()
        .route("/", get(async || "hello"))
        .route("/stream", get(stream))
        .route("/empty", get(async || StatusCode::NO_CONTENT))
}

/// A layer under which a request holds a slot.
fn held<S: Store>(store: S, policies: impl Into<Policies>) -> Router {
    let layer = RateLimitLayer::new(store, user(), policies.into());
    routes().layer(layer.until_body_end())
}

/// A layer under which only failures count. All requests succeed.
fn only_failures<S: Store>(store: S, policies: impl Into<Policies>) -> Router {
    let layer = RateLimitLayer::new(store, user(), policies.into());
    routes().layer(layer.settle(|response| match response.status {
        StatusCode::UNAUTHORIZED => Settlement::Keep,
        _ => Settlement::Refund,
    }))
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// A connection that sends a request as soon as it has the last byte of the response.
struct Connection(BufReader<TcpStream>);

impl Connection {
    async fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self(BufReader::new(stream))
    }

    /// Returns the status, and the seconds of `Retry-After`.
    async fn send(&mut self, path: &str, user: &str) -> (u16, u64) {
        let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nx-user: {user}\r\n\r\n");
        self.0.write_all(request.as_bytes()).await.unwrap();
        let status = self.line().await;
        let status = status.split(' ').nth(1).unwrap().parse().unwrap();
        let (mut length, mut is_chunked, mut retry_after) = (0, false, 0);
        loop {
            let line = self.line().await;
            match line.split_once(": ") {
                Some(("content-length", value)) => length = value.parse().unwrap(),
                Some(("transfer-encoding", _)) => is_chunked = true,
                Some(("retry-after", value)) => retry_after = value.parse().unwrap(),
                Some(_) => {}
                None => break,
            }
        }
        if is_chunked {
            while !self.line().await.starts_with('0') {
                self.line().await;
            }
            self.line().await;
        } else {
            self.0.read_exact(&mut vec![0; length]).await.unwrap();
        }
        (status, retry_after)
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        let length = self.0.read_line(&mut line).await.unwrap();
        assert!(length > 0, "the server has closed the connection");
        line.trim_end().to_owned()
    }
}

/// Sends requests, alternately on these connections, and returns the number of denied ones.
async fn denied(connections: &mut [Connection], requests: usize, path: &str, user: &str) -> usize {
    let mut denied = 0;
    for i in 0..requests {
        let connection = i % connections.len();
        let (status, _) = connections[connection].send(path, user).await;
        denied += usize::from(status == 429);
    }
    denied
}

/// Sends the requests of one client to each path: on one connection, and on two in turn. The client is new, since another
/// store may still release what an earlier client had.
async fn is_never_denied(app: Router, what: &str) {
    let address = serve(app).await;
    let user = what.replace(' ', "-");
    let paths = ["/", "/stream", "/empty"];
    for connections in 1..=2 {
        for path in paths {
            let mut connections = join_all((0..connections).map(|_| Connection::to(address))).await;
            let requests = REQUESTS / 2 / paths.len();
            let denied = denied(&mut connections, requests, path, &user).await;
            let count = connections.len();
            assert_eq!(
                denied, 0,
                "{what}, {path}, {count} connections of the client"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_one_slot_is_served() {
    let server = RedisServer::start();
    for connections in [1, 2, 8] {
        let app = held(store(&server, connections), in_flight("x", 1));
        is_never_denied(app, &format!("{connections} connections")).await;
    }
}

/// Sends requests of busy callers, one connection each, until this is dropped.
fn busy(address: SocketAddr) -> watch::Sender<()> {
    let (running, stopped) = watch::channel(());
    for caller in 0..BUSY {
        let mut stopped = stopped.clone();
        let requests = async move {
            let mut connection = Connection::to(address).await;
            loop {
                connection.send("/", &format!("busy{caller}")).await;
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = requests => {}
                _ = stopped.changed() => {}
            }
        });
    }
    running
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_callers_delay_no_release() {
    let server = RedisServer::start();
    for connections in [1, 2, 8] {
        let store = store(&server, connections);
        let layer = RateLimitLayer::new(store.clone(), user(), in_flight("x", 1));
        let app = only_failures(store, attempts(1)).layer(layer.until_body_end());
        let address = serve(app).await;
        let _busy = busy(address);
        let mut client = [Connection::to(address).await];
        let user = format!("ann{connections}");
        let denied = denied(&mut client, REQUESTS / 3, "/", &user).await;
        assert_eq!(denied, 0, "{connections} connections");
    }
}

/// A client with one request more than its slots is denied until one ends, and not after the wait of the response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_client_is_served_after_its_wait() {
    let server = RedisServer::start();
    let (end, ended) = watch::channel(false);
    let (running, mut started) = watch::channel(0);
    let hold = get(async move || {
        running.send_modify(|running| *running += 1);
        ended.clone().wait_for(|ended| *ended).await.unwrap();
    });
    let layer = RateLimitLayer::new(store(&server, 2), user(), in_flight("x", 4)).until_body_end();
    let address = serve(routes().route("/hold", hold).layer(layer)).await;
    let hold = move || async move { Connection::to(address).await.send("/hold", "ann").await };
    let held: Vec<_> = (0..4).map(|_| tokio::spawn(hold())).collect();
    started.wait_for(|started| *started == 4).await.unwrap();
    let mut client = Connection::to(address).await;
    let (status, retry_after) = client.send("/", "ann").await;
    assert_eq!((status, retry_after), (429, 1));
    end.send_replace(true);
    for request in held {
        assert_eq!(request.await.unwrap().0, 200);
    }
    sleep(Duration::from_secs(retry_after)).await;
    assert_eq!(denied(&mut [client], REQUESTS, "/", "ann").await, 0);
}

/// A release is for all layers over the store, also behind a fallback and under several policies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_layer_sees_what_another_gives_back() {
    let server = RedisServer::start();
    let quota = || Policy::new("quota", Strategy::Gcra, "10000/s").unwrap();
    let both = Policies::new([attempts(1), quota()]).unwrap();
    let redis = store(&server, 2);
    let patient = |store| {
        Fallback::builder(store, LocalStore::default())
            .deadline(Duration::from_secs(20))
            .unwrap()
            .build()
    };
    let two_layers = only_failures(redis.clone(), attempts(1))
        .layer(RateLimitLayer::new(redis.clone(), user(), in_flight("x", 1)).until_body_end());
    // Each request uses the other one of two routers with the same policy.
    let turn = Arc::new(AtomicUsize::new(0));
    let routers = [(), ()].map(|()| held(redis.clone(), in_flight("y", 1)));
    let in_turn = Router::new().fallback(move |request: Request| {
        let turn = turn.fetch_add(1, Relaxed);
        routers[turn % 2].clone().oneshot(request)
    });
    for (app, what) in [
        (only_failures(redis.clone(), both), "two policies"),
        (two_layers, "two layers"),
        (in_turn, "two services in turn"),
        (
            held(patient(redis.clone()), in_flight("z", 1)),
            "a fallback",
        ),
        (
            held(AnyStore::from(patient(redis)), in_flight("u", 1)),
            "any store",
        ),
    ] {
        is_never_denied(app, what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_failures_count() {
    let server = RedisServer::start();
    for limit in [1, 2, 5, 20] {
        let app = only_failures(store(&server, 2), attempts(limit));
        is_never_denied(app, &format!("{limit} attempts")).await;
    }
}

/// A response is dropped by a thread outside of the runtime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_thread_gives_back() {
    let server = RedisServer::start();
    let app = held(store(&server, 2), in_flight("x", 1));
    for _ in 0..50 {
        let request = Request::get("/").header("x-user", "ann");
        let request = request.body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        std::thread::spawn(move || drop(response)).join().unwrap();
    }
}

/// A bucket drains while the check is on its way, so the age of a charge must not count that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_failures_count_in_a_bucket() {
    let server = RedisServer::start();
    for strategy in [
        Strategy::Gcra,
        Strategy::LeakyBucket,
        Strategy::TokenBucket(Default::default()),
    ] {
        let name = format!("{strategy:?}");
        let policy = Policy::new("attempts", strategy, "1 per 24h").unwrap();
        is_never_denied(only_failures(store(&server, 2), policy), &name).await;
    }
}
