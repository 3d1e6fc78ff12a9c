//! Several keys of one request, all or nothing.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use http::request::Parts;
use http::{Request, Response};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision, DryRun, JointCheck, Mode, Outcome, Source};
use tower_redis_ratelimit::extract::{Global, HeaderKey, MissingKey, key_fn};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::{OnError, OnMissingKey};
use tower_redis_ratelimit::select::policies_fn;
use tower_redis_ratelimit::settle::{RequestCost, ReserveError, Settlement};
use tower_redis_ratelimit::store::{AnyStore, BoxStore, ErrorKind, Store};
use tower_redis_ratelimit::{
    CallLimitLayer, Key, Leased, Limiter, LocalStore, Policies, Policy, RateLimitLayer,
};

use crate::mocks::*;
use crate::support::STRATEGIES;

pub(super) fn list(name: &str, quota: &str) -> Policies {
    gcra(name, quota).into()
}

pub(super) fn by_header(name: &'static str) -> HeaderKey {
    HeaderKey::new(name).unwrap().readable()
}

/// Of each user 3, of each organization 4, and of all 100.
pub(super) fn layer_of<S: Store>(store: S) -> RateLimitLayer<S, HeaderKey> {
    RateLimitLayer::new(store, by_header("x-user"), gcra("user", "3/h"))
        .and(by_header("x-org"), gcra("org", "4/h burst 4"))
        .and(Global, gcra("all", "100/m"))
}

pub(super) fn of(user: &str, org: &str) -> Request<String> {
    let mut request = request(user);
    request.headers_mut().insert("x-org", org.parse().unwrap());
    request
}

pub(super) fn remaining<S: Store>(store: &S, key: &str, policies: &Policies) -> u32 {
    let check = Check::peek(Key::new(key), policies, 0);
    settled(store.check(check)).unwrap().remaining()
}

/// All stores that wrap a local one decide alike.
fn wrapped(local: &LocalStore) -> Vec<BoxStore> {
    vec![
        BoxStore::new(local.clone()),
        BoxStore::new(Arc::new(local.clone())),
        BoxStore::new(AnyStore::from(local.clone())),
        BoxStore::new(AnyStore::from(BoxStore::new(local.clone()))),
        BoxStore::new(Leased::new(local.clone())),
    ]
}

#[tokio::test(start_paused = true)]
async fn a_denial_takes_nothing_from_other_keys() {
    let store = LocalStore::default();
    let service = limited(layer_of(store.clone()));
    let mut statuses = vec![];
    // The third key of `ann` is denied, then the organization.
    for user in ["ann", "ann", "ann", "ann", "bob", "bob", "bob"] {
        statuses.push(send(&service, of(user, "acme")).await.status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 429, 200, 429, 429]);
    assert_eq!(remaining(&store, "bob", &list("user", "3/h")), 2);
    assert_eq!(remaining(&store, "acme", &list("org", "4/h burst 4")), 0);
    let all = Check::peek(Key::GLOBAL, &list("all", "100/m"), 0);
    assert_eq!(settled(store.check(all)).unwrap().remaining(), 96);
}

