//! Notifications of observers, and the resulting metrics and logs.

#[cfg(feature = "tracing")]
mod log;
#[cfg(feature = "metrics")]
mod prometheus;

use std::convert::Infallible;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use http::{Method, Request, Response};
use tokio::time::advance;
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::extract::{
    Global, HeaderKey, KeyExtractor, PeerIp, by_extension, key_fn,
};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::{OnMissingKey, Rejection};
use tower_redis_ratelimit::select::{Live, PolicySelector, Routes, Tier, Tiers};
use tower_redis_ratelimit::settle::{RequestCost, Settlement};
use tower_redis_ratelimit::store::{BoxStore, ErrorKind, MockStore, RedisStoreBuilder, StoreError};
use tower_redis_ratelimit::{
    CallLimitLayer, Fallback, Key, Leased, Limiter, LocalStore, Policies, Policy, Quota,
    RateLimitLayer, RedisStore, Strategy, ThrottleLayer,
};

use crate::mocks::{
    Broken, Problems, anonymous, by_header, costing, gcra, hello, layer, layer_with, limited,
    manual_store, request, send,
};

/// A Redis that refuses connections, with timeouts that never elapse in a test.
fn nowhere() -> RedisStoreBuilder {
    RedisStore::builder("redis://127.0.0.1:1/").timeout(LONG)
}

/// A store with a fallback.
fn fallback() -> Fallback<RedisStore, LocalStore> {
    Fallback::builder(nowhere().connect_lazy().unwrap(), LocalStore::default())
        .deadline(LONG)
        .unwrap()
        .build()
}

const LONG: Duration = Duration::from_secs(20);

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn add(&self, note: impl Into<String>) {
        self.0.lock().unwrap().push(note.into());
    }

    /// Returns the notes since the last call.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Observer for Notes {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Decided {
                key,
                decision,
                elapsed,
                dry_run,
                ..
            } => {
                let (policy, outcome) =
                    (decision.policies()[0].name(), decision.outcome().as_str());
                assert!(!dry_run);
                self.add(format!(
                    "{} {policy} {outcome} {:?} {elapsed:?}",
                    key.reveal(),
                    decision.source()
                ));
            }
            Event::Failed { key, error, .. } => {
                self.add(format!(
                    "{} failed: {:?}",
                    key.unwrap().reveal(),
                    error.kind()
                ));
            }
            Event::Misconfigured { problem, .. } => {
                self.add(problem);
            }
            Event::Degraded { .. } => {
                self.add("degraded");
            }
            Event::Sent { .. } => {
                self.add("sends");
            }
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn decisions_and_failures_name_their_caller() {
    let notes = Notes::default();
    let service = limited(layer("1/h").observer((notes.clone(), ())));
    send(&service, request("alice")).await;
    send(&service, request("alice")).await;
    assert_eq!(
        notes.take(),
        ["alice api allowed Local 0ns", "alice api denied Local 0ns"]
    );
    send(
        &limited(layer_with(Broken, "1/h").observer(notes.clone())),
        request("bob"),
    )
    .await;
    assert_eq!(notes.take(), ["bob failed: Configuration"]);
}

#[tokio::test(start_paused = true)]
async fn late_answers_name_caller_and_duration() {
    let notes = Notes::default();
    let (store, mut questions) = manual_store();
    let service = limited(layer_with(store, "1/h").observer(notes.clone()));
    let (alice, ()) = tokio::join!(send(&service, request("alice")), async {
        let question = questions.recv().await.unwrap();
        advance(Duration::from_millis(50)).await;
        question.allow();
    });
    let (bob, ()) = tokio::join!(send(&service, request("bob")), async {
        questions.recv().await.unwrap().fail()
    });
    assert_eq!((alice.status().as_u16(), bob.status().as_u16()), (200, 503));
    assert_eq!(
        notes.take(),
        ["alice api allowed Local 50ms", "bob failed: Configuration"]
    );
}

#[tokio::test]
async fn events_name_callers_only_on_demand() {
    /// Records the `Debug` text of events.
    struct Events(Notes);

    impl Observer for Events {
        fn notify(&self, event: &Event<'_>) {
            if let Event::Decided { .. } | Event::Failed { .. } = event {
                self.0.add(format!("{event:?} {event:#?}"));
            }
        }
    }

    let notes = Notes::default();
    send(
        &limited(layer("1/h").observer(Events(notes.clone()))),
        request("alice"),
    )
    .await;
    send(
        &limited(layer_with(Broken, "1/h").observer(Events(notes.clone()))),
        request("alice"),
    )
    .await;
    for event in notes.take() {
        assert!(
            event.contains("key: ") && event.contains("Key(#") && !event.contains("alice"),
            "{event}"
        );
    }
}

#[tokio::test]
async fn one_call_attaches_an_observer_everywhere() {
    let notes = Notes::default();
    let store = fallback();
    let service = limited(layer_with(store.clone(), "9/h").observer(notes.clone()));
    while !store.is_degraded() {
        send(&service, request("alice")).await;
    }
    let seen = notes.take();
    assert_eq!(seen[..2], ["sends", "alice failed: Unreachable"]);
    assert!(seen[2].starts_with("alice api allowed Local"), "{seen:?}");
    assert_eq!(seen.iter().filter(|note| *note == "degraded").count(), 1);
}

/// Whichever of the selector and the observer is set first.
#[test]
fn an_observer_reaches_every_selector() {
    #[derive(Clone, Default)]
    struct Watched(Arc<AtomicBool>);

    impl<R> PolicySelector<R> for Watched {
        fn policies(&self, _: &R, _: Option<&Key>) -> Option<Policies> {
            None
        }

        fn observe(&self, _: &Arc<dyn Observer>) {
            self.0.store(true, Relaxed);
        }
    }

    let watched = [(); 7].map(|()| Watched::default());
    let [alone, default, route, method, before, after, throttle] = watched.clone();
    let routes = Routes::new(default).route("/a", route).unwrap();
    let routes = routes.method(Method::GET, "/b", method).unwrap();
    let layer = |selector: Routes| RateLimitLayer::new(LocalStore::default(), Global, selector);
    let _ = (
        layer(routes).observer(Notes::default()),
        layer(Routes::new(alone))
            .shadow(before)
            .observer(Notes::default())
            .shadow(after),
        ThrottleLayer::new(LocalStore::default(), Key::GLOBAL, throttle).observer(Notes::default()),
    );
    assert_eq!(watched.map(|watched| watched.0.load(Relaxed)), [true; 7]);
}

