//! Permits in `poll_ready`.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::{join_all, poll_fn};
use futures_util::{FutureExt, stream};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};
use tower::balance::p2c::Balance;
use tower::buffer::Buffer;
use tower::limit::ConcurrencyLimit;
use tower::load::Constant;
use tower::retry::{Policy as RetryPolicy, Retry};
use tower::timeout::Timeout;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_redis_ratelimit::check::{Check, Mode};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::reject::OnError;
use tower_redis_ratelimit::select::Live;
use tower_redis_ratelimit::store::{ErrorKind, MockStore, Store, StoreError};
use tower_redis_ratelimit::{Fallback, Key, LocalStore, Policies, Policy, Strategy, ThrottleLayer};
use tower_test::mock;

use crate::mocks::{Problems, watched};
use crate::support::policy;

const KEY: Key = Key::GLOBAL;

/// Returns the charged units of a quota that frees none during a test.
async fn charged(store: &impl Store, policies: &Policies) -> u32 {
    let peek = store.check(Check::peek(KEY, policies, 0)).await.unwrap();
    peek.capacity() - peek.remaining()
}

/// Lets all tasks run until none has anything to do.
async fn settle() {
    sleep(Duration::from_millis(1)).await;
}

async fn ok(_: &'static str) -> Result<(), Infallible> {
    Ok(())
}

/// Three instances with fifty tasks each: together they keep to the rate and use it, with about one
/// call per grant.
#[tokio::test(start_paused = true)]
async fn instances_share_the_rate_without_a_herd() {
    for (strategy, quota, used, calls) in [
        (Strategy::Gcra, "50/s", 0.97, 1.02),
        (Strategy::Gcra, "50/s burst 3", 0.97, 1.02),
        // A burst below the number of instances: they contend.
        (Strategy::Gcra, "50/s burst 1", 0.95, 1.8),
        (Strategy::LeakyBucket, "50/s burst 10", 0.97, 1.02),
        (
            Strategy::TokenBucket(Default::default()),
            "50/s",
            0.97,
            1.02,
        ),
        (
            Strategy::FixedWindow(Default::default()),
            "50/s",
            0.95,
            1.02,
        ),
        (Strategy::SlidingWindow { cells: 10 }, "50/s", 0.9, 1.2),
        (Strategy::SlidingLog, "50/s", 0.92, 1.7),
        (Strategy::SlidingCounter, "50/s", 0.9, 3.0),
    ] {
        let (_, store) = watched();
        let policies = policy(strategy, quota);
        let burst = policies[0].quota().capacity();
        let (start, end) = (Instant::now(), Duration::from_secs(20));
        let times = Arc::new(Mutex::new(vec![]));
        let tasks = (0..3).flat_map(|_| {
            let layer = ThrottleLayer::new(store.clone(), KEY, policies.clone());
            let times = Arc::clone(&times);
            (0..50).map(move |_| {
                // If calls ended immediately, one task could take all permits before another one
                // starts.
                let calls = service_fn(async |request| {
                    yield_now().await;
                    ok(request).await
                });
                let (mut service, times) = (layer.layer(calls), Arc::clone(&times));
                async move {
                    let mut calls = 0;
                    while start.elapsed() < end {
                        service.ready().await.unwrap().call("").await.unwrap();
                        times.lock().unwrap().push(start.elapsed());
                        calls += 1;
                    }
                    calls
                }
            })
        });
        let each: Vec<u32> = join_all(tasks.map(tokio::spawn))
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        let times = times.lock().unwrap();
        let in_time = times.iter().filter(|time| **time <= end).count() as f64;
        let may = f64::from(50 * 20 + burst);
        // For windows, the number of grants depends on the start of the windows.
        assert!(
            in_time >= used * may,
            "{strategy:?} {quota}: {in_time} of {may}"
        );
        for (i, from) in times.iter().enumerate() {
            let within = times[i..]
                .iter()
                .take_while(|time| **time < *from + Duration::from_secs(1))
                .count();
            assert!(
                within as u32 <= 50 + burst,
                "{strategy:?} {quota}: {within} in a second"
            );
        }
        let asked = store.asked().len() as f64 / times.len() as f64;
        assert!(
            asked <= calls,
            "{strategy:?} {quota}: {asked} calls per grant"
        );
        // The tasks of an instance queue. Instances alternate if permits are taken in advance;
        // otherwise chance decides which instance is first at the start of a window.
        let takes_ahead = matches!(
            strategy,
            Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(_)
        );
        let takes_turns = takes_ahead && burst >= 3;
        for tasks in each.chunks(if takes_turns { 150 } else { 50 }) {
            let (least, most) = (tasks.iter().min().unwrap(), tasks.iter().max().unwrap());
            // Two tasks with the same time may swap their order, and the end may fall between them.
            assert!(
                most - least <= if takes_turns { 3 } else { 2 },
                "{strategy:?} {quota}: {tasks:?}"
            );
        }
    }
}