#[tokio::test(start_paused = true)]
async fn fields_list_the_policies_of_all_keys() {
    let service = limited(layer_of(LocalStore::default()));
    let policies = "\"user\";q=3;w=3600, \"org\";q=4;w=3600, \"all\";q=100;w=60";
    for (status, fields) in [
        (
            200,
            "\"user\";r=2;t=1200, \"org\";r=3;t=900, \"all\";r=99;t=1",
        ),
        (
            200,
            "\"user\";r=1;t=1200, \"org\";r=2;t=900, \"all\";r=98;t=1",
        ),
        (
            200,
            "\"user\";r=0;t=1200, \"org\";r=1;t=900, \"all\";r=97;t=1",
        ),
        (
            429,
            "\"user\";r=0;t=1200, \"org\";r=1;t=900, \"all\";r=97;t=1",
        ),
    ] {
        let response = send(&service, of("ann", "acme")).await;
        assert_eq!(response.status(), status);
        assert_eq!(field(&response, "ratelimit-policy"), Some(policies));
        let shown: Vec<&str> = field(&response, "ratelimit").unwrap().split(", ").collect();
        let names: Vec<&str> = shown
            .iter()
            .map(|item| item.split(";t").next().unwrap())
            .collect();
        let expected: Vec<&str> = fields
            .split(", ")
            .map(|item| item.split(";t").next().unwrap())
            .collect();
        assert_eq!(names, expected);
    }
    // Both deny now: the longest wait counts, and each is named.
    send(&service, of("bob", "acme")).await;
    let denied = send(&service, of("ann", "acme")).await;
    assert_eq!(field(&denied, "retry-after"), Some("1200"));
    let decided = decision(&denied).unwrap();
    assert_eq!(decided.policy().name(), "user");
    let denying: Vec<bool> = decided.each().map(|each| each.is_allowed()).collect();
    assert_eq!(denying, [false, false, true]);
    let violated = json(denied).await;
    assert_eq!(
        violated["violated-policies"],
        serde_json::json!(["user", "org"])
    );
}

/// 40 tasks with the keys of three callers in every order, under every strategy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_in_any_order_are_charged_exactly() {
    for strategy in STRATEGIES {
        let policies = ["40/100d", "60/100d", "90/100d"].map(|quota| {
            Policies::from(Policy::new(&format!("of{}", &quota[..2]), strategy, quota).unwrap())
        });
        let store = LocalStore::default();
        let limiter = Limiter::new(store.clone(), policies[0].clone());
        let mut tasks = vec![];
        for task in 0..40 {
            let (limiter, policies) = (limiter.clone(), policies.clone());
            tasks.push(tokio::spawn(async move {
                let mut rng = Rng::with_seed(task);
                let mut granted = 0;
                for _ in 0..20 {
                    let user = format!("user{}", rng.u32(..2));
                    let mut parts = [
                        (Key::new(&user), &policies[0]),
                        (Key::new("org"), &policies[1]),
                        (Key::GLOBAL, &policies[2]),
                    ];
                    rng.shuffle(&mut parts);
                    granted += limiter.take_all(parts, 1).await.unwrap().granted();
                }
                granted
            }));
        }
        let mut granted = 0;
        for task in tasks {
            granted += task.await.unwrap();
        }
        assert_eq!(granted, 60, "{strategy}: all of the organization");
        let used = |key, list: &Policies| {
            settled(store.check(Check::peek(key, list, 0)))
                .unwrap()
                .used()
        };
        let users = used(Key::new("user0"), &policies[0]) + used(Key::new("user1"), &policies[0]);
        let of_all = [
            users,
            used(Key::new("org"), &policies[1]),
            used(Key::GLOBAL, &policies[2]),
        ];
        assert_eq!(of_all, [60; 3], "{strategy}");
    }
}

/// Random checks of one to four keys, against each key alone.
#[test]
fn random_checks_equal_those_of_single_keys() {
    let mut denied = 0;
    for seed in 0..300 {
        let mut rng = Rng::with_seed(seed);
        let (joint_store, single) = (LocalStore::default(), LocalStore::default());
        let stores = wrapped(&joint_store);
        for step in 0..60 {
            let count = rng.usize(1..=4);
            let cost = rng.u32(0..=4);
            let lists: Vec<(Key, Policies)> = (0..count)
                .map(|part| {
                    let key = Key::new(format!("key{}", rng.u32(..3)));
                    let strategy = STRATEGIES[(seed as usize + part) % STRATEGIES.len()];
                    let quota = format!("{}/100d", 10 + 5 * part);
                    let list = Policy::new(&format!("part{part}"), strategy, &*quota).unwrap();
                    (key, list.into())
                })
                .collect();
            let parts = lists.iter().map(|(key, list)| (*key, list));
            let store = &stores[step % stores.len()];
            let joint = JointCheck::take(parts, cost).unwrap();
            let decided = settled(store.check_all(joint)).unwrap();
            let whole = decided.decision().clone();
            let fits = |(key, list): &(Key, Policies)| {
                settled(single.check(Check::peek(*key, list, cost))).unwrap()
            };
            let alone: Vec<Decision> = lists.iter().map(fits).collect();
            assert_eq!(whole.is_allowed(), alone.iter().all(Decision::is_allowed));
            for (part, alone) in decided.parts().iter().zip(&alone) {
                assert_eq!(part.as_ref().unwrap().is_allowed(), alone.is_allowed());
            }
            if whole.is_allowed() {
                for ((key, list), part) in lists.iter().zip(decided.parts()) {
                    let taken = settled(single.check(Check::take(*key, list, cost))).unwrap();
                    assert_eq!(part.as_ref().unwrap().remaining(), taken.remaining());
                }
            } else {
                denied += 1;
                assert_eq!(whole.granted(), 0);
            }
        }
    }
    assert!(denied > 1_000, "{denied}");
}

