//! Waiting with a store that replies late, fails or gets refunds, and under changing quotas.

use std::convert::Infallible;
use std::error::Error;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use std::{fmt, thread};

use futures_util::FutureExt;
use futures_util::future::{join_all, poll_fn};
use tokio::runtime::Builder;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower::load_shed::LoadShed;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Decision, Mode, Outcome, RateLimited};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::OnError;
use tower_redis_ratelimit::select::{Live, PolicySelector};
use tower_redis_ratelimit::store::{Answer, ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::strategy::{Align, Refill};
use tower_redis_ratelimit::wait::Wait;
use tower_redis_ratelimit::{
    CallLimitLayer, Key, Limiter, LocalStore, Policies, Policy, Strategy, ThrottleLayer,
};

use crate::late::Late;
use crate::support::policy;

const ANN: Key = Key::GLOBAL;
const LONG: Duration = Duration::from_secs(7_200);
const FEW: NonZeroUsize = NonZeroUsize::new(3).unwrap();

async fn ok<R>(_: R) -> Result<(), Infallible> {
    Ok(())
}

/// Runs three instances at different distances from the store, each with fifty tasks that call in a loop. Returns the
/// time of each grant with its instance, and the number of store calls per grant, without refunds.
async fn three_instances(
    local: &LocalStore,
    policies: &Policies,
    there: [u64; 3],
    time: Duration,
) -> ([Vec<Duration>; 3], f64) {
    let (mut stores, start) = (vec![], Instant::now());
    let instances = there.map(|there| {
        let store = Late::new(local, Duration::from_millis(there));
        stores.push(store.clone());
        let layer = ThrottleLayer::new(store, ANN, policies.clone());
        let times = Arc::new(Mutex::new(vec![]));
        let tasks = (0..50).map(|_| {
            let (mut service, times) = (layer.layer(service_fn(ok::<()>)), Arc::clone(&times));
            tokio::spawn(timeout(time, async move {
                loop {
                    service.ready().await.unwrap().call(()).await.unwrap();
                    times.lock().unwrap().push(start.elapsed());
                }
            }))
        });
        (tasks.collect::<Vec<_>>(), times)
    });
    let times = join_all(instances.map(|(tasks, times)| async move {
        join_all(tasks).await;
        times.lock().unwrap().clone()
    }));
    let times: [Vec<Duration>; 3] = times.await.try_into().unwrap();
    // At the end, each waiting task refunds its turn.
    let asked = stores.iter().flat_map(|store| store.asked());
    let asked = asked.filter(|mode| *mode != Mode::Refund).count();
    let grants: usize = times.iter().map(Vec::len).sum();
    (times, asked as f64 / grants as f64)
}

/// A check that was granted to another instance must not leave a debt for the full cost: permits become due one by one.
#[tokio::test(start_paused = true)]
async fn permits_come_evenly_from_slow_stores() {
    for strategy in [
        Strategy::Gcra,
        Strategy::LeakyBucket,
        Strategy::TokenBucket(Default::default()),
    ] {
        for (quota, time, gap) in [("50/s", 20, 0.1), ("60/m", 1_800, 4.0)] {
            let policies = policy(strategy, quota);
            let (times, calls) = three_instances(
                &LocalStore::default(),
                &policies,
                [1, 1, 2],
                Duration::from_secs(time),
            )
            .await;
            let mut all = times.concat();
            all.sort();
            let longest = all
                .windows(2)
                .map(|pair| (pair[1] - pair[0]).as_secs_f64())
                .fold(0.0, f64::max);
            assert!(
                longest < gap,
                "{strategy:?} {quota}: no permit for {longest} s"
            );
            assert!(calls < 1.2, "{strategy:?} {quota}: {calls} calls a grant");
            // The first instance may take most of the burst; after that the instances alternate.
            let after_burst = Duration::from_secs(time / 10);
            let each = times.map(|times| times.iter().filter(|at| **at > after_burst).count());
            let (least, most) = (each.iter().min().unwrap(), each.iter().max().unwrap());
            assert!(
                most - least <= most / 10 + 2,
                "{strategy:?} {quota}: {each:?}"
            );
        }
    }
}

/// Under strategies that cannot reserve turns ahead, the instance nearest to the store must not get all permits.
#[tokio::test(start_paused = true)]
async fn a_distant_instance_gets_permits_too() {
    for strategy in [
        Strategy::FixedWindow(Default::default()),
        Strategy::SlidingWindow { cells: 10 },
        Strategy::SlidingLog,
        Strategy::TokenBucket(Refill::Interval),
    ] {
        for (quota, time, most) in [("50/s", 200, 10_000), ("60/m", 7_200, 7_200)] {
            let policies = policy(strategy, quota);
            let (times, calls) = three_instances(
                &LocalStore::default(),
                &policies,
                [1, 2, 4],
                Duration::from_secs(time),
            )
            .await;
            let each = times.map(|times| times.len());
            let all: usize = each.iter().sum();
            assert!(
                each.iter().all(|count| count * 6 >= all),
                "{strategy:?} {quota}: {each:?}"
            );
            assert!(all * 10 >= most * 9, "{strategy:?} {quota}: {each:?}");
            assert!(calls <= 0.5, "{strategy:?} {quota}: {calls} calls a grant");
        }
    }
}

/// A waiter behind waiters of other costs is not checked alone; otherwise a queue would not drain under steady traffic.
#[tokio::test(start_paused = true)]
async fn a_queue_of_mixed_costs_drains() {
    let policies = policy(Strategy::Gcra, "10000/s");
    let local = LocalStore::default();
    let limiter = Limiter::new(
        Late::new(&local, Duration::from_millis(2)),
        policies.clone(),
    );
    let mut waits = vec![];
    for ms in 0..2_000 {
        if ms == 500 {
            let _ = local
                .check(Check::charge(ANN, &policies, 10_000))
                .await
                .unwrap();
        }
        let limiter = limiter.clone();
        waits.push(tokio::spawn(async move {
            let start = Instant::now();
            let decision = limiter
                .wait(ANN, 1 + ms % 3, Duration::from_millis(100))
                .await
                .unwrap();
            (ms, decision.is_allowed(), start.elapsed())
        }));
        sleep(Duration::from_millis(1)).await;
    }
    for wait in waits {
        let (ms, allowed, took) = wait.await.unwrap();
        assert!(
            allowed && took < Duration::from_millis(50),
            "of {ms} ms: {allowed} after {took:?}"
        );
    }
}

/// A check takes one slot. Waiters are nevertheless checked concurrently; otherwise a queue would not drain under
/// steady traffic.
#[tokio::test(start_paused = true)]
async fn a_queue_of_in_flight_requests_drains() {
    let jobs = || Policy::in_flight("jobs", 50).unwrap();
    let rate = Policy::new("rate", Strategy::Gcra, "1000000/s").unwrap();
    for (policies, there, gap) in [
        (Policies::from(jobs()), 2, 2),
        (jobs().into(), 5, 5),
        (Policies::new([jobs(), rate]).unwrap(), 2, 2),
    ] {
        let store = Late::new(&LocalStore::default(), Duration::from_millis(there));
        let layer = CallLimitLayer::new(store, |_: &u32| Some(ANN), policies.clone());
        let service = layer
            .cost(|cost| *cost)
            .wait(Duration::from_secs(1))
            .layer(service_fn(async |_| {
                sleep(Duration::from_millis(10)).await;
                Ok::<_, Infallible>(())
            }));
        let mut calls = vec![];
        for i in 0..1_000 {
            for _ in 0..if i == 250 { 120 } else { 1 } {
                let service = service.clone();
                calls.push(tokio::spawn(async move {
                    let start = Instant::now();
                    let answer = service.oneshot(100 + i % 3).await;
                    (i, answer.is_ok(), start.elapsed())
                }));
            }
            sleep(Duration::from_millis(gap)).await;
        }
        for call in calls {
            let (i, passed, took) = call.await.unwrap();
            // Only a part of the burst gets slots immediately.
            let most = if (250..300).contains(&i) { 200 } else { 40 };
            assert!(
                passed && took < Duration::from_millis(most),
                "{policies:?}, {i}: {passed} after {took:?}"
            );
        }
    }
}

/// A freed permit is requested about once, and is not left unused for long.
#[tokio::test(start_paused = true)]
async fn freed_capacity_is_requested_once() {
    for (instances, limit, calls_a_grant) in [(1, 50, 1.1), (1, 4, 1.5), (3, 50, 1.6)] {
        let policies = Policies::from(Policy::in_flight("jobs", limit).unwrap());
        let (local, in_flight) = (LocalStore::default(), Arc::new(AtomicU32::new(0)));
        let (most, grants) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (mut stores, mut tasks) = (vec![], vec![]);
        for _ in 0..instances {
            let store = Late::new(&local, Duration::from_millis(2));
            stores.push(store.clone());
            let layer = CallLimitLayer::new(store, |_: &()| Some(ANN), policies.clone()).wait(LONG);
            let (in_flight, most, grants) = (
                Arc::clone(&in_flight),
                Arc::clone(&most),
                Arc::clone(&grants),
            );
            let service = layer.layer(service_fn(move |()| {
                let (in_flight, most, grants) = (
                    Arc::clone(&in_flight),
                    Arc::clone(&most),
                    Arc::clone(&grants),
                );
                async move {
                    most.fetch_max(in_flight.fetch_add(1, SeqCst) + 1, SeqCst);
                    sleep(Duration::from_millis(
                        1 + u64::from(grants.fetch_add(1, SeqCst) % 19),
                    ))
                    .await;
                    in_flight.fetch_sub(1, SeqCst);
                    Ok::<_, Infallible>(())
                }
            }));
            for _ in 0..99 {
                let service = service.clone();
                tasks.push(tokio::spawn(timeout(Duration::from_secs(2), async move {
                    while service.clone().oneshot(()).await.is_ok() {}
                })));
            }
        }
        let ended = join_all(tasks).await;
        assert!(
            ended.into_iter().all(|task| task.unwrap().is_err()),
            "{instances}, {limit}: one was refused"
        );
        assert_eq!(most.load(SeqCst), limit);
        let asked = stores
            .iter()
            .flat_map(Late::asked)
            .filter(|mode| matches!(mode, Mode::Take | Mode::TakeAhead));
        let (grants, calls) = (
            grants.load(SeqCst),
            asked.count() as f64 / f64::from(grants.load(SeqCst)),
        );
        assert!(
            calls < calls_a_grant,
            "{instances}, {limit}: {calls} calls a grant"
        );
        // A request runs for 10 ms, and its slot is held for 4 ms more.
        let full = limit * 2_000 / 14;
        assert!(
            grants > full / 2,
            "{instances}, {limit}: {grants} of {full} grants"
        );
    }
}

/// Also under steady traffic, where the store never denies a check.
#[tokio::test(start_paused = true)]
async fn no_wait_exceeds_its_maximum_by_much() {
    let store = Late::new(&LocalStore::default(), Duration::from_millis(10));
    let layer = CallLimitLayer::new(
        store,
        |_: &()| Some(ANN),
        Policy::in_flight("jobs", 20).unwrap(),
    );
    let wait =
        Wait::up_to(Duration::from_millis(150)).per_caller(NonZeroUsize::new(1_000).unwrap());
    let service = layer.wait(wait).layer(service_fn(ok));
    let mut calls = vec![];
    for _ in 0..2_000 {
        let service = service.clone();
        calls.push(tokio::spawn(async move {
            let start = Instant::now();
            (service.oneshot(()).await.is_ok(), start.elapsed())
        }));
        sleep(Duration::from_millis(1)).await;
    }
    let mut passed = 0;
    for call in calls {
        let (passes, took) = call.await.unwrap();
        passed += u32::from(passes);
        // The first call is alone; after that one call may be in flight and one queued.
        assert!(
            took <= Duration::from_millis(150 + 3 * 20),
            "{passes} after {took:?}"
        );
    }
    assert!(passed > 500 && passed < 1_500, "{passed}");
}

/// No permit is requested without need from an evenly charged log, where each call gets little. Depending on the
/// jitter, the longest gap of a run is usually 14 times the period of a permit, and rarely 20.
#[tokio::test(start_paused = true)]
async fn instances_share_permits_coming_one_by_one() {
    for (quota, time, gap, most) in [("50/s", 60, 2, 2.0), ("60/m", 1_200, 30, 4.0)] {
        let (local, policies) = (LocalStore::default(), policy(Strategy::SlidingLog, quota));
        for _ in 0..policies[0].quota().limit() {
            assert!(
                local
                    .check(Check::take(ANN, &policies, 1))
                    .await
                    .unwrap()
                    .is_allowed()
            );
            sleep(policies[0].quota().period() / policies[0].quota().limit()).await;
        }
        let (times, calls) =
            three_instances(&local, &policies, [1, 2, 4], Duration::from_secs(time)).await;
        let longest = times
            .iter()
            .flat_map(|times| times.windows(2).map(|pair| pair[1] - pair[0]))
            .max()
            .unwrap();
        let each = times.map(|times| times.len());
        let all: usize = each.iter().sum();
        assert!(
            each.iter().all(|count| count * 5 >= all),
            "{quota}: {each:?}"
        );
        assert!(
            longest < Duration::from_secs(gap),
            "{quota}: an instance waited for {longest:?}"
        );
        assert!(calls <= most, "{quota}: {calls} calls a grant");
    }
}

/// The store's calls do not count towards the time that a request waits.
#[tokio::test(start_paused = true)]
async fn store_latency_denies_no_waiter_with_room() {
    const THERE: Duration = Duration::from_millis(20);
    for &strategy in Strategy::ALL {
        let store = Late::new(&LocalStore::default(), THERE);
        let limiter = Limiter::new(store, policy(strategy, "1000/s"));
        let waits = (0..8).map(|i| limiter.wait(ANN, 1 + i % 2, Duration::ZERO));
        let start = Instant::now();
        let answers = join_all(waits).await;
        assert!(
            answers
                .iter()
                .all(|answer| answer.as_ref().unwrap().is_allowed()),
            "{strategy:?}: {answers:?}"
        );
        assert!(
            start.elapsed() <= 8 * 2 * THERE + THERE,
            "{strategy:?}: {:?}",
            start.elapsed()
        );
    }
}

/// Waiters that joined under the old quota keep it.
#[tokio::test(start_paused = true)]
async fn a_new_quota_applies_to_later_waiters() {
    for &strategy in Strategy::ALL {
        let live = Live::new(policy(strategy, "1/h"));
        let layer =
            CallLimitLayer::new(LocalStore::default(), |_: &()| Some(ANN), live.clone()).wait(LONG);
        let throttle = ThrottleLayer::new(LocalStore::default(), ANN, live.clone());
        let (service, throttled) = (layer.layer(service_fn(ok)), throttle.layer(service_fn(ok)));
        for _ in 0..2 {
            tokio::spawn(service.clone().oneshot(()));
            tokio::spawn(throttled.clone().oneshot(()));
            sleep(Duration::from_secs(1)).await;
        }
        live.replace(policy(strategy, "1000/s"));
        let start = Instant::now();
        service.clone().oneshot(()).await.unwrap();
        throttled.clone().oneshot(()).await.unwrap();
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{strategy:?}: {:?}",
            start.elapsed()
        );
    }
}