#[tokio::test]
async fn a_limiter_passes_observers_to_its_store() {
    let notes = Notes::default();
    let limiter = Limiter::new(fallback(), gcra("mails", "9/h")).observer(notes.clone());
    let _ = limiter.take(Key::new("alice"), 1).await.unwrap();
    let [sends, failed, decided] = &notes.take()[..] else {
        panic!("three events")
    };
    assert_eq!([sends, failed], ["sends", "alice failed: Unreachable"]);
    assert!(
        decided.starts_with("alice mails allowed Local "),
        "{decided}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_limiter_reports_decisions_like_a_layer() {
    let (alice, notes) = (Key::new("alice"), Notes::default());
    let mails = gcra("mails", "2/h");
    let limiter = Limiter::new(LocalStore::default(), mails).observer(notes.clone());
    let reported = |outcome: &str| format!("alice mails {outcome} Local 0ns");

    let _ = limiter.take(alice, 1).await.unwrap();
    assert_eq!(notes.take(), [reported("allowed")]);
    let held = limiter.reserve(alice, 1).await.unwrap();
    assert_eq!(notes.take(), [reported("allowed")]);
    let _ = limiter.take_with_id(alice, 1, "job-7").await.unwrap();
    let _ = limiter.up_to(alice, 1).await.unwrap();
    let _ = limiter.wait(alice, 1, Duration::ZERO).await.unwrap();
    assert_eq!(notes.take(), [(); 3].map(|()| reported("denied")));
    limiter.reserve(alice, 1).await.unwrap_err();
    let denied = limiter.reserve_within(alice, 1, Duration::ZERO);
    denied.await.unwrap_err();
    assert_eq!(notes.take(), [(); 2].map(|()| reported("denied")));
    drop(held);

    // They let nothing pass.
    let _ = limiter.peek(alice, 1).await.unwrap();
    limiter.charge(alice, 1).await.unwrap();
    limiter.refund(alice, 1).await.unwrap();
    limiter.reset(alice).await.unwrap();
    assert_eq!(notes.take(), [""; 0]);

    let _ = limiter.take(alice, 2).await.unwrap();
    let turn = limiter.wait(alice, 1, Duration::from_secs(1_800));
    assert!(turn.await.unwrap().is_allowed());
    let [_, waited] = &notes.take()[..] else {
        panic!("two decisions")
    };
    assert!(
        waited.starts_with("alice mails allowed Local 180"),
        "{waited}"
    );
}

#[tokio::test]
async fn a_limiter_reports_exempt_callers() {
    struct Reasons(Notes);

    impl Observer for Reasons {
        fn notify(&self, event: &Event<'_>) {
            match *event {
                Event::Decided { .. } => {
                    self.0.add("decided");
                }
                Event::Uncounted {
                    reason, allowed, ..
                } => {
                    self.0.add(format!("{} {}", reason.as_str(), allowed));
                }
                _ => {}
            }
        }
    }

    let notes = Notes::default();
    let exempt = |_: &Key| None;
    let limiter = Limiter::new(LocalStore::default(), exempt).observer(Reasons(notes.clone()));
    let _ = limiter.take(Key::GLOBAL, 1).await.unwrap();
    let _ = limiter.wait(Key::GLOBAL, 1, LONG).await.unwrap();
    assert_eq!(notes.take(), ["exempt true"; 2]);
}

#[tokio::test]
async fn a_limiter_reports_failures_like_a_layer() {
    let (alice, notes) = (Key::new("alice"), Notes::default());
    let limiter = Limiter::new(Broken, gcra("mails", "9/h")).observer(notes.clone());
    let failed = "alice failed: Configuration";
    limiter.take(alice, 1).await.unwrap_err();
    limiter.peek(alice, 1).await.unwrap_err();
    limiter.charge(alice, 1).await.unwrap_err();
    limiter.reserve(alice, 1).await.unwrap_err();
    assert_eq!(notes.take(), [failed; 4]);
}

/// Customers have different quotas under one name.
#[tokio::test]
async fn given_policies_are_not_compared() {
    let log = |quota: &str| Policy::new("mails", Strategy::SlidingLog, quota).unwrap();
    let (notes, store) = (Problems::default(), LocalStore::default());
    let [here, there] =
        [(); 2].map(|()| Limiter::new(store.clone(), log("10/d")).observer(notes.clone()));
    let given = here.under(&log("20/d").into());
    let _ = given.take(Key::new("ann"), 1).await.unwrap();
    for limiter in [&here, &there] {
        let _ = limiter.take(Key::new("ann"), 1).await.unwrap();
    }
    assert_eq!(*notes.0.lock().unwrap(), [""; 0]);
}

#[tokio::test]
async fn a_store_keeps_its_own_observer() {
    let [of_redis, of_fallback, of_first, of_second] = [(); 4].map(|()| Notes::default());
    let redis = nowhere().observer(of_redis.clone()).connect_lazy().unwrap();
    // Later settings of the fallback keep the observer.
    let store = Fallback::builder(redis, LocalStore::default())
        .observer(of_fallback.clone())
        .deadline(LONG)
        .unwrap()
        .build();
    send(
        &limited(layer_with(store, "9/h").observer(of_first.clone())),
        request("alice"),
    )
    .await;
    assert_eq!(
        (of_redis.take(), of_fallback.take()),
        (
            vec!["sends".into()],
            vec!["alice failed: Unreachable".into()]
        )
    );
    assert_eq!(of_first.take().len(), 1, "the decision");

    // A store without an observer gets the first layer's.
    let store = fallback();
    let _first = layer_with(store.clone(), "9/h").observer(of_first.clone());
    send(
        &limited(layer_with(store, "9/h").observer(of_second.clone())),
        request("alice"),
    )
    .await;
    assert_eq!(of_first.take(), ["sends", "alice failed: Unreachable"]);
    assert_eq!(of_second.take().len(), 1, "the decision");
}

#[tokio::test(start_paused = true)]
async fn layers_report_misconfigurations_once_a_minute() {
    let notes = Notes::default();
    let layer = || {
        RateLimitLayer::new(LocalStore::default(), PeerIp, gcra("api", "1/h"))
            .observer(notes.clone())
    };
    let service = limited(layer().on_missing_key(OnMissingKey::Allow));
    let mut seen = 0;
    for (wait, expected) in [(0, 1), (0, 1), (59, 1), (1, 2), (59, 2), (600, 3), (0, 3)] {
        advance(Duration::from_secs(wait)).await;
        assert_eq!(send(&service, anonymous()).await.status(), 500);
        let problems = notes.take();
        seen += problems.len();
        assert_eq!(seen, expected, "after {wait} s");
        assert!(
            problems
                .iter()
                .all(|problem| problem.contains("into_make_service_with_connect_info")),
            "{problems:?}"
        );
    }
    send(&limited(layer()), anonymous()).await;
    assert_eq!(notes.take().len(), 1, "another layer");
    assert_eq!(
        send(&limited(layer().dry_run()), anonymous())
            .await
            .status(),
        200
    );
    assert_eq!(
        notes.take().len(),
        1,
        "a dry run, which counts nothing either"
    );
    let client = limited(crate::mocks::layer("1/h").observer(notes.clone()));
    assert_eq!(send(&client, anonymous()).await.status(), 400);
    assert_eq!(
        notes.take().len(),
        0,
        "a client's mistake is none of the server's"
    );
    let exempt =
        RateLimitLayer::new(LocalStore::default(), PeerIp, None::<Policy>).observer(notes.clone());
    assert_eq!(send(&limited(exempt), anonymous()).await.status(), 200);
    assert_eq!(notes.take().len(), 0, "an exempt request needs no key");
}

#[tokio::test(start_paused = true)]
async fn a_repeated_layer_is_reported_once() {
    let notes = Notes::default();
    let problems = |notes: &Notes| {
        notes
            .take()
            .into_iter()
            .filter(|note| note.contains("twice"))
            .collect::<Vec<_>>()
    };
    let twice = layer("9/h").observer(notes.clone());
    let service = twice.layer(limited(twice.clone()));
    for _ in 0..3 {
        assert_eq!(send(&service, request("alice")).await.status(), 200);
        advance(Duration::from_secs(60)).await;
    }
    let seen = problems(&notes);
    assert!(seen.len() == 1 && seen[0].contains("\"api\""), "{seen:?}");
    assert!(
        seen[0].contains("(counted-twice: https://docs.rs/"),
        "{seen:?}"
    );

    // Windows with different limits share a count too.
    let log = |quota: &str| {
        let policy = Policy::new("api", Strategy::SlidingLog, quota).unwrap();
        RateLimitLayer::new(LocalStore::default(), Global, policy).observer(notes.clone())
    };
    send(&log("5/h").layer(limited(log("9/h"))), request("alice")).await;
    assert_eq!(problems(&notes).len(), 1);

    // Two different layers do not.
    let another = RateLimitLayer::new(LocalStore::default(), Global, gcra("all", "9/h"))
        .observer(notes.clone());
    let service = another.layer(limited(layer("9/h").observer(notes.clone())));
    send(&service, request("alice")).await;
    assert_eq!(problems(&notes), [""; 0]);
}

/// Under windows, `/a` would use up the small limit of `/b`.
#[tokio::test]
async fn a_count_with_two_limits_is_reported() {
    let problems = |strategy: Strategy, quotas: [&str; 2], stores: [LocalStore; 2]| {
        let notes = Problems::default();
        let mut kept = vec![];
        for (quota, store) in quotas.into_iter().zip(stores) {
            let policy = Policy::new("api", strategy, quota).unwrap();
            let layer = RateLimitLayer::new(store, Global, policy).observer(notes.clone());
            // A layer that wraps several services, as for several routes, is one.
            kept.extend([limited(layer.clone()), limited(layer)]);
        }
        notes.0.lock().unwrap().clone()
    };
    let (store, log) = (LocalStore::default(), Strategy::SlidingLog);
    let one = [store.clone(), store.clone()];
    let seen = problems(log, ["100/m", "2/m"], one.clone());
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(
        seen[0].starts_with(
            "suspected: two layers or limiters have a policy \"api\", one with 100/m and one with 2/m, and they share one count per caller: give each \
             policy a name of its own, or both the same quota (one-name-two-quotas: https://docs.rs/"
        ),
        "{seen:?}"
    );
    // The layers of the first call are gone.
    assert_eq!(problems(log, ["5/m", "5/m"], one.clone()), [""; 0]);
    assert_eq!(problems(log, ["5/m", "6/h"], one.clone()), [""; 0]);
    assert_eq!(problems(Strategy::Gcra, ["5/m", "6/h"], one).len(), 1);
    let two = [store, LocalStore::default()];
    assert_eq!(problems(log, ["5/m", "6/m"], two), [""; 0]);
}

/// A service may make a limiter for each request.
#[tokio::test]
async fn limiters_with_two_quotas_are_suspected_once() {
    let log = |name: &str, quota: &str| Policy::new(name, Strategy::SlidingLog, quota).unwrap();
    let (notes, store) = (Problems::default(), LocalStore::default());
    let take = async |policy: Policy| {
        let limiter = Limiter::new(store.clone(), policy).observer(notes.clone());
        let _ = limiter.take(Key::new("ann"), 1).await.unwrap();
        limiter
    };
    let mails = take(log("mails", "100/d")).await;
    let same = take(log("mails", "100/d")).await;
    let other = take(log("jobs", "100/d")).await;
    assert_eq!(*notes.0.lock().unwrap(), [""; 0]);
    for _ in 0..3 {
        take(log("mails", "20/d")).await;
    }
    let seen = notes.0.lock().unwrap().clone();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(
        seen[0].starts_with(
            "suspected: two layers or limiters have a policy \"mails\", one with 100/d and one with 20/d, and they share one count"
        ),
        "{seen:?}"
    );
    // A limiter that only waits.
    let waiting = Limiter::new(store.clone(), log("jobs", "20/d")).observer(notes.clone());
    let granted = waiting.wait(Key::new("ann"), 1, LONG).await.unwrap();
    assert!(granted.is_allowed());
    assert_eq!(notes.0.lock().unwrap().len(), 2);
    drop((mails, same, other));
}

#[tokio::test]
async fn a_denial_with_success_is_reported_once() {
    let problems = async |status: u16, on_purpose: bool, grpc: bool| {
        let notes = Problems::default();
        let answer = move |_: Rejection<'_>| {
            let response = Response::builder().status(status);
            let response = match grpc {
                true => response.header("grpc-status", 8),
                false => response,
            };
            response.body(String::new()).unwrap()
        };
        let layer = layer("1/h").observer(notes.clone()).reject_with(answer);
        let service = limited(match on_purpose {
            true => layer.denied_with_success(),
            false => layer,
        });
        for expected in [200, status, status] {
            assert_eq!(send(&service, request("ann")).await.status(), expected);
        }
        notes.0.lock().unwrap().clone()
    };
    let seen = problems(200, false, false).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("a rejection has the status 200, which tells the client that its request was served: give it")
            && report.ends_with("#denied-with-success)"),
        "{report}"
    );
    assert_eq!(problems(202, false, false).await.len(), 1);
    for (status, on_purpose, grpc) in [
        (200, true, false),
        (200, false, true),
        (302, false, false),
        (429, false, false),
    ] {
        assert_eq!(problems(status, on_purpose, grpc).await, [""; 0]);
    }
}

