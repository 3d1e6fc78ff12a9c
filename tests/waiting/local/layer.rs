//! Requests that wait for a permit.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision, Source, Verdict};
use tower_redis_ratelimit::extract::{KeyExtractor, key_fn};
use tower_redis_ratelimit::reject::OnError;
use tower_redis_ratelimit::store::{Answer, ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::wait::Wait;
use tower_redis_ratelimit::{Key, LocalStore, Policies, RateLimitLayer, Strategy};

use crate::support::policy;

const FEW: NonZeroUsize = NonZeroUsize::new(3).unwrap();

fn by_path() -> impl KeyExtractor + Clone {
    key_fn(|request| Some(Key::new(request.uri.path())))
}

fn get(path: &str) -> Request<()> {
    Request::builder().uri(path).body(()).unwrap()
}

/// Responds with the status only.
async fn ok(_: Request<()>) -> Result<Response<String>, std::convert::Infallible> {
    Ok(Response::new(String::new()))
}

/// Sends `count` concurrent requests to a path. Returns their statuses, and the times of the
/// responses.
async fn send<S>(service: &S, path: &str, count: usize) -> Vec<(StatusCode, Duration)>
where
    S: Service<Request<()>, Response = Response<String>, Error = std::convert::Infallible> + Clone,
{
    let start = Instant::now();
    let all = (0..count).map(|_| {
        let service = service.clone();
        async move {
            (
                service.oneshot(get(path)).await.unwrap().status(),
                start.elapsed(),
            )
        }
    });
    join_all(all).await
}

#[tokio::test(start_paused = true)]
async fn queued_requests_pass_at_their_time() {
    for strategy in [
        Strategy::Gcra,
        Strategy::LeakyBucket,
        Strategy::SlidingLog,
        Strategy::FixedWindow(Default::default()),
    ] {
        let layer = RateLimitLayer::new(LocalStore::default(), by_path(), policy(strategy, "10/s"))
            .wait(Duration::from_secs(5));
        let service = layer.layer(service_fn(ok));
        let answers = send(&service, "/a", 30).await;
        assert!(
            answers.iter().all(|(status, _)| *status == 200),
            "{strategy:?}: {answers:?}"
        );
        // In the order of arrival, and no earlier than the quota allows.
        assert!(
            answers.is_sorted_by_key(|(_, at)| *at),
            "{strategy:?}: {answers:?}"
        );
        let (_, last) = answers[29];
        assert!(
            last > Duration::from_millis(900) && last < Duration::from_millis(2_500),
            "{strategy:?}: {last:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn too_long_waits_are_rejected_immediately() {
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        by_path(),
        policy(Strategy::Gcra, "10/s burst 1"),
    )
    .wait(Duration::from_secs(1));
    let service = layer.layer(service_fn(ok));
    let answers = send(&service, "/a", 30).await;
    let (passed, rejected): (Vec<_>, Vec<_>) =
        answers.iter().partition(|(status, _)| *status == 200);
    assert_eq!(
        passed.len(),
        11,
        "one immediately, and one every 100 ms: {answers:?}"
    );
    assert!(
        rejected
            .iter()
            .all(|(status, at)| *status == 429 && at.is_zero()),
        "{answers:?}"
    );
    // Its wait is the one behind all others.
    let turn = send(&service, "/b", 11);
    let late = async { service.clone().oneshot(get("/b")).await.unwrap() };
    let (_, late) = tokio::join!(turn, late);
    assert_eq!(
        (
            late.status().as_u16(),
            late.headers()["retry-after"].to_str().unwrap()
        ),
        (429, "2")
    );
}

/// A longer wait would end in a client that has given up.
#[tokio::test(start_paused = true)]
async fn a_grpc_call_waits_within_its_deadline() {
    for strategy in [
        Strategy::Gcra,
        Strategy::SlidingLog,
        Strategy::FixedWindow(Align::FirstHit),
    ] {
        let layer = RateLimitLayer::new(LocalStore::default(), by_path(), policy(strategy, "1/s"))
            .wait(Duration::from_secs(5));
        let service = layer.layer(service_fn(ok));
        let call = async |timeout: &str| {
            let mut request = get("/a");
            let timeout = timeout.parse().unwrap();
            request.headers_mut().insert("grpc-timeout", timeout);
            let start = Instant::now();
            let response = service.clone().oneshot(request).await.unwrap();
            (response.status().as_u16(), start.elapsed())
        };
        assert_eq!(call("200m").await, (200, Duration::ZERO), "{strategy:?}");
        for short in ["200m", "200000u", "99999999n", "0S"] {
            let answer = call(short).await;
            assert_eq!(answer, (429, Duration::ZERO), "{strategy:?}: {short}");
        }
        // Long enough, or not a deadline.
        for long in [
            "2S",
            "1M",
            "1H",
            "99999999H",
            "200",
            "200ms",
            "+200m",
            "999999999n",
            "",
        ] {
            let (status, wait) = call(long).await;
            assert!(
                status == 200 && wait > Duration::from_millis(900),
                "{strategy:?}: {long}: {status} after {wait:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_number_of_waiters_is_bounded() {
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        by_path(),
        policy(Strategy::Gcra, "1/s"),
    );
    let long = Wait::up_to(Duration::from_secs(3_600));
    let each = layer
        .clone()
        .wait(long.per_caller(FEW))
        .layer(service_fn(ok));
    let rejected = |answers: &[(StatusCode, Duration)]| {
        answers.iter().filter(|(status, _)| *status == 429).count()
    };
    let (ann, bob) = tokio::join!(send(&each, "/ann", 10), send(&each, "/bob", 10));
    assert_eq!((rejected(&ann), rejected(&bob)), (6, 6));
    assert!(
        ann.iter()
            .all(|(status, at)| *status == 200 || at.is_zero())
    );

    let all = layer.wait(long.total(FEW)).layer(service_fn(ok));
    let (cid, dan) = tokio::join!(send(&all, "/cid", 4), send(&all, "/dan", 10));
    assert_eq!(
        (rejected(&cid), rejected(&dan)),
        (0, 9),
        "three wait already"
    );
    assert_eq!(
        rejected(&send(&all, "/eve", 4).await),
        0,
        "no request waits"
    );
}

/// A request that arrives while others wait joins the queue, and does not take their permits.
#[tokio::test(start_paused = true)]
async fn nobody_overtakes() {
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        by_path(),
        policy(Strategy::Gcra, "10/s"),
    )
    .cost(|request| {
        request
            .headers
            .get("cost")
            .map_or(1, |cost| cost.to_str().unwrap().parse().unwrap())
    })
    .wait(Duration::from_secs(10));
    let service = layer.layer(service_fn(ok));
    send(&service, "/a", 10).await;
    let mut large = get("/a");
    large.headers_mut().insert("cost", "5".parse().unwrap());
    let start = Instant::now();
    let large = async {
        (
            service.clone().oneshot(large).await.unwrap().status(),
            start.elapsed(),
        )
    };
    let small = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        send(&service, "/a", 1).await;
        start.elapsed()
    };
    let (large, small) = tokio::join!(large, small);
    assert!(
        large.0 == 200 && large.1 < Duration::from_millis(520),
        "{large:?}"
    );
    assert!(small > Duration::from_millis(599), "{small:?}");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_waiter_passes_its_permit_on() {
    let store = LocalStore::default();
    let policies: Policies = policy(Strategy::Gcra, "1/s");
    let layer = RateLimitLayer::new(store.clone(), by_path(), policies.clone())
        .wait(Duration::from_secs(10));
    let service = layer.layer(service_fn(ok));
    send(&service, "/a", 1).await;
    let start = Instant::now();
    let mut dropped = Box::pin(service.clone().oneshot(get("/a")));
    assert!(dropped.as_mut().now_or_never().is_none());
    let next = async {
        (
            service.clone().oneshot(get("/a")).await.unwrap().status(),
            start.elapsed(),
        )
    };
    let drops = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        drop(dropped);
    };
    let (next, ()) = tokio::join!(next, drops);
    assert!(
        next.0 == 200 && next.1 < Duration::from_millis(1_010),
        "{next:?}"
    );

    // The last waiter's permit is refunded to the store.
    let mut last = Box::pin(service.clone().oneshot(get("/a")));
    assert!(last.as_mut().now_or_never().is_none());
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(last);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let peek = store
        .check(Check::peek(Key::new("/a"), &policies, 1))
        .await
        .unwrap();
    assert!(
        peek.retry_after().unwrap() < Duration::from_millis(910),
        "{peek:?}"
    );
}

/// The handler and the client see the same decision as for a request that did not wait.
#[tokio::test(start_paused = true)]
async fn waited_requests_are_annotated_as_allowed() {
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        by_path(),
        policy(Strategy::Gcra, "1/s"),
    )
    .wait(Duration::from_secs(10))
    .decision_in_response();
    let service = layer.layer(service_fn(async |request: Request<()>| {
        let decision = request.extensions().get::<Decision>().cloned();
        Ok::<_, std::convert::Infallible>(Response::new(format!(
            "{:?}",
            decision.map(|it| (it.is_allowed(), it.granted()))
        )))
    }));
    for _ in 0..2 {
        let response = service.clone().oneshot(get("/a")).await.unwrap();
        assert!(
            response
                .extensions()
                .get::<Decision>()
                .unwrap()
                .is_allowed()
        );
        assert_eq!(response.headers()["ratelimit"], "\"test\";r=0;t=1");
        assert_eq!(response.body(), "Some((true, 1))");
    }
}

/// Waiters use no capacity of the inner service.
#[tokio::test(start_paused = true)]
async fn waiting_does_not_hold_the_inner_service() {
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        by_path(),
        policy(Strategy::Gcra, "1/s"),
    )
    .wait(Duration::from_secs(10));
    let service = layer.layer(ConcurrencyLimitLayer::new(1).layer(service_fn(ok)));
    send(&service, "/a", 1).await;
    let waits = send(&service, "/a", 3);
    let other = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        send(&service, "/b", 1).await[0]
    };
    let (waited, other) = tokio::join!(waits, other);
    assert_eq!(other, (StatusCode::OK, Duration::ZERO));
    assert!(
        waited.iter().all(|(status, _)| *status == 200),
        "{waited:?}"
    );
}

