//! Settlement combined with other features: dry runs, shadows, waiting, several policies, tiers,
//! nested layers.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::join;
use tokio::task::yield_now;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_redis_ratelimit::Policies;
use tower_redis_ratelimit::check::{DryRun, Mode, Source, Verdict};
use tower_redis_ratelimit::extract::HeaderKey;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::Rejection;
use tower_redis_ratelimit::select::{Tier, Tiers};
use tower_redis_ratelimit::store::{ErrorKind, MockStore, StoreError};

use super::*;

/// A handler that counts 3 units with its charge.
async fn three(request: Request<String>) -> Result<Response<String>, Infallible> {
    yield_now().await;
    request
        .extensions()
        .get::<RequestCost>()
        .expect("a handle")
        .add(3);
    Ok(Response::new(String::new()))
}

fn tried<B>(response: &Response<B>) -> Vec<u32> {
    let dry: &DryRun = response.extensions().get().expect("a dry run");
    dry.decisions()
        .iter()
        .map(|decision| decision.remaining())
        .collect()
}

#[tokio::test]
async fn a_dry_run_settles_as_if_enforced() {
    for (settlement, cost) in [
        (Settlement::Refund, 0),
        (Settlement::Cost(70), 70),
        (Settlement::AtEnd, 3),
    ] {
        let count = Count::new();
        let service = count
            .settling(settlement)
            .dry_run()
            .layer(service_fn(three));
        let response = send(&service, request("alice")).await;
        assert_eq!(tried(&response), [990]);
        assert!(decision(&response).is_none());
        drop(response);
        assert_eq!(count.charged(), cost, "{settlement:?}");
    }
}

#[tokio::test]
async fn shadows_settle_as_if_enforced() {
    for (settlement, cost) in [
        (Settlement::Refund, 0),
        (Settlement::Cost(70), 70),
        (Settlement::AtEnd, 3),
    ] {
        let count = Count::new();
        let layer = count.layer().shadow(quota("new", "500/d"));
        let service = layer
            .clone()
            .settle(move |_| settlement)
            .layer(service_fn(three));
        drop(send(&service, request("alice")).await);
        assert_eq!(count.charged(), cost, "{settlement:?}");
        let look = layer.cost(|_| 0).layer(service_fn(hello::<String>));
        assert_eq!(
            tried(&send(&look, request("alice")).await),
            [500 - cost],
            "{settlement:?}"
        );
    }
}

/// A handler that counts parts of its reservation relies on this.
#[tokio::test]
async fn the_handle_returns_dry_run_reservations() {
    let count = Count::new();
    let half = service_fn(async |request: Request<String>| {
        let charge: &RequestCost = request.extensions().get().expect("a handle");
        charge.set(charge.reserved() / 2);
        Ok::<_, Infallible>(Response::new(String::new()))
    });
    drop(
        send(
            &count.settling(Settlement::AtEnd).dry_run().layer(half),
            request("alice"),
        )
        .await,
    );
    assert_eq!(count.charged(), 5);
}

/// The shadow's reply comes after the head of the response.
#[tokio::test]
async fn a_late_shadow_is_settled_too() {
    for (settlement, cost) in [
        (Settlement::Refund, 0),
        (Settlement::Cost(7), 7),
        (Settlement::AtEnd, 3),
    ] {
        let (store, mut questions) = manual_store();
        let layer = RateLimitLayer::new(store, Global, quota("test", "1000/d"))
            .dry_run()
            .cost(|_| 10);
        let service = layer.settle(move |_| settlement).layer(service_fn(three));
        let response = tokio::spawn(service.oneshot(request("alice")));
        let taken = questions.recv().await.unwrap();
        assert_eq!((taken.check.mode(), taken.check.cost()), (Mode::Take, 10));
        // Let the inner service respond first.
        for _ in 0..10 {
            yield_now().await;
        }
        taken.allow();
        drop(response.await.unwrap().unwrap());
        let back = questions.recv().await.unwrap();
        assert_eq!(
            (back.check.mode(), back.check.cost()),
            (Mode::Refund, 10 - cost),
            "{settlement:?}"
        );
        back.allow();
    }
}

#[tokio::test]
async fn dry_run_denials_reserve_nothing() {
    let count = Count::new();
    let service = count
        .settling(Settlement::Cost(3))
        .cost(|_| 1_001)
        .dry_run()
        .layer(service_fn(three));
    drop(send(&service, request("alice")).await);
    assert_eq!(count.charged(), 0);
}