#[tokio::test]
async fn a_grpc_call_denied_over_http_is_suspected_once() {
    let problems = async |kind: &str, grpc: bool| {
        let notes = Problems::default();
        let answer = move |rejection: Rejection<'_>| {
            let response = Response::builder().status(rejection.status());
            let response = match grpc {
                true => response.header("grpc-status", 8),
                false => response,
            };
            response.body(String::new()).unwrap()
        };
        let layer = layer("1/h").observer(notes.clone()).reject_with(answer);
        let service = limited(layer);
        for expected in [200, 429, 429] {
            let mut request = request("ann");
            *request.method_mut() = Method::POST;
            let kind = kind.parse().unwrap();
            request.headers_mut().insert("content-type", kind);
            assert_eq!(send(&service, request).await.status(), expected);
        }
        notes.0.lock().unwrap().clone()
    };
    let seen = problems("application/grpc+proto", false).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("suspected: a gRPC call was rejected over HTTP, so its client sees a broken server: enable")
            && report.ends_with("#grpc-over-http)"),
        "{report}"
    );
    for (kind, grpc) in [
        ("application/grpc", true),
        ("application/grpc-web", false),
        ("application/json", false),
    ] {
        assert_eq!(problems(kind, grpc).await, [""; 0]);
    }
}