/// Denies its first check, later, and allows the others, immediately.
#[derive(Clone, Default)]
struct DeniesOnce(Arc<AtomicUsize>);

impl Store for DeniesOnce {
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let decided =
            move |verdict| Ok(check.decided(Source::Other("mock"), check.cost(), |_| verdict));
        if self.0.fetch_add(1, SeqCst) > 0 {
            return Answer::ready(decided(Verdict::allowed()));
        }
        Answer::pending(Box::pin(async move {
            tokio::task::yield_now().await;
            decided(Verdict::denied(Duration::from_secs(1)))
        }))
    }
}

/// The turn may have come when the request joins the queue. Its service is then ready too.
#[tokio::test(start_paused = true)]
async fn a_turn_that_comes_immediately_finds_the_inner_service_ready() {
    let quota = policy(Strategy::FixedWindow(Align::FirstHit), "1/s");
    let layer =
        RateLimitLayer::new(DeniesOnce::default(), by_path(), quota).wait(Duration::from_secs(10));
    let service = layer.layer(ConcurrencyLimitLayer::new(1).layer(service_fn(ok)));
    assert_eq!(
        send(&service, "/a", 2).await,
        [(StatusCode::OK, Duration::ZERO); 2]
    );
}

/// If the inner service fails to become ready, its error is returned and the permit goes to the next.
#[tokio::test(start_paused = true)]
async fn a_failing_inner_service_passes_permits_on() {
    let store = LocalStore::default();
    let layer = RateLimitLayer::new(store, by_path(), policy(Strategy::Gcra, "1/s"))
        .wait(Duration::from_secs(10));
    let polls = Arc::new(AtomicUsize::new(0));
    let service = layer.layer(FailsReady { polls, fails_at: 3 });
    let start = Instant::now();
    let answers = join_all((0..3).map(|_| service.clone().oneshot(get("/a")))).await;
    assert_eq!(
        answers.iter().filter(|answer| answer.is_err()).count(),
        1,
        "{answers:?}"
    );
    assert!(
        start.elapsed() < Duration::from_millis(1_010),
        "{:?}",
        start.elapsed()
    );
}

