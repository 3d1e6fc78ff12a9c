//! Requests in flight: each has a slot until its body has ended, or its reservation.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use http::{Request, Response};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, DryRun, Mode, RateLimited};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::OnError;
use tower_redis_ratelimit::select::Live;
use tower_redis_ratelimit::settle::{RequestCost, ReserveError, Settlement};
use tower_redis_ratelimit::store::{Answer, Store};
use tower_redis_ratelimit::{
    CallLimitLayer, Key, Limiter, LocalStore, Policies, Policy, Quota, RateLimitLayer, Strategy,
};

use crate::mocks::*;
use crate::settle::local::{Count, Handles, charged};

fn uploads(limit: u32) -> Policy {
    Policy::in_flight("uploads", limit).unwrap()
}

fn taken(store: &LocalStore, limit: u32) -> u32 {
    charged(store, Key::GLOBAL, &uploads(limit))
}

#[tokio::test]
async fn a_body_is_in_flight_until_dropped() {
    let store = LocalStore::default();
    let layer = RateLimitLayer::new(store.clone(), Global, uploads(2)).until_body_end();
    let service = layer.layer(service_fn(hello::<String>));
    let first = send(&service, request("alice")).await;
    assert_eq!(field(&first, "ratelimit"), Some("\"uploads\";r=1"));
    let second = send(&service, request("alice")).await;
    assert_eq!(send(&service, request("alice")).await.status(), 429);
    assert_eq!(taken(&store, 2), 2);
    drop(first);
    let third = send(&service, request("alice")).await;
    assert_eq!(third.status(), 200);
    drop((second, third));
    assert_eq!(taken(&store, 2), 0);
}

/// A clone of the handle is in flight, also after an error.
#[tokio::test]
async fn an_error_ends_the_request_before_its_future_is_dropped() {
    for kept in [0, 1] {
        let (store, handles) = (LocalStore::default(), Handles::default());
        let layer = RateLimitLayer::new(store.clone(), Global, uploads(2)).until_body_end();
        let mut service = layer.layer(service_fn(async |request: Request<String>| {
            let handle: &RequestCost = request.extensions().get().unwrap();
            let handles = &mut *handles.lock().unwrap();
            handles.extend((0..kept).map(|_| handle.clone()));
            Err::<Response<String>, _>("gone")
        }));
        let service = service.ready().await.unwrap();
        let mut response = std::pin::pin!(service.call(request("alice")));
        assert_eq!(response.as_mut().await.unwrap_err(), "gone");
        assert_eq!(taken(&store, 2), kept);
        handles.lock().unwrap().clear();
        assert_eq!(taken(&store, 2), 0);
    }
}

#[tokio::test]
async fn a_kept_handle_keeps_requests_in_flight() {
    let store = LocalStore::default();
    let handles = Handles::default();
    let kept = Arc::clone(&handles);
    let layer = RateLimitLayer::new(store.clone(), Global, uploads(1)).until_body_end();
    let service = layer.layer(service_fn(move |request: Request<String>| {
        kept.lock()
            .unwrap()
            .push(request.extensions().get::<RequestCost>().unwrap().clone());
        hello::<String>(request)
    }));
    drop(send(&service, request("alice")).await);
    assert_eq!(send(&service, request("alice")).await.status(), 429);
    handles.lock().unwrap().clear();
    assert_eq!(taken(&store, 1), 0);
}

#[tokio::test]
async fn a_request_without_response_is_released() {
    let store = LocalStore::default();
    let layer = RateLimitLayer::new(store.clone(), Global, uploads(1)).settle(|_| Settlement::Keep);
    let failing = service_fn(async |_: Request<String>| Err::<Response<String>, _>("no response"));
    assert!(
        layer
            .clone()
            .layer(failing)
            .oneshot(request("alice"))
            .await
            .is_err()
    );
    assert_eq!(taken(&store, 1), 0);
    let endless = service_fn(async |_: Request<String>| {
        std::future::pending::<()>().await;
        Ok::<_, Infallible>(Response::new(String::new()))
    });
    let mut call = Box::pin(layer.layer(endless).oneshot(request("alice")));
    assert!(waits(call.as_mut()));
    assert_eq!(taken(&store, 1), 1);
    drop(call);
    assert_eq!(taken(&store, 1), 0);
}

