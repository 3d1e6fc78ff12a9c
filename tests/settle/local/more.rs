//! Units that a handler reserves in addition to its request's reservation.

use std::error::Error;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::sleep;
use tower_redis_ratelimit::check::{Decision, Mode};
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::settle::ReserveError;
use tower_redis_ratelimit::store::{Answer, Backend, ErrorKind, MockStore, StoreError};
use tower_redis_ratelimit::{Fallback, Policies};

use super::*;

type Outcome = Result<(), ReserveError>;

/// The handler's use of the charge.
#[derive(Clone, Copy)]
struct Plan {
    more: u32,
    count: Option<u32>,
}

/// A handler that reserves more units, and returns the outcome in the response's extensions.
async fn more(request: Request<Plan>) -> Result<Response<String>, Infallible> {
    let charge = request
        .extensions()
        .get::<RequestCost>()
        .expect("a handle")
        .clone();
    let Plan { more, count } = *request.body();
    let outcome: Outcome = charge.reserve(more).await;
    if let Some(count) = count {
        charge.set(count);
    }
    let mut response = Response::new(String::new());
    response
        .extensions_mut()
        .insert((outcome, charge.reserved()));
    Ok(response)
}

fn plan(more: u32, count: impl Into<Option<u32>>) -> Request<Plan> {
    Request::builder()
        .header(USER, "alice")
        .body(Plan {
            more,
            count: count.into(),
        })
        .unwrap()
}

fn outcome<B>(response: &Response<B>) -> &Outcome {
    &response.extensions().get::<(Outcome, u32)>().unwrap().0
}

fn reserved<B>(response: &Response<B>) -> u32 {
    response.extensions().get::<(Outcome, u32)>().unwrap().1
}

#[tokio::test]
async fn more_is_settled_with_the_rest() {
    for (count, cost) in [
        (None, 510),
        (Some(0), 0),
        (Some(7), 7),
        (Some(30), 30),
        (Some(510), 510),
        (Some(700), 700),
    ] {
        let counted = Count::new();
        let service = counted.layer().until_body_end().layer(service_fn(more));
        let response = send(&service, plan(500, count)).await;
        assert!(outcome(&response).is_ok());
        assert_eq!((reserved(&response), counted.charged()), (510, 510));
        assert_eq!(
            decision(&response).unwrap().remaining(),
            490,
            "as the head is sent"
        );
        assert_eq!(decision(&response).unwrap().granted(), 510);
        drop(response);
        assert_eq!(counted.charged(), cost, "{count:?}");
    }
}

#[tokio::test]
async fn the_head_may_settle_all_of_it() {
    for (settlement, cost) in [
        (Settlement::Keep, 510),
        (Settlement::Refund, 0),
        (Settlement::Cost(40), 40),
    ] {
        let counted = Count::new();
        let service = counted.settling(settlement).layer(service_fn(more));
        let response = send(&service, plan(500, 3)).await;
        assert_eq!(counted.charged(), cost, "{settlement:?}");
        let told = decision(&response).unwrap();
        assert_eq!(
            (told.remaining(), told.granted()),
            (1_000 - cost, cost),
            "{settlement:?}"
        );
        // It is settled: no reservation is left.
        drop(response);
        assert_eq!(counted.charged(), cost);
    }
}

#[tokio::test]
async fn without_room_nothing_is_reserved() {
    let counted = Count::new();
    let service = counted.layer().until_body_end().layer(service_fn(more));
    let response = send(&service, plan(991, None)).await;
    let Err(ReserveError::Denied(denied)) = outcome(&response) else {
        panic!("a denial")
    };
    assert_eq!(denied.decision().remaining(), 990);
    assert_eq!((reserved(&response), counted.charged()), (10, 10));
    assert_eq!(decision(&response).unwrap().remaining(), 990);
    drop(response);
    assert_eq!(counted.charged(), 10, "what it costs beforehand");
}

/// The response of a handler that returns the denial has the fields of its policies only once.
#[cfg(feature = "axum")]
#[tokio::test]
async fn a_denied_handler_responds_like_the_layer() {
    use axum::{Router, routing::get};

    async fn much(charge: RequestCost) -> Result<(), ReserveError> {
        charge.reserve(991).await
    }
    let counted = Count::new();
    let app: Router = Router::new()
        .route("/books", get(much))
        .layer(counted.layer().until_body_end());
    let denied = send(&app, anonymous()).await;
    assert_eq!(denied.status(), 429);
    assert_eq!(denied.headers().get_all("ratelimit").iter().count(), 1);
    assert!(
        field(&denied, "ratelimit")
            .unwrap()
            .starts_with("\"test\";r=990")
    );
    assert!(!decision(&denied).unwrap().is_allowed());
}