/// Measures how long a waiter that could wait for a minute waits if `wake` is called after a second. `others` wait
/// before it.
async fn woken<F>(
    strategy: Strategy,
    others: usize,
    act: impl FnOnce(Limiter<LocalStore>) -> F,
) -> Duration
where
    F: Future<Output = ()>,
{
    let limiter = Limiter::new(LocalStore::default(), policy(strategy, "1/m"));
    assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
    let others: Vec<_> = (0..others)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.wait(ANN, 1, LONG).await })
        })
        .collect();
    for other in others {
        assert!(other.await.unwrap().unwrap().is_allowed());
    }
    let waits = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.wait(ANN, 1, LONG).await }
    });
    sleep(Duration::from_secs(1)).await;
    let start = Instant::now();
    act(limiter.clone()).await;
    assert!(waits.await.unwrap().unwrap().is_allowed());
    start.elapsed()
}

/// Reserved turns keep their times.
#[tokio::test(start_paused = true)]
async fn a_refund_wakes_waiters() {
    for strategy in [
        Strategy::FixedWindow(Align::FirstHit),
        Strategy::SlidingWindow { cells: 10 },
        Strategy::SlidingLog,
        Strategy::SlidingCounter,
        Strategy::TokenBucket(Refill::Interval),
    ] {
        for others in 0..2 {
            let refunded = woken(strategy, others, async |limiter| {
                limiter.refund(ANN, 1).await.unwrap();
            });
            let reset = woken(strategy, others, async |limiter| {
                limiter.reset(ANN).await.unwrap();
            });
            let took = [refunded.await, reset.await];
            assert!(
                took.iter().all(|took| *took < Duration::from_millis(50)),
                "{strategy:?}, {others}: {took:?}"
            );
        }
    }
}