/// Like a request that ends without a response: it keeps its reservation.
#[tokio::test]
async fn a_panicking_rule_releases_the_request() {
    let count = Count::new();
    let both = Policies::new([count.policy.clone(), uploads(1)]).unwrap();
    let layer = RateLimitLayer::new(count.store.clone(), Global, both).cost(|_| 10);
    let service = layer
        .settle(|_| panic!("a fault of the rule"))
        .layer(service_fn(hello::<String>));
    let call = std::panic::AssertUnwindSafe(service.oneshot(request("alice")));
    assert!(call.catch_unwind().await.is_err());
    assert_eq!((count.charged(), taken(&count.store, 1)), (10, 0));
}

/// A settlement by the head does not end the request.
#[tokio::test]
async fn in_flight_ignores_cost_and_settlement() {
    for cost in [0, 500, 700] {
        let count = Count::new();
        let both = Policies::new([count.policy.clone(), uploads(4)]).unwrap();
        let layer = RateLimitLayer::new(count.store.clone(), Global, both)
            .cost(|_| 500)
            .decision_in_response();
        let service = layer
            .settle(move |_| Settlement::Cost(cost))
            .layer(service_fn(hello::<String>));
        let response = send(&service, request("alice")).await;
        assert_eq!((count.charged(), taken(&count.store, 4)), (cost, 1));
        let each: Vec<u32> = decision(&response)
            .unwrap()
            .each()
            .map(|each| each.remaining())
            .collect();
        assert_eq!(each, [1_000 - cost, 3]);
        drop(response);
        assert_eq!((count.charged(), taken(&count.store, 4)), (cost, 0));
    }
}

/// A request without a cost has no reservation to release, but a slot.
#[tokio::test]
async fn a_free_request_is_in_flight_too() {
    let count = Count::new();
    let both = Policies::new([count.policy.clone(), uploads(4)]).unwrap();
    let layer = RateLimitLayer::new(count.store.clone(), Global, both);
    drop(
        send(
            &layer
                .clone()
                .until_body_end()
                .layer(service_fn(hello::<String>)),
            request("alice"),
        )
        .await,
    );
    assert_eq!((count.charged(), taken(&count.store, 4)), (1, 0));
    let free = layer
        .cost(|_| 0)
        .settle(|_| Settlement::Refund)
        .layer(service_fn(hello::<String>));
    let response = send(&free, request("alice")).await;
    assert_eq!((count.charged(), taken(&count.store, 4)), (1, 1));
    drop(response);
    assert_eq!((count.charged(), taken(&count.store, 4)), (1, 0));
}

#[tokio::test]
async fn dry_runs_and_shadows_are_released_too() {
    let store = LocalStore::default();
    let layer = RateLimitLayer::new(store.clone(), Global, uploads(1))
        .shadow(uploads(2))
        .dry_run()
        .until_body_end();
    let service = layer.layer(service_fn(hello::<String>));
    let would = |response: &Response<_>| {
        let dry: &DryRun = response.extensions().get().unwrap();
        dry.decisions()
            .iter()
            .map(|decision| decision.is_allowed())
            .collect::<Vec<_>>()
    };
    for _ in 0..3 {
        let first = send(&service, request("alice")).await;
        assert_eq!(would(&first), [true, true]);
        let second = send(&service, request("alice")).await;
        assert_eq!(would(&second), [false, true]);
        assert_eq!(
            would(&send(&service, request("alice")).await),
            [false, false]
        );
    }
    assert_eq!(taken(&store, 1), 0);
}