#[tokio::test]
async fn several_policies_settle_equally() {
    let count = Count::new();
    let other = quota("other", "200/d");
    let both = Policies::new([count.policy.clone(), other.clone()]).unwrap();
    for (cost, charged_by_now) in [(0, 0), (10, 10), (25, 35), (4, 39)] {
        let layer = RateLimitLayer::new(count.store.clone(), Global, both.clone())
            .cost(|_| 10)
            .decision_in_response();
        let service = layer
            .settle(move |_| Settlement::Cost(cost))
            .layer(service_fn(three));
        let response = send(&service, request("alice")).await;
        let decided = decision(&response).unwrap();
        assert_eq!(
            (decided.policy().name(), decided.remaining()),
            ("other", 200 - charged_by_now)
        );
        let each = [count.charged(), charged(&count.store, Key::GLOBAL, &other)];
        assert_eq!(each, [charged_by_now; 2]);
    }
}

/// A policy whose debt is full cuts the settlement for itself only: otherwise a small quota of a minute would hide costs
/// from that of the day.
#[tokio::test]
async fn each_policy_cuts_a_settlement_separately() {
    let count = Count::new();
    let minute = quota("minute", "20/d");
    let both = Policies::new([count.policy.clone(), minute.clone()]).unwrap();
    let layer = RateLimitLayer::new(count.store.clone(), Global, both).cost(|_| 10);
    let service = layer
        .settle(|_| Settlement::Cost(300))
        .layer(service_fn(three));
    for charged_by_now in [300, 300] {
        drop(send(&service, request("alice")).await);
        assert_eq!(count.charged(), charged_by_now);
        let debt = Check::charge(Key::GLOBAL, &minute.clone().into(), 1);
        let answer = count.store.check(debt).now_or_never().unwrap().unwrap();
        assert!(!answer.is_allowed(), "{answer:?}");
    }
}

#[tokio::test]
async fn settlement_uses_the_policies_of_the_request() {
    let count = Count::new();
    let pro = quota("pro", "5000/d");
    let tiers = Tiers::new(count.policy.clone()).tier("pro", pro.clone());
    let layer = RateLimitLayer::new(count.store.clone(), Global, tiers)
        .settle(|_| Settlement::AtEnd)
        .cost_under(|_, policies| if policies[0].name() == "pro" { 100 } else { 1 });
    let service = layer.layer(service_fn(three));
    drop(send(&service, request("alice")).await);
    let mut paying = request("alice");
    paying.extensions_mut().insert(Tier::new("pro"));
    drop(send(&service, paying).await);
    assert_eq!(
        (count.charged(), charged(&count.store, Key::GLOBAL, &pro)),
        (3, 3)
    );
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waited_is_settled() {
    let store = LocalStore::default();
    let policy = quota("test", "10/m");
    let layer = RateLimitLayer::new(store.clone(), Global, policy.clone()).cost(|_| 10);
    let service = layer
        .wait(Duration::from_secs(90))
        .until_body_end()
        .layer(service_fn(three));
    let first = send(&service, request("alice"));
    let second = async {
        yield_now().await;
        service.clone().oneshot(request("alice")).await.unwrap()
    };
    let (first, second) = join(first, second).await;
    assert_eq!(
        [first.status().as_u16(), second.status().as_u16()],
        [200, 200]
    );
    drop(first);
    assert_eq!(
        charged(&store, Key::GLOBAL, &policy),
        10,
        "that of the first one was of another minute"
    );
    drop(second);
    assert_eq!(charged(&store, Key::GLOBAL, &policy), 3);
}

/// The turn came long before the inner service was ready.
#[tokio::test(start_paused = true)]
async fn a_permit_held_for_long_is_settled() {
    let store = LocalStore::default();
    let policy = quota("test", "10/m");
    let take = Check::take(Key::GLOBAL, &policy.clone().into(), 10);
    assert!(store.check(take).await.unwrap().is_allowed());
    let layer = RateLimitLayer::new(store.clone(), Global, policy.clone()).cost(|_| 10);
    let (inner, mut handle) = tower_test::mock::pair::<Request<String>, Response<String>>();
    let mut service = layer
        .wait(Duration::from_secs(90))
        .settle(|_| Settlement::Refund)
        .layer(inner);
    handle.allow(1);
    let response = service.ready().await.unwrap().call(request("alice"));
    handle.allow(0);
    let serves = async {
        sleep(Duration::from_secs(100)).await;
        assert_eq!(charged(&store, Key::GLOBAL, &policy), 10);
        handle.allow(1);
        handle
            .next_request()
            .await
            .unwrap()
            .1
            .send_response(Response::new(String::new()));
    };
    assert_eq!(join(response, serves).await.0.unwrap().status(), 200);
    assert_eq!(charged(&store, Key::GLOBAL, &policy), 0);
}

#[tokio::test]
async fn one_handle_counts_for_all_layers() {
    let (inner, outer, middle) = (Count::new(), Count::new(), Count::new());
    let service = inner.settling(Settlement::AtEnd).layer(service_fn(three));
    // A layer in between that does not settle changes nothing.
    let service = middle.layer().layer(service);
    let service = outer
        .settling(Settlement::AtEnd)
        .cost(|_| 20)
        .layer(service);
    let response = send(&service, request("alice")).await;
    assert_eq!(
        [inner.charged(), middle.charged(), outer.charged()],
        [10, 10, 20]
    );
    drop(response);
    assert_eq!(
        [inner.charged(), middle.charged(), outer.charged()],
        [3, 10, 3]
    );
}

/// An outer layer responds instead of the inner one.
#[tokio::test]
async fn outer_denials_have_a_body_too() {
    let (inner, outer) = (Count::new(), Count::new());
    let service = inner.settling(Settlement::AtEnd).layer(service_fn(three));
    let service = outer
        .settling(Settlement::Keep)
        .cost(|_| 600)
        .layer(service);
    assert_eq!(send(&service, request("alice")).await.status(), 200);
    let denied = send(&service, request("alice")).await;
    assert_eq!(denied.status(), 429);
    assert!(text(denied).await.contains("1000 per day"));
    assert_eq!([inner.charged(), outer.charged()], [3, 600]);
}

fn plain(rejection: Rejection<'_>) -> Response<String> {
    Response::new(rejection.to_string())
}

#[tokio::test]
async fn settings_before_and_after_are_kept() {
    let count = Count::new();
    let key = || HeaderKey::new(USER).unwrap();
    let layer = RateLimitLayer::new(count.store.clone(), key(), count.policy.clone())
        .decision_in_response();
    let before = layer
        .clone()
        .cost(|_| 10)
        .reject_with(plain)
        .skip(|request| request.uri.path() == "/health")
        .settle(|_| Settlement::Cost(600));
    let after = layer
        .settle(|_| Settlement::Cost(600))
        .cost(|_| 10)
        .reject_with(plain)
        .skip(|request| request.uri.path() == "/health");
    for (user, layer) in [("alice", before), ("bob", after)] {
        let service = layer.layer(service_fn(hello::<String>));
        assert_eq!(text(send(&service, request(user)).await).await, "hello");
        assert_eq!(
            decision(&send(&service, request(user)).await)
                .unwrap()
                .remaining(),
            0
        );
        assert!(
            text(send(&service, request(user)).await)
                .await
                .contains("is used up")
        );
        let health = Request::builder()
            .uri("/health")
            .body(String::new())
            .unwrap();
        assert_eq!(text(send(&service, health).await).await, "hello");
    }
}

#[derive(Clone, Default)]
struct Failures(Arc<AtomicU32>);

impl Observer for Failures {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { key, .. } = *event {
            assert!(key.is_some());
            self.0.fetch_add(1, Relaxed);
        }
    }
}