/// A request without a key, and one that no store can decide, are rejected too.
#[tokio::test]
async fn each_rejection_has_its_protocol_and_status() {
    let problems = async |layer: RateLimitLayer<BoxStore, HeaderKey>,
                          mut request: Request<String>| {
        let notes = Problems::default();
        let answer = |_: Rejection<'_>| Response::new(String::new());
        let service = limited(layer.observer(notes.clone()).reject_with(answer));
        *request.method_mut() = Method::POST;
        let kind = "application/grpc".parse().unwrap();
        request.headers_mut().insert("content-type", kind);
        assert_eq!(send(&service, request).await.status(), 200);
        notes.0.lock().unwrap().clone()
    };
    let local = layer_with(BoxStore::new(LocalStore::default()), "1/h");
    let broken = layer_with(BoxStore::new(Broken), "1/h");
    for (layer, request) in [(local, anonymous()), (broken, request("ann"))] {
        let [success, grpc] = &problems(layer, request).await[..] else {
            panic!("two reports");
        };
        assert!(
            success.starts_with("a rejection has the status 200"),
            "{success}"
        );
        assert!(
            grpc.starts_with("suspected: a gRPC call was rejected over HTTP"),
            "{grpc}"
        );
    }
}

#[tokio::test]
async fn upgraded_connections_without_a_cost_are_suspected_once() {
    let problems = async |status: u16, is_kept: bool, policy: Policy| {
        let notes = Problems::default();
        let kept = Mutex::new(vec![]);
        let layer = RateLimitLayer::new(LocalStore::default(), Global, policy);
        let layer = layer.observer(notes.clone()).until_body_end();
        let service = layer.layer(service_fn(async |request: http::Request<String>| {
            if is_kept && let Some(cost) = request.extensions().get::<RequestCost>() {
                kept.lock().unwrap().push(cost.clone());
            }
            let response = Response::builder().status(status);
            Ok::<_, Infallible>(response.body(String::new()).unwrap())
        }));
        for _ in 0..3 {
            assert_eq!(send(&service, request("ann")).await.status(), status);
        }
        notes.0.lock().unwrap().clone()
    };
    let sockets = || Policy::in_flight("sockets", 9).unwrap();
    let seen = problems(101, false, sockets()).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("suspected: an upgraded connection, such as a WebSocket, is not counted in flight, since its task")
            && report.ends_with("#upgrade-without-cost)"),
        "{report}"
    );
    assert_eq!(problems(101, true, sockets()).await, [""; 0]);
    assert_eq!(problems(200, false, sockets()).await, [""; 0]);
    assert_eq!(problems(101, false, gcra("api", "9/s")).await, [""; 0]);
}

#[tokio::test]
async fn requests_that_cost_nothing_are_suspected() {
    let problems = async |is_settled: bool, first: u32, policy: Policy| {
        let notes = Problems::default();
        let policies = Policies::new([gcra("api", "60/h burst 5"), policy]).unwrap();
        let calls = CallLimitLayer::new(LocalStore::default(), Global, policies)
            .cost(move |number| if *number == first { 1 } else { 0 })
            .observer(notes.clone());
        let hello = service_fn(async |_: u32| Ok::<_, tower::BoxError>(()));
        match is_settled {
            true => {
                let calls = calls.settle(|_: &Result<(), _>| Settlement::Keep);
                send_calls(calls.layer(hello)).await;
            }
            false => send_calls(calls.layer(hello)).await,
        }
        notes.0.lock().unwrap().clone()
    };
    let daily = || gcra("daily", "1000/d");
    let seen = problems(false, u32::MAX, daily()).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("suspected: none of the first 1000 requests cost anything, so the layer limits nothing: return at least 1")
            && report.ends_with("#no-cost)"),
        "{report}"
    );
    assert_eq!(problems(false, 999, daily()).await, [""; 0]);
    assert_eq!(problems(true, u32::MAX, daily()).await, [""; 0]);
    let in_flight = Policy::in_flight("calls", 2).unwrap();
    assert_eq!(problems(false, u32::MAX, in_flight).await, [""; 0]);
}