#[tokio::test(start_paused = true)]
async fn requests_wait_until_others_end() {
    let store = LocalStore::default();
    let layer = RateLimitLayer::new(store.clone(), Global, uploads(1))
        .wait(Duration::from_secs(20))
        .until_body_end();
    let service = layer.layer(service_fn(hello::<String>));
    let first = send(&service, request("alice")).await;
    let waiting = tokio::spawn(service.clone().oneshot(request("alice")));
    sleep(Duration::from_secs(5)).await;
    let freed = Instant::now();
    drop(first);
    let second = waiting.await.unwrap().unwrap();
    assert_eq!(second.status(), 200);
    assert!(
        freed.elapsed() < Duration::from_millis(300),
        "{:?}",
        freed.elapsed()
    );
    assert_eq!(taken(&store, 1), 1);
    drop(second);
    assert_eq!(taken(&store, 1), 0);
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_slot_ends_at_the_longest_wait() {
    let layer = RateLimitLayer::new(LocalStore::default(), Global, uploads(1))
        .wait(Duration::from_secs(1))
        .until_body_end();
    let service = layer.layer(service_fn(hello::<String>));
    let _first = send(&service, request("alice")).await;
    let began = Instant::now();
    assert_eq!(send(&service, request("alice")).await.status(), 429);
    let waited = began.elapsed().as_millis();
    assert!((1_000..1_300).contains(&waited), "{waited} ms");
}

#[tokio::test]
async fn layers_without_settlement_name_the_fix() {
    let problems = Problems::default();
    let found = Live::new(uploads(1));
    let layer =
        RateLimitLayer::new(LocalStore::default(), Global, found).observer(problems.clone());
    let response = send(&limited(layer.clone()), request("alice")).await;
    assert!(
        response.status() == 200 && decision(&response).is_none(),
        "that is left out: {response:?}"
    );
    // A dry run ignores the policy too, so it makes no check.
    let response = send(&limited(layer.clone().dry_run()), request("alice")).await;
    assert_eq!(
        (
            response.status().as_u16(),
            response
                .extensions()
                .get::<DryRun>()
                .unwrap()
                .decisions()
                .len()
        ),
        (200, 0)
    );
    let problems = problems.0.lock().unwrap();
    assert_eq!(problems.len(), 2);
    assert!(
        problems
            .iter()
            .all(|problem| problem.contains("`.until_body_end()` to it (in-flight-without-end: ")),
        "{problems:?}"
    );
}

/// A layer whose fixed policies it cannot enforce panics when it is created.
#[test]
fn a_layer_that_cannot_enforce_panics() {
    let layer = |policies| RateLimitLayer::new(LocalStore::default(), Global, policies);
    let (rate, both) = (
        gcra("api", "9/m"),
        Policies::new([gcra("api", "9/m"), uploads(1)]).unwrap(),
    );
    for layer in [
        layer(Policies::from(uploads(1))),
        layer(both.clone()),
        layer(both.clone()).dry_run(),
        layer(rate.clone().into()).shadow(both.clone()),
    ] {
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            drop(limited(layer.clone()))
        }));
        let text = *made
            .expect_err("it cannot count")
            .downcast::<String>()
            .unwrap();
        assert!(text.contains("add `.until_body_end()`"), "{text}");
        drop(
            layer
                .clone()
                .until_body_end()
                .layer(service_fn(hello::<String>)),
        );
        drop(
            layer
                .settle(|_| Settlement::Keep)
                .layer(service_fn(hello::<String>)),
        );
    }
    drop(limited(layer(rate.into())));
}

/// A request that no store could decide is in flight too.
#[tokio::test]
async fn undecided_requests_have_the_usual_body() {
    let layer = RateLimitLayer::new(Broken, Global, uploads(1))
        .on_error(OnError::Allow)
        .until_body_end();
    let response = send(&layer.layer(service_fn(hello::<String>)), request("alice")).await;
    assert_eq!(text(response).await, "hello");
}

#[tokio::test]
async fn calls_are_in_flight_until_the_response() {
    let store = LocalStore::default();
    let layer = CallLimitLayer::new(store.clone(), Global, uploads(1));
    let service = layer.layer(service_fn(async |_: String| {
        yield_now().await;
        Ok::<_, Infallible>(())
    }));
    let mut first = Box::pin(service.clone().oneshot(String::new()));
    assert!(waits(first.as_mut()));
    let denied = service.clone().oneshot(String::new()).await.unwrap_err();
    assert!(denied.is::<RateLimited>());
    first.await.unwrap();
    assert_eq!(taken(&store, 1), 0);
    let mut dropped = Box::pin(service.clone().oneshot(String::new()));
    assert!(waits(dropped.as_mut()));
    drop(dropped);
    assert!(service.oneshot(String::new()).await.is_ok());
}

