//! Denials are cached until their `retry_after`, for at most a second: a flood on one key costs
//! Redis next to nothing, and a reset or a refund by any instance is visible within a second.

use std::collections::HashSet;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision, Outcome, Source};
use tower_redis_ratelimit::extract::Global;
use tower_redis_ratelimit::settle::{ReserveError, Settlement};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{
    Key, Limiter, Policies, Policy, Quota, RateLimitLayer, RedisStore, Strategy,
};

use crate::support::{RedisServer, STRATEGIES, is_gradual, policy, until};

const ANN: Key = Key::GLOBAL;

async fn ask(store: &RedisStore, check: Check) -> Decision {
    store.check(check).await.unwrap()
}

async fn take(store: &RedisStore, policies: &Policies, cost: u32) -> Decision {
    ask(store, Check::take(ANN, policies, cost)).await
}

#[tokio::test]
async fn a_flood_of_denials_costs_one_call() {
    let server = RedisServer::start();
    let store = server.store();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "10/100d");
        let _ = take(&store, &policies, 10).await;
        let before = server.calls("evalsha").await;
        let first = take(&store, &policies, 1).await;
        assert_eq!(first.source(), Source::Redis);
        tokio::time::pause();
        let flood = join_all((0..1_000).map(|_| take(&store, &policies, 1))).await;
        for denied in flood {
            assert_eq!((denied.source(), denied.used()), (Source::Cached, 10));
            let (wait, first) = (denied.retry_after().unwrap(), first.retry_after().unwrap());
            assert!(
                wait < first && wait > first - Duration::from_secs(20),
                "{strategy:?}: {wait:?} of {first:?}"
            );
        }
        // A larger cost is denied too, even above the capacity; Redis decides a smaller one.
        assert_eq!(take(&store, &policies, 1).await.source(), Source::Cached);
        assert_eq!(
            take(&store, &policies, 11).await.outcome(),
            Outcome::ExceedsCapacity
        );
        tokio::time::resume();
        assert_eq!(server.calls("evalsha").await - before, 1, "{strategy:?}");
        assert_eq!(take(&store, &policies, 0).await.outcome(), Outcome::Allowed);
        let _ = ask(&store, Check::reset(ANN, &policies)).await;
    }
}

/// Redis decides a larger cost whose wait does not follow from a cached denial. With four costs cached, a larger one
/// gets a wait that is certain to suffice.
#[tokio::test]
async fn a_larger_cost_waits_longer() {
    let server = RedisServer::start();
    let builder = || RedisStore::builder(server.url()).timeout(Duration::from_secs(20));
    let store = builder().connect().await.unwrap();
    let uncached = builder().denials(0).connect().await.unwrap();
    for strategy in STRATEGIES {
        let policies = Policies::new([of("test", strategy, 10), of("other", strategy, 12)]);
        let policies = policies.unwrap();
        for _ in 0..10 {
            let _ = take(&store, &policies, 1).await;
        }
        // A cached denial is as old as its call.
        let asked_at = Instant::now();
        assert!(!take(&store, &policies, 1).await.is_allowed());
        let is_exact = is_gradual(strategy) || matches!(strategy, Strategy::FixedWindow(_));
        let before = server.calls("evalsha").await;
        for cost in (1..=10).chain(1..=10) {
            let decision = take(&store, &policies, cost).await;
            let exact = take(&uncached, &policies, cost).await;
            for (wait, exact) in decision.each().zip(exact.each()) {
                let [wait, exact] =
                    [wait, exact].map(|each| each.retry_after().unwrap_or_default());
                let age = asked_at.elapsed() + Duration::from_millis(1);
                let is_bound = !is_exact && cost > 4;
                assert!(
                    wait + age >= exact && (wait <= exact + age || is_bound),
                    "{strategy:?}: {wait:?} for {exact:?} of a cost of {cost}"
                );
            }
        }
        let calls = server.calls("evalsha").await - before - 20;
        let seconds = asked_at.elapsed().as_secs();
        let most = if is_exact { 0 } else { 3 } + 4 * seconds;
        assert!(calls <= most, "{strategy:?}: {calls} calls, {most} at most");
    }
}