/// The handler should have counted one.
#[tokio::test]
async fn requests_that_end_without_a_cost_are_suspected() {
    let problems = async |counts: bool| {
        let notes = Problems::default();
        let layer = RateLimitLayer::new(LocalStore::default(), Global, gcra("api", "60/h"))
            .cost(|_| 0)
            .until_body_end()
            .observer(notes.clone());
        let service = layer.layer(service_fn(move |request: Request<String>| {
            if counts {
                let cost: &RequestCost = request.extensions().get().unwrap();
                cost.add(0);
            }
            hello::<String>(request)
        }));
        for _ in 0..1_100 {
            assert_eq!(send(&service, request("ann")).await.status(), 200);
        }
        notes.0.lock().unwrap().clone()
    };
    let seen = problems(false).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("suspected: none of the first 1000 requests cost anything, so the layer limits nothing: their initial cost is 0, and")
            && report.ends_with("#no-cost)"),
        "{report}"
    );
    assert_eq!(problems(true).await, [""; 0]);
}

/// Each caller would be charged for the first request only.
#[tokio::test]
async fn an_id_that_never_changes_is_suspected() {
    let problems = async |id_of: fn(&u32) -> Option<Key>| {
        let notes = Problems::default();
        let calls = CallLimitLayer::new(LocalStore::default(), Global, gcra("api", "2000/h"))
            .id(id_of)
            .observer(notes.clone());
        send_calls(calls.layer(service_fn(async |_: u32| Ok::<_, tower::BoxError>(())))).await;
        notes.0.lock().unwrap().clone()
    };
    let expect = |seen: &[String]| {
        let [report] = seen else {
            panic!("it is reported once: {seen:?}");
        };
        assert!(
            report.starts_with("suspected: all of the first 1000 requests with an id have the same one, so only the first request of")
                && report.ends_with("#constant-id)"),
            "{report}"
        );
    };
    expect(&problems(|_| Some(Key::new("id"))).await);
    assert_eq!(
        problems(|number| Some(Key::from(u64::from(*number == 999)))).await,
        [""; 0]
    );
    assert_eq!(problems(|_| None).await, [""; 0]);

    let notes = Problems::default();
    let limiter = Limiter::new(LocalStore::default(), gcra("api", "9/h")).observer(notes.clone());
    for _ in 0..1_000 {
        let _ = limiter.take_with_id(Key::GLOBAL, 1, "id").await.unwrap();
    }
    expect(&notes.0.lock().unwrap());
}