/// Even without settlement, the slots are kept until the call has ended.
#[tokio::test]
async fn tried_calls_are_in_flight_until_answered() {
    #[derive(Clone, Default)]
    struct Tried(Arc<Mutex<Vec<bool>>>);

    impl Observer for Tried {
        fn notify(&self, event: &Event<'_>) {
            if let Event::Decided {
                decision,
                dry_run: true,
                ..
            } = event
            {
                self.0.lock().unwrap().push(decision.is_allowed());
            }
        }
    }

    for is_shadow in [false, true] {
        let (store, tried) = (LocalStore::default(), Tried::default());
        let layer = match is_shadow {
            false => CallLimitLayer::new(store, Global, uploads(1)).dry_run(),
            true => CallLimitLayer::new(store, Global, uploads(9)).shadow(uploads(1)),
        };
        let service = layer
            .observer(tried.clone())
            .layer(service_fn(async |_: String| {
                yield_now().await;
                Ok::<_, Infallible>(())
            }));
        let call = || {
            let mut call = Box::pin(service.clone().oneshot(String::new()));
            assert!(waits(call.as_mut()));
            call
        };
        let (first, dropped) = (call(), call());
        assert_eq!(*tried.0.lock().unwrap(), [true, false]);
        first.await.unwrap();
        drop(dropped);
        drop([call(), call()]);
        drop(call());
        assert_eq!(*tried.0.lock().unwrap(), [true, false, true, false, true]);
    }
}

/// The test decides checks under the policy `late`, and a local store all others.
#[derive(Clone)]
struct Late {
    manual: ManualStore,
    store: LocalStore,
}

impl Store for Late {
    type Future = <ManualStore as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        match check.policies()[0].name() {
            "late" => self.manual.check(check),
            _ => Answer::ready(self.store.check(check).now_or_never().unwrap()),
        }
    }
}

/// When a call has ended, its slot is released, even if the result still waits for another check.
#[tokio::test]
async fn tried_calls_end_before_late_checks() {
    async fn ends<S: Service<String, Response = (), Error = BoxError>>(
        service: S,
        store: &LocalStore,
        questions: &mut Questions,
    ) {
        let mut call = Box::pin(service.oneshot(String::new()));
        assert!(waits(call.as_mut()));
        assert_eq!(taken(store, 1), 1);
        assert!(waits(call.as_mut()));
        assert_eq!(taken(store, 1), 0);
        questions.try_recv().unwrap().allow();
        call.await.unwrap();
    }

    let answer = service_fn(async |_: String| {
        yield_now().await;
        Ok::<_, Infallible>(())
    });
    for (is_dry, settles) in [(false, false), (false, true), (true, false), (true, true)] {
        let ((manual, mut questions), store) = (manual_store(), LocalStore::default());
        let late = Late {
            manual,
            store: store.clone(),
        };
        let layer = CallLimitLayer::new(late, Global, uploads(1)).shadow(gcra("late", "9/h"));
        let layer = if is_dry { layer.dry_run() } else { layer };
        match settles {
            false => ends(layer.layer(answer), &store, &mut questions).await,
            true => {
                let layer = layer.settle(|_: &Result<(), _>| Settlement::Keep);
                ends(layer.layer(answer), &store, &mut questions).await;
            }
        }
    }
}

/// The reply to a shadow's check comes after the end of its call, whose completed future is kept.
#[tokio::test(start_paused = true)]
async fn a_late_shadow_keeps_no_slot() {
    async fn releases<S: Service<String, Response = (), Error = BoxError>>(
        mut service: S,
        questions: &mut Questions,
    ) {
        let mut call = Box::pin(service.ready().await.unwrap().call(String::new()));
        assert!(waits(call.as_mut()));
        questions.try_recv().unwrap().allow();
        call.as_mut().await.unwrap();
        let released = questions.recv().await.unwrap();
        assert_eq!(released.check.mode(), Mode::Release);
        drop(call);
    }

    let answer = service_fn(async |_: String| Ok::<_, Infallible>(()));
    for settles in [false, true] {
        let (manual, mut questions) = manual_store();
        let late = Late {
            manual,
            store: LocalStore::default(),
        };
        let slots = Policy::in_flight("late", 1).unwrap();
        let layer = CallLimitLayer::new(late, Global, gcra("api", "9/h")).shadow(slots);
        if settles {
            let layer = layer.settle(|_: &Result<(), _>| Settlement::AtEnd);
            releases(layer.layer(answer), &mut questions).await;
        } else {
            releases(layer.layer(answer), &mut questions).await;
        }
    }
}