/// A handler rejects by the layer's own `Reject`.
#[cfg(feature = "axum")]
#[tokio::test]
async fn a_denied_handler_may_respond_by_the_layers_reject() {
    use axum::response::{IntoResponse, Response};
    use axum::{Router, routing::get};
    use http::request::Parts;
    use http_body_util::BodyExt;
    use tower_redis_ratelimit::headers::Headers;
    use tower_redis_ratelimit::reject::Rejection;

    fn rejected(rejection: Rejection<'_>) -> Response {
        (rejection.status(), format!("no: {rejection}")).into_response()
    }
    async fn much(charge: RequestCost, request: Parts) -> Result<(), Response> {
        let reserved = charge.reserve(991).await;
        reserved.map_err(|error| Rejection::new(&error, &request).response(&rejected))
    }
    let counted = Count::new();
    let layer = counted.layer().until_body_end();
    for (headers, fields) in [(Headers::DRAFT_11, 1), (Headers::NONE, 0)] {
        let layer = layer.clone().headers(headers).reject_with(rejected);
        let app: Router = Router::new().route("/books", get(much)).layer(layer);
        let denied = send(&app, anonymous()).await;
        assert_eq!(denied.status(), 429);
        let sent = denied.headers().get_all("ratelimit").iter().count();
        assert_eq!(sent, fields);
        assert!(denied.headers().contains_key("retry-after"));
        let body = denied.into_body().collect().await.unwrap().to_bytes();
        assert!(body.starts_with(b"no: The quota of"), "{body:?}");
    }
}

/// The fields of another layer are kept.
#[cfg(feature = "axum")]
#[tokio::test]
async fn a_denied_handler_follows_the_layers_headers() {
    use axum::{Router, routing::get};
    use http::HeaderValue;
    use tower_redis_ratelimit::headers::Headers;

    async fn much(charge: RequestCost) -> Result<(), ReserveError> {
        charge.reserve(991).await
    }
    let old = Headers::X_SECONDS;
    let both = Headers::DRAFT_11.and(Headers::X_SECONDS);
    for (headers, draft, legacy) in [
        (Headers::DRAFT_11, 2, None),
        (Headers::NONE, 1, None),
        (old, 1, Some("990")),
        (both, 2, Some("990")),
    ] {
        let [counted, other] = [(); 2].map(|()| Count::new());
        let other = RateLimitLayer::new(other.store, Global, quota("other", "9/d"));
        let app: Router = Router::new()
            .route("/books", get(much))
            .layer(other)
            .layer(counted.layer().headers(headers).until_body_end());
        let denied = send(&app, anonymous()).await;
        assert_eq!(denied.status(), 429);
        for name in ["ratelimit", "ratelimit-policy"] {
            let fields: Vec<_> = denied.headers().get_all(name).iter().collect();
            let is_other = |field: &&HeaderValue| field.to_str().unwrap().contains("other");
            assert_eq!(fields.len(), draft, "{headers:?}");
            assert!(fields.iter().any(is_other), "{headers:?}");
        }
        assert_eq!(
            field(&denied, "x-ratelimit-remaining"),
            legacy,
            "{headers:?}"
        );
        assert!(!decision(&denied).unwrap().is_allowed());
    }
}

/// The same if Redis fails after the layer's check: the denial is then under the instance's share.
#[cfg(feature = "axum")]
#[tokio::test]
async fn a_denied_handler_follows_the_layers_headers_in_an_outage() {
    use axum::{Router, routing::get};
    use tower_redis_ratelimit::headers::Headers;

    for (headers, fields) in [(Headers::DRAFT_11, 1), (Headers::NONE, 0)] {
        let primary = MockStore::new();
        let store = Fallback::builder(primary.clone(), LocalStore::default())
            .share(2)
            .build();
        let layer = RateLimitLayer::new(store, Global, quota("api", "10/d"));
        let much = async move |charge: RequestCost| {
            primary.fail(StoreError::new(ErrorKind::NotReady));
            charge.reserve(100).await
        };
        let app: Router = Router::new()
            .route("/books", get(much))
            .layer(layer.headers(headers).until_body_end());
        let denied = send(&app, anonymous()).await;
        assert_eq!(denied.status(), 429);
        for name in ["ratelimit", "ratelimit-policy"] {
            let sent = denied.headers().get_all(name).iter().count();
            assert_eq!(sent, fields, "{headers:?}");
        }
    }
}

