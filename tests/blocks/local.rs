//! Blocks in this process, on a paused clock.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::Request;
use http::request::Parts;
use tokio::time::{advance, sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, RateLimited, Source};
use tower_redis_ratelimit::extract::{HeaderKey, key_fn};
use tower_redis_ratelimit::headers::Headers;
use tower_redis_ratelimit::reject::{HttpReject, OnMissingKey};
use tower_redis_ratelimit::select::{Routes, Tiers};
use tower_redis_ratelimit::store::{BoxStore, MockStore, Store};
use tower_redis_ratelimit::wait::Wait;
use tower_redis_ratelimit::{
    CallLimitLayer, Key, Leased, Limiter, LocalStore, Policies, Policy, RateLimitLayer, RedisStore,
    Strategy,
};

use crate::mocks::*;

const MINUTE: Duration = Duration::from_secs(60);
/// The strikes of the requests before are counted.
const COUNTED: Duration = Duration::from_millis(300);

/// One request per second and user; three denials within a minute block for ten.
fn blocking() -> RateLimitLayer<LocalStore, HeaderKey> {
    layer("1/s").block_after("3/min", 10 * MINUTE).unwrap()
}

async fn statuses<S, B>(service: &S, user: &str, count: usize) -> Vec<u16>
where
    S: Service<Request<String>, Response = http::Response<B>, Error: std::fmt::Debug> + Clone,
{
    let mut statuses = vec![];
    for _ in 0..count {
        statuses.push(send(service, request(user)).await.status().as_u16());
    }
    statuses
}

#[tokio::test(start_paused = true)]
async fn denials_block_until_the_time_has_passed() {
    let service = limited(blocking());
    assert_eq!(statuses(&service, "ann", 3).await, [200, 429, 429]);
    advance(2 * COUNTED).await;
    sleep(COUNTED).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(
        statuses(&service, "ann", 2).await,
        [200, 429],
        "the third strike"
    );
    sleep(COUNTED).await;
    sleep(Duration::from_secs(1)).await;
    let blocked = send(&service, request("ann")).await;
    assert_eq!(blocked.status(), 429);
    assert_eq!(decision(&blocked).unwrap().source(), Source::Blocked);
    assert_eq!(field(&blocked, "retry-after"), Some("599"));
    let body = text(blocked).await;
    assert!(
        body.contains("Requests are blocked. Try again in 599 s."),
        "{body}"
    );
    assert_eq!(statuses(&service, "bob", 1).await, [200]);

    // These denials do not extend the block.
    for _ in 0..9 {
        assert_eq!(statuses(&service, "ann", 5).await, [429; 5]);
        sleep(MINUTE).await;
    }
    sleep(MINUTE).await;
    assert_eq!(statuses(&service, "ann", 1).await, [200]);
}

#[tokio::test(start_paused = true)]
async fn only_denials_of_enforced_takes_are_strikes() {
    let store = LocalStore::default();
    let layer = || {
        layer_with(store.clone(), "1/s")
            .cost(by_header)
            .block_after("1/min", MINUTE)
            .unwrap()
    };
    let cost = async |service: &_, cost| send(service, costing(cost)).await.status();
    // Shadows, dry runs in both orders, and costs above the burst.
    let shadowed = limited(layer().shadow(gcra("shadow", "1/h")));
    assert_eq!(cost(&shadowed, 1).await, 200);
    assert_eq!(cost(&shadowed, 2).await, 429);
    for dry in [
        layer().dry_run(),
        RateLimitLayer::dry_run(layer_with(store.clone(), "1/s"))
            .block_after("1/min", MINUTE)
            .unwrap()
            .cost(by_header),
    ] {
        let dry = limited(dry);
        assert_eq!(cost(&dry, 1).await, 200);
        assert_eq!(cost(&dry, 1).await, 200);
    }
    // A peek.
    let limiter = Limiter::new(store.clone(), gcra("api", "1/s"))
        .block_after("1/min", MINUTE)
        .unwrap();
    let ann = Key::new("alice");
    assert!(!limiter.peek(ann, 1).await.unwrap().is_allowed());
    sleep(Duration::from_secs(2)).await;
    assert_eq!(cost(&shadowed, 1).await, 200);
    // The store cannot decide.
    let mock = MockStore::new();
    let failing = limited(
        layer_with(mock.clone(), "1/s")
            .block_after("1/min", MINUTE)
            .unwrap(),
    );
    mock.fail(tower_redis_ratelimit::store::StoreError::new(
        tower_redis_ratelimit::store::ErrorKind::Timeout,
    ));
    assert_eq!(statuses(&failing, "ann", 1).await, [503]);
    mock.allow();
    sleep(COUNTED).await;
    assert_eq!(statuses(&failing, "ann", 1).await, [200]);
    assert_eq!(mock.asked().len(), 2, "no strike was sent");
}