/// An unused reservation is settled off the request path.
#[tokio::test(start_paused = true)]
async fn a_settlement_wakes_waiters() {
    let store = Late::new(&LocalStore::default(), Duration::from_millis(1));
    let limiter = Limiter::new(store, policy(Strategy::SlidingLog, "1/m"));
    let reserved = limiter.reserve(ANN, 1).await.unwrap();
    let waits = limiter.wait(ANN, 1, LONG);
    let settles = async {
        sleep(Duration::from_millis(500)).await;
        drop(reserved);
    };
    let start = Instant::now();
    let (waited, ()) = tokio::join!(waits, settles);
    assert!(waited.unwrap().is_allowed());
    assert!(
        start.elapsed() < Duration::from_millis(600),
        "{:?}",
        start.elapsed()
    );
}

/// Refunds by other instances are not reported here.
#[tokio::test(start_paused = true)]
async fn long_waits_check_again() {
    for strategy in [Strategy::Gcra, Strategy::FixedWindow(Default::default())] {
        let store = MockStore::new();
        store.deny(Duration::from_secs(60));
        let limiter = Limiter::new(store.clone(), policy(strategy, "1/m"));
        let waits = limiter.wait(ANN, 1, LONG);
        let elsewhere = async {
            sleep(Duration::from_millis(500)).await;
            store.allow();
        };
        let start = Instant::now();
        let (waited, ()) = tokio::join!(waits, elsewhere);
        assert!(waited.unwrap().is_allowed());
        assert!(
            start.elapsed() < Duration::from_secs(31),
            "{strategy:?}: {:?}",
            start.elapsed()
        );
    }
    // The pause ends.
    let store = MockStore::new();
    store.deny(Duration::from_secs(3_600));
    let limiter = Limiter::new(store.clone(), policy(Strategy::Gcra, "1/h"));
    let _ = timeout(Duration::from_secs(3_600), limiter.wait(ANN, 1, LONG)).await;
    assert!(
        store.asked().len() <= 40,
        "{} calls in an hour",
        store.asked().len()
    );
}

