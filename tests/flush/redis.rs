//! The end of a process: `flush` waits until Redis has what the process owes it, from any runtime, and reports the rest.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::routing::get;
use futures_util::future::join;
use futures_util::stream;
use http::StatusCode;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::settle::{Reservation, Settlement};
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Key, Limiter, Policies, Policy, RateLimitLayer, RedisStore, Strategy};

use crate::support::{RedisServer, policy, until};

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn units() -> Policies {
    policy(Strategy::FixedWindow(Align::FirstHit), "10000/d")
}

fn slots() -> Policies {
    Policy::in_flight("slots", 10).unwrap().into()
}

/// Returns the count of these policies in Redis, read with a separate store.
async fn counted(server: &RedisServer, policies: Policies) -> u32 {
    let peek = Limiter::new(server.store(), policies).peek(Key::GLOBAL, 0);
    let peek = peek.await.unwrap();
    peek.capacity() - peek.remaining()
}

/// Records the errors of a store.
#[derive(Clone, Default)]
struct Errors(Arc<Mutex<Vec<(ErrorKind, String)>>>);

impl Observer for Errors {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { error, .. } = *event {
            let source = std::error::Error::source(error).map(ToString::to_string);
            let error = (error.kind(), source.unwrap_or_default());
            self.0.lock().unwrap().push(error);
        }
    }
}

impl Errors {
    /// Returns the number of failed flushes with this text.
    fn unflushed(&self, text: &str) -> usize {
        let errors = self.0.lock().unwrap();
        errors.iter().filter(|error| error.1.contains(text)).count()
    }
}

/// A job on a current-thread runtime ends right after its settlement.
#[test]
fn a_flush_settles_before_the_end() {
    let server = RedisServer::start();
    runtime().block_on(async {
        let limiter = Limiter::new(server.store(), units());
        let job = limiter.reserve(Key::GLOBAL, 1_000).await.unwrap();
        job.settle(10);
        until("it is settled", || limiter.flush()).await;
    });
    assert_eq!(runtime().block_on(counted(&server, units())), 10);
}

/// A flush of any clone of the store waits for the operations of all layers and limiters, as does that of a limiter. It may be
/// called repeatedly and concurrently.
#[test]
fn a_flush_waits_for_all_layers() {
    let server = RedisServer::start();
    runtime().block_on(async {
        let store = server.store();
        let layers = [(), ()].map(|()| RateLimitLayer::new(store.clone(), Global, units()));
        let limiter = Limiter::new(store.clone(), units());
        let job = limiter.reserve(Key::GLOBAL, 1_000).await.unwrap();
        for layer in layers {
            let layer = layer.settle(|_| Settlement::Refund);
            let app: Router = Router::new().route("/", get(async || {})).layer(layer);
            let response = app.oneshot(Request::new(Body::empty())).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
        }
        drop(job);
        let other = Limiter::new(store.clone(), units());
        until("nothing is owed", async || {
            join(store.flush(), other.flush()).await == (true, true)
        })
        .await;
        assert!(store.clone().flush().await, "and again");
    });
    assert_eq!(runtime().block_on(counted(&server, units())), 0);
}

/// A refund is given up, since Redis may have executed it. A release stays owed: it is sent until its slot has expired.
#[tokio::test]
async fn a_frozen_redis_ends_a_flush() {
    for (policies, timeout, text) in [
        (units(), 100, ""),
        (units(), 60_000, "lose 1 charges, refunds and releases,"),
        (slots(), 100, "charges, refunds and releases,"),
    ] {
        let server = RedisServer::start();
        let errors = Errors::default();
        let store = RedisStore::builder(server.url())
            .timeout(Duration::from_millis(timeout))
            .observer(errors.clone())
            .connect_lazy()
            .unwrap();
        let limiter = Limiter::new(store.clone(), policies.clone()).observer(errors.clone());
        let job = until_reserved(&limiter).await;
        server.freeze();
        // Its queue is alive until the operation has ended.
        drop(limiter);
        drop(job);
        // Far more than its bound, for a busy machine, and less than the longest timeout of the store.
        let flush = tokio::time::timeout(Duration::from_secs(30), store.flush());
        assert_eq!(flush.await, Ok(false), "{text}");
        assert!(
            errors.unflushed(text) > 0,
            "{text} is not in {errors:?}",
            errors = errors.0
        );
        server.thaw();
        until("nothing is owed", || store.flush()).await;
        if !text.is_empty() {
            assert_eq!(counted(&server, policies).await, 0);
        }
    }
}

/// Reserves one unit, repeatedly while a busy machine exceeds the timeout of the store.
async fn until_reserved(limiter: &Limiter<RedisStore>) -> Reservation {
    loop {
        if let Ok(job) = limiter.reserve(Key::GLOBAL, 1).await {
            return job;
        }
    }
}

/// The running request owes nothing until its end.
#[tokio::test]
async fn a_flush_leaves_running_streams() {
    let server = RedisServer::start();
    let store = server.store();
    let both = [units(), slots()];
    let policies = Policies::new(both.iter().flat_map(|one| one.iter().cloned())).unwrap();
    let layer = RateLimitLayer::new(store.clone(), Global, policies).until_body_end();
    let endless = async || Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
    let app: Router = Router::new().route("/", get(endless)).layer(layer);
    let streaming = app.oneshot(Request::new(Body::empty())).await.unwrap();
    assert!(store.flush().await);
    assert_eq!(counted(&server, slots()).await, 1);
    drop(streaming);
    until("nothing is owed", || store.flush()).await;
    assert_eq!(counted(&server, slots()).await, 0);
}

/// The store is a `static`, and its first runtime, whose task sends what is owed, runs on another thread or has shut down.
#[test]
fn any_runtime_flushes_a_static_store() {
    static STORE: OnceLock<RedisStore> = OnceLock::new();
    let server = RedisServer::start();
    let store = STORE.get_or_init(|| server.store());
    for has_shut_down in [false, true] {
        let first = Builder::new_multi_thread().enable_all().build().unwrap();
        let [one, two] = [units(), slots()].map(|policies| Limiter::new(store.clone(), policies));
        let jobs = [&one, &two].map(|limiter| {
            let job = first.block_on(async { limiter.reserve(Key::GLOBAL, 1).await });
            job.unwrap()
        });
        let first = (!has_shut_down).then_some(first);
        // Outside of a runtime.
        drop(jobs);
        runtime().block_on(until("nothing is owed", || store.flush()));
        for policies in [units(), slots()] {
            assert_eq!(runtime().block_on(counted(&server, policies)), 0);
        }
        drop(first);
    }
}