/// A part of the cost, a repeated id and a waiter that has left, before a denial that is one.
#[tokio::test(start_paused = true)]
async fn only_a_denied_call_is_a_strike() {
    let limiter = Limiter::new(LocalStore::default(), gcra("api", "2/h"))
        .block_after("1/min", MINUTE)
        .unwrap();
    let ann = Key::new("ann");
    let source = async || limiter.peek(ann, 0).await.unwrap().source();
    let first = limiter.take_with_id(ann, 1, "7").await.unwrap();
    assert!(first.is_allowed());
    assert_eq!(limiter.up_to(ann, 5).await.unwrap().granted(), 1);
    let repeated = limiter.take_with_id(ann, 1, "7").await.unwrap();
    assert!(repeated.is_allowed());
    let left = timeout(MINUTE / 60, limiter.wait(ann, 1, 60 * MINUTE)).await;
    assert!(left.is_err(), "the waiter leaves");
    sleep(COUNTED).await;
    assert_eq!(source().await, Source::Local);
    assert!(!limiter.up_to(ann, 5).await.unwrap().is_allowed());
    sleep(COUNTED).await;
    assert_eq!(source().await, Source::Blocked);
}

/// A block does not end what has begun: a waiting request, and one in flight.
#[tokio::test(start_paused = true)]
async fn a_block_ends_nothing_that_has_begun() {
    let limiter = Limiter::new(LocalStore::default(), gcra("api", "1/s")).with_blocks();
    let ann = Key::new("ann");
    let reserved = limiter.reserve(ann, 1).await.unwrap();
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.wait(ann, 1, MINUTE).await.unwrap() }
    });
    sleep(MINUTE / 600).await;
    limiter.block(ann, MINUTE).await.unwrap();
    let waited = waiting.await.unwrap();
    assert!(waited.is_allowed(), "{waited:?}");
    reserved.settle(3);
    limiter.flush().await;
    limiter.unblock(ann).await.unwrap();
    let settled = limiter.peek(ann, 1).await.unwrap();
    assert!(settled.retry_after().unwrap() > MINUTE / 60, "{settled:?}");
}