/// Polls a throttle once on a runtime that then ends or stalls, and waits for it on another.
fn on_two_runtimes(ends: bool, prepare: impl FnOnce(&MockStore)) {
    let store = MockStore::new();
    let layer = ThrottleLayer::new(store.clone(), ANN, policy(Strategy::Gcra, "10/s"));
    let mut service = layer.layer(service_fn(ok::<()>));
    prepare(&store);
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    first.block_on(async {
        for _ in 0..5 {
            let once = poll_fn(|cx| {
                std::task::Poll::Ready(Service::<()>::poll_ready(&mut service, cx).is_ready())
            });
            assert!(!once.await);
            tokio::task::yield_now().await;
        }
    });
    // A stalled runtime is alive but runs nothing.
    let _first = (!ends).then_some(first);
    store.allow();
    runtime().block_on(async {
        let ready = timeout(Duration::from_secs(10), service.ready()).await;
        ready
            .expect("it is ready on the second runtime")
            .unwrap()
            .call(())
            .await
            .unwrap();
    });
}

#[test]
fn a_throttle_outlives_its_runtime() {
    on_two_runtimes(true, |store| {
        store.fail(StoreError::new(ErrorKind::Unreachable))
    });
    on_two_runtimes(true, |store| store.deny(Duration::from_secs(60)));
}