#[tokio::test]
async fn one_key_may_be_in_two_parts() {
    let store = LocalStore::default();
    let limiter = Limiter::new(store.clone(), list("user", "5/d"));
    let (user, org) = (list("user", "5/d"), list("org", "3/d"));
    let both = || limiter.take_all([(Key::new("ann"), &user), (Key::new("ann"), &org)], 2);
    assert!(both().await.unwrap().is_allowed());
    assert_eq!(both().await.unwrap().policy().name(), "org");
    assert_eq!(remaining(&store, "ann", &user), 3);
    assert_eq!(remaining(&store, "ann", &org), 1);
}

#[tokio::test]
async fn too_many_keys_and_equal_names_are_refused() {
    let lists: Vec<Policies> = (0..17).map(|i| list(&format!("p{i}"), "1/d")).collect();
    let nine = |from: usize| {
        Policies::new((from..from + 9).map(|i| gcra(&format!("p{i}"), "1/d"))).unwrap()
    };
    let limiter = Limiter::new(LocalStore::default(), lists[0].clone());
    let refused = async |parts: Vec<(Key, &Policies)>| {
        let error = limiter.take_all(parts, 1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        let text = error.to_string();
        text.strip_prefix("invalid store configuration: ")
            .unwrap()
            .to_owned()
    };
    let keys = |lists: &'static [usize]| lists.iter().map(|i| (Key::from(*i as u64), *i));
    let five = keys(&[0, 1, 2, 3, 4])
        .map(|(key, i)| (key, &lists[i]))
        .collect();
    assert!(refused(five).await.starts_with("5 keys for one check: "));
    assert!(refused(vec![]).await.contains("has no key"));
    let (first, second) = (nine(0), nine(20));
    let many = vec![(Key::GLOBAL, &first), (Key::new("a"), &second)];
    assert!(
        refused(many)
            .await
            .starts_with("18 policies for one check: ")
    );
    let twice = vec![(Key::GLOBAL, &lists[0]), (Key::new("a"), &lists[0])];
    assert!(
        refused(twice)
            .await
            .starts_with("two policies are named \"p0\": ")
    );
}

/// What a panic says.
fn panic_of(act: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(act).unwrap_err();
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => (*panic.downcast::<&str>().unwrap()).to_owned(),
    }
}

#[test]
fn a_layer_that_cannot_decide_panics_early() {
    let hello = || service_fn(hello::<String>);
    let plain = || RateLimitLayer::new(LocalStore::default(), Global, gcra("a", "1/s"));
    let waits = panic_of(move || {
        let layer = plain()
            .and(Global, gcra("b", "1/s"))
            .wait(Duration::from_secs(1));
        drop(layer.layer(hello()));
    });
    assert!(
        waits.starts_with("a layer of several keys cannot make requests wait"),
        "{waits}"
    );
    let named = panic_of(move || drop(plain().and(Global, gcra("a", "2/s")).layer(hello())));
    assert!(named.starts_with("two policies are named \"a\""), "{named}");
    let many = panic_of(move || {
        let mut layer = plain();
        for name in ["b", "c", "d", "e"] {
            layer = layer.and(Global, gcra(name, "1/s"));
        }
        drop(layer.layer(hello()));
    });
    assert!(
        many.starts_with("5 keys for one layer: use at most 4"),
        "{many}"
    );
    let in_flight = panic_of(move || {
        let policy = Policy::in_flight("jobs", 1).unwrap();
        drop(plain().and(Global, policy).layer(hello()));
    });
    assert!(in_flight.contains("until_body_end"), "{in_flight}");
}