/// Beyond the callers whose strikes are added up, each strike is sent.
#[tokio::test(start_paused = true)]
async fn a_flood_of_callers_is_bounded() {
    let mock = MockStore::new();
    mock.deny(MINUTE);
    let limiter = Limiter::new(mock.clone(), gcra("api", "1/s"));
    let limiter = limiter.block_after("20/min", MINUTE).unwrap();
    for number in 0..10_007_u64 {
        let _ = limiter.take(Key::from(number), 1).await.unwrap();
    }
    let charges = || {
        let asked = mock.asked().into_iter();
        asked
            .filter(|check| check.policies()[0].quota().limit() == 20)
            .count()
    };
    sleep(COUNTED / 3).await;
    assert_eq!(charges(), 7);
    sleep(COUNTED).await;
    assert!(mock.flush().await);
    assert_eq!(charges(), 10_007);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_is_no_strike() {
    let one = NonZeroUsize::MIN;
    let layer = blocking().wait(Wait::up_to(MINUTE).total(one));
    let service = limited(layer);
    assert_eq!(statuses(&service, "ann", 1).await, [200]);
    let requests = join_all((0..20).map(|_| send(&service, request("ann"))));
    let refused = requests
        .await
        .iter()
        .filter(|response| response.status() == 429)
        .count();
    assert_eq!(refused, 19);
    sleep(COUNTED).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(statuses(&service, "ann", 1).await, [200]);
}

#[tokio::test(start_paused = true)]
async fn a_limiter_blocks_and_unblocks() {
    let limiter = Limiter::new(LocalStore::default(), gcra("api", "1/s"))
        .block_after("3/min", 10 * MINUTE)
        .unwrap();
    let ann = Key::new("ann");
    limiter.block(ann, MINUTE).await.unwrap();
    limiter.block(ann, MINUTE / 2).await.unwrap();
    let rest = |wait: Option<Duration>| wait.unwrap();
    let denied = limiter.take(ann, 1).await.unwrap();
    assert_eq!(
        (denied.source(), rest(denied.retry_after())),
        (Source::Blocked, MINUTE)
    );
    limiter.reset(ann).await.unwrap();
    assert!(
        !limiter.peek(ann, 1).await.unwrap().is_allowed(),
        "a reset ends no block"
    );
    assert!(!limiter.up_to(ann, 5).await.unwrap().is_allowed());
    assert!(
        !limiter
            .take_with_id(ann, 1, "7")
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(limiter.reserve(ann, 1).await.is_err());
    assert!(limiter.reserve_within(ann, 1, 2 * MINUTE).await.is_err());
    let waited = limiter.wait(ann, 1, 2 * MINUTE).await.unwrap();
    assert_eq!(waited.source(), Source::Blocked, "it does not wait");
    limiter.unblock(ann).await.unwrap();
    assert!(limiter.take(ann, 1).await.unwrap().is_allowed());
    let (eve, day) = (Key::new("eve"), 24 * 60 * MINUTE);
    limiter.block(eve, 1_000 * day).await.unwrap();
    let longest = limiter.take(eve, 1).await.unwrap().retry_after();
    assert_eq!(longest, Some(366 * day), "a year at most");

    // The strikes end with the block.
    for _ in 0..3 {
        assert!(!limiter.take(ann, 1).await.unwrap().is_allowed());
    }
    sleep(COUNTED).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(
        limiter.take(ann, 1).await.unwrap().source(),
        Source::Blocked
    );
    limiter.unblock(ann).await.unwrap();
    assert!(limiter.take(ann, 1).await.unwrap().is_allowed());
    for _ in 0..2 {
        assert!(!limiter.take(ann, 1).await.unwrap().is_allowed());
    }
    sleep(COUNTED).await;
    sleep(Duration::from_secs(1)).await;
    assert!(limiter.take(ann, 1).await.unwrap().is_allowed());
}

/// No layer or limiter enforces the block. Over Redis, another process may.
#[tokio::test]
async fn a_block_without_effect_is_suspected() {
    let nowhere = RedisStore::connect_lazy("redis://127.0.0.1:1/").unwrap();
    let problems = async |limiter: Limiter<BoxStore>| {
        let notes = Problems::default();
        let limiter = limiter.observer(notes.clone());
        for _ in 0..2 {
            let _sent = limiter.block(Key::new("ann"), MINUTE).await;
            let _sent = limiter.unblock(Key::new("ann")).await;
        }
        notes.0.lock().unwrap().clone()
    };
    let over = |store: BoxStore| Limiter::new(store, gcra("api", "9/s"));
    let local = LocalStore::default();
    for store in [
        BoxStore::new(local.clone()),
        BoxStore::new(MockStore::new()),
    ] {
        let seen = problems(over(store)).await;
        let [report] = &seen[..] else {
            panic!("it is reported once: {seen:?}");
        };
        assert!(report.ends_with("#unenforced-block)"), "{report}");
        assert!(report.contains("add `.with_blocks()`"), "{report}");
    }
    let mock = over(BoxStore::new(MockStore::new())).with_blocks();
    assert_eq!(problems(mock).await, [""; 0]);
    assert_eq!(problems(over(BoxStore::new(nowhere))).await, [""; 0]);
    let _layer = layer_with(local.clone(), "9/s").with_blocks();
    assert_eq!(problems(over(BoxStore::new(local))).await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn blocks_hold_where_they_are_enforced() {
    let store = LocalStore::default();
    let limiter = Limiter::new(store.clone(), gcra("api", "9/s"));
    let ann = Key::new("ann");
    limiter.block(ann, MINUTE).await.unwrap();
    assert!(limiter.take(ann, 1).await.unwrap().is_allowed());
    let enforcing = limiter.clone().with_blocks();
    assert!(!enforcing.take(ann, 1).await.unwrap().is_allowed());
    let service = limited(layer_with(store.clone(), "9/s").with_blocks());
    assert_eq!(statuses(&service, "ann", 1).await, [429]);
    assert_eq!(statuses(&service, "bob", 1).await, [200]);
    // Another first policy has its own blocks.
    let other = Limiter::new(store.clone(), gcra("other", "9/s")).with_blocks();
    assert!(other.take(ann, 1).await.unwrap().is_allowed());
    // Leased quota is not granted either.
    let leased = Policy::new("api", Strategy::Gcra, "1000/s").unwrap();
    let leased = leased.leased(Duration::from_millis(100)).unwrap();
    let leasing = Limiter::new(Leased::new(store), leased).with_blocks();
    assert_eq!(
        leasing.take(ann, 1).await.unwrap().source(),
        Source::Blocked
    );
}

#[tokio::test(start_paused = true)]
async fn another_key_is_blocked() {
    let by_address = key_fn(|request| request.headers.get("x-address").map(Key::new));
    let layer = layer("1/min")
        .block_after_by(by_address, "3/min", 10 * MINUTE)
        .unwrap();
    let service = limited(layer);
    let from = |user: &str, address: &'static str| {
        let mut request = request(user);
        request
            .headers_mut()
            .insert("x-address", address.parse().unwrap());
        request
    };
    for _ in 0..4 {
        send(&service, from("ann", "evil")).await;
    }
    sleep(COUNTED).await;
    let blocked = send(&service, from("bob", "evil")).await;
    assert_eq!(decision(&blocked).unwrap().source(), Source::Blocked);
    let denied = send(&service, from("ann", "good")).await;
    assert_eq!(
        decision(&denied).unwrap().source(),
        Source::Local,
        "ann is not blocked"
    );
    // Without such a key there is neither a strike nor a block.
    for _ in 0..9 {
        send(&service, request("ann")).await;
    }
    sleep(COUNTED).await;
    let denied = send(&service, request("ann")).await;
    assert_eq!(decision(&denied).unwrap().source(), Source::Local);
}

/// Without a block, no request pays for the second key.
#[tokio::test(start_paused = true)]
async fn another_key_is_extracted_only_for_blocks() {
    let extracted = Arc::new(AtomicUsize::new(0));
    let by_address = {
        let extracted = Arc::clone(&extracted);
        key_fn(move |_| {
            extracted.fetch_add(1, Ordering::Relaxed);
            Some(Key::GLOBAL)
        })
    };
    let layer = layer("5/min").block_after_by(by_address, "1/min", 10 * MINUTE);
    let service = limited(layer.unwrap());
    let statuses_of_ann = statuses(&service, "ann", 6).await;
    assert_eq!(statuses_of_ann, [200, 200, 200, 200, 200, 429]);
    assert_eq!(extracted.load(Ordering::Relaxed), 1, "of the denial");
    sleep(COUNTED).await;
    assert_eq!(
        statuses(&service, "bob", 1).await,
        [429],
        "by the same address"
    );
    assert_eq!(extracted.load(Ordering::Relaxed), 2);
}

/// A client enters ann's name in a login form until its denials begin a block. A block by that name is ann's own.
#[tokio::test(start_paused = true)]
async fn a_typed_name_blocks_no_other_client() {
    let by_address = key_fn(|request| request.headers.get("x-address").map(Key::new));
    let by_name = layer("1/min").block_after("3/min", 10 * MINUTE).unwrap();
    let by_address = layer("1/min")
        .block_after_by(by_address, "3/min", 10 * MINUTE)
        .unwrap();
    for (layer, status_of_ann) in [(by_name, 429), (by_address, 200)] {
        let service = limited(layer);
        let from = async |address: &'static str| {
            let mut request = request("ann");
            request
                .headers_mut()
                .insert("x-address", address.parse().unwrap());
            send(&service, request).await
        };
        for _ in 0..4 {
            from("evil").await;
        }
        // Her quota is refilled.
        sleep(MINUTE).await;
        let evil = from("evil").await;
        assert_eq!(decision(&evil).unwrap().source(), Source::Blocked);
        assert_eq!(from("good").await.status(), status_of_ann);
    }
}

#[tokio::test(start_paused = true)]
async fn a_forbidden_caller_gets_a_403() {
    let store = LocalStore::default();
    let limiter = Limiter::new(store.clone(), gcra("api", "1/s")).with_blocks();
    limiter.block(Key::new("ann"), MINUTE).await.unwrap();
    let service = limited(
        layer_with(store.clone(), "1/s")
            .with_blocks()
            .forbid_blocked(),
    );
    let forbidden = send(&service, request("ann")).await;
    assert_eq!(forbidden.status(), 403);
    assert_eq!(field(&forbidden, "retry-after"), None);
    assert_eq!(decision(&forbidden).unwrap().source(), Source::Forbidden);
    let problem = serde_json::json!({
        "type": "about:blank", "title": "Forbidden", "status": 403, "detail": "Requests are blocked.",
    });
    assert_eq!(json(forbidden).await, problem);

    let forbidding = limiter.forbid_blocked();
    let denied = forbidding.take(Key::new("ann"), 1).await.unwrap();
    assert_eq!(HttpReject::new().response::<String>(&denied).status(), 403);
    let error = denied.allowed().unwrap_err();
    assert_eq!(error.to_string(), "calls are blocked (api)");
}

#[tokio::test(start_paused = true)]
async fn denials_extend_a_block_if_asked() {
    let second = Duration::from_secs(1);
    let store = LocalStore::default();
    let limiter = Limiter::new(store.clone(), gcra("api", "1/d"))
        .extend_blocks(true)
        .block_after("3/min", 10 * MINUTE)
        .unwrap();
    let service = limited(
        layer_with(store, "1/d")
            .block_after("3/min", 10 * MINUTE)
            .unwrap()
            .extend_blocks(true),
    );
    let ann = Key::new("ann");
    let rest = async || limiter.peek(ann, 0).await.unwrap().retry_after().unwrap();
    statuses(&service, "ann", 4).await;
    sleep(COUNTED).await;
    sleep(5 * second).await;
    assert_eq!(statuses(&service, "ann", 1).await, [429]);
    assert!(rest().await < 595 * second, "too early to extend");
    sleep(second).await;
    assert_eq!(statuses(&service, "ann", 1).await, [429]);
    assert_eq!(rest().await, 10 * MINUTE);
    for _ in 0..5 {
        sleep(9 * MINUTE).await;
        let denied = limiter.take(ann, 1).await.unwrap();
        assert_eq!(denied.retry_after(), Some(MINUTE), "that before");
        assert_eq!(rest().await, 10 * MINUTE);
    }
    // A longer block by an operator stays.
    limiter.block(ann, 60 * MINUTE).await.unwrap();
    sleep(10 * MINUTE).await;
    assert_eq!(statuses(&service, "ann", 1).await, [429]);
    assert_eq!(rest().await, 50 * MINUTE);
    sleep(50 * MINUTE).await;
    assert!(limiter.peek(ann, 0).await.unwrap().is_allowed());
}

/// `eve` is blocked by the limits, and so is a route. No store is asked.
fn with_blocked(store: &MockStore) -> RateLimitLayer<MockStore, HeaderKey> {
    let user = HeaderKey::new(USER).unwrap().readable();
    let tiers = Tiers::new(gcra("api", "9/s")).caller(user.key_of("eve"), Policies::blocked());
    let routes = Routes::new(tiers)
        .route("/closed", Policies::blocked())
        .unwrap();
    RateLimitLayer::new(store.clone(), user, routes).decision_in_response()
}

fn at(path: &str, mut request: Request<String>) -> Request<String> {
    *request.uri_mut() = path.parse().unwrap();
    request
}

#[tokio::test(start_paused = true)]
async fn blocked_policies_deny_everything() {
    let store = MockStore::new();
    let layer = || {
        with_blocked(&store)
            .cost(|_: &Parts| 0)
            .headers(Headers::DRAFT_11.and(Headers::GITHUB))
    };
    let waiting = layer().wait(Wait::up_to(MINUTE));
    let blocking = layer().block_after("1/min", MINUTE).unwrap();
    for layer in [layer(), waiting, blocking] {
        let service = limited(layer.on_missing_key(OnMissingKey::Allow));
        for blocked in [
            request("eve"),
            at("/closed", request("ann")),
            at("/closed/", request("ann")),
            at("/closed", anonymous()),
        ] {
            let denied = send(&service, blocked).await;
            assert_eq!(denied.status(), 429);
            for name in [
                "retry-after",
                "ratelimit",
                "ratelimit-policy",
                "x-ratelimit-limit",
            ] {
                assert_eq!(field(&denied, name), None, "{name}");
            }
            let by = decision(&denied).unwrap();
            assert_eq!((by.source(), by.remaining()), (Source::Blocked, 0));
            let problem = json(denied).await;
            assert_eq!(problem["detail"], "Requests are blocked.");
        }
    }
    assert_eq!(store.asked().len(), 0);

    let forbidding = limited(with_blocked(&store).forbid_blocked());
    let forbidden = send(&forbidding, request("eve")).await;
    assert_eq!(forbidden.status(), 403);
    assert_eq!(decision(&forbidden).unwrap().source(), Source::Forbidden);
    // A dry run denies nobody, and others are asked about.
    let dry = limited(with_blocked(&store).dry_run());
    assert_eq!(send(&dry, request("eve")).await.status(), 200);
    assert_eq!(store.asked().len(), 0);
    assert_eq!(send(&forbidding, request("ann")).await.status(), 200);
    assert_eq!(store.asked().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_limiter_with_blocked_policies_charges_nothing() {
    let store = MockStore::new();
    let limiter = Limiter::new(store.clone(), Policies::blocked());
    let ann = Key::new("ann");
    for denied in [
        limiter.take(ann, 0).await.unwrap(),
        limiter.take_with_id(ann, 1, "7").await.unwrap(),
        limiter.up_to(ann, 3).await.unwrap(),
        limiter.peek(ann, 1).await.unwrap(),
        limiter.wait(ann, 1, MINUTE).await.unwrap(),
    ] {
        let seen = (denied.source(), denied.granted(), denied.retry_after());
        assert_eq!(seen, (Source::Blocked, 0, None));
        let error = denied.allowed().unwrap_err();
        assert_eq!(error.to_string(), "calls are blocked (blocked)");
    }
    assert!(limiter.reserve(ann, 1).await.is_err());
    assert!(limiter.reserve_within(ann, 1, MINUTE).await.is_err());
    for applied in [
        limiter.charge(ann, 3).await.unwrap(),
        limiter.refund(ann, 3).await.unwrap(),
        limiter.reset(ann).await.unwrap(),
    ] {
        assert!(applied.decision().is_allowed());
        assert_eq!(applied.decision().granted(), 0);
    }
    assert_eq!(store.asked().len(), 0);
    // A check of the store itself is denied too.
    let check = Check::take(ann, &Policies::blocked(), 1);
    let denied = LocalStore::default().check(check).await.unwrap();
    assert!(!denied.is_allowed());
}

#[cfg(feature = "tonic")]
#[tokio::test(start_paused = true)]
async fn a_forbidden_call_is_not_permitted() {
    use tower_redis_ratelimit::reject::GrpcReject;

    let store = LocalStore::default();
    let limiter = Limiter::new(store.clone(), gcra("api", "1/s"));
    limiter.block(Key::new("ann"), MINUTE).await.unwrap();
    let layer = || {
        layer_with(store.clone(), "1/s")
            .with_blocks()
            .reject(GrpcReject::new())
    };
    let call = || {
        let mut call = request("ann");
        *call.method_mut() = http::Method::POST;
        call.headers_mut()
            .insert("content-type", "application/grpc".parse().unwrap());
        call
    };
    let denied = send(&limited(layer()), call()).await;
    assert_eq!(field(&denied, "grpc-status"), Some("8"));
    assert_eq!(field(&denied, "grpc-retry-pushback-ms"), Some("60000"));
    let forbidden = send(&limited(layer().forbid_blocked()), call()).await;
    assert_eq!(
        (
            forbidden.status().as_u16(),
            field(&forbidden, "grpc-status")
        ),
        (200, Some("7"))
    );
    assert_eq!(field(&forbidden, "grpc-retry-pushback-ms"), Some("-1"));
    // The status and the message, without details.
    let details = field(&forbidden, "grpc-status-details-bin");
    assert_eq!(details, Some("CAcSFVJlcXVlc3RzIGFyZSBibG9ja2VkLg"));
}

#[tokio::test(start_paused = true)]
async fn calls_are_blocked() {
    let layer = CallLimitLayer::new(
        LocalStore::default(),
        |_: &&'static str| Some(Key::GLOBAL),
        gcra("api", "1/s"),
    )
    .block_after("1/min", MINUTE)
    .unwrap();
    let service = layer.layer(service_fn(async |_: &'static str| {
        Ok::<_, std::io::Error>(())
    }));
    let call = async || service.clone().oneshot("ann").await;
    call().await.unwrap();
    call().await.unwrap_err();
    sleep(COUNTED).await;
    let error = call().await.unwrap_err();
    let denied = error.downcast_ref::<RateLimited>().unwrap();
    assert_eq!(denied.decision().source(), Source::Blocked);
    let text = denied.to_string();
    assert!(
        text.starts_with("calls are blocked (api); try again in 59.9s"),
        "{text}"
    );
}

/// The strikes are added up: a flood of denials is a few charges.
#[tokio::test(start_paused = true)]
async fn strikes_are_added_up() {
    let mock = MockStore::new();
    mock.deny(MINUTE);
    let service = limited(
        layer_with(mock.clone(), "1/s")
            .block_after("20/min", MINUTE)
            .unwrap(),
    );
    assert_eq!(statuses(&service, "ann", 500).await, [429; 500]);
    sleep(COUNTED).await;
    let charges: Vec<Check> = mock
        .asked()
        .into_iter()
        .filter(|check| check.policies()[0].quota().limit() == 20)
        .collect();
    assert_eq!(charges.len(), 1);
    assert_eq!(charges[0].cost(), 500);
    assert!(mock.flush().await);
}