#[test]
fn a_throttle_survives_a_stalled_runtime() {
    on_two_runtimes(false, |store| {
        store.fail(StoreError::new(ErrorKind::Unreachable))
    });
    on_two_runtimes(false, |store| store.deny(Duration::from_secs(60)));
}

/// The first poll takes free capacity, for a layer that does not wait for readiness.
#[tokio::test(start_paused = true)]
async fn load_shed_sheds_nothing_below_the_quota() {
    for &strategy in Strategy::ALL {
        let layer = ThrottleLayer::new(LocalStore::default(), ANN, policy(strategy, "10000/s"));
        let mut shed = LoadShed::new(layer.layer(service_fn(ok::<()>)));
        for i in 0..100 {
            assert!(
                shed.ready().await.unwrap().call(()).await.is_ok(),
                "{strategy:?}: {i}"
            );
            assert!(shed.clone().oneshot(()).await.is_ok(), "{strategy:?}: {i}");
        }
    }
}

/// Waiting does not help these requests, whether or not others wait, and no one must wait behind them.
#[tokio::test(start_paused = true)]
async fn queued_costs_above_capacity_are_refused() {
    let limiter = Limiter::new(LocalStore::default(), policy(Strategy::Gcra, "1/s"));
    let layer = CallLimitLayer::new(
        LocalStore::default(),
        |_: &u32| Some(ANN),
        policy(Strategy::Gcra, "1/s"),
    );
    let service = layer
        .cost(|cost| *cost)
        .wait(Duration::from_secs(3))
        .layer(service_fn(ok));
    let wait = async |cost: u32, after| {
        sleep(Duration::from_millis(after)).await;
        limiter
            .wait(ANN, cost, Duration::from_secs(3))
            .await
            .unwrap()
            .outcome()
    };
    let call = async |cost: u32, after| {
        sleep(Duration::from_millis(after)).await;
        match service.clone().oneshot(cost).await {
            Ok(()) => Outcome::Allowed,
            Err(error) => error
                .downcast_ref::<RateLimited>()
                .unwrap()
                .decision()
                .outcome(),
        }
    };
    let waits = futures_util::future::join4(wait(1, 0), wait(1, 10), wait(100, 20), wait(1, 30));
    let calls = futures_util::future::join4(call(1, 0), call(1, 10), call(100, 20), call(1, 30));
    let ((a, b, large, c), (d, e, larger, f)) = tokio::join!(waits, calls);
    assert_eq!(
        (large, larger),
        (Outcome::ExceedsCapacity, Outcome::ExceedsCapacity)
    );
    assert_eq!([a, b, c, d, e, f], [Outcome::Allowed; 6]);
}

/// The bound counts the waiters of a caller together, under all policies.
#[tokio::test(start_paused = true)]
async fn a_caller_waits_under_all_policies() {
    struct ByName;

    impl PolicySelector<u32> for ByName {
        fn policies(&self, name: &u32, _: Option<&Key>) -> Option<Policies> {
            Some(
                Policy::new(&name.to_string(), Strategy::Gcra, "1/s burst 1")
                    .unwrap()
                    .into(),
            )
        }
    }

    let layer = CallLimitLayer::new(LocalStore::default(), |_: &u32| Some(ANN), ByName);
    let service = layer
        .wait(Wait::up_to(LONG).per_caller(FEW))
        .layer(service_fn(ok));
    let calls = (0..20).map(|i| service.clone().oneshot(i % 5));
    let passed = join_all(calls)
        .await
        .iter()
        .filter(|call| call.is_ok())
        .count();
    assert_eq!(passed, 5 + 3);
}

/// Also before the first reply of the store.
#[tokio::test(start_paused = true)]
async fn the_number_of_waiters_is_bounded() {
    let store = Late::new(&LocalStore::default(), Duration::from_millis(1));
    let limiter = Limiter::new(store.clone(), policy(Strategy::Gcra, "1/s"));
    let waits = (0..10_010).map(|_| limiter.wait(ANN, 1, Duration::from_secs(20)));
    let answers = join_all(waits).await;
    assert!(answers.iter().all(|answer| answer.is_ok()));
    let few = limiter.max_waiting(FEW);
    let start = Instant::now();
    let waits = (0..10).map(|_| few.wait(Key::new("bob"), 1, LONG));
    let passed = join_all(waits)
        .await
        .into_iter()
        .filter(|answer| answer.as_ref().unwrap().is_allowed())
        .count();
    assert_eq!((passed, start.elapsed().as_secs()), (3, 2));

    // Requests beyond the bound try again.
    let layer = ThrottleLayer::new(
        store,
        Key::new("cid"),
        policy(Strategy::Gcra, "10/s burst 1"),
    )
    .max_waiting(FEW);
    let start = Instant::now();
    let (mut calls, watched) = (vec![], layer.clone());
    for _ in 0..20 {
        calls.push(tokio::spawn(layer.layer(service_fn(ok)).oneshot(())));
    }
    for _ in 0..20 {
        sleep(Duration::from_millis(50)).await;
        let shown = format!("{watched:?}");
        assert!(
            (0..=3).any(|waiting| shown.contains(&format!("waiting: {waiting},"))),
            "{shown}"
        );
    }
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let took = start.elapsed();
    assert!(
        took > Duration::from_millis(1_890) && took < Duration::from_secs(4),
        "{took:?}"
    );
}

