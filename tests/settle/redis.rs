//! Settlement in Redis: timely refunds, the number of calls, and the effect of an outage.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::settle::{RequestCost, Reservation, Settlement};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policies, RateLimitLayer, RedisStore, Strategy,
};

use crate::devices::holding;
use crate::support::{RedisServer, policy, until};

const WINDOW: Strategy = Strategy::FixedWindow(Align::FirstHit);

fn request() -> Request<String> {
    Request::new(String::new())
}

#[tokio::test(flavor = "multi_thread")]
async fn parallel_guesses_get_no_more_tries() {
    let server = RedisServer::start();
    let tries = Arc::new(AtomicU32::new(0));
    let layer = RateLimitLayer::new(server.store(), Global, policy(Strategy::SlidingLog, "5/h"));
    let layer = layer.settle(|response| match response.status {
        StatusCode::UNAUTHORIZED => Settlement::Keep,
        _ => Settlement::Refund,
    });
    let counted = Arc::clone(&tries);
    let service = layer.layer(service_fn(move |request: Request<String>| {
        let is_right = request.uri().path() == "/right";
        counted.fetch_add(1, Relaxed);
        async move {
            let mut response = Response::new(String::new());
            *response.status_mut() = if is_right {
                StatusCode::OK
            } else {
                StatusCode::UNAUTHORIZED
            };
            Ok::<_, Infallible>(response)
        }
    }));
    // Correct guesses use no try, in any number.
    let mut right = 0;
    let log_in = || {
        Request::builder()
            .uri("/right")
            .body(String::new())
            .unwrap()
    };
    while right < 20 {
        let logged_in = async || service.clone().oneshot(log_in()).await.unwrap().status() == 200;
        until("what was reserved before is refunded", logged_in).await;
        right += 1;
    }
    let limiter = Limiter::new(server.store(), policy(Strategy::SlidingLog, "5/h"));
    until("all is refunded", async || {
        limiter.peek(Key::GLOBAL, 5).await.unwrap().is_allowed()
    })
    .await;
    tries.store(0, Relaxed);
    let guesses = (0..100).map(|_| tokio::spawn(service.clone().oneshot(request())));
    let statuses: Vec<_> = join_all(guesses)
        .await
        .into_iter()
        .map(|guess| guess.unwrap().unwrap().status())
        .collect();
    assert_eq!(statuses.iter().filter(|status| **status == 401).count(), 5);
    assert_eq!(
        (
            tries.load(Relaxed),
            statuses.iter().filter(|status| **status == 429).count()
        ),
        (5, 95)
    );
}