/// Two selected policies of one name are found with the request.
#[tokio::test]
async fn selected_policies_of_one_name_are_an_error() {
    let layer = RateLimitLayer::new(LocalStore::default(), Global, gcra("a", "9/s"))
        .and(Global, policies_fn(|_| Policies::from(gcra("a", "9/s"))));
    assert_eq!(send(&limited(layer), request("ann")).await.status(), 503);
}

#[tokio::test]
async fn a_missing_key_follows_the_setting() {
    let store = LocalStore::default();
    let strict = limited(layer_of(store.clone()));
    assert_eq!(
        send(&strict, request("ann")).await.status(),
        400,
        "no organization"
    );
    assert_eq!(remaining(&store, "ann", &list("user", "3/h")), 3);

    let lenient = limited(layer_of(store.clone()).on_missing_key(OnMissingKey::Allow));
    for expected in [200, 200, 200, 429] {
        assert_eq!(send(&lenient, request("ann")).await.status(), expected);
    }
    assert_eq!(
        send(&lenient, anonymous()).await.status(),
        200,
        "only of all"
    );
    let all = Check::peek(Key::GLOBAL, &list("all", "100/m"), 0);
    assert_eq!(settled(store.check(all)).unwrap().used(), 4);

    let malformed = |_: &http::request::Parts| -> Option<Key> { None };
    let layer = RateLimitLayer::new(store, key_fn(malformed), gcra("user", "3/h"))
        .and(Malformed, gcra("org", "3/h"))
        .on_missing_key(OnMissingKey::Allow);
    assert_eq!(send(&limited(layer), request("ann")).await.status(), 400);
}

struct Malformed;

impl tower_redis_ratelimit::extract::KeyExtractor for Malformed {
    fn extract(&self, _: &http::request::Parts) -> Result<Key, MissingKey> {
        Err(MissingKey::malformed("two keys"))
    }
}

#[tokio::test]
async fn a_key_without_policies_is_left_out() {
    let store = LocalStore::default();
    let org = Policies::from(gcra("org", "1/h"));
    let of_some = move |request: &http::request::Parts| {
        (request.headers["x-org"] == "acme").then(|| org.clone())
    };
    let layer = RateLimitLayer::new(store, by_header("x-user"), gcra("user", "3/h"))
        .and(by_header("x-org"), policies_fn(of_some));
    let service = limited(layer.decision_in_response());
    let free = send(&service, of("ann", "free")).await;
    assert_eq!(decision(&free).unwrap().policies().len(), 1);
    assert_eq!(send(&service, of("ann", "acme")).await.status(), 200);
    assert_eq!(send(&service, of("ann", "acme")).await.status(), 429);
    assert_eq!(send(&service, of("ann", "free")).await.status(), 200);
}

#[tokio::test]
async fn all_keys_are_settled() {
    let store = LocalStore::default();
    let (user, org) = (list("user", "100/d"), list("org", "100/d"));
    let layer = RateLimitLayer::new(store.clone(), by_header("x-user"), user[0].clone())
        .and(by_header("x-org"), org[0].clone())
        .cost(|_| 10)
        .settle(|response| match response.headers.get("x-cost") {
            Some(cost) => Settlement::Cost(cost.to_str().unwrap().parse().unwrap()),
            None => Settlement::AtEnd,
        });
    let left = |of: &str| (remaining(&store, "ann", &user), remaining(&store, of, &org));
    let answer = |request: Request<String>| async move {
        let cost: RequestCost = request.extensions().get::<RequestCost>().unwrap().clone();
        let mut response = Response::new(String::new());
        match request.uri().path() {
            "/head" => drop(response.headers_mut().insert("x-cost", 25.into())),
            "/more" => {
                cost.reserve(20).await.unwrap();
                assert_eq!(cost.reserved(), 30);
                cost.set(12);
            }
            "/too-much" => {
                let denied = cost.reserve(90).await.unwrap_err();
                let ReserveError::Denied(denied) = denied else {
                    panic!("{denied}")
                };
                assert_eq!(denied.decision().policies().len(), 2);
                cost.set(1);
            }
            _ => {}
        }
        Ok::<_, Infallible>(response)
    };
    let service = layer.layer(service_fn(answer));
    let mut expected = 100;
    for (path, cost) in [("/", 10), ("/head", 25), ("/more", 12), ("/too-much", 1)] {
        let mut request = of("ann", "acme");
        *request.uri_mut() = path.parse().unwrap();
        drop(send(&service, request).await);
        expected -= cost;
        assert_eq!(left("acme"), (expected, expected), "{path}");
    }
}