/// A take, a take ahead and a refund.
#[tokio::test(start_paused = true)]
async fn dropped_requests_cost_three_calls_each() {
    let store = Late::new(&LocalStore::default(), Duration::from_millis(1));
    let layer = CallLimitLayer::new(
        store.clone(),
        |_: &()| Some(ANN),
        policy(Strategy::Gcra, "1/m"),
    );
    let service = layer.wait(LONG).layer(service_fn(ok));
    service.clone().oneshot(()).await.unwrap();
    let before = store.asked().len();
    for _ in 0..200 {
        assert!(
            timeout(Duration::from_millis(50), service.clone().oneshot(()))
                .await
                .is_err()
        );
        sleep(Duration::from_millis(10)).await;
    }
    let asked = store.asked().len() - before;
    assert!(asked <= 600, "{asked} calls for 200 requests");
}

#[tokio::test(start_paused = true)]
async fn one_failing_call_ends_one_wait() {
    let store = Late::new(&LocalStore::default(), Duration::from_millis(1));
    let layer = CallLimitLayer::new(
        store.clone(),
        |_: &()| Some(ANN),
        policy(Strategy::SlidingLog, "10/s"),
    );
    let service = layer
        .wait(LONG)
        .on_error(OnError::Allow)
        .layer(service_fn(ok));
    let passed = Arc::new(AtomicU32::new(0));
    for _ in 0..100 {
        let (call, passed) = (service.clone().oneshot(()), Arc::clone(&passed));
        tokio::spawn(async move {
            call.await.unwrap();
            passed.fetch_add(1, SeqCst);
        });
    }
    sleep(Duration::from_millis(500)).await;
    store.fail_next(1);
    sleep(Duration::from_millis(500)).await;
    let passed_so_far = passed.load(SeqCst);
    assert!(
        (8..=12).contains(&passed_so_far),
        "{passed_so_far} in a second"
    );
    // A store that is down must not keep requests waiting.
    store.fail(true);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(passed.load(SeqCst), 100);
    let start = Instant::now();
    service.clone().oneshot(()).await.unwrap();
    assert!(
        start.elapsed() < Duration::from_millis(5),
        "{:?}",
        start.elapsed()
    );
}

/// Each request that joins or leaves a queue takes the lock of the wait queues.
#[tokio::test(start_paused = true)]
async fn errors_are_dropped_without_a_lock() {
    /// When dropped, checks whether another thread can take the lock of the wait queues.
    struct Cause(Limiter<MockStore>, mpsc::Sender<bool>);

    impl Drop for Cause {
        fn drop(&mut self) {
            let (limiter, (seen, is_seen)) = (self.0.clone(), mpsc::channel());
            thread::spawn(move || seen.send(format!("{limiter:?}")));
            let _ = self
                .1
                .send(is_seen.recv_timeout(Duration::from_secs(1)).is_ok());
        }
    }

    impl fmt::Debug for Cause {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a cause")
        }
    }

    impl fmt::Display for Cause {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a cause")
        }
    }

    impl Error for Cause {}

    let (store, (is_free, was_free)) = (MockStore::new(), mpsc::channel());
    let limiter = Limiter::new(store.clone(), policy(Strategy::Gcra, "10/s"));
    store.deny(Duration::from_millis(100));
    let waits = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { drop(limiter.wait(ANN, 1, LONG).await) })
    };
    let (first, second, third) = (waits(), waits(), waits());
    sleep(Duration::from_millis(10)).await;
    let cause = limiter.clone();
    store.answer(move |_| {
        Err(StoreError::with_source(
            ErrorKind::Refused,
            Cause(cause.clone(), is_free.clone()),
        ))
    });
    first.await.unwrap();
    second.await.unwrap();
    store.allow();
    third.await.unwrap();
    assert_eq!(was_free.try_iter().collect::<Vec<_>>(), [true, true]);
}

#[tokio::test(start_paused = true)]
async fn throttles_rarely_retry_a_failing_store() {
    let store = Late::new(&LocalStore::default(), Duration::from_micros(10));
    store.fail(true);
    let layer = ThrottleLayer::new(store.clone(), ANN, policy(Strategy::Gcra, "10000/s"));
    let ready = Arc::new(AtomicUsize::new(0));
    for _ in 0..1_000 {
        let (mut service, ready) = (layer.layer(service_fn(ok::<()>)), Arc::clone(&ready));
        tokio::spawn(async move {
            service.ready().await.unwrap().call(()).await.unwrap();
            ready.fetch_add(1, SeqCst);
        });
        sleep(Duration::from_millis(2)).await;
    }
    let before = store.asked().len();
    sleep(Duration::from_secs(10)).await;
    let asked = store.asked().len() - before;
    assert!(asked <= 120, "{asked} in ten seconds");
    store.fail(false);
    sleep(Duration::from_millis(800)).await;
    assert_eq!(ready.load(SeqCst), 1_000);
}