/// Sends requests, 64 at a time.
async fn send<S>(service: S, requests: u32)
where
    S: Service<Request<String>, Error = Infallible, Future: Send> + Clone + Send + 'static,
    S::Response: Send,
{
    let one = move |service: S| async move {
        for _ in 0..requests / 64 {
            drop(service.clone().oneshot(request()).await);
        }
    };
    join_all((0..64).map(|_| tokio::spawn(one(service.clone())))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settling_takes_few_script_calls() {
    const REQUESTS: u32 = 64 * 200;
    let server = RedisServer::start();
    let policies: Policies = policy(WINDOW, "100000000/d");
    let layer = RateLimitLayer::new(server.store(), Global, policies.clone()).cost(|_| 10);
    for handler in [Duration::ZERO, Duration::from_millis(3)] {
        let inner = service_fn(move |request: Request<String>| async move {
            if let Some(charge) = request.extensions().get::<RequestCost>() {
                charge.set(3);
            }
            if !handler.is_zero() {
                tokio::time::sleep(handler).await;
            }
            Ok::<_, Infallible>(Response::new(String::new()))
        });
        let calls = async || server.calls("evalsha").await;
        let start = calls().await;
        send(layer.clone().layer(inner), REQUESTS).await;
        let without = calls().await - start;
        let limiter = Limiter::new(server.store(), policies.clone());
        limiter.reset(Key::GLOBAL).await.unwrap();
        let start = calls().await;
        let settling = layer.clone().settle(|_| Settlement::AtEnd);
        send(settling.layer(inner), REQUESTS).await;
        until("all is settled", async || {
            limiter.peek(Key::GLOBAL, 0).await.unwrap().remaining() == 100_000_000 - 3 * REQUESTS
        })
        .await;
        let with = calls().await - start;
        let each = |calls: f64| calls / f64::from(REQUESTS);
        let settling = each(with as f64 - without as f64);
        println!(
            "{handler:?}: {:.3} calls a request, {settling:.3} more to settle",
            each(without as f64)
        );
        assert!(
            settling <= 0.3,
            "{handler:?}: {settling:.3} calls to settle a request"
        );
    }
}

#[derive(Clone, Default)]
struct Failures(Arc<AtomicU32>);

impl Observer for Failures {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { key: Some(_), .. } = event {
            self.0.fetch_add(1, Relaxed);
        }
    }
}

const HELD: u32 = 40;
const RESERVED: u32 = 10;

async fn reserve<S: Store>(limiter: &Limiter<S>) -> Vec<Reservation> {
    let each = (0..HELD).map(|_| async { limiter.reserve(Key::GLOBAL, RESERVED).await.unwrap() });
    join_all(each).await
}

/// Returns the count in Redis, read with a separate store.
async fn charged(server: &RedisServer) -> u32 {
    let limiter = Limiter::new(server.store(), policy(WINDOW, "10000/d"));
    10_000 - limiter.peek(Key::GLOBAL, 0).await.unwrap().remaining()
}

/// Redis hangs when the first settlements are sent, for longer than their timeout.
#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_server_settles_nothing_twice() {
    for cost in [3, 17] {
        let server = RedisServer::start();
        let failures = Failures::default();
        let redis = RedisStore::builder(server.url())
            .timeout(Duration::from_millis(300))
            .connect_lazy()
            .unwrap();
        let limiter = Limiter::new(redis, policy(WINDOW, "10000/d")).observer(failures.clone());
        let held = reserve(&limiter).await;
        server.freeze();
        for (i, reserved) in held.into_iter().enumerate() {
            reserved.settle(cost);
            if i % 4 == 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.thaw();
        // Redis now executes the settlements that it has received, although their replies are lost.
        // The rest is sent later.
        until("all is settled", async || {
            charged(&server).await == HELD * cost
        })
        .await;
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert_eq!(charged(&server).await, HELD * cost, "and not twice");
        println!("{cost}: {} reported as lost", failures.0.load(Relaxed));
    }
}

/// Redis hangs, dies and returns empty. Afterwards it has only the charges that were sent later.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_charges_nothing_twice() {
    let mut server = RedisServer::start();
    let failures = Failures::default();
    let store = RedisStore::builder(server.url())
        .connections(NonZeroUsize::MIN)
        .connect_lazy()
        .unwrap();
    let limiter = Limiter::new(store, policy(WINDOW, "10000/d")).observer(failures.clone());
    let held = reserve(&limiter).await;
    server.freeze();
    let mut held = held.into_iter();
    held.by_ref()
        .take(5)
        .for_each(|reserved| reserved.settle(RESERVED + 7));
    // Without a reply, its outcome is unknown.
    until("it is reported", async || failures.0.load(Relaxed) > 0).await;
    server.kill();
    held.for_each(|reserved| reserved.settle(RESERVED + 7));
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.restart();
    let all = async || charged(&server).await + 7 * failures.0.load(Relaxed) == 7 * HELD;
    until("what was not sent is sent again", all).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(
        charged(&server).await + 7 * failures.0.load(Relaxed),
        7 * HELD
    );
    assert!(
        failures.0.load(Relaxed) <= 5,
        "{} lost",
        failures.0.load(Relaxed)
    );
}