#[tokio::test]
async fn a_denied_caller_passes_after_its_wait() {
    let server = RedisServer::start();
    let store = server.store();
    for strategy in STRATEGIES {
        let policies = policy(strategy, "2/400ms");
        // A window may end between two takes.
        let wait = loop {
            if let Some(wait) = take(&store, &policies, 2).await.retry_after() {
                break wait;
            }
        };
        let start = tokio::time::Instant::now();
        until("it passes", async || {
            take(&store, &policies, 2).await.is_allowed()
        })
        .await;
        let waited = start.elapsed();
        assert!(
            waited + Duration::from_millis(50) >= wait,
            "{strategy:?}: after {waited:?} of {wait:?}"
        );
        let _ = ask(&store, Check::reset(ANN, &policies)).await;
    }
}

/// This instance's own refunds and resets invalidate the cache. Denials are cached per list of
/// policies.
#[tokio::test]
async fn a_denial_is_forgotten_with_its_reason() {
    let server = RedisServer::start();
    let store = server.store();
    let policies = policy(Strategy::Gcra, "10/100d");
    let exhaust = async || {
        let _ = ask(&store, Check::up_to(ANN, &policies, 10)).await;
        until("the denial is cached", async || {
            let denied = take(&store, &policies, 1).await;
            assert!(!denied.is_allowed());
            denied.source() == Source::Cached
        })
        .await;
    };
    exhaust().await;
    let _ = ask(&store, Check::refund(ANN, &policies, 1)).await;
    assert!(take(&store, &policies, 1).await.is_allowed());

    exhaust().await;
    let _ = ask(&store, Check::reset(ANN, &policies)).await;
    assert!(take(&store, &policies, 1).await.is_allowed());

    exhaust().await;
    let more = policy(Strategy::Gcra, "20/100d");
    assert!(
        take(&store, &more, 1).await.is_allowed(),
        "the quota has been raised"
    );

    exhaust().await;
    assert_eq!(
        ask(&store, Check::take(ANN, &policies, 1).with_id("request-1"))
            .await
            .source(),
        Source::Redis
    );
    let forgetful = RedisStore::builder(server.url())
        .denials(0)
        .connect()
        .await
        .unwrap();
    for _ in 0..3 {
        assert_eq!(take(&forgetful, &policies, 1).await.source(), Source::Redis);
    }
}

/// Also a reset by a tool, such as `examples/inspect.rs`.
#[tokio::test]
async fn others_free_within_a_second() {
    let server = RedisServer::start();
    let (one, other) = (server.store(), server.store());
    for strategy in STRATEGIES {
        let policies = policy(strategy, "3/100d");
        for frees in [
            Check::reset(ANN, &policies),
            Check::refund(ANN, &policies, 3),
        ] {
            let _ = take(&one, &policies, 3).await;
            assert!(!take(&one, &policies, 1).await.is_allowed(), "{strategy:?}");
            let _ = ask(&other, frees.clone()).await;
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(1)).await;
            tokio::time::resume();
            assert!(
                take(&one, &policies, 1).await.is_allowed(),
                "{strategy:?}: {frees:?}"
            );
            let _ = ask(&one, Check::reset(ANN, &policies)).await;
        }
    }
}

/// The reset may have been executed.
#[tokio::test]
async fn an_unanswered_reset_forgets_the_denial() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_millis(200))
        .connect()
        .await
        .unwrap();
    let policies = policy(Strategy::Gcra, "10/100d");
    let _ = take(&store, &policies, 10).await;
    let _ = take(&store, &policies, 1).await;
    assert_eq!(take(&store, &policies, 1).await.source(), Source::Cached);
    server.freeze();
    assert!(store.check(Check::reset(ANN, &policies)).await.is_err());
    server.thaw();
    until("Redis decides again", async || {
        let decision = store.check(Check::take(ANN, &policies, 1)).await;
        decision.is_ok_and(|decision| decision.source() == Source::Redis)
    })
    .await;
}