/// The decision has the values at the time of use, not those at the time of the charge.
#[tokio::test(start_paused = true)]
async fn reset_is_relative_to_the_permit() {
    let limiter = Limiter::new(LocalStore::default(), policy(Strategy::Gcra, "1/m burst 5"));
    let _ = limiter.take(ANN, 5).await.unwrap();
    let (first, second) = tokio::join!(limiter.wait(ANN, 1, LONG), limiter.wait(ANN, 1, LONG));
    for decision in [first.unwrap(), second.unwrap()] {
        assert!(
            decision.reset_after() <= Duration::from_secs(300),
            "{decision:?}"
        );
        assert!(
            decision.reset_after() > Duration::from_secs(299),
            "{decision:?}"
        );
    }
}

/// A free slot must not be found by chance.
#[tokio::test(start_paused = true)]
async fn a_local_end_frees_capacity_immediately() {
    for there in [0, 1] {
        let store = Late::new(&LocalStore::default(), Duration::from_millis(there));
        let layer = CallLimitLayer::new(
            store,
            |_: &()| Some(ANN),
            Policy::in_flight("jobs", 2).unwrap(),
        )
        .wait(LONG);
        let service = layer.layer(service_fn(async |()| {
            sleep(Duration::from_millis(10)).await;
            Ok::<_, Infallible>(())
        }));
        let start = Instant::now();
        let calls = join_all((0..60).map(|_| service.clone().oneshot(()))).await;
        assert!(calls.iter().all(Result::is_ok));
        // 300 ms if no slot were ever free.
        assert!(
            start.elapsed() < Duration::from_millis(900),
            "{there}: {:?}",
            start.elapsed()
        );
    }
}

/// A request that is allowed because the store cannot decide is in flight too.
#[tokio::test(start_paused = true)]
async fn passing_after_failed_waits_is_in_flight() {
    let local = LocalStore::default();
    let store = Late::new(&local, Duration::from_millis(1));
    let policies = Policies::from(Policy::in_flight("jobs", 2).unwrap());
    let layer = CallLimitLayer::new(store.clone(), |_: &u64| Some(ANN), policies.clone());
    let service = layer
        .wait(LONG)
        .on_error(OnError::Allow)
        .layer(service_fn(async |seconds| {
            sleep(Duration::from_secs(seconds)).await;
            Ok::<_, Infallible>(())
        }));
    for _ in 0..2 {
        tokio::spawn(service.clone().oneshot(5));
    }
    sleep(Duration::from_millis(10)).await;
    for _ in 0..5 {
        tokio::spawn(service.clone().oneshot(20));
    }
    sleep(Duration::from_millis(200)).await;
    store.fail(true);
    sleep(Duration::from_secs(2)).await;
    store.fail(false);
    // The first two requests have ended, and the five that were allowed later have not: the first renewal counts those
    // five.
    sleep(Duration::from_secs(10)).await;
    let peek: Decision = local
        .check(Check::peek(ANN, &policies, 1))
        .now_or_never()
        .unwrap()
        .unwrap();
    assert_eq!(peek.remaining(), 0);
    sleep(Duration::from_secs(20)).await;
    let peek = local
        .check(Check::peek(ANN, &policies, 1))
        .now_or_never()
        .unwrap()
        .unwrap();
    assert_eq!(peek.remaining(), 2);
    assert!(store.asked().contains(&Mode::Renew));
}

/// Newer charges of other instances must not be refunded.
#[tokio::test(start_paused = true)]
async fn an_unused_permit_refunds_its_charge() {
    for strategy in [Strategy::SlidingLog, Strategy::SlidingWindow { cells: 60 }] {
        let (store, policies) = (LocalStore::default(), policy(strategy, "100/m"));
        let layer = ThrottleLayer::new(store.clone(), ANN, policies.clone());
        let mut held: Vec<_> = (0..50).map(|_| layer.layer(service_fn(ok::<()>))).collect();
        for throttle in &mut held {
            ServiceExt::<()>::ready(throttle).await.unwrap();
        }
        let mut used = vec![];
        for second in [50, 1, 9, 2] {
            sleep(Duration::from_secs(second)).await;
            used.push(
                store
                    .check(Check::up_to(ANN, &policies, 100))
                    .await
                    .unwrap()
                    .granted(),
            );
            held.clear();
        }
        assert_eq!(used, [50, 50, 0, 0], "{strategy:?}");
    }
}

/// A store whose refunds take a second.
#[derive(Clone)]
struct SlowRefunds(LocalStore);

impl Store for SlowRefunds {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let store = self.0.clone();
        Answer::pending(Box::pin(async move {
            sleep(Duration::from_secs(u64::from(check.mode() == Mode::Refund))).await;
            store.check(check).await
        }))
    }
}