/// The fallback settles while Redis cannot, and charges Redis after the recovery.
#[tokio::test(flavor = "multi_thread")]
async fn behind_a_fallback_an_outage_doubles_nothing() {
    for (hangs, cost) in [(true, 3), (true, 17), (false, 17)] {
        let mut server = RedisServer::start();
        // A late reply of a busy machine would reserve twice.
        let store = Fallback::builder(server.store(), LocalStore::default())
            .deadline(Duration::from_secs(1))
            .unwrap()
            .build();
        let limiter = Limiter::new(store.clone(), policy(WINDOW, "10000/d"));
        let held = reserve(&limiter).await;
        if hangs {
            server.freeze()
        } else {
            server.kill()
        }
        for (i, reserved) in held.into_iter().enumerate() {
            reserved.settle(cost);
            if i % 4 == 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        until("the fallback decides", async || store.is_degraded()).await;
        let local = async || 10_000 - limiter.peek(Key::GLOBAL, 0).await.unwrap().remaining();
        // A refund waits for Redis, which has the charge.
        until("all is charged locally", async || {
            local().await == HELD * cost.max(RESERVED)
        })
        .await;
        if hangs {
            server.thaw()
        } else {
            server.restart()
        }
        until("Redis decides again", async || !store.is_degraded()).await;
        let real = HELD * cost;
        if hangs {
            until("all is settled", async || charged(&server).await == real).await;
        }
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        // A killed server has lost the reservations, and operations sent to it are not sent again.
        let charged = charged(&server).await;
        println!("{hangs} {cost}: {charged} of {real}");
        if hangs {
            assert_eq!(charged, real);
        } else {
            assert!(charged <= HELD * (cost - RESERVED), "{charged} charged");
        }
    }
}

/// A delayed refund frees only the units that have not refilled yet: others may have used those.
#[tokio::test]
async fn delayed_refunds_free_only_the_rest() {
    let server = RedisServer::start();
    let (url, holds) = holding(&server).await;
    let held_back = RedisStore::builder(url)
        .timeout(Duration::from_secs(60))
        .connect()
        .await
        .unwrap();
    let (other, policies) = (server.store(), policy(Strategy::Gcra, "100/s"));
    let granted = held_back
        .check(Check::take(Key::GLOBAL, &policies, 100))
        .await
        .unwrap();
    holds.send_replace(true);
    let back = granted.refund(Key::GLOBAL, 100, Duration::ZERO).unwrap();
    let back = tokio::spawn(held_back.check(back));
    let peek = async || {
        other
            .check(Check::peek(Key::GLOBAL, &policies, 1))
            .await
            .unwrap()
    };
    until("most units have refilled", async || {
        peek().await.remaining() >= 90
    })
    .await;
    let start = Instant::now();
    let all_there_is = async || {
        other
            .check(Check::up_to(Key::GLOBAL, &policies, 100))
            .await
            .unwrap()
            .granted()
    };
    let first = all_there_is().await;
    holds.send_replace(false);
    let given = back.await.unwrap().unwrap().granted();
    let passed = first + all_there_is().await;
    let most = 100 + start.elapsed().as_millis() as u32 / 10;
    assert!(
        given <= 10 && passed <= most,
        "{given} are refunded, and {passed} pass of {most} at most"
    );
}

/// A reservation that is dropped outside of a runtime is refunded with the next request on a runtime.
#[test]
fn a_reservation_outlives_its_runtime() {
    let server = RedisServer::start();
    let limiter = Limiter::new(
        RedisStore::connect_lazy(server.url()).unwrap(),
        policy(Strategy::SlidingLog, "10/h"),
    );
    let first = runtime();
    let reserved = first.block_on(async { limiter.reserve(Key::GLOBAL, 10).await });
    let reserved = reserved.unwrap();
    drop(first);
    drop(reserved);
    runtime().block_on(async {
        // A denied reservation also makes the queue send the refund.
        let refunded = async || limiter.reserve(Key::GLOBAL, 10).await.is_ok();
        until("it is refunded", refunded).await;
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}