/// A refund by another instance is visible within about a second, in layers that settle and for
/// reservations. Until then, a flood of checks sends one to Redis per second.
#[tokio::test]
async fn refunds_of_other_instances_are_seen() {
    let server = RedisServer::start();
    let store = || {
        RedisStore::builder(server.url())
            .timeout(Duration::from_secs(60))
            .connect_lazy()
            .unwrap()
    };
    let policies = policy(Strategy::SlidingLog, "10/100d");
    let (one, other) = (
        Limiter::new(store(), policies.clone()),
        Limiter::new(store(), policies.clone()),
    );
    let layer =
        RateLimitLayer::new(store(), Global, policies.clone()).settle(|_| Settlement::Refund);
    let service = layer.layer(service_fn(async |_: Request<String>| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    let status = || {
        let request = Request::new(String::new());
        async { service.clone().oneshot(request).await.unwrap().status() }
    };
    let held = one.reserve(ANN, 10).await.unwrap();

    let denied = async || match other.reserve(ANN, 1).await {
        Err(ReserveError::Denied(denied)) => denied.decision().source(),
        other => panic!("{other:?}"),
    };
    let start = tokio::time::Instant::now();
    let before = server.calls("evalsha").await;
    assert_eq!(denied().await, Source::Redis);
    assert_eq!(status().await, StatusCode::TOO_MANY_REQUESTS);
    for _ in 0..100 {
        join_all((0..10).map(|_| denied())).await;
        assert_eq!(status().await, StatusCode::TOO_MANY_REQUESTS);
    }
    let calls = server.calls("evalsha").await - before;
    let most = 2 + 2 * start.elapsed().as_secs() * 11;
    assert!(calls <= most, "{calls} calls, {most} at most");

    held.settle(0);
    until("a reservation passes", async || {
        other.reserve(ANN, 10).await.is_ok()
    })
    .await;
    until("a request passes", async || {
        status().await == StatusCode::OK
    })
    .await;
}

/// Refunds and denials run concurrently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_denial_outlives_a_refund() {
    let server = RedisServer::start();
    let store = server.store();
    let policies = policy(Strategy::Gcra, "1/100d");
    for _ in 0..300 {
        let _ = take(&store, &policies, 1).await;
        let flood = (0..8).map(|_| {
            let (store, policies) = (store.clone(), policies.clone());
            tokio::spawn(async move { take(&store, &policies, 1).await.granted() })
        });
        let flood: Vec<_> = flood.collect();
        let _ = ask(&store, Check::reset(ANN, &policies)).await;
        let granted: u32 = join_all(flood).await.into_iter().map(Result::unwrap).sum();
        if granted == 0 {
            assert!(
                take(&store, &policies, 1).await.is_allowed(),
                "denied by a memory"
            );
        }
        let _ = ask(&store, Check::reset(ANN, &policies)).await;
    }
}

/// A policy with this name, whose charges do not expire during a test.
fn of(name: &str, strategy: Strategy, limit: u32) -> Policy {
    Policy::new(
        name,
        strategy,
        Quota::per(limit, Duration::from_secs(100 * 86_400)),
    )
    .unwrap()
}

/// Exhausts every policy of some lists, from another instance.
async fn exhaust(server: &RedisServer, lists: &[Policies]) {
    let store = server.store();
    for list in lists {
        for policy in list.iter() {
            let _ = ask(&store, Check::up_to(ANN, &policy.clone().into(), u32::MAX)).await;
        }
    }
}

#[tokio::test]
async fn alternating_policies_cost_a_call_each() {
    let server = RedisServer::start();
    let store = server.store();
    let lists = [
        of("read", Strategy::Gcra, 10).into(),
        of("write", Strategy::SlidingLog, 10).into(),
    ];
    exhaust(&server, &lists).await;
    let before = server.calls("evalsha").await;
    for i in 0..2_000 {
        assert!(!take(&store, &lists[i % 2], 1).await.is_allowed());
        if i == 1 {
            tokio::time::pause();
        }
    }
    tokio::time::resume();
    assert_eq!(server.calls("evalsha").await - before, 2, "of 2000 checks");
}

/// The denials of a list apply to its costs, and no list replaces another.
#[tokio::test]
async fn denials_of_other_lists_stay() {
    let server = RedisServer::start();
    let store = server.store();
    let (read, write) = (
        of("read", Strategy::Gcra, 10),
        of("write", Strategy::SlidingWindow { cells: 10 }, 10),
    );
    let lists: [Policies; 3] = [
        read.clone().into(),
        write.clone().into(),
        Policies::new([read.clone(), write.clone()]).unwrap(),
    ];
    exhaust(&server, &lists).await;
    let before = server.calls("evalsha").await;
    let mut waits = vec![];
    for round in 0..20 {
        waits.clear();
        for list in &lists {
            for cost in [5, 1, 5, 7, 3] {
                waits.push(take(&store, list, cost).await.retry_after().unwrap());
            }
        }
        if round == 0 {
            tokio::time::pause();
        }
    }
    // Under the meter, whose unit takes ten days, Redis decides a cost of 5, and then a cost of 1, from which all others
    // follow. Under the window, in which a cell frees all units together, it decides each of four costs.
    for (list, is_equal) in waits.chunks(5).zip([false, true, true]) {
        let days = |wait: &Duration| (wait.as_secs_f64() / 86_400.0).round() as u64;
        let waits: Vec<u64> = list.iter().map(days).collect();
        let expected = if is_equal {
            vec![waits[0]; 5]
        } else {
            vec![50, 10, 50, 70, 30]
        };
        assert_eq!(waits, expected);
    }

    // Equal policies that are created later use the same entries.
    let again = [
        of("read", Strategy::Gcra, 10).into(),
        of("write", Strategy::SlidingWindow { cells: 10 }, 10).into(),
    ];
    for list in &again {
        assert_eq!(take(&store, list, 1).await.source(), Source::Cached);
    }
    // So does a check for any part of a cost.
    assert_eq!(
        ask(&store, Check::up_to(ANN, &lists[0], 8)).await.source(),
        Source::Cached
    );
    tokio::time::resume();
    assert_eq!(server.calls("evalsha").await - before, 10, "of 300 checks");
    // A refund under one list invalidates all lists, since they share policies.
    let _ = ask(&store, Check::refund(ANN, &lists[0], 2)).await;
    for list in &lists {
        assert_eq!(take(&store, list, 2).await.source(), Source::Redis);
    }
}

#[tokio::test]
async fn costs_above_capacity_take_one_call() {
    let server = RedisServer::start();
    let store = server.store();
    let (few, many) = (
        of("few", Strategy::Gcra, 10),
        of("many", Strategy::Gcra, 100),
    );
    let lists = [few.clone().into(), Policies::new([few, many]).unwrap()];
    exhaust(&server, &lists).await;
    let before = server.calls("evalsha").await;
    for i in 0..500 {
        for list in &lists {
            let never = take(&store, list, 11 + i * 37 % 90).await;
            assert_eq!(
                (never.outcome(), never.remaining()),
                (Outcome::ExceedsCapacity, 0)
            );
        }
        if i == 0 {
            tokio::time::pause();
        }
    }
    let both = take(&store, &lists[1], 101).await;
    assert_eq!(
        (both.source(), both.outcome()),
        (Source::Cached, Outcome::ExceedsCapacity),
        "of both policies"
    );
    tokio::time::resume();
    assert_eq!(server.calls("evalsha").await - before, 2, "of 1001 checks");
    assert!(
        !take(&store, &lists[0], 10)
            .await
            .retry_after()
            .unwrap()
            .is_zero(),
        "it may fit one day"
    );
}

/// The id may have been granted before.
#[tokio::test]
async fn no_memory_denies_an_id() {
    let server = RedisServer::start();
    let store = server.store();
    let list: Policies = of("api", Strategy::Gcra, 10).into();
    let take_id = |id: &str| ask(&store, Check::take(ANN, &list, 2).with_id(id));
    let granted = take_id("granted").await;
    assert!(granted.is_allowed());
    exhaust(&server, std::slice::from_ref(&list)).await;
    let _ = take(&store, &list, 1).await;
    let before = server.calls("evalsha").await;
    for _ in 0..5 {
        for id in ["one", "two"] {
            assert!(!take_id(id).await.is_allowed());
        }
    }
    assert_eq!(
        server.calls("evalsha").await - before,
        10,
        "Redis decides each"
    );
    assert_eq!(take_id("granted").await, granted);

    // An id that was granted in the end stays granted.
    let _ = ask(&store, Check::refund(ANN, &list, 2)).await;
    assert!(
        !ask(&store, Check::take(ANN, &list, 3).with_id("one"))
            .await
            .is_allowed()
    );
    let one = take_id("one").await;
    assert!(one.is_allowed());
    assert_eq!(
        ask(&store, Check::take(ANN, &list, 3).with_id("one")).await,
        one
    );
}

/// Any mix of lists, costs and ids: at most one call per second, list and cost, and each reply is
/// correct.
#[tokio::test]
async fn mixed_floods_cost_one_call_per_check() {
    let server = RedisServer::start();
    let store = server.store();
    let forgetful = RedisStore::builder(server.url())
        .denials(0)
        .connect()
        .await
        .unwrap();
    for seed in 0..20 {
        let mut rng = Rng::with_seed(seed);
        let lists: Vec<Policies> = (0..4)
            .map(|_| {
                let first = of("first", STRATEGIES[rng.usize(..STRATEGIES.len())], 10);
                let second = of("second", STRATEGIES[rng.usize(..STRATEGIES.len())], 20);
                match rng.u8(..3) {
                    0 => first.into(),
                    1 => second.into(),
                    _ => Policies::new([first, second]).unwrap(),
                }
            })
            .collect();
        exhaust(&server, &lists).await;
        let (mut questions, mut with_id) = (HashSet::new(), 0);
        let mut checks: Vec<Check> = (0..1_500)
            .map(|_| {
                let (list, cost) = (rng.usize(..4), rng.u32(1..=24));
                // Few different ids, so that some repeat.
                let id = (rng.u8(..20) == 0).then(|| rng.u8(..2).to_string());
                if id.is_some() {
                    with_id += 1;
                } else {
                    questions.insert((list, cost));
                }
                let check = Check::take(ANN, &lists[list], cost);
                if let Some(id) = id {
                    check.with_id(id)
                } else {
                    check
                }
            })
            .collect();
        let (before, since) = (server.calls("evalsha").await, tokio::time::Instant::now());
        for check in &checks {
            assert!(!ask(&store, check.clone()).await.is_allowed());
        }
        let calls = server.calls("evalsha").await - before;
        // Each smaller cost, and four larger ones for each list.
        let most = (questions.len() as u64).min(60) * (1 + since.elapsed().as_secs()) + with_id;
        assert!(calls <= most, "seed {seed}: {calls} calls, {most} at most");

        rng.shuffle(&mut checks);
        for check in checks.into_iter().take(100) {
            let (known, asked) = (
                ask(&store, check.clone()).await,
                ask(&forgetful, check.clone()).await,
            );
            let (never, really_never) = (
                known.outcome() == Outcome::ExceedsCapacity,
                asked.outcome() == Outcome::ExceedsCapacity,
            );
            assert_eq!(never, really_never, "seed {seed}: {check:?}");
            let slack = Duration::from_secs(60);
            let [known, exact] =
                [&known, &asked].map(|denied| denied.retry_after().unwrap_or_default());
            assert!(
                never || known + slack >= exact,
                "seed {seed}: {known:?} for {exact:?}: {check:?}"
            );
        }
        for list in &lists {
            let _ = ask(&store, Check::reset(ANN, list)).await;
        }
    }
}

/// Callers that are denied once do not displace one that is denied all the time.
#[tokio::test]
async fn frequent_denials_survive_a_flood() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .denials(1_000)
        .timeout(Duration::from_secs(20));
    let store = store.connect().await.unwrap();
    let list: Policies = of("api", Strategy::FixedWindow(Align::FirstHit), 1).into();
    exhaust(&server, std::slice::from_ref(&list)).await;
    let (mut sent, mut hits, since) = (0, 0, tokio::time::Instant::now());
    for first in (0..20_000).step_by(50) {
        let others = async || {
            let others =
                (first..first + 50).map(|i| Check::take(Key::new(format!("other-{i}")), &list, 1));
            join_all(others.map(|check| store.check(check))).await
        };
        others().await;
        assert!(
            others()
                .await
                .into_iter()
                .all(|decision| !decision.unwrap().is_allowed())
        );
        for _ in 0..3 {
            match take(&store, &list, 1).await.source() {
                Source::Cached => hits += 1,
                _ => sent += 1,
            }
        }
    }
    let most = 3 + since.elapsed().as_secs();
    assert!(
        sent <= most,
        "{sent} of {} checks were sent, {most} at most",
        sent + hits
    );
}

/// Twice as many denied callers as fit, in rotation: some of them are cached each time.
#[tokio::test]
async fn an_overfull_denial_cache_still_helps() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .denials(200)
        .timeout(Duration::from_secs(20));
    let store = store.connect().await.unwrap();
    let list: Policies = of("api", Strategy::FixedWindow(Align::FirstHit), 1).into();
    let mut hits = vec![];
    // Few enough for a busy machine: a denial is cached for a second.
    for _ in 0..8 {
        let mut cached = 0;
        for first in (0..400).step_by(100) {
            let checks = (first..first + 100)
                .map(|i| store.check(Check::take(Key::new(format!("caller-{i}")), &list, 1)));
            let decisions = join_all(checks).await.into_iter().map(Result::unwrap);
            cached += decisions
                .filter(|decision| decision.source() == Source::Cached)
                .count();
        }
        hits.push(cached);
    }
    assert!(
        hits[3..].iter().all(|cached| *cached > 140),
        "of 400 each: {hits:?}"
    );
}