#[tokio::test]
async fn a_reservation_holds_and_settles_all_keys() {
    let store = LocalStore::default();
    let both = |name: &str, most| {
        let jobs = Policy::in_flight(&format!("{name}-jobs"), most).unwrap();
        Policies::new([gcra(name, "100/d"), jobs]).unwrap()
    };
    let (user, org) = (both("user", 1), both("org", 2));
    let limiter = Limiter::new(store.clone(), user.clone());
    let reserve = |name: &'static str| {
        limiter.reserve_all([(Key::new(name), &user), (Key::new("acme"), &org)], 10)
    };
    let denied_by = |denied: ReserveError| match denied {
        ReserveError::Denied(denied) => denied.decision().policy().name().to_owned(),
        error => panic!("{error}"),
    };
    let ann = reserve("ann").await.unwrap();
    assert_eq!(denied_by(reserve("ann").await.err().unwrap()), "user-jobs");
    let bob = reserve("bob").await.unwrap();
    assert_eq!(denied_by(reserve("eve").await.err().unwrap()), "org-jobs");
    ann.settle(3);
    drop(bob);
    let eve = reserve("eve").await.unwrap();
    eve.add(1);
    drop(eve);
    let costs = |list: &Policies| Policies::from(list[0].clone());
    let left = |key| remaining(&store, key, &costs(&user));
    assert_eq!([left("ann"), left("bob"), left("eve")], [97, 100, 99]);
    assert_eq!(remaining(&store, "acme", &costs(&org)), 96);
}

#[tokio::test]
async fn calls_hold_a_slot_of_each_key() {
    let store = LocalStore::default();
    let by_user = |job: &(u64, u64)| Some(Key::from(job.0));
    let by_org = |job: &(u64, u64)| Some(Key::from(job.1));
    let (release, gate) = tokio::sync::watch::channel(false);
    let layer = CallLimitLayer::new(store, by_user, Policy::in_flight("user", 1).unwrap())
        .and(by_org, Policy::in_flight("org", 2).unwrap());
    let service = ServiceBuilder::new()
        .layer(layer)
        .service_fn(move |_: (u64, u64)| {
            let mut gate = gate.clone();
            async move {
                let _ = gate.wait_for(|open| *open).await;
                Ok::<_, std::io::Error>(())
            }
        });
    let mut held = vec![];
    for job in [(1, 9), (2, 9)] {
        let mut call = Box::pin(service.clone().oneshot(job));
        assert!(waits(call.as_mut()));
        held.push(call);
    }
    for job in [(1, 8), (3, 9)] {
        assert!(service.clone().oneshot(job).await.is_err(), "{job:?}");
    }
    release.send(true).unwrap();
    for call in held {
        call.await.unwrap();
    }
    for job in [(1, 9), (2, 9), (3, 9)] {
        service.clone().oneshot(job).await.unwrap();
    }
}