#[tokio::test]
async fn uncounted_requests_and_dry_runs_reserve_nothing() {
    let counted = Count::new();
    let skipping = counted.layer().until_body_end().skip(|_| true);
    let trying = counted.layer().until_body_end().dry_run();
    for (layer, charged) in [(skipping, 0), (trying, 10)] {
        let response = send(&layer.layer(service_fn(more)), plan(5_000, None)).await;
        assert!(outcome(&response).is_ok());
        drop(response);
        assert_eq!(counted.charged(), charged);
    }
}

#[tokio::test]
async fn a_shadow_is_charged_in_the_end() {
    let counted = Count::new();
    let layer = counted
        .layer()
        .shadow(quota("new", "2000/d"))
        .settle(|_| Settlement::Keep);
    drop(send(&layer.layer(service_fn(more)), plan(500, None)).await);
    let look = counted
        .layer()
        .cost(|_| 0)
        .shadow(quota("new", "2000/d"))
        .layer(service_fn(hello::<String>));
    let response = send(&look, request("alice")).await;
    let tried: &tower_redis_ratelimit::check::DryRun = response.extensions().get().unwrap();
    assert_eq!(tried.decisions()[0].remaining(), 2_000 - 510);
}

#[tokio::test]
async fn nested_layers_reserve_all_or_nothing() {
    for (limit, ok, charged_within) in [(600, true, 510), (400, false, 10)] {
        let (outer, inner) = (Count::new(), Count::new());
        let small = quota("small", &format!("{limit}/d"));
        let around =
            RateLimitLayer::new(outer.store.clone(), Global, small.clone()).until_body_end();
        let service = around.layer(inner.layer().until_body_end().layer(service_fn(more)));
        let response = send(&service, plan(500, None)).await;
        assert_eq!(outcome(&response).is_ok(), ok);
        assert_eq!(inner.charged(), charged_within);
        assert_eq!(
            charged(&outer.store, Key::GLOBAL, &small),
            if ok { 501 } else { 1 }
        );
        drop(response);
        assert_eq!(inner.charged(), charged_within);
    }
}

#[tokio::test]
async fn more_is_no_request_in_flight() {
    let (store, tokens) = (LocalStore::default(), quota("tokens", "1000/d"));
    let streams = Policy::in_flight("streams", 1).unwrap();
    let both = Policies::new([tokens.clone(), streams.clone()]).unwrap();
    let by_user = HeaderKey::new(USER).unwrap().readable();
    let service = RateLimitLayer::new(store.clone(), by_user, both)
        .until_body_end()
        .layer(service_fn(more));
    let response = send(&service, plan(500, 20)).await;
    assert!(outcome(&response).is_ok());
    let alice = Key::new("alice");
    assert_eq!(
        (
            charged(&store, alice, &tokens),
            charged(&store, alice, &streams)
        ),
        (501, 1)
    );
    drop(response);
    assert_eq!(
        (
            charged(&store, alice, &tokens),
            charged(&store, alice, &streams)
        ),
        (20, 0)
    );

    let service = RateLimitLayer::new(store, Global, streams)
        .until_body_end()
        .layer(service_fn(more));
    assert!(
        outcome(&send(&service, plan(500, 20)).await).is_ok(),
        "nothing counts costs"
    );
}

/// A sum that exceeds `u32` stays reserved too.
#[tokio::test(start_paused = true)]
async fn more_than_a_check_may_cost_is_kept() {
    const MUCH: u32 = 3_000_000_000;
    for settlement in [Settlement::Keep, Settlement::AtEnd] {
        let (store, policy) = (LocalStore::default(), quota("test", "4000000000/s"));
        let twice = service_fn(async |request: Request<String>| {
            let charge: &RequestCost = request.extensions().get().unwrap();
            for _ in 0..2 {
                sleep(Duration::from_secs(1)).await;
                charge.reserve(MUCH).await.unwrap();
            }
            assert_eq!(charge.reserved(), u32::MAX);
            Ok::<_, Infallible>(Response::new(String::new()))
        });
        let layer =
            RateLimitLayer::new(store.clone(), Global, policy.clone()).settle(move |_| settlement);
        drop(send(&layer.layer(twice), request("alice")).await);
        assert_eq!(
            charged(&store, Key::GLOBAL, &policy),
            MUCH,
            "{settlement:?}"
        );
    }
}