/// Whenever tasks are dropped, the final charge equals the number of calls, and no task stays
/// blocked.
#[tokio::test(start_paused = true)]
async fn a_storm_of_cancels_loses_nothing() {
    for seed in 0..40 {
        let (local, _) = watched();
        let policies = policy(Strategy::Gcra, "100000/100d");
        let layers: Vec<_> = (0..3)
            .map(|_| ThrottleLayer::new(local.clone(), KEY, policies.clone()))
            .collect();
        let called = Arc::new(AtomicU32::new(0));
        // Leave little quota: with more, all of it would be taken immediately.
        let _ = local
            .check(Check::charge(KEY, &policies, 100_000 - seed * 3))
            .await
            .unwrap();
        let before = charged(&local, &policies).await;
        let tasks = (0..90).map(|i| {
            let (layer, called) = (layers[i % 3].clone(), Arc::clone(&called));
            tokio::spawn(async move {
                let mut rng = Rng::with_seed(u64::from(seed) * 1_000 + i as u64);
                for _ in 0..20 {
                    let mut service = layer.layer(service_fn(ok));
                    let patience = Duration::from_micros(rng.u64(..3_000));
                    if let Ok(ready) = timeout(patience, service.ready()).await {
                        if rng.bool() {
                            sleep(Duration::from_micros(rng.u64(..3_000))).await;
                        }
                        if rng.u8(..4) > 0 {
                            ready.unwrap().call("").await.unwrap();
                            called.fetch_add(1, SeqCst);
                        }
                    }
                }
            })
        });
        for task in tasks {
            task.await.unwrap();
        }
        settle().await;
        let used = charged(&local, &policies).await - before;
        assert_eq!(used, called.load(SeqCst), "seed {seed}");
        assert!(
            layers
                .iter()
                .all(|layer| format!("{layer:?}").contains("waiting: 0")),
            "{layers:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn unused_permits_are_refunded() {
    let (local, _) = watched();
    let policies = policy(Strategy::Gcra, "10/100d");
    let layer = ThrottleLayer::new(local.clone(), KEY, policies.clone());
    let mut service = layer.layer(service_fn(ok));
    service.ready().await.unwrap();
    service.ready().await.unwrap();
    assert_eq!(
        charged(&local, &policies).await,
        1,
        "ready twice is one permit"
    );
    let mut clone = service.clone();
    clone.ready().await.unwrap();
    assert_eq!(
        charged(&local, &policies).await,
        2,
        "a clone has its own permit"
    );
    clone.call("").await.unwrap();
    drop((service, clone));
    settle().await;
    assert_eq!(
        charged(&local, &policies).await,
        1,
        "what was not called goes back"
    );

    let mut unready = layer.layer(service_fn(ok));
    unready.call("").await.unwrap();
    settle().await;
    assert_eq!(
        charged(&local, &policies).await,
        2,
        "a call that was not ready is charged"
    );
}

/// The permit passes to the next waiter in this process, without a store call.
#[tokio::test(start_paused = true)]
async fn an_unused_permit_passes_on() {
    // The turn that was reserved for the second is refunded.
    for quota in ["25/s burst 1", "1/h"] {
        let (_, store) = watched();
        let layer = ThrottleLayer::new(store.clone(), KEY, policy(Strategy::Gcra, quota));
        let mut first = layer.layer(service_fn(ok));
        first.ready().await.unwrap();
        let second = tokio::spawn(layer.layer(service_fn(ok)).oneshot(""));
        settle().await;
        let before = store.asked().len();
        let start = Instant::now();
        drop(first);
        second.await.unwrap().unwrap();
        assert!(start.elapsed() < Duration::from_millis(5));
        settle().await;
        let since: Vec<_> = store.asked()[before..]
            .iter()
            .map(|check| (check.mode(), check.cost()))
            .collect();
        assert_eq!(since, [(Mode::Refund, 1)], "{quota}");
    }
}

/// A charge that has expired before its permit is used is charged again; otherwise idle services
/// could save up calls.
#[tokio::test(start_paused = true)]
async fn expired_permits_are_charged_again() {
    let (_, store) = watched();
    let layer = ThrottleLayer::new(store.clone(), KEY, policy(Strategy::Gcra, "10/s"));
    for (held, charges) in [(50, 0), (950, 0), (1_050, 1)] {
        let before = store.asked().len();
        let mut service = layer.layer(service_fn(ok));
        service.ready().await.unwrap();
        sleep(Duration::from_millis(held)).await;
        service.call("").await.unwrap();
        settle().await;
        let asked = store.asked();
        let again = asked[before..]
            .iter()
            .filter(|check| check.mode() == Mode::Charge)
            .count();
        assert_eq!(again, charges, "after {held} ms");
        // A permit with an expired charge is not refunded either.
        let mut service = layer.layer(service_fn(ok));
        service.ready().await.unwrap();
        let before = store.asked().len();
        sleep(Duration::from_millis(1_000)).await;
        drop(service);
        settle().await;
        assert_eq!(store.asked().len(), before);
    }
}

/// Under a policy whose charge has expired, a permit is charged again or not refunded; other
/// policies are unaffected.
#[tokio::test(start_paused = true)]
async fn permits_expire_under_each_policy_separately() {
    let (local, store) = watched();
    let named = |name, quota: &str| Policy::new(name, Strategy::Gcra, quota).unwrap();
    for least in ["7/s", "7000/s"] {
        let policies = Policies::new([named("second", least), named("day", "20/d")]).unwrap();
        let day = Policies::from(policies[1].clone());
        for (used, mode) in [(true, Mode::Charge), (false, Mode::Refund)] {
            let charged_before = charged(&local, &day).await;
            let layer = ThrottleLayer::new(store.clone(), KEY, policies.clone());
            let mut service = layer.layer(service_fn(ok));
            service.ready().await.unwrap();
            let before = store.asked().len();
            sleep(Duration::from_millis(1_500)).await;
            if used {
                service.call("").await.unwrap();
            }
            drop(service);
            settle().await;
            let asked = &store.asked()[before..];
            assert_eq!(asked.len(), 1, "{least}: {asked:?}");
            assert_eq!(asked[0].mode(), mode, "{least}");
            // A refund is of both: the store knows what is left of each.
            let names = asked[0].policies().iter().map(|policy| policy.name());
            let expected: &[&str] = if used {
                &["second"]
            } else {
                &["second", "day"]
            };
            assert!(names.eq(expected.iter().copied()), "{least}: {asked:?}");
            let of_day = charged(&local, &day).await - charged_before;
            assert_eq!(of_day, u32::from(used), "{least}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_unready_service_takes_no_permit() {
    let (local, _) = watched();
    let policies = policy(Strategy::Gcra, "10/100d");
    let layer = ThrottleLayer::new(local.clone(), KEY, policies.clone());
    let (inner, mut handle) = mock::pair::<(), ()>();
    let mut service = layer.layer(inner);
    handle.allow(0);
    assert!(service.ready().now_or_never().is_none());
    settle().await;
    assert_eq!(charged(&local, &policies).await, 0);
    handle.allow(1);
    service.ready().await.unwrap();
    assert_eq!(charged(&local, &policies).await, 1);
    let response = service.call(());
    let ((), reply) = handle.next_request().await.unwrap();
    reply.send_response(());
    response.await.unwrap();
    settle().await;
    assert_eq!(charged(&local, &policies).await, 1);
}

/// The service may fail while it holds its permit, or while it waits for one.
#[tokio::test(start_paused = true)]
async fn a_failing_service_refunds_its_permit() {
    for quota in ["10/100d", "1/100d"] {
        let (local, _) = watched();
        let policies = policy(Strategy::Gcra, quota);
        let layer = ThrottleLayer::new(local.clone(), KEY, policies.clone());
        let before = if quota.starts_with("1/") { 1 } else { 0 };
        let _ = local
            .check(Check::take(KEY, &policies, before))
            .await
            .unwrap();
        let (inner, mut handle) = mock::pair::<(), ()>();
        let mut service = layer.layer(inner);
        let _ = service.ready().now_or_never();
        settle().await;
        let _ = service.ready().now_or_never();
        handle.send_error("gone");
        let error = service.ready().await.map(drop).unwrap_err();
        assert_eq!(error.to_string(), "gone");
        settle().await;
        assert_eq!(charged(&local, &policies).await, before, "{quota}");
    }
}

#[tokio::test(start_paused = true)]
async fn waits_under_buffer_limit_and_timeout() {
    let (local, _) = watched();
    let policies = policy(Strategy::Gcra, "1/s burst 3");
    let layer = ThrottleLayer::new(local.clone(), KEY, policies.clone());
    let start = Instant::now();
    let inner = ConcurrencyLimit::new(layer.layer(service_fn(ok)), 2);
    let buffered = Buffer::new(inner, NonZeroUsize::MIN.get() * 8);
    let calls = (0..6).map(|_| buffered.clone().oneshot(""));
    assert!(join_all(calls).await.iter().all(Result::is_ok));
    assert!(
        (3.0..3.1).contains(&start.elapsed().as_secs_f64()),
        "{:?}",
        start.elapsed()
    );

    // The timeout applies to the call, not to the wait for readiness; giving up the wait loses
    // nothing.
    let mut timed = Timeout::new(layer.layer(service_fn(ok)), Duration::from_millis(1));
    assert!(
        timeout(Duration::from_millis(300), timed.ready())
            .await
            .is_err()
    );
    timed.ready().await.unwrap().call("").await.unwrap();
    assert!(
        (4.0..4.1).contains(&start.elapsed().as_secs_f64()),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn every_retry_takes_a_permit() {
    #[derive(Clone)]
    struct Twice(u32);

    impl<R: Clone, A, E> RetryPolicy<R, A, E> for Twice {
        type Future = std::future::Ready<()>;

        fn retry(&mut self, _: &mut R, result: &mut Result<A, E>) -> Option<Self::Future> {
            self.0 = self.0.checked_sub(u32::from(result.is_err()))?;
            result.is_err().then(|| std::future::ready(()))
        }

        fn clone_request(&mut self, request: &R) -> Option<R> {
            Some(request.clone())
        }
    }

    let (local, _) = watched();
    let policies = policy(Strategy::Gcra, "10/100d");
    let layer = ThrottleLayer::new(local.clone(), KEY, policies.clone());
    let fails = layer.layer(service_fn(async |_: &str| {
        Err::<(), _>(BoxError::from("no"))
    }));
    let retry = Retry::new(Twice(2), fails);
    retry.oneshot("").await.unwrap_err();
    settle().await;
    assert_eq!(charged(&local, &policies).await, 3);
}

/// Balanced services that are ready but idle hold a permit each, and release it when they are
/// dropped.
#[tokio::test(start_paused = true)]
async fn balanced_services_share_one_count() {
    let (local, _) = watched();
    let policies = policy(Strategy::Gcra, "100/100d");
    let layer = ThrottleLayer::new(local.clone(), KEY, policies.clone());
    let services = (0..4).map(|i| {
        Ok::<_, Infallible>(tower::discover::Change::Insert(
            i,
            Constant::new(layer.layer(service_fn(ok)), i),
        ))
    });
    let mut balance = Balance::new(Box::pin(stream::iter(services)));
    for _ in 0..20 {
        balance.ready().await.unwrap().call("").await.unwrap();
    }
    let held = charged(&local, &policies).await - 20;
    assert!(held <= 4, "{held} held by 4");
    drop(balance);
    settle().await;
    assert_eq!(charged(&local, &policies).await, 20);
}

/// While a fallback decides with this instance's share, permits are granted at that rate.
#[tokio::test(start_paused = true)]
async fn an_outage_limits_waiters_by_share() {
    let redis = MockStore::new();
    redis.fail(StoreError::new(ErrorKind::Unreachable));
    let store = Fallback::builder(redis, LocalStore::default())
        .share(5)
        .build();
    let layer = ThrottleLayer::new(store, KEY, policy(Strategy::Gcra, "50/s burst 5"));
    let start = Instant::now();
    for _ in 0..21 {
        layer.layer(service_fn(ok)).oneshot("").await.unwrap();
    }
    assert!(
        (1.99..2.1).contains(&start.elapsed().as_secs_f64()),
        "{:?}",
        start.elapsed()
    );
}

/// The caller is idle between `ready` and `call`.
#[tokio::test(start_paused = true)]
async fn a_refusal_expires() {
    async fn call(store: impl Store, idle: Duration) -> Result<(), BoxError> {
        let layer = ThrottleLayer::new(store, KEY, policy(Strategy::Gcra, "1/m"));
        let mut client = layer.max_wait(Duration::from_secs(1)).layer(service_fn(ok));
        let ready = client.ready().await?;
        sleep(idle).await;
        ready.call("").await
    }
    let policies = policy(Strategy::Gcra, "1/m");
    for (seconds, passes) in [(0, false), (59, false), (61, true), (3_600, true)] {
        let local = LocalStore::default();
        let take = Check::take(KEY, &policies, 1);
        let _ = local.check(take).await.unwrap();
        let answer = call(local.clone(), Duration::from_secs(seconds)).await;
        assert_eq!(answer.is_ok(), passes, "after {seconds} s");
        assert_eq!(charged(&local, &policies).await, 1);
    }
    let failing = MockStore::new();
    failing.fail(StoreError::new(ErrorKind::Unreachable));
    for (millis, passes) in [(0, false), (249, false), (251, true)] {
        let answer = call(failing.clone(), Duration::from_millis(millis)).await;
        assert_eq!(answer.is_ok(), passes, "after {millis} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn an_undecided_permit_is_requested_again() {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<String>>>);

    impl Observer for Log {
        fn notify(&self, event: &Event<'_>) {
            match *event {
                Event::Decided {
                    elapsed, decision, ..
                } => {
                    let waited = elapsed.as_millis();
                    self.0
                        .lock()
                        .unwrap()
                        .push(format!("{} after {waited} ms", decision.outcome().as_str()));
                }
                Event::Failed { error, .. } => {
                    self.0
                        .lock()
                        .unwrap()
                        .push(error.kind().as_str().to_owned());
                }
                Event::Uncounted { reason, .. } => {
                    self.0.lock().unwrap().push(reason.as_str().to_owned());
                }
                _ => {}
            }
        }
    }

    let (_, store) = watched();
    let log = Log::default();
    let layer = ThrottleLayer::new(store.clone(), KEY, policy(Strategy::Gcra, "10/s"))
        .observer(log.clone());
    store.fail(StoreError::new(ErrorKind::Unreachable));
    let mut service = layer.layer(service_fn(ok));
    let ready = tokio::spawn(async move { service.ready().await.map(drop) });
    sleep(Duration::from_millis(600)).await;
    assert!(
        !ready.is_finished() && store.asked().len() == 3,
        "{:?}",
        store.asked()
    );
    store.allow();
    ready.await.unwrap().unwrap();
    assert_eq!(
        *log.0.lock().unwrap(),
        [
            "unreachable",
            "unreachable",
            "unreachable",
            "allowed after 0 ms"
        ]
    );

    store.fail(StoreError::new(ErrorKind::Unreachable));
    let mut lenient = layer.on_error(OnError::Allow).layer(service_fn(ok));
    log.0.lock().unwrap().clear();
    lenient.ready().await.unwrap().call("").await.unwrap();
    assert_eq!(*log.0.lock().unwrap(), ["unreachable", "failed"]);
}

/// No call passes under blocked policies, and the service is ready after others replace them.
#[tokio::test(start_paused = true)]
async fn blocked_policies_hold_calls() {
    let live = Live::new(Policies::blocked());
    let layer = ThrottleLayer::new(LocalStore::default(), KEY, live.clone());
    let mut service = layer.layer(service_fn(ok));
    let ready = tokio::spawn(async move { service.ready().await?.call("").await });
    sleep(Duration::from_secs(60)).await;
    assert!(!ready.is_finished());
    live.replace(policy(Strategy::Gcra, "10/s"));
    ready.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_panicking_observer_fails_one_call() {
    /// Panics once.
    struct Panics(AtomicU32);

    impl Observer for Panics {
        fn notify(&self, event: &Event<'_>) {
            if let Event::Decided { .. } = *event {
                assert!(self.0.fetch_add(1, SeqCst) > 0, "the first one");
            }
        }
    }

    let (store, policies) = (LocalStore::default(), policy(Strategy::Gcra, "2/h"));
    let layer = ThrottleLayer::new(store.clone(), KEY, policies.clone())
        .observer(Panics(AtomicU32::new(0)));
    let mut service = layer.layer(service_fn(ok));
    assert!(
        AssertUnwindSafe(service.ready())
            .catch_unwind()
            .await
            .is_err()
    );
    service.ready().await.unwrap().call("").await.unwrap();
    assert_eq!(
        charged(&store, &policies).await,
        1,
        "the permit of the first has gone back"
    );
}

#[tokio::test(start_paused = true)]
async fn wakes_the_task_that_polled_last() {
    let (_, store) = watched();
    let layer = ThrottleLayer::new(store, KEY, policy(Strategy::Gcra, "1/s"));
    layer.layer(service_fn(ok)).oneshot("").await.unwrap();
    let mut service = layer.layer(service_fn(ok));
    let once = poll_fn(|cx| {
        let _ = Service::<&str>::poll_ready(&mut service, cx);
        std::task::Poll::Ready(())
    });
    once.await;
    tokio::spawn(async move { service.ready().await.unwrap().call("").await.unwrap() })
        .await
        .unwrap();
}

/// A throttle does not see calls end, so such a policy would never be freed.
#[tokio::test(start_paused = true)]
async fn in_flight_policies_are_skipped_and_reported() {
    let rate = Policy::new("rate", Strategy::Gcra, "10/s burst 1").unwrap();
    let in_flight = Policy::in_flight("calls", 1).unwrap();
    let both = Policies::new([rate, in_flight.clone()]).unwrap();
    for (policies, took) in [(both, 200), (in_flight.into(), 0)] {
        let problems = Problems::default();
        let layer =
            ThrottleLayer::new(LocalStore::default(), KEY, policies).observer(problems.clone());
        let mut service = layer.layer(service_fn(ok));
        let start = Instant::now();
        for _ in 0..3 {
            service.ready().await.unwrap().call("").await.unwrap();
        }
        let elapsed = start.elapsed().as_millis();
        assert!((took..took + 20).contains(&elapsed), "{elapsed} ms");
        let problems = problems.0.lock().unwrap();
        assert!(
            problems.len() == 1
                && problems[0].contains("`RateLimitLayer` (in-flight-in-throttle: "),
            "{problems:?}"
        );
    }
}