/// Nothing is rejected, and all keys are counted.
#[tokio::test]
async fn a_dry_run_and_a_shadow_reject_nothing() {
    let store = LocalStore::default();
    let service = limited(layer_of(store.clone()).dry_run());
    let mut allowed = vec![];
    for _ in 0..5 {
        let response = send(&service, of("ann", "acme")).await;
        assert_eq!(response.status(), 200);
        let tried = response.extensions().get::<DryRun>().unwrap();
        let tried: Vec<&Decision> = tried.decisions().iter().collect();
        assert_eq!(tried[0].policies().len(), 3);
        allowed.push(tried[0].is_allowed());
    }
    assert_eq!(allowed, [true, true, true, false, false]);
    assert_eq!(remaining(&store, "acme", &list("org", "4/h burst 4")), 1);
    assert_eq!(send(&service, anonymous()).await.status(), 200);

    let shadowed = limited(layer_of(LocalStore::default()).shadow(gcra("tried", "1/h")));
    let mut tried = vec![];
    for _ in 0..2 {
        let response = send(&shadowed, of("ann", "acme")).await;
        let shadow = response.extensions().get::<DryRun>().unwrap();
        tried.extend(shadow.decisions().iter().map(Decision::is_allowed));
    }
    assert_eq!(tried, [true, false]);
}

#[tokio::test]
async fn an_id_is_charged_once_for_all_keys() {
    let store = LocalStore::default();
    let layer = layer_of(store.clone()).id(|request| request.headers.get("x-id").map(Key::new));
    let service = limited(layer);
    let with_id = |user: &str, id: &str| {
        let mut request = of(user, "acme");
        request.headers_mut().insert("x-id", id.parse().unwrap());
        request
    };
    for (user, id, used) in [
        ("ann", "1", 1),
        ("ann", "1", 1),
        ("ann", "2", 2),
        ("bob", "1", 3),
    ] {
        assert_eq!(send(&service, with_id(user, id)).await.status(), 200);
        let left = remaining(&store, "acme", &list("org", "4/h burst 4"));
        assert_eq!(left, 4 - used, "{user} {id}");
    }
    // A denial is not remembered, and a repetition passes although nothing remains.
    send(&service, with_id("bob", "3")).await;
    assert_eq!(send(&service, with_id("eve", "4")).await.status(), 429);
    assert_eq!(send(&service, with_id("ann", "1")).await.status(), 200);
}

/// The keys and the policies of the decisions.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<(String, String, bool)>>>);

impl Observer for Notes {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Decided { decision, key, .. } = *event {
            let policy = decision.policy().name().to_owned();
            let key = key.reveal().to_owned();
            let is_allowed = decision.outcome() == Outcome::Allowed;
            self.0.lock().unwrap().push((key, policy, is_allowed));
        }
    }
}

#[tokio::test]
async fn events_name_the_denying_policy_and_its_key() {
    let notes = Notes::default();
    let service = limited(layer_of(LocalStore::default()).observer(notes.clone()));
    for user in ["ann", "ann", "ann", "ann", "bob", "eve"] {
        send(&service, of(user, "acme")).await;
    }
    let notes = notes.0.lock().unwrap();
    let denied: Vec<(&str, &str)> = notes
        .iter()
        .filter(|(.., is_allowed)| !is_allowed)
        .map(|(key, policy, _)| (&**key, &**policy))
        .collect();
    assert_eq!(denied, [("ann", "user"), ("acme", "org")]);
    assert_eq!(notes.len(), 6);
}