/// Fails checks that cost more than 100, before or after they are sent.
#[derive(Clone)]
struct Failing(LocalStore, fn() -> StoreError);

impl Store for Failing {
    type Future = <LocalStore as Store>::Future;

    fn backend(&self) -> Backend<'_, Self::Future> {
        self.0.backend()
    }

    fn check(&self, check: Check) -> Answer<Self::Future> {
        match check.mode() {
            Mode::Take if check.cost() > 100 => Answer::ready(Err((self.1)())),
            _ => self.0.check(check),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failing_store_reserves_nothing() {
    fn refused() -> StoreError {
        StoreError::with_source(ErrorKind::Unreachable, std::io::Error::other("refused"))
    }
    for failure in [refused, || refused().not_sent()] {
        let (store, policy) = (LocalStore::default(), quota("test", "1000/d"));
        let layer = RateLimitLayer::new(Failing(store.clone(), failure), Global, policy.clone())
            .cost(|_| 10);
        let response = send(
            &layer.until_body_end().layer(service_fn(more)),
            plan(500, 3),
        )
        .await;
        let Err(error @ ReserveError::Failed(_)) = outcome(&response) else {
            panic!("an immediate error, without a retry")
        };
        assert_eq!(error.source().unwrap().to_string(), "refused");
        drop(response);
        sleep(Duration::from_secs(5)).await;
        assert_eq!(charged(&store, Key::GLOBAL, &policy), 3);
    }
}

/// The first part is granted by Redis, the second one by the local store; each is settled where it
/// was granted.
#[tokio::test(start_paused = true)]
async fn a_fallback_may_grant_what_is_more() {
    let (primary, local, policy) = (
        LocalStore::default(),
        LocalStore::default(),
        quota("test", "1000/d"),
    );
    let unsent = || StoreError::new(ErrorKind::Unreachable).not_sent();
    let store = Fallback::new(Failing(primary.clone(), unsent), local.clone());
    let layer = RateLimitLayer::new(store, Global, policy.clone())
        .cost(|_| 10)
        .until_body_end();
    let response = send(&layer.layer(service_fn(more)), plan(500, 30)).await;
    assert!(outcome(&response).is_ok());
    assert_eq!(charged(&primary, Key::GLOBAL, &policy), 10);
    drop(response);
    // The primary store recovers, and the fallback's grants are charged there.
    sleep(Duration::from_secs(60)).await;
    assert_eq!(charged(&primary, Key::GLOBAL, &policy), 30);
}

/// A store that needs this number of polls to decide, and again to reply.
#[derive(Clone)]
struct Slow(LocalStore, u8);

impl Store for Slow {
    type Future = futures_util::future::BoxFuture<'static, Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let Self(local, polls) = self.clone();
        Answer::pending(Box::pin(async move {
            for _ in 0..polls {
                yield_now().await;
            }
            let answer = local.check(check).await;
            for _ in 0..polls {
                yield_now().await;
            }
            answer
        }))
    }
}

/// Dropped at any of its polls, a request is charged the counted units in all layers, exactly once.
#[tokio::test(start_paused = true)]
async fn a_dropped_wait_loses_nothing() {
    let mut ends = [0, 0];
    for count in [None, Some(7)] {
        for dropped_after in 0..60 {
            let (outer, inner) = (Count::new(), Count::new());
            let slow = |count: &Count| {
                let store = Slow(count.store.clone(), 2);
                RateLimitLayer::new(store, Global, count.policy.clone())
                    .cost(|_| 10)
                    .until_body_end()
            };
            let counting = service_fn(move |request: Request<Plan>| async move {
                if let Some(count) = count {
                    request
                        .extensions()
                        .get::<RequestCost>()
                        .unwrap()
                        .set(count);
                }
                more(request).await
            });
            let mut service = slow(&outer).layer(slow(&inner).layer(counting));
            let mut response = Box::pin(service.call(plan(500, None)));
            let mut ended = false;
            for _ in 0..dropped_after {
                ended =
                    std::future::poll_fn(|cx| Poll::Ready(response.as_mut().poll(cx).is_ready()))
                        .await;
                if ended {
                    break;
                }
                yield_now().await;
            }
            drop(response);
            sleep(Duration::from_secs(1)).await;
            ends[usize::from(ended)] += 1;
            for charged in [outer.charged(), inner.charged()] {
                match count {
                    Some(count) => assert!(
                        [0, 10, count].contains(&charged),
                        "{charged} at {dropped_after}"
                    ),
                    None => assert!(
                        [0, 10, 510].contains(&charged),
                        "{charged} at {dropped_after}"
                    ),
                }
            }
            if let Some(count) = count
                && ended
            {
                assert_eq!((outer.charged(), inner.charged()), (count, count));
            }
        }
    }
    assert!(
        ends.iter().all(|ends| *ends > 5),
        "{ends:?}: dropped, and not"
    );
}

/// Replies to takes after a yield, and never to other checks.
#[derive(Clone)]
struct OnlyTakes(LocalStore);

impl Store for OnlyTakes {
    type Future = futures_util::future::BoxFuture<'static, Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let Self(local) = self.clone();
        Answer::pending(Box::pin(async move {
            yield_now().await;
            match check.mode() {
                Mode::Take => local.check(check).await,
                _ => std::future::pending().await,
            }
        }))
    }
}