#[tokio::test]
async fn a_reservation_is_in_flight() {
    let store = LocalStore::default();
    let limiter = Limiter::new(store.clone(), uploads(1));
    let first = limiter.reserve(Key::GLOBAL, 1).await.unwrap();
    assert!(matches!(
        limiter.reserve(Key::GLOBAL, 1).await,
        Err(ReserveError::Denied(_))
    ));
    first.settle(300);
    assert_eq!(taken(&store, 1), 0);
    drop(limiter.reserve(Key::GLOBAL, 1).await.unwrap());
    assert_eq!(taken(&store, 1), 0);
}

/// Otherwise, refunding five tokens would free requests in flight, and charging 300 tokens would
/// count 300 requests.
#[tokio::test]
async fn charges_and_refunds_are_not_in_flight() {
    let tokens = Policy::new("tokens", Strategy::SlidingLog, Quota::per_minute(1_000)).unwrap();
    let both = Policies::new([tokens, Policy::in_flight("streams", 4).unwrap()]).unwrap();
    let limiter = Limiter::new(LocalStore::default(), both);
    let user = Key::new("user");
    let _held = [
        limiter.reserve(user, 10).await.unwrap(),
        limiter.reserve(user, 10).await.unwrap(),
    ];
    assert_eq!(
        limiter.refund(user, 5).await.unwrap().decision().granted(),
        5
    );
    assert_eq!(
        limiter
            .charge(user, 300)
            .await
            .unwrap()
            .decision()
            .granted(),
        300
    );
    let each: Vec<u32> = limiter
        .peek(user, 0)
        .await
        .unwrap()
        .each()
        .map(|each| each.remaining())
        .collect();
    assert_eq!(each, [685, 2]);
}

#[tokio::test(start_paused = true)]
async fn unrenewed_slots_expire() {
    let store = LocalStore::default();
    let policies = Policy::in_flight("streams", 1)
        .unwrap()
        .slot_ttl(Duration::from_secs(3))
        .unwrap()
        .into();
    let check = || Check::take(Key::new("ann"), &policies, 1);
    let take = async || store.check(check()).await.unwrap();
    let first = check();
    let slot = first.slot().unwrap();
    let first = store.check(first).await.unwrap();
    assert!(first.is_allowed() && first.reset_after() == Duration::from_secs(3));
    for _ in 0..5 {
        tokio::time::advance(Duration::from_millis(2_999)).await;
        assert!(!take().await.is_allowed());
        assert_eq!(
            store
                .check(Check::renew(Key::new("ann"), &policies, slot))
                .await
                .unwrap()
                .granted(),
            1
        );
    }
    tokio::time::advance(Duration::from_millis(3_000)).await;
    assert!(take().await.is_allowed());
}

/// On that runtime only the next request renews them.
#[test]
fn requests_outside_runtimes_stay_counted() {
    let streams = Policy::in_flight("streams", 2)
        .unwrap()
        .slot_ttl(Duration::from_secs(1))
        .unwrap();
    let limiter = Limiter::new(LocalStore::default(), streams);
    let reserve = || {
        limiter
            .reserve(Key::GLOBAL, 1)
            .now_or_never()
            .expect("an immediate answer")
            .ok()
    };
    let mut held = vec![reserve().unwrap(), reserve().unwrap()];
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(1_200) {
        held.extend(reserve());
        std::thread::sleep(Duration::from_millis(10));
    }
    // Send no request until the slots have expired.
    std::thread::sleep(Duration::from_millis(1_100));
    held.extend(reserve());
    assert_eq!(held.len(), 2);
    drop(held);
    assert_eq!(
        [reserve(), reserve(), reserve()].iter().flatten().count(),
        2
    );
}
