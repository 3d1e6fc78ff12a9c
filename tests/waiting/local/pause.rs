//! Maximum waits, and pauses that a server requests.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use futures_util::future::join_all;
use http::Response;
use tokio::time::{Instant, sleep};
use tower::buffer::Buffer;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, RateLimited};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::OnError;
use tower_redis_ratelimit::settle::ReserveError;
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::throttle::{Pause, retry_after};
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policies, Policy, RateLimitLayer, Strategy, ThrottleLayer,
};

use crate::mocks::{anonymous, field, gcra, json, limited, send};

const KEY: Key = Key::GLOBAL;
const SECOND: Duration = Duration::from_secs(1);

fn policy(quota: &str) -> Policy {
    Policy::new("test", Strategy::Gcra, quota).unwrap()
}

async fn ok(_: &'static str) -> Result<(), Infallible> {
    Ok(())
}

fn denied_for(error: &BoxError) -> Duration {
    error
        .downcast_ref::<RateLimited>()
        .expect("it is denied")
        .retry_after()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn calls_that_would_wait_too_long_fail() {
    let calls = AtomicU32::new(0);
    let layer =
        ThrottleLayer::new(LocalStore::default(), KEY, policy("1/10s")).max_wait(15 * SECOND);
    let counted = || {
        service_fn(async |request| {
            calls.fetch_add(1, SeqCst);
            ok(request).await
        })
    };
    let (mut service, start) = (layer.layer(counted()), Instant::now());
    service.ready().await.unwrap().call("").await.unwrap();
    // One call may wait; the next one would wait too long.
    let mut second = layer.layer(counted());
    let (waits, fails) = tokio::join!(second.ready(), async {
        tokio::task::yield_now().await;
        let error = service.ready().await.unwrap().call("").await.unwrap_err();
        (denied_for(&error), start.elapsed())
    });
    assert!(
        (19 * SECOND..=20 * SECOND).contains(&fails.0) && fails.1 < SECOND,
        "{fails:?}"
    );
    waits.unwrap().call("").await.unwrap();
    assert_eq!(
        (start.elapsed().as_secs(), calls.load(SeqCst)),
        (10, 2),
        "what has failed was not made"
    );

    // The refused call charged nothing.
    service.ready().await.unwrap().call("").await.unwrap();
    assert_eq!(start.elapsed().as_secs(), 20);
}

#[tokio::test(start_paused = true)]
async fn a_later_poll_checks_again() {
    let layer = ThrottleLayer::new(LocalStore::default(), KEY, policy("1/10s")).max_wait(SECOND);
    let mut service = layer.layer(service_fn(ok));
    service.ready().await.unwrap().call("").await.unwrap();
    service.ready().await.unwrap();
    sleep(10 * SECOND).await;
    service.ready().await.unwrap().call("").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_refused_call_leaves_its_buffer_alive() {
    let layer = ThrottleLayer::new(LocalStore::default(), KEY, policy("1/10s")).max_wait(SECOND);
    let mut service = Buffer::new(layer.layer(service_fn(ok)), 8);
    for passes in [true, false, false] {
        assert_eq!(
            service.ready().await.unwrap().call("").await.is_ok(),
            passes
        );
    }
    sleep(10 * SECOND).await;
    service.ready().await.unwrap().call("").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_timed_throttle_reports_failures() {
    #[derive(Clone, Default)]
    struct Log(std::sync::Arc<std::sync::Mutex<Vec<String>>>);

    impl Observer for Log {
        fn notify(&self, event: &Event<'_>) {
            match *event {
                Event::Decided { decision, .. } => {
                    self.0
                        .lock()
                        .unwrap()
                        .push(decision.outcome().as_str().to_owned());
                }
                Event::Failed { error, .. } => {
                    self.0
                        .lock()
                        .unwrap()
                        .push(error.kind().as_str().to_owned());
                }
                _ => {}
            }
        }
    }

    let (store, log) = (MockStore::new(), Log::default());
    let layer = ThrottleLayer::new(store.clone(), KEY, policy("1/s"))
        .max_wait(SECOND)
        .observer(log.clone());
    store.fail(StoreError::new(ErrorKind::Unreachable));
    let error = layer.layer(service_fn(ok)).oneshot("").await.unwrap_err();
    assert_eq!(
        error.downcast_ref::<StoreError>().unwrap().kind(),
        ErrorKind::Unreachable
    );
    store.deny(5 * SECOND);
    assert_eq!(
        denied_for(&layer.layer(service_fn(ok)).oneshot("").await.unwrap_err()),
        5 * SECOND
    );
    assert_eq!(*log.0.lock().unwrap(), ["unreachable", "denied"]);
    store.fail(StoreError::new(ErrorKind::Unreachable));
    layer
        .on_error(OnError::Allow)
        .layer(service_fn(ok))
        .oneshot("")
        .await
        .unwrap();
}

/// Returns the remaining time of a pause.
async fn left(store: &impl Store, pause: &Pause<impl Store>) -> Duration {
    let peek = store
        .check(Check::peek(KEY, &pause.policy().into(), 1))
        .await
        .unwrap();
    peek.retry_after().unwrap_or_default()
}

/// Allows for a rounding by a few units of ten microseconds.
fn assert_close(left: Duration, expected: Duration) {
    assert!(
        left.abs_diff(expected) <= Duration::from_micros(30),
        "{left:?} instead of {expected:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_longest_of_several_pauses_counts() {
    let store = LocalStore::default();
    let pause = Pause::new(store.clone(), "pause", 300 * SECOND).unwrap();
    let limiter = Limiter::new(store.clone(), pause.policy());
    // Before a pause, no call is denied.
    for _ in 0..100_000 {
        assert!(limiter.take(KEY, 1).await.unwrap().is_allowed());
    }
    sleep(2 * SECOND).await;

    let all = join_all((0..50).map(|_| pause.begin(KEY, 30 * SECOND))).await;
    assert!(all.iter().all(Result::is_ok));
    assert_close(left(&store, &pause).await, 30 * SECOND);
    sleep(10 * SECOND).await;
    pause.begin(KEY, 5 * SECOND).await.unwrap();
    pause.begin(KEY, Duration::ZERO).await.unwrap();
    assert_close(left(&store, &pause).await, 20 * SECOND);
    pause.begin(KEY, 60 * SECOND).await.unwrap();
    assert_close(left(&store, &pause).await, 60 * SECOND);
    assert!(!limiter.take(KEY, 1).await.unwrap().is_allowed());

    // A pause is capped, regardless of the server's request.
    for time in [301 * SECOND, Duration::from_secs(u64::MAX), Duration::MAX] {
        pause.begin(KEY, time).await.unwrap();
        assert_close(left(&store, &pause).await, 300 * SECOND);
    }
    sleep(300 * SECOND + Duration::from_millis(1)).await;
    assert!(limiter.take(KEY, 1).await.unwrap().is_allowed());

    pause.begin(KEY, 60 * SECOND).await.unwrap();
    let _ = limiter.reset(KEY).await.unwrap();
    assert!(limiter.take(KEY, 1).await.unwrap().is_allowed());

    for max in [
        Duration::ZERO,
        Duration::from_millis(999),
        5 * 3_600 * SECOND + Duration::from_nanos(1),
    ] {
        let error = Pause::new(store.clone(), "pause", max)
            .unwrap_err()
            .to_string();
        assert!(error.contains("use 1 second to 5 hours"), "{error}");
    }
    let longest = Pause::new(store.clone(), "longest", 5 * 3_600 * SECOND).unwrap();
    longest.begin(KEY, Duration::MAX).await.unwrap();
    assert_close(left(&store, &longest).await, 5 * 3_600 * SECOND);
}

/// A pause is a time: another maximum under its name is another count, and neither changes the other.
#[tokio::test(start_paused = true)]
async fn pauses_of_two_maxima_keep_their_times() {
    let store = LocalStore::default();
    let [short, long] =
        [60, 3_600].map(|max| Pause::new(store.clone(), "pause", max * SECOND).unwrap());
    long.begin(KEY, 1_000 * SECOND).await.unwrap();
    assert_close(left(&store, &short).await, Duration::ZERO);
    short.begin(KEY, 30 * SECOND).await.unwrap();
    assert_close(left(&store, &long).await, 1_000 * SECOND);
    sleep(10 * SECOND).await;
    assert_close(left(&store, &short).await, 20 * SECOND);
    assert_close(left(&store, &long).await, 990 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_429_pauses_all_instances() {
    let store = LocalStore::default();
    let pause = Pause::new(store.clone(), "pause", 60 * SECOND).unwrap();
    let policies = Policies::new([policy("10/s"), pause.policy()]).unwrap();
    let layer = || ThrottleLayer::new(store.clone(), KEY, policies.clone());
    let (mut one, mut two) = (
        layer().layer(service_fn(ok)),
        layer().max_wait(10 * SECOND).layer(service_fn(ok)),
    );
    let start = Instant::now();
    one.ready().await.unwrap().call("").await.unwrap();
    two.ready().await.unwrap().call("").await.unwrap();

    pause.begin(KEY, 30 * SECOND).await.unwrap();
    let error = two.ready().await.unwrap().call("").await.unwrap_err();
    assert_close(denied_for(&error), 30 * SECOND);
    assert!(start.elapsed() < SECOND);
    one.ready().await.unwrap().call("").await.unwrap();
    let took = start.elapsed();
    assert!((30 * SECOND..31 * SECOND).contains(&took), "{took:?}");
    two.ready().await.unwrap().call("").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_a_pause_large_costs_pass() {
    for max in [
        SECOND,
        1_500 * Duration::from_nanos(1_000_001),
        5 * 3_600 * SECOND,
    ] {
        let store = LocalStore::default();
        let pause = Pause::new(store.clone(), "pause", max).unwrap();
        let limiter = Limiter::new(store, pause.policy());
        for cost in [1, 2_000_000_000, 100_000_000] {
            let decision = limiter.take(KEY, cost).await.unwrap();
            assert!(decision.is_allowed(), "{cost} of {max:?}");
        }
    }
}

/// A pause limits no rate, so clients see neither its quota nor what is left of it.
#[tokio::test(start_paused = true)]
async fn clients_see_no_quota_of_a_pause() {
    for list in [true, false] {
        let store = LocalStore::default();
        let pause = Pause::new(store.clone(), "block", 60 * SECOND).unwrap();
        let rate = gcra("api", "9/h");
        let policies = match list {
            true => Policies::new([pause.policy(), rate]).unwrap(),
            false => pause.policy().into(),
        };
        let legacy = Headers::DRAFT_11.and(Headers::X_SECONDS);
        let limiter = Limiter::new(store.clone(), policies.clone());
        let service = limited(RateLimitLayer::new(store, Global, policies).headers(legacy));
        let allowed = send(&service, anonymous()).await;
        pause
            .begin(KEY, Duration::from_millis(29_500))
            .await
            .unwrap();
        let denied = send(&service, anonymous()).await;
        let policy = list.then_some("\"api\";q=9;w=3600");
        let of = |response| {
            (
                field(response, "ratelimit-policy"),
                field(response, "ratelimit"),
            )
        };
        assert_eq!(of(&allowed), (policy, list.then_some("\"api\";r=8;t=3200")));
        // Nothing of the rest can be used during the pause.
        assert_eq!(of(&denied), (policy, None));
        let limit = |response| field(response, "x-ratelimit-limit");
        assert_eq!(
            (limit(&allowed), limit(&denied)),
            (list.then_some("9"), None)
        );
        assert_eq!(field(&denied, "retry-after"), Some("30"));
        let Err(ReserveError::Denied(error)) = limiter.reserve(KEY, 1).await else {
            panic!("a denial")
        };
        let error = error.to_string();
        assert!(
            error.starts_with("calls are paused (block); try again in 29.5"),
            "{error}"
        );
        let problem = json(denied).await;
        assert_eq!(problem["detail"], "Calls are paused. Try again in 30 s.");
        assert_eq!(problem["violated-policies"], serde_json::json!(["block"]));
    }
}

/// An instance's share applies to the rate, not to the duration of a pause.
#[tokio::test(start_paused = true)]
async fn a_pause_lasts_as_long_by_fallback() {
    let redis = MockStore::new();
    redis.fail(StoreError::new(ErrorKind::Unreachable));
    let store = Fallback::builder(redis, LocalStore::default())
        .share(4)
        .build();
    let pause = Pause::new(store.clone(), "pause", 60 * SECOND).unwrap();
    pause.begin(KEY, 30 * SECOND).await.unwrap();
    let peek = store
        .check(Check::peek(KEY, &pause.policy().into(), 1))
        .await
        .unwrap();
    let left = peek.retry_after().unwrap();
    assert!(
        left.abs_diff(30 * SECOND) < Duration::from_millis(1),
        "{left:?}"
    );
}

#[test]
fn only_requested_waits_are_parsed() {
    let told = |status: u16, name: &'static str, value: &[u8]| {
        let response = Response::builder()
            .status(status)
            .header(name, value)
            .body(())
            .unwrap();
        retry_after(response.status(), response.headers())
    };
    for status in [429, 503] {
        assert_eq!(told(status, "retry-after", b"30"), Some(30 * SECOND));
        assert_eq!(told(status, "retry-after", b" 0 "), Some(Duration::ZERO));
        assert_eq!(
            told(status, "retry-after", b"18446744073709551615"),
            Some(Duration::from_secs(u64::MAX))
        );
        for wrong in [
            "",
            "-1",
            "+1",
            "1.5",
            "soon",
            "18446744073709551616",
            "Fri, 31 Dec 1999 23:59:59 GMT",
        ] {
            assert_eq!(
                told(status, "retry-after", wrong.as_bytes()),
                None,
                "{wrong}"
            );
        }
        assert_eq!(told(status, "retry-after", b"\xff"), None);
    }
    let dated = |date: &str, until: &str| {
        let response = Response::builder()
            .status(503)
            .header("date", date)
            .header("retry-after", until);
        let response = response.body(()).unwrap();
        retry_after(response.status(), response.headers())
    };
    let date = "Fri, 31 Dec 1999 23:59:29 GMT";
    for (until, expected) in [
        ("Fri, 31 Dec 1999 23:59:59 GMT", Some(30 * SECOND)),
        ("Friday, 31-Dec-99 23:59:59 GMT", Some(30 * SECOND)),
        ("Fri, 31 Dec 1999 23:59:00 GMT", Some(Duration::ZERO)),
        ("Fri, 31 Dec", None),
    ] {
        assert_eq!(dated(date, until), expected, "{until}");
        assert_eq!(dated("now", until), None, "{until}");
    }
    assert_eq!(told(200, "retry-after", b"30"), None);
    assert_eq!(told(301, "retry-after", b"30"), None);
    assert_eq!(
        told(200, "grpc-retry-pushback-ms", b"1500"),
        Some(Duration::from_millis(1_500))
    );
    assert_eq!(told(200, "grpc-retry-pushback-ms", b"-1"), None);
}