fn over_takes() -> RateLimitLayer<OnlyTakes, Global> {
    RateLimitLayer::new(
        OnlyTakes(LocalStore::default()),
        Global,
        quota("test", "1000000/d"),
    )
    .cost(|_| 10)
}

#[tokio::test(start_paused = true)]
async fn more_is_requested_before_background_operations() {
    let layer = over_takes().settle(|_| Settlement::Refund);
    let service = layer.layer(service_fn(more));
    for _ in 0..2_000 {
        drop(send(&service, plan(0, None)).await);
    }
    let response =
        tokio::time::timeout(Duration::from_millis(100), send(&service, plan(500, None))).await;
    assert!(outcome(&response.expect("an immediate response")).is_ok());
}

/// The background queue is on a runtime that stalls. A request on another runtime reserves more
/// units without it.
#[test]
fn more_is_requested_on_the_requests_runtime() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let service = over_takes()
        .settle(|_| Settlement::Refund)
        .layer(service_fn(more));
    let (still, other) = (runtime(), runtime());
    still.block_on(async {
        drop(send(&service, plan(0, None)).await);
    });
    let response = other.block_on(async {
        tokio::time::timeout(Duration::from_secs(3), send(&service, plan(500, None))).await
    });
    assert!(outcome(&response.expect("an immediate response")).is_ok());
}

/// The runtime shuts down before, while or after the request reserves more units.
#[test]
fn more_from_an_ending_runtime_is_settled() {
    for polls in 0..8 {
        let counted = Count::new();
        let layer = RateLimitLayer::new(
            Slow(counted.store.clone(), 2),
            Global,
            counted.policy.clone(),
        )
        .cost(|_| 10);
        let service = layer.until_body_end().layer(service_fn(more));
        let runtime = || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
        };
        let first = runtime();
        first.block_on(async {
            let service = service.clone();
            tokio::spawn(async move { drop(send(&service, plan(500, Some(7))).await) });
            for _ in 0..polls {
                yield_now().await;
            }
        });
        drop(first);
        runtime().block_on(async {
            drop(send(&service, plan(0, Some(0))).await);
            sleep(Duration::from_millis(100)).await;
        });
        assert!(
            [0, 7, 10, 510].contains(&counted.charged()),
            "{} after {polls}",
            counted.charged()
        );
        assert_ne!(counted.charged(), 500, "{polls}");
    }
}

/// The handler does not wait for the reply: the request costs what the head has settled.
#[tokio::test(start_paused = true)]
async fn a_grant_after_the_head_is_settled() {
    for (settlement, cost) in [
        (Settlement::Keep, 510),
        (Settlement::Refund, 0),
        (Settlement::Cost(40), 40),
    ] {
        let counted = Count::new();
        let layer = RateLimitLayer::new(
            Slow(counted.store.clone(), 3),
            Global,
            counted.policy.clone(),
        );
        let service = layer
            .cost(|_| 10)
            .settle(move |_| settlement)
            .layer(service_fn(async |request| {
                let request: Request<String> = request;
                let charge = request.extensions().get::<RequestCost>().unwrap();
                assert!(charge.reserve(500).now_or_never().is_none());
                Ok::<_, Infallible>(Response::new(String::new()))
            }));
        drop(send(&service, request("alice")).await);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(counted.charged(), cost, "{settlement:?}");
    }
}
