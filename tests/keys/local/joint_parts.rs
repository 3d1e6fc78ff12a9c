//! The effects of a check over several keys on each of them: units, slots, shadows.

use std::io;
use std::time::Duration;

use http::Request;
use http::request::Parts;
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::advance;
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision, DryRun, JointCheck, Mode, Source};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::select::policies_fn;
use tower_redis_ratelimit::store::{Answer, ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{
    CallLimitLayer, Fallback, Key, Leased, Limiter, LocalStore, Policies, Policy, RateLimitLayer,
};

use super::joint::{by_header, layer_of, list, of, remaining};
use crate::mocks::*;
use crate::support::STRATEGIES;

fn broken() -> MockStore {
    let primary = MockStore::new();
    primary.fail(StoreError::new(ErrorKind::Unreachable).not_sent());
    primary
}

/// A denial lists the units that the other keys have after their refund.
#[tokio::test(start_paused = true)]
async fn a_denial_lists_what_others_have_back() {
    for strategy in STRATEGIES {
        let (local, mock) = watched();
        let lists = ["8/h", "2/h", "9/h"].map(|quota| {
            Policies::from(Policy::new(&format!("of{}", &quota[..1]), strategy, quota).unwrap())
        });
        let keys = [Key::new("ann"), Key::new("acme"), Key::GLOBAL];
        let limiter = Limiter::new(mock.clone(), lists[0].clone());
        let take = || limiter.take_all(keys.into_iter().zip(&lists), 2);
        assert!(take().await.unwrap().is_allowed());
        let denied = take().await.unwrap();
        let shown: Vec<u32> = denied.each().map(|each| each.remaining()).collect();
        assert_eq!(shown, [6, 0, 7], "{strategy}");
        assert!(mock.flush().await);
        for ((key, list), shown) in keys.into_iter().zip(&lists).zip(denied.each()) {
            let found = settled(local.check(Check::peek(key, list, 0))).unwrap();
            assert_eq!(found.remaining(), shown.remaining(), "{strategy}");
            let later = shown.reset_after().abs_diff(found.reset_after());
            assert!(later < Duration::from_millis(1), "{strategy}: {later:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn fields_of_a_denial_show_refunded_units() {
    let (_, mock) = watched();
    let service = limited(layer_of(mock));
    for user in ["ann", "ann", "ann", "bob"] {
        assert_eq!(send(&service, of(user, "acme")).await.status(), 200);
    }
    let denied = send(&service, of("bob", "acme")).await;
    assert_eq!(denied.status(), 429);
    let fields = field(&denied, "ratelimit").unwrap();
    assert!(fields.starts_with("\"user\";r=2;"), "{fields}");
    assert!(fields.contains("\"all\";r=96;"), "{fields}");
}

/// A request that is admitted after an error of one key holds the slots that the other keys have granted.
#[tokio::test(start_paused = true)]
async fn a_request_after_an_error_holds_its_slots() {
    let [user, org] = [("user", 1), ("org", 2)]
        .map(|(name, most)| Policies::from(Policy::in_flight(name, most).unwrap()));
    for (on_error, is_sent, held) in [
        (OnError::Allow, true, 1),
        (OnError::Allow, false, 1),
        (OnError::Reject, true, 0),
        (OnError::Reject, false, 0),
    ] {
        let (local, mock) = watched();
        let asked = local.clone();
        mock.answer(move |check| {
            if *check.key() == Key::from(9) && check.mode() == Mode::Take {
                let error = error();
                return Err(if is_sent { error } else { error.not_sent() });
            }
            settled(asked.check(check.clone()))
        });
        let by_user = |job: &(u64, u64)| Some(Key::from(job.0));
        let by_org = |job: &(u64, u64)| Some(Key::from(job.1));
        let layer = CallLimitLayer::new(mock, by_user, user[0].clone())
            .and(by_org, org[0].clone())
            .on_error(on_error);
        let (release, gate) = watch::channel(false);
        let service = ServiceBuilder::new()
            .layer(layer)
            .service_fn(move |_: (u64, u64)| {
                let mut gate = gate.clone();
                async move {
                    let _ = gate.wait_for(|open| *open).await;
                    Ok::<_, io::Error>(())
                }
            });
        let used = || {
            let peek = Check::peek(Key::from(1), &user, 0);
            settled(local.check(peek)).unwrap().used()
        };
        let mut call = Box::pin(service.oneshot((1, 9)));
        assert_eq!(waits(call.as_mut()), held == 1);
        // The queues have sent what they had to.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(used(), held, "{on_error:?}, {is_sent}");
        if held == 1 {
            release.send(true).unwrap();
            call.await.unwrap();
            assert_eq!(used(), 0);
        }
    }
}

/// A shadow counts by the layer's first key, also if only other keys are checked.
#[tokio::test]
async fn a_shadow_is_of_the_first_key() {
    for is_dry_run in [false, true] {
        let exempt = policies_fn(|_: &Parts| None::<Policies>);
        let layer = RateLimitLayer::new(LocalStore::default(), by_header("x-user"), exempt)
            .and(by_header("x-org"), gcra("org", "9/h"))
            .shadow(gcra("tried", "1/h"))
            .on_missing_key(OnMissingKey::Allow);
        let layer = if is_dry_run { layer.dry_run() } else { layer };
        let service = limited(layer);
        let shadow = async |request: Request<String>| {
            let response = send(&service, request).await;
            let tried = response.extensions().get::<DryRun>()?.decisions().last();
            let tried = tried.filter(|tried| tried.policy().name() == "tried");
            tried.map(Decision::is_allowed)
        };
        assert_eq!(shadow(of("ann", "acme")).await, Some(true));
        assert_eq!(shadow(of("ann", "other")).await, Some(false));
        assert_eq!(shadow(of("bob", "acme")).await, Some(true));
        let mut nobody = of("bob", "acme");
        nobody.headers_mut().remove("x-user");
        assert_eq!(shadow(nobody).await, None, "{is_dry_run}");
    }
}

/// The slot of a shadow is held until the call ends, with one key and with several.
#[tokio::test(start_paused = true)]
async fn calls_hold_the_slots_of_shadows() {
    for has_several in [false, true] {
        let store = LocalStore::default();
        let in_flight = |name| Policy::in_flight(name, 9).unwrap();
        let mut layer =
            CallLimitLayer::new(store.clone(), Global, in_flight("all")).shadow(in_flight("tried"));
        let mut held = 2;
        if has_several {
            layer = layer.and(|_: &()| Some(Key::new("acme")), in_flight("org"));
            held += 1;
        }
        let service = layer.layer(service_fn(async |()| {
            yield_now().await;
            Ok::<_, io::Error>(())
        }));
        let mut call = Box::pin(service.oneshot(()));
        assert!(waits(call.as_mut()));
        assert_eq!(store.len(), held, "{has_several}");
        call.await.unwrap();
        assert_eq!(store.len(), 0, "{has_several}");
    }
}

/// A repeated id charges a shadow once, although a request with slots is charged each time.
#[tokio::test]
async fn a_repeated_id_charges_a_shadow_once() {
    let jobs = Policy::in_flight("jobs", 9).unwrap();
    let layer = RateLimitLayer::new(LocalStore::default(), by_header("x-user"), jobs)
        .and(by_header("x-org"), gcra("org", "9/h"))
        .shadow(gcra("tried", "9/h"))
        .id(|_| Some(Key::new("request-1")))
        .until_body_end();
    let service = layer.layer(service_fn(hello::<String>));
    let mut left = vec![];
    for _ in 0..2 {
        let response = send(&service, of("ann", "acme")).await;
        let tried = response.extensions().get::<DryRun>().unwrap();
        left.extend(tried.decisions().iter().map(Decision::remaining));
    }
    assert_eq!(left, [8, 8]);
}

/// Wraps a store, and forwards only the method for one key.
#[derive(Clone)]
struct Forwards<S>(S);

impl<S: Store> Store for Forwards<S> {
    type Future = S::Future;

    fn check(&self, check: Check) -> Answer<S::Future> {
        self.0.check(check)
    }
}

/// A part may be refunded, so no leased block decides it.
#[tokio::test]
async fn no_block_decides_a_part() {
    let time = Duration::from_millis(200);
    let user = Policies::from(gcra("user", "50000/s").leased(time).unwrap());
    let org = list("org", "50000/s");
    let store = Forwards(Leased::new(LocalStore::default()));
    let take = Check::take(Key::new("ann"), &user, 1);
    let is_leased = async || {
        let decision = store.check(take.clone()).await.unwrap();
        decision.source() == Source::Leased
    };
    crate::support::until("a block is leased", is_leased).await;
    for _ in 0..20 {
        let parts = [(Key::new("ann"), &user), (Key::new("acme"), &org)];
        let joint = JointCheck::take(parts, 1).unwrap();
        let decided = store.check_all(joint).await.unwrap();
        for part in decided.parts() {
            assert_eq!(part.as_ref().unwrap().source(), Source::Local);
        }
    }
    assert!(is_leased().await, "the block was there");
}

/// A look at a key after a denial takes no slot there: a fallback keeps the slots of granted checks.
#[tokio::test]
async fn a_look_takes_no_slot() {
    let (_, primary) = watched();
    let local = LocalStore::default();
    let store = Forwards(Fallback::new(primary, local.clone()));
    let (user, org) = (
        list("user", "1/d"),
        Policies::from(Policy::in_flight("org", 2).unwrap()),
    );
    let limiter = Limiter::new(store, user.clone());
    assert!(limiter.take(Key::new("ann"), 1).await.unwrap().is_allowed());
    let parts = [(Key::new("ann"), &user), (Key::new("acme"), &org)];
    let denied = limiter.take_all(parts, 1).await.unwrap();
    assert_eq!((denied.is_allowed(), denied.policies().len()), (false, 2));
    assert_eq!(remaining(&local, "acme", &org), 2);
}

/// In an outage, a caller who was raised from a slow quota waits for the new one.
#[tokio::test(start_paused = true)]
async fn a_faster_quota_drains_in_an_outage() {
    let store = Fallback::new(broken(), LocalStore::default());
    let (slow, fast) = (list("user", "100/d"), list("user", "100/s"));
    let org = list("org", "9999/s");
    let limiter = Limiter::new(store, slow.clone());
    let take = async |user: &Policies, cost| {
        let parts = [(Key::new("ann"), user), (Key::new("acme"), &org)];
        limiter.take_all(parts, cost).await.unwrap()
    };
    assert!(take(&slow, 100).await.is_allowed());
    let denied = take(&fast, 1).await;
    let wait = denied.retry_after().unwrap();
    assert!(wait <= Duration::from_millis(10), "{wait:?}");
    advance(wait).await;
    assert!(take(&fast, 1).await.is_allowed());
}

/// A custom fallback fails for one key: the others have their units back.
#[tokio::test]
async fn a_fallback_that_fails_for_a_key_takes_nothing() {
    let (local, fallback) = watched();
    let asked = local.clone();
    fallback.answer(move |check| {
        if *check.key() == Key::new("acme") && check.mode() == Mode::Take {
            return Err(error());
        }
        settled(asked.check(check.clone()))
    });
    let store = Fallback::new(broken(), fallback);
    let (user, org) = (list("user", "5/d"), list("org", "5/d"));
    let limiter = Limiter::new(store, user.clone());
    let parts = [(Key::new("ann"), &user), (Key::new("acme"), &org)];
    assert!(limiter.take_all(parts, 2).await.is_err());
    assert_eq!(remaining(&local, "ann", &user), 5);
}