/// Is not ready at the fourth poll of a clone, which waiting requests use.
#[derive(Debug, Clone)]
struct FailsReady {
    polls: Arc<AtomicUsize>,
    fails_at: usize,
}

impl Service<Request<()>> for FailsReady {
    type Response = Response<String>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Response<String>, &'static str>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        let fails = self.polls.fetch_add(1, SeqCst) == self.fails_at;
        std::task::Poll::Ready(if fails { Err("not ready") } else { Ok(()) })
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        std::future::ready(Ok(Response::new(String::new())))
    }
}

#[tokio::test(start_paused = true)]
async fn store_failures_while_waiting_are_reported() {
    for (on_error, status) in [(OnError::Reject, 503), (OnError::Allow, 200)] {
        let store = MockStore::new();
        let layer = RateLimitLayer::new(
            store.clone(),
            by_path(),
            policy(Strategy::SlidingLog, "1/s"),
        )
        .wait(Duration::from_secs(10))
        .on_error(on_error);
        let service = layer.layer(service_fn(ok));
        store.deny(Duration::from_secs(1));
        let mut waits = Box::pin(send(&service, "/a", 3));
        assert!(waits.as_mut().now_or_never().is_none());
        store.fail(StoreError::new(ErrorKind::Unreachable));
        assert!(waits.await.iter().all(|(answer, _)| *answer == status));
        assert!(
            store.asked().len() <= 5,
            "all waiters fail together: {:?}",
            store.asked()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn costs_above_capacity_do_not_wait() {
    let layer = RateLimitLayer::new(
        LocalStore::default(),
        by_path(),
        policy(Strategy::Gcra, "1/s"),
    )
    .cost(|_| 2)
    .wait(Duration::from_secs(10));
    assert_eq!(
        send(&layer.layer(service_fn(ok)), "/a", 1).await,
        [(StatusCode::TOO_MANY_REQUESTS, Duration::ZERO)]
    );
}

/// Units that another caller took while the inner service was not ready are not refunded.
#[tokio::test(start_paused = true)]
async fn only_unexpired_charges_are_refunded() {
    let (store, key) = (LocalStore::default(), Key::new("/a"));
    let policies: Policies = policy(Strategy::Gcra, "10/s");
    let take = async |cost| {
        store
            .check(Check::take(key, &policies, cost))
            .await
            .unwrap()
    };
    assert!(take(10).await.is_allowed());
    let layer = RateLimitLayer::new(store.clone(), by_path(), policies.clone())
        .cost(|_| 10)
        .wait(Duration::from_secs(10));
    let (inner, mut handle) = tower_test::mock::pair::<Request<()>, Response<String>>();
    let mut service = layer.layer(inner);
    handle.allow(1);
    let mut response = Box::pin(service.ready().await.unwrap().call(get("/a")));
    handle.allow(0);
    // Its turn is after a second. 6 of its units are left then, and 4 are taken.
    let patience = Duration::from_millis(1_400);
    assert!(
        tokio::time::timeout(patience, response.as_mut())
            .await
            .is_err()
    );
    assert!(take(4).await.is_allowed());
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(response);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let peek = store.check(Check::peek(key, &policies, 0)).await.unwrap();
    // The other charge leaves 6. The turn drained first, so its other half is refunded.
    assert_eq!(peek.remaining(), 6);
}

/// A request with an id is charged once, whether it waits or not, and whether others wait.
#[tokio::test(start_paused = true)]
async fn a_repeated_id_neither_waits_nor_is_charged() {
    for strategy in [Strategy::Gcra, Strategy::FixedWindow(Align::FirstHit)] {
        let store = LocalStore::default();
        let policies = policy(strategy, "1/s");
        let (asked, requests) = (Arc::new(AtomicU32::new(0)), AtomicU32::new(0));
        let counted = Arc::clone(&asked);
        let layer = RateLimitLayer::new(store, by_path(), policies)
            .wait(Duration::from_secs(10))
            .decision_in_response()
            .id(move |request| {
                counted.fetch_add(1, SeqCst);
                request.headers.get("id").map(Key::new)
            });
        let service = layer.layer(service_fn(ok));
        let start = Instant::now();
        let send = |id: &'static str| {
            let mut request = get("/a");
            if !id.is_empty() {
                request.headers_mut().insert("id", id.parse().unwrap());
            }
            let service = service.clone();
            requests.fetch_add(1, SeqCst);
            tokio::spawn(async move {
                let response = service.oneshot(request).await.unwrap();
                let decision = response.extensions().get::<Decision>().unwrap();
                assert_eq!(decision.granted(), 1, "{strategy:?}: also of a known id");
                (
                    response.status().as_u16(),
                    start.elapsed().as_millis() / 900,
                )
            })
        };
        let passes_at = async |sent: tokio::task::JoinHandle<_>| {
            let (status, second) = sent.await.unwrap();
            assert_eq!(status, 200, "{strategy:?}");
            second
        };
        for _ in 0..2 {
            assert_eq!(passes_at(send("one")).await, 0, "{strategy:?}");
        }
        assert_eq!(passes_at(send("two")).await, 1, "{strategy:?}: it waits");
        let waits = send("");
        tokio::task::yield_now().await;
        // While others wait, a new id waits behind them.
        let new = send("three");
        assert_eq!(passes_at(send("two")).await, 1, "{strategy:?}: it is known");
        assert_eq!(passes_at(waits).await, 2, "{strategy:?}");
        assert_eq!(passes_at(new).await, 3, "{strategy:?}");
        assert_eq!(passes_at(send("three")).await, 3, "{strategy:?}");
        assert_eq!(
            passes_at(send("")).await,
            4,
            "{strategy:?}: nothing else was charged"
        );
        assert_eq!(asked.load(SeqCst), requests.load(SeqCst), "{strategy:?}");
    }
}