/// Sends 1,100 calls with their numbers.
async fn send_calls(service: impl Service<u32, Error = tower::BoxError, Future: Send> + Clone) {
    for number in 0..1_100 {
        let call = service.clone().oneshot(number).await;
        assert!(call.is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_without_ready_is_reported_once() {
    let problems = async |policies: Option<Policy>, is_ready: bool, max_wait: Option<Duration>| {
        let notes = Problems::default();
        let store = LocalStore::default();
        let layer = ThrottleLayer::new(store, Key::GLOBAL, policies).observer(notes.clone());
        let hello = service_fn(async |()| Ok::<_, tower::BoxError>(()));
        match max_wait {
            None => {
                let mut throttle = layer.layer(hello);
                for _ in 0..3 {
                    if is_ready {
                        throttle.ready().await.unwrap();
                    }
                    throttle.call(()).await.unwrap();
                }
            }
            Some(wait) => {
                let mut throttle = layer.max_wait(wait).layer(hello);
                throttle.ready().await.unwrap().call(()).await.unwrap();
                throttle.ready().await.unwrap();
                // It was ready to fail for longer than the wait that its error tells.
                advance(Duration::from_secs(7_200)).await;
                throttle.call(()).await.unwrap();
            }
        }
        notes.0.lock().unwrap().clone()
    };
    let policy = || Some(gcra("api", "1/h"));
    let seen = problems(policy(), false, None).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("a throttle was called before it was ready, so the call did not wait for its turn: wait for `ready()")
            && report.ends_with("#call-without-ready)"),
        "{report}"
    );
    assert_eq!(problems(policy(), true, None).await, [""; 0]);
    assert_eq!(problems(None, false, None).await, [""; 0], "unlimited");
    assert_eq!(problems(policy(), true, Some(LONG)).await, [""; 0]);
}

/// A share of 1 never allows a cost of 2.
#[tokio::test]
async fn a_share_below_a_cost_is_reported_once() {
    let problems = async |instances: u32, costs: &[u32]| {
        let (notes, redis) = (Problems::default(), MockStore::new());
        let store = Fallback::builder(redis.clone(), LocalStore::default())
            .share(instances)
            .build();
        let limits = ["api", "jobs"]
            .map(|name| Policy::new(name, Strategy::Gcra, Quota::per_minute(100)).unwrap());
        let limiters =
            limits.map(|policy| Limiter::new(store.clone(), policy).observer(notes.clone()));
        let take = async |cost| {
            for limiter in &limiters {
                let _ = limiter.take(Key::new("ann"), cost).await.unwrap();
            }
        };
        take(2).await;
        assert_eq!(*notes.0.lock().unwrap(), [""; 0], "Redis decides");
        redis.fail(StoreError::new(ErrorKind::Unreachable));
        for cost in costs {
            take(*cost).await;
        }
        notes.0.lock().unwrap().clone()
    };
    let seen = problems(1_000, &[1, 1, 2, 5, 2]).await;
    let [api, jobs] = &seen[..] else {
        panic!("each policy is reported once: {seen:?}");
    };
    assert!(
        api.starts_with(
            "a request costs 2, and this instance's share of the policy \"api\" of 100/m is 1, since 1000 instances share it: without"
        ) && api.ends_with("#small-share)"),
        "{api}"
    );
    assert!(jobs.contains("the policy \"jobs\" of 100/m is 1"), "{jobs}");
    assert_eq!(
        problems(50, &[2, 2, 2]).await,
        [""; 0],
        "used up, but large enough"
    );
    let never = problems(1_000, &[101]).await;
    assert_eq!(never.len(), 2, "{never:?}");
    for problem in never {
        assert!(
            problem.contains("#never-passes"),
            "the whole policy does not allow it"
        );
    }
}

#[tokio::test]
async fn a_caller_that_no_extractor_makes_is_reported() {
    let ip = Key::ip([192, 0, 2, 7].into());
    let of = |key: Key| Tiers::new(gcra("free", "9/m")).caller(key, gcra("own", "90/m"));
    let network = || {
        let tiers = Tiers::new(gcra("free", "9/m"));
        tiers.exempt_network("10.0.0.0/8".parse().unwrap()).unwrap()
    };
    async fn problems(extractor: impl KeyExtractor, policies: impl PolicySelector) -> Vec<String> {
        let notes = Problems::default();
        let layer = RateLimitLayer::new(LocalStore::default(), extractor, policies);
        let service = limited(layer.observer(notes.clone()));
        for _ in 0..2 {
            let mut request = request("ann");
            request
                .extensions_mut()
                .insert(IpAddr::from([192, 0, 2, 8]));
            assert_eq!(send(&service, request).await.status(), 200);
        }
        notes.0.lock().unwrap().clone()
    }
    let header = || HeaderKey::new("x-user").unwrap();
    let impossible = [
        (
            problems(header(), of(Key::new("ann"))).await,
            "which is one of texts in clear",
        ),
        (
            problems(header(), Live::new(of(ip))).await,
            "which is one of addresses",
        ),
        (
            problems(PeerIp, Routes::new(of(Key::secret("sk-1")))).await,
            "since the extractor makes addresses (`ip:192.0.2.7`) only",
        ),
        (
            problems((PeerIp, header()), of(ip)).await,
            "makes hashes, as of secrets (`~8c3b..`) or tuples",
        ),
        (
            problems(header(), network()).await,
            "the networks of the `Tiers` apply to nothing",
        ),
    ];
    for (seen, part) in impossible {
        let [report] = &seen[..] else {
            panic!("it is reported once: {seen:?}");
        };
        assert!(
            report.contains(part) && report.ends_with("#caller-form)"),
            "{report}"
        );
    }
    let by_user = by_extension(|_: &IpAddr| "ann");
    for possible in [
        problems(header(), of(header().key_of("ann"))).await,
        problems(header().readable(), of(Key::new("ann"))).await,
        problems(PeerIp, of(ip)).await,
        problems(PeerIp, network()).await,
        problems(header().or(PeerIp), of(ip)).await,
        problems(
            (PeerIp, header()),
            of(Key::tuple(&[ip, Key::secret("ann")])),
        )
        .await,
        // The application's code makes the key.
        problems(by_user, of(ip)).await,
        problems(key_fn(|_| Some(Key::GLOBAL)), of(ip)).await,
    ] {
        assert_eq!(possible, [""; 0]);
    }
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn requests_without_a_route_are_suspected() {
    use axum::{Router, body::Body, routing::get};
    use tower_redis_ratelimit::extract::MatchedRoute;

    let problems = async |inside: bool, unmatched: usize| {
        let notes = Problems::default();
        let key = (Global, MatchedRoute);
        let layer = RateLimitLayer::new(LocalStore::default(), key, gcra("api", "100000/s"));
        let layer = layer.observer(notes.clone());
        let app = Router::new().route("/", get(async || "hello"));
        let app = match inside {
            true => app.layer(layer),
            false => Router::new().fallback_service(layer.layer(app)),
        };
        let first = ["/none"].repeat(unmatched);
        for path in first.into_iter().chain(["/"]).chain(["/none"; 1_000]) {
            let request = http::Request::get(path).body(Body::empty()).unwrap();
            app.clone().oneshot(request).await.unwrap();
        }
        notes.0.lock().unwrap().clone()
    };
    let seen = problems(false, 0).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("suspected: none of the first 1000 requests matched a route, and all of them shared one key: add the layer")
            && report.ends_with("#no-route)"),
        "{report}"
    );
    assert_eq!(problems(true, 999).await, [""; 0], "one route is enough");
}

/// A service may make a layer for each of its customers.
#[tokio::test]
async fn many_layers_are_made_quickly() {
    let store = LocalStore::default();
    let mut kept = vec![];
    let mut start = Instant::now();
    let mut times = vec![];
    for i in 0..16_000 {
        let quota = Quota::per_minute(i + 1);
        let policy = Policy::new("api", Strategy::SlidingLog, quota).unwrap();
        kept.push(
            RateLimitLayer::new(store.clone(), Global, policy)
                .observer(())
                .layer(()),
        );
        if (i + 1) % 1_000 == 0 {
            times.push(start.elapsed());
            start = Instant::now();
        }
    }
    // The fastest of several, since the machine may be busy. A time that grows with the number of layers is 13 times longer.
    let early = times[..4].iter().min().unwrap();
    let late = times[12..].iter().min().unwrap();
    assert!(*late < *early * 6, "{times:?}");
}

#[tokio::test]
async fn a_cost_that_never_passes_is_reported() {
    let notes = Problems::default();
    let layer = layer("60/h burst 5")
        .cost(by_header)
        .observer(notes.clone());
    let service = limited(layer);
    for (cost, status) in [(5, 200), (5, 429), (6, 429), (10, 429)] {
        assert_eq!(send(&service, costing(cost)).await.status(), status);
    }
    let seen = notes.0.lock().unwrap().clone();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(
        seen[0].starts_with(
            "a request costs 6, the burst of the policy \"api\" is 5, and so the request never passes: raise the burst, or \
             lower the cost (never-passes: https://docs.rs/"
        ),
        "{seen:?}"
    );
}

#[tokio::test]
async fn an_unknown_plan_is_reported() {
    let tiers = || {
        Tiers::new(gcra("free", "9/m"))
            .tier("pro", gcra("pro", "90/m"))
            .exempt("internal")
    };
    let problems =
        async |policies: Arc<dyn PolicySelector>, reload: &dyn Fn(), plans: &[&'static str]| {
            let notes = Problems::default();
            let layer = RateLimitLayer::new(LocalStore::default(), Global, policies);
            let service = limited(layer.observer(notes.clone()));
            reload();
            for plan in plans {
                let mut request = anonymous();
                request.extensions_mut().insert(Tier::new(*plan));
                assert_eq!(send(&service, request).await.status(), 200);
            }
            notes.0.lock().unwrap().clone()
        };
    let known = ["pro", "free", "internal"];
    assert_eq!(
        problems(Arc::new(tiers()), &|| (), &known).await,
        [""; 0],
        "the default plan needs no entry"
    );
    let (live, reloaded) = (Live::new(tiers()), Live::new(tiers()));
    let reload = || reloaded.replace(tiers());
    type Case<'a> = (Arc<dyn PolicySelector>, &'a dyn Fn());
    let cases: [Case<'_>; 3] = [
        (Arc::new(tiers()), &|| ()),
        (Arc::new(live), &|| ()),
        (Arc::new(Some(reloaded.clone())), &reload),
    ];
    for (policies, reload) in cases {
        let seen = problems(policies, reload, &["pro", "Pro", "prof", "Pro"]).await;
        assert_eq!(seen.len(), 1, "{seen:?}");
        assert!(
            seen[0].starts_with(
                "the plan \"Pro\" is not listed, and the default plan counts instead: use one of [\"internal\", \"pro\"], or \
                 list it (unknown-tier: https://docs.rs/"
            ),
            "{seen:?}"
        );
    }
}

/// Policies of one name share a count between plans, and so no name tells the default plan.
#[tokio::test]
async fn an_unlisted_default_plan_is_only_suspected() {
    let tiers = Tiers::new(gcra("api", "9/m")).tier("pro", gcra("api", "90/m"));
    let notes = Problems::default();
    let layer = RateLimitLayer::new(LocalStore::default(), Global, tiers);
    let service = limited(layer.observer(notes.clone()));
    for plan in ["pro", "free", "free", "Pro", "free", "prof", "Pro"] {
        let mut request = anonymous();
        request.extensions_mut().insert(Tier::new(plan));
        assert_eq!(send(&service, request).await.status(), 200);
    }
    let seen = notes.0.lock().unwrap().clone();
    let starts = [
        "suspected: the plan \"free\" is not listed, and the default plan counts: list it, or ignore this if it is the default plan, \
         as [\"pro\"] are not (unknown-tier: https://docs.rs/",
        "the plan \"Pro\" is not listed, and the default plan counts instead: use one of [\"pro\"], or list it (unknown-tier: ",
    ];
    assert_eq!(seen.len(), 2, "{seen:?}");
    for (report, start) in seen.iter().zip(starts) {
        assert!(report.starts_with(start), "{report}");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_without_a_plan_are_reported_once() {
    let problems = async |tiers: Tiers, anonymous_first: usize, plan_after: bool| {
        let notes = Problems::default();
        let layer = RateLimitLayer::new(LocalStore::default(), Global, tiers);
        let service = limited(layer.observer(notes.clone()));
        for _ in 0..anonymous_first {
            send(&service, anonymous()).await;
        }
        if plan_after {
            let mut request = anonymous();
            request.extensions_mut().insert(Tier::new("pro"));
            send(&service, request).await;
        }
        for _ in 0..1_000 {
            send(&service, anonymous()).await;
        }
        for time in [599, 1, 1, 600] {
            advance(Duration::from_secs(time)).await;
            send(&service, anonymous()).await;
            notes.0.lock().unwrap().push(format!("after {time} s"));
        }
        notes.0.lock().unwrap().clone()
    };
    let times = ["after 599 s", "after 1 s", "after 1 s", "after 600 s"];
    let free = || Tiers::new(gcra("free", "9/m"));
    let tiers = || free().tier("pro", gcra("pro", "90/m"));
    let seen = problems(tiers(), 5, false).await;
    let [suspected, first, report, others @ ..] = &seen[..] else {
        panic!("it is reported: {seen:?}");
    };
    assert!(
        suspected.starts_with(
            "suspected: none of the first 1000 requests named a plan, and the default plan"
        ) && suspected.contains("or set `.tier_by(..)`, which a settings file does not contain")
            && suspected.ends_with("#no-tier)"),
        "any client can send these: {suspected}"
    );
    let by_closure = problems(tiers().tier_by(|_| None), 5, false).await;
    assert!(
        by_closure[0]
            .contains("inside the authentication that inserts what the closure of `tier_by` reads"),
        "{by_closure:?}"
    );
    assert!(
        report.starts_with("none of the requests of the first ten minutes named a plan, and")
            && report.ends_with("#no-tier)"),
        "{report}"
    );
    assert_eq!(
        (first.as_str(), others),
        (times[0], &times.map(str::to_owned)[1..])
    );
    assert_eq!(
        problems(tiers(), 5, true).await,
        times,
        "one plan shows that the order is right"
    );
    assert_eq!(problems(free(), 5, false).await, times, "no plan is listed");
}

#[tokio::test]
async fn an_ineffective_lease_is_reported_once() {
    let leased = gcra("api", "9/s")
        .leased(Duration::from_millis(100))
        .unwrap();
    let problems = async |is_leased: bool| {
        let (notes, local) = (Notes::default(), LocalStore::default());
        if is_leased {
            let store = Leased::new(Fallback::new(local, LocalStore::default()));
            let layer = RateLimitLayer::new(store.clone(), Global, leased.clone());
            send(&limited(layer.observer(notes.clone())), request("alice")).await;
            let limiter = Limiter::new(store, leased.clone()).observer(notes.clone());
            let _ = limiter.take(Key::GLOBAL, 1).await.unwrap();
        } else {
            let store = Fallback::new(local.clone(), LocalStore::default());
            let service =
                limited(RateLimitLayer::new(store, Global, leased.clone()).observer(notes.clone()));
            let limiter = Limiter::new(local, leased.clone()).observer(notes.clone());
            for _ in 0..3 {
                send(&service, request("alice")).await;
                let _ = limiter.take(Key::GLOBAL, 1).await.unwrap();
            }
        }
        notes
            .take()
            .into_iter()
            .filter(|note| note.contains("leased"))
            .collect::<Vec<_>>()
    };
    assert_eq!(problems(true).await, [""; 0]);
    let seen = problems(false).await;
    assert!(
        seen.len() == 2 && seen[0] == seen[1],
        "of the layer, and of the limiter: {seen:?}"
    );
    assert!(
        seen[0].contains("\"api\" is leased") && seen[0].contains("(not-leased: https://docs.rs/"),
        "{seen:?}"
    );

    let (notes, list) = (
        Notes::default(),
        Policies::new([gcra("all", "99/s"), leased]).unwrap(),
    );
    let beside = RateLimitLayer::new(Leased::new(LocalStore::default()), Global, list)
        .observer(notes.clone());
    send(&limited(beside), request("alice")).await;
    assert!(
        notes
            .take()
            .iter()
            .any(|note| note.contains("\"api\" is leased without effect")),
        "also if another policy is not leased"
    );
}

#[tokio::test]
async fn a_leased_store_without_leases_is_suspected() {
    let problems = async |leased_at: usize| {
        let notes = Problems::default();
        let store = Leased::new(LocalStore::default());
        let plain = gcra("plain", "9000/s");
        let leased = gcra("leased", "9000/s");
        let leased = leased.leased(Duration::from_millis(100)).unwrap();
        let limiters = [plain, leased]
            .map(|policy| Limiter::new(store.clone(), policy).observer(notes.clone()));
        for number in 0..1_100 {
            let limiter = &limiters[usize::from(number == leased_at)];
            let _ = limiter.take(Key::GLOBAL, 1).await.unwrap();
        }
        notes.0.lock().unwrap().clone()
    };
    let seen = problems(usize::MAX).await;
    let [report] = &seen[..] else {
        panic!("it is reported once: {seen:?}");
    };
    assert!(
        report.starts_with("suspected: none of the first 1000 checks of a `Leased` store is under leased policies, so it")
            && report.ends_with("#not-leased)"),
        "{report}"
    );
    assert_eq!(problems(999).await, [""; 0]);
}

/// Even if the store leases.
#[tokio::test(start_paused = true)]
async fn leased_checks_without_a_block_are_reported() {
    let policies = || {
        gcra("api", "90/s")
            .leased(Duration::from_millis(100))
            .unwrap()
    };
    let store = || Leased::new(LocalStore::default());
    let reports = |notes: &Notes| {
        notes
            .take()
            .iter()
            .filter(|note| note.contains("(not-leased: "))
            .count()
    };
    let notes = Notes::default();

    let inside = Fallback::new(store(), LocalStore::default());
    send(
        &limited(RateLimitLayer::new(inside, Global, policies()).observer(notes.clone())),
        request("alice"),
    )
    .await;
    assert_eq!(reports(&notes), 1, "inside of a fallback");

    let settled = RateLimitLayer::new(store(), Global, policies())
        .settle(|_| Settlement::Keep)
        .observer(notes.clone());
    for _ in 0..2 {
        send(
            &settled.layer(service_fn(hello::<http_body_util::Full<bytes::Bytes>>)),
            request("alice"),
        )
        .await;
    }
    assert_eq!(reports(&notes), 1, "settled");

    let throttle = ThrottleLayer::new(store(), Key::GLOBAL, policies()).observer(notes.clone());
    let mut service = throttle.layer(service_fn(async |()| Ok::<_, std::convert::Infallible>(())));
    for _ in 0..2 {
        service.ready().await.unwrap().call(()).await.unwrap();
    }
    assert_eq!(reports(&notes), 1, "a throttle");

    let limiter = || Limiter::new(store(), policies()).observer(notes.clone());
    let _ = limiter().reserve(Key::GLOBAL, 1).await.unwrap();
    assert_eq!(reports(&notes), 1, "reserve");
    let _ = limiter().wait(Key::GLOBAL, 1, LONG).await.unwrap();
    assert_eq!(reports(&notes), 1, "wait");
    let _ = limiter().up_to(Key::GLOBAL, 1).await.unwrap();
    assert_eq!(reports(&notes), 1, "up_to");
    let leasing = limiter();
    let _ = leasing.take(Key::GLOBAL, 1).await.unwrap();
    let _ = leasing.up_to(Key::GLOBAL, 1).await.unwrap();
    assert_eq!(
        reports(&notes),
        0,
        "others of its checks are decided by blocks"
    );
}

/// On whichever thread a request is handled.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn all_threads_report_a_misconfiguration_once() {
    let notes = Notes::default();
    let layer = RateLimitLayer::new(LocalStore::default(), PeerIp, gcra("api", "1/h"))
        .observer(notes.clone());
    let service = axum::Router::<()>::new().layer(layer);
    let calls = (0..64).map(|_| {
        let service = service.clone();
        tokio::spawn(async move { send(&service, anonymous()).await.status().as_u16() })
    });
    let all: Vec<u16> = futures_util::future::try_join_all(calls).await.unwrap();
    assert_eq!(all, [500; 64]);
    assert_eq!(notes.take().len(), 1);
}

/// Panics at the first decision.
struct Panics(AtomicBool);

impl Observer for Panics {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Decided { .. } = *event {
            assert!(self.0.swap(true, Relaxed), "the first one");
        }
    }
}

#[tokio::test]
async fn a_panicking_observer_fails_only_its_request() {
    let (store, mut questions) = manual_store();
    let inner = ConcurrencyLimit::new(service_fn(hello::<String>), 1);
    let mut service = layer_with(store, "9/h")
        .observer(Panics(AtomicBool::new(false)))
        .layer(inner);
    for panics in [true, false] {
        let mut response = Box::pin(
            service
                .ready()
                .now_or_never()
                .expect("a place")
                .unwrap()
                .call(request("alice")),
        );
        assert!(response.as_mut().now_or_never().is_none());
        questions.try_recv().unwrap().allow();
        let response = AssertUnwindSafe(response.as_mut()).catch_unwind().await;
        assert_eq!(response.is_err(), panics);
    }
}