#[tokio::test(start_paused = true)]
async fn only_denials_of_the_first_key_block() {
    let layer = layer_of(LocalStore::default())
        .block_after("2/min", Duration::from_secs(600))
        .unwrap();
    let service = limited(layer);
    for user in ["ann", "ann", "ann", "bob"] {
        assert_eq!(send(&service, of(user, "acme")).await.status(), 200);
    }
    for user in ["bob", "bob", "ann", "ann"] {
        assert_eq!(send(&service, of(user, "acme")).await.status(), 429);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let source = async |user| {
        let denied = send(&service, of(user, "acme")).await;
        decision(&denied).unwrap().source()
    };
    assert_eq!(source("bob").await, Source::Local);
    assert_eq!(source("ann").await, Source::Blocked);
}

/// A store that knows one key at a time checks one after the other, and refunds.
#[tokio::test]
async fn an_own_store_refunds_after_a_denial() {
    let (local, mock) = watched();
    let limiter = Limiter::new(mock.clone(), list("user", "5/d"));
    let lists = [list("user", "5/d"), list("org", "2/d"), list("all", "9/d")];
    let take = || {
        let keys = [Key::new("ann"), Key::new("acme"), Key::GLOBAL];
        limiter.take_all(keys.into_iter().zip(&lists), 2)
    };
    assert!(take().await.unwrap().is_allowed());
    let denied = take().await.unwrap();
    assert_eq!(
        (denied.policy().name(), denied.policies().len()),
        ("org", 3)
    );
    let left: Vec<u32> = denied.each().map(|state| state.remaining()).collect();
    assert_eq!(left, [3, 0, 7], "as after the refund");
    let modes: Vec<Mode> = mock.asked().iter().map(Check::mode).collect();
    use Mode::{Peek, Refund, Take};
    assert_eq!(modes, [Take, Take, Take, Take, Take, Peek, Refund]);
    assert_eq!(remaining(&local, "ann", &lists[0]), 3);
    assert_eq!(remaining(&local, "acme", &lists[1]), 0);
    let all = Check::peek(Key::GLOBAL, &lists[2], 0);
    assert_eq!(settled(local.check(all)).unwrap().remaining(), 7);
}

/// An id that only some keys know is new: those are charged too.
#[tokio::test]
async fn an_own_store_knows_an_id_of_all_keys() {
    let (local, mock) = watched();
    let lists = [list("user", "5/d"), list("org", "2/d")];
    let take = async |user: &str| {
        let keys = [Key::new(user), Key::new("acme")];
        let joint = JointCheck::take(keys.into_iter().zip(&lists), 1).unwrap();
        let decided = mock.check_all(joint.with_id("request-1")).await.unwrap();
        decided.decision().is_allowed()
    };
    for (user, is_allowed, used) in [("ann", true, 1), ("ann", true, 1), ("bob", true, 2)] {
        assert_eq!(take(user).await, is_allowed);
        assert_eq!(2 - remaining(&local, "acme", &lists[1]), used, "{user}");
    }
    // The organization knows the id, and `eve` does not: a take, which the organization denies.
    assert!(!take("eve").await);
    assert_eq!(remaining(&local, "eve", &lists[0]), 5);
    assert!(take("ann").await, "a repetition");
}

#[tokio::test]
async fn an_error_of_one_key_takes_nothing() {
    let (local, mock) = watched();
    let asked = local.clone();
    mock.answer(move |check| {
        if check.key() == &Key::new("acme") && check.mode() == Mode::Take {
            return Err(error());
        }
        settled(asked.check(check.clone()))
    });
    let lists = [list("user", "5/d"), list("org", "2/d")];
    let limiter = Limiter::new(mock, lists[0].clone());
    let keys = [Key::new("ann"), Key::new("acme")];
    assert!(
        limiter
            .take_all(keys.into_iter().zip(&lists), 1)
            .await
            .is_err()
    );
    assert_eq!(remaining(&local, "ann", &lists[0]), 5);
}

/// A blocked list of one key denies all keys, without a check of the store.
#[tokio::test]
async fn a_blocked_key_denies_all() {
    let local = LocalStore::default();
    let (user, blocked) = (list("user", "10/h"), Policies::blocked());
    let limiter = Limiter::new(local.clone(), user.clone());
    let (ann, acme) = (Key::new("ann"), Key::new("acme"));
    for parts in [
        [(ann, &user), (acme, &blocked)],
        [(ann, &blocked), (acme, &blocked)],
    ] {
        for cost in [0, 1] {
            let denied = limiter.take_all(parts, cost).await.unwrap();
            assert!(!denied.is_allowed() && denied.source() == Source::Blocked);
            let reserved = limiter.reserve_all(parts, cost).await;
            assert!(matches!(reserved, Err(ReserveError::Denied(_))));
        }
    }
    for first in [user.clone(), blocked.clone()] {
        let layer = RateLimitLayer::new(local.clone(), by_header("x-user"), first)
            .and(by_header("x-org"), blocked.clone())
            .on_error(OnError::Allow)
            .cost(|_: &Parts| 0);
        let service = limited(layer);
        assert_eq!(send(&service, of("ann", "acme")).await.status(), 429);
    }
    assert_eq!(remaining(&local, "ann", &user), 10);
}