/// A turn in flight at the end of the window is not charged to the next window.
#[tokio::test(start_paused = true)]
async fn unused_permits_spare_the_next_window() {
    let (store, policies) = (
        LocalStore::default(),
        policy(Strategy::FixedWindow(Align::FirstHit), "100/m"),
    );
    let throttle = ThrottleLayer::new(SlowRefunds(store.clone()), ANN, policies.clone());
    let mut held: Vec<_> = (0..50)
        .map(|_| throttle.layer(service_fn(ok::<()>)))
        .collect();
    let start = Instant::now();
    for throttle in &mut held {
        ServiceExt::<()>::ready(throttle).await.unwrap();
    }
    sleep_until(start + Duration::from_millis(59_500)).await;
    drop(held);
    let mut used = vec![];
    for _ in 0..2 {
        sleep(Duration::from_millis(900)).await;
        used.push(
            store
                .check(Check::up_to(ANN, &policies, 100))
                .await
                .unwrap()
                .granted(),
        );
    }
    assert_eq!(used, [100, 0]);
}

/// Counts the operations that failed.
#[derive(Clone, Default)]
struct Failures(Arc<AtomicUsize>);

impl Observer for Failures {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { .. } = *event {
            self.0.fetch_add(1, SeqCst);
        }
    }
}

/// An unsent operation is sent again. An operation of unknown outcome is not, and the observer is notified.
#[tokio::test(start_paused = true)]
async fn failed_refunds_of_permits_are_retried_or_reported() {
    for (error, tries, reported, remaining) in [
        (
            StoreError::new(ErrorKind::Unreachable).not_sent(),
            3,
            0,
            100,
        ),
        (StoreError::new(ErrorKind::Timeout), 1, 1, 99),
    ] {
        let (local, store, failures) =
            (LocalStore::default(), MockStore::new(), Failures::default());
        let (asked, failing) = (local.clone(), AtomicU32::new(2));
        store.answer(move |check| match check.mode() {
            Mode::Refund
                if failing
                    .fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1))
                    .is_ok() =>
            {
                Err(error.clone())
            }
            _ => asked.check(check.clone()).now_or_never().unwrap(),
        });
        let policies = policy(Strategy::SlidingLog, "100/m");
        let layer =
            ThrottleLayer::new(store.clone(), ANN, policies.clone()).observer(failures.clone());
        let mut throttle = layer.layer(service_fn(ok::<()>));
        ServiceExt::<()>::ready(&mut throttle).await.unwrap();
        drop(throttle);
        sleep(Duration::from_secs(5)).await;
        let refunds = store
            .asked()
            .iter()
            .filter(|check| check.mode() == Mode::Refund)
            .count();
        assert_eq!((refunds, failures.0.load(SeqCst)), (tries, reported));
        let peek = local.check(Check::peek(ANN, &policies, 1)).await.unwrap();
        assert_eq!(peek.remaining(), remaining);
    }
}

/// A charge that is not due yet under one policy may have expired under another.
#[tokio::test(start_paused = true)]
async fn cancelled_waiters_refund_every_policy_separately() {
    let store = LocalStore::default();
    let slow = Policy::new("slow", Strategy::Gcra, "60/m burst 100").unwrap();
    let quick = Policy::new("quick", Strategy::Gcra, "100/s").unwrap();
    let both = Limiter::new(
        store.clone(),
        Policies::new([slow.clone(), quick.clone()]).unwrap(),
    );
    let [slow, quick] = [slow, quick].map(|policy| Limiter::new(store.clone(), policy));
    assert!(both.take(ANN, 100).await.unwrap().is_allowed());
    let wait = |cost| {
        let both = both.clone();
        tokio::spawn(async move { both.wait(ANN, cost, LONG).await })
    };
    let first = wait(1);
    sleep(Duration::from_millis(5)).await;
    let second = wait(90);
    assert!(first.await.unwrap().unwrap().is_allowed());
    sleep(Duration::from_secs(30)).await;
    assert!(quick.take(ANN, 100).await.unwrap().is_allowed());
    second.abort();
    sleep(Duration::from_millis(4)).await;
    let again = quick.up_to(ANN, 100).await.unwrap().granted();
    assert!(again <= 1, "{again} more of 100 a second");
    // Under the slow policy all of the charge still counts.
    assert!(slow.peek(ANN, 30).await.unwrap().is_allowed());
}

/// A request that ends does not help waiters under a rate.
#[tokio::test(start_paused = true)]
async fn request_ends_do_not_wake_rate_waiters() {
    let store = Late::new(&LocalStore::default(), Duration::from_millis(1));
    let streams = Policy::in_flight("streams", 1_000).unwrap();
    let rate = Policy::new("rate", Strategy::Gcra, "1/h").unwrap();
    let only = Limiter::new(store.clone(), streams.clone());
    let both = Limiter::new(store.clone(), Policies::new([rate, streams]).unwrap());
    assert!(both.take(ANN, 1).await.unwrap().is_allowed());
    for i in 0..10 {
        let only = only.clone();
        tokio::spawn(async move {
            sleep(Duration::from_millis(i)).await;
            for _ in 0..500 {
                let one = only.reserve(ANN, 1).await.unwrap();
                sleep(Duration::from_millis(10)).await;
                drop(one);
            }
        });
    }
    let _ = timeout(Duration::from_secs(5), both.wait(ANN, 1, LONG)).await;
    let asks = store
        .asked()
        .iter()
        .filter(|mode| **mode == Mode::TakeAhead)
        .count();
    assert!(asks <= 5 * 100 + 1, "{asks} asks in 5 s");
}