/// A store that grants takes, and fails settlements.
fn settles_not(error: StoreError) -> MockStore {
    let store = MockStore::new();
    store.answer(move |check| match check.mode() {
        Mode::Take => {
            let verdict = Verdict::allowed().with_reset_after(Duration::from_secs(60));
            Ok(check.decided(Source::Other("mock"), 10, |_| verdict))
        }
        _ => Err(error.clone()),
    });
    store
}

#[tokio::test(start_paused = true)]
async fn failed_settlements_are_reported() {
    let unsent = || StoreError::new(ErrorKind::Unreachable).not_sent();
    for (error, cost, tries, lost) in [
        (StoreError::new(ErrorKind::Timeout), 3, 1..=1, 1),
        (unsent(), 13, 55..=75, 1),
        // At the end there is nothing to refund.
        (unsent(), 3, 55..=75, 0),
    ] {
        let (store, failures) = (settles_not(error), Failures::default());
        let layer = RateLimitLayer::new(store.clone(), Global, quota("test", "10/m")).cost(|_| 10);
        // Only the observer that was set last is notified.
        let layer = layer
            .observer(())
            .settle(move |_| Settlement::Cost(cost))
            .observer(failures.clone());
        drop(send(&layer.layer(service_fn(three)), request("alice")).await);
        sleep(Duration::from_secs(90)).await;
        let asked = store.asked().len() - 1;
        assert!(tries.contains(&asked), "{asked} attempts");
        assert_eq!(failures.0.load(Relaxed), lost);
    }
}

#[tokio::test(start_paused = true)]
async fn settlements_during_an_outage_are_sent_later() {
    let store = settles_not(StoreError::new(ErrorKind::Unreachable).not_sent());
    let failures = Failures::default();
    let layer = RateLimitLayer::new(store.clone(), Global, quota("test", "10/h")).cost(|_| 10);
    let service = layer
        .observer(failures.clone())
        .settle(|_| Settlement::Cost(12))
        .layer(service_fn(three));
    drop(send(&service, request("alice")).await);
    sleep(Duration::from_secs(600)).await;
    store.allow();
    let tries = store.asked().len();
    sleep(Duration::from_secs(5)).await;
    let asked = store.asked();
    assert_eq!(
        (asked.len(), failures.0.load(Relaxed)),
        (tries + 1, 0),
        "once"
    );
    assert_eq!(
        (asked[tries].mode(), asked[tries].cost()),
        (Mode::Charge, 2)
    );
}
