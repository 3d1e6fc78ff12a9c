//! `Limiter`: FIFO waits and deadlines, without losing a grant.

use std::sync::Mutex;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_redis_ratelimit::check::Outcome;
use tower_redis_ratelimit::strategy::Refill;
use tower_redis_ratelimit::{Key, Limiter, LocalStore, RedisStore, Strategy};

use crate::mocks::limiter;
use crate::support::{STRATEGIES, is_gradual, policy, until, unused_port};

const ANN: Key = Key::GLOBAL;
const LONG: Duration = Duration::from_secs(3_600);

#[tokio::test(start_paused = true)]
async fn waits_exactly_as_long_as_needed() {
    for strategy in STRATEGIES {
        let limiter = limiter(strategy, "10/s");
        let _ = limiter.take(ANN, 10).await.unwrap();
        let wait = limiter.peek(ANN, 4).await.unwrap().retry_after().unwrap();
        let start = Instant::now();
        let decision = limiter.wait(ANN, 4, Duration::from_secs(10)).await.unwrap();
        assert_eq!(decision.granted(), 4, "{strategy:?}");
        let late = start
            .elapsed()
            .checked_sub(wait)
            .expect("not before its time");
        // A repeated check has a jitter of a fifth of the period, or 20 ms; a turn taken ahead has no jitter.
        let most = match strategy {
            Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(Refill::Greedy) => 3,
            _ => 23,
        };
        assert!(
            late <= Duration::from_millis(most),
            "{strategy:?}: {late:?} late"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn too_long_waits_are_denied_immediately() {
    let limiter = limiter(Strategy::Gcra, "1/m");
    let _ = limiter.take(ANN, 1).await.unwrap();
    let start = Instant::now();
    let decision = limiter.wait(ANN, 1, Duration::from_secs(59)).await.unwrap();
    assert!(matches!(decision.outcome(), Outcome::Denied { .. }));
    assert_eq!(
        limiter
            .wait(ANN, 2, Duration::from_secs(600))
            .await
            .unwrap()
            .outcome(),
        Outcome::ExceedsCapacity
    );
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(
        limiter
            .wait(ANN, 1, Duration::MAX)
            .await
            .unwrap()
            .is_allowed()
    );
}

#[tokio::test(start_paused = true)]
async fn small_costs_do_not_starve_large() {
    let limiter = limiter(Strategy::Gcra, "10/s");
    let _ = limiter.take(ANN, 10).await.unwrap();
    let order = Mutex::new(vec![]);
    let wait = async |cost: u32| {
        assert!(
            limiter
                .wait(ANN, cost, Duration::from_secs(60))
                .await
                .unwrap()
                .is_allowed()
        );
        order.lock().unwrap().push(cost);
    };
    tokio::join!(wait(10), wait(1), wait(2), wait(9), wait(3));
    assert_eq!(*order.lock().unwrap(), [10, 1, 2, 9, 3]);
}

/// A waiter that runs out of time leaves the queue, and the others stay.
#[tokio::test(start_paused = true)]
async fn deadlines_apply_in_the_queue() {
    let limiter = limiter(Strategy::Gcra, "1/s");
    let _ = limiter.take(ANN, 1).await.unwrap();
    let start = Instant::now();
    let (first, hasty, last) = tokio::join!(
        limiter.wait(ANN, 1, Duration::from_secs(10)),
        limiter.wait(ANN, 1, Duration::from_millis(500)),
        limiter.wait(ANN, 1, Duration::from_secs(10)),
    );
    assert!(
        first.unwrap().is_allowed() && !hasty.unwrap().is_allowed() && last.unwrap().is_allowed()
    );
    assert!(
        start.elapsed() < Duration::from_millis(2_100),
        "{:?}",
        start.elapsed()
    );
}

/// A later waiter with less time does not overtake earlier waiters.
#[tokio::test(start_paused = true)]
async fn later_waiters_do_not_overtake() {
    let limiter = limiter(Strategy::Gcra, "10/s");
    let _ = limiter.take(ANN, 10).await.unwrap();
    let start = Instant::now();
    let patient = limiter.wait(ANN, 5, Duration::from_secs(60));
    let hasty = async {
        for _ in 0..100 {
            let decision = limiter
                .wait(ANN, 1, Duration::from_millis(5))
                .await
                .unwrap();
            assert!(
                start.elapsed() > Duration::from_millis(500) || !decision.is_allowed(),
                "{decision:?}"
            );
        }
    };
    let (patient, ()) = tokio::join!(async { (patient.await.unwrap(), start.elapsed()) }, hasty);
    assert!(
        patient.0.is_allowed() && patient.1 < Duration::from_millis(520),
        "{patient:?}"
    );
}

/// Each quota has a queue of its own, and both are one count.
#[tokio::test(start_paused = true)]
async fn two_quotas_of_a_bucket_are_two_queues() {
    const WAITERS: usize = 20;
    let store = LocalStore::default();
    for strategy in STRATEGIES
        .into_iter()
        .filter(|strategy| is_gradual(*strategy))
    {
        let limiters = ["10/s burst 1", "20/s burst 1"]
            .map(|quota| Limiter::new(store.clone(), policy(strategy, quota)));
        let start = Instant::now();
        let passed = [Mutex::new(vec![]), Mutex::new(vec![])];
        let waits = (0..2 * WAITERS).map(|number| {
            let (limiter, passed) = (&limiters[number % 2], &passed[number % 2]);
            async move {
                // Each comes a moment later, under the other quota than the one before.
                sleep(Duration::from_millis(number as u64)).await;
                let decision = limiter.wait(ANN, 1, LONG).await.unwrap();
                assert!(decision.is_allowed());
                passed.lock().unwrap().push((number, start.elapsed()));
            }
        });
        join_all(waits).await;
        let mut all = vec![];
        for passed in passed {
            let passed = passed.into_inner().unwrap();
            assert!(passed.is_sorted(), "{strategy}: {passed:?}");
            all.extend(passed.into_iter().map(|(_, time)| time));
        }
        all.sort();
        println!("{strategy}: {all:?}");
        let most = |time: Duration| 1.0 + 20.0 * time.as_secs_f64() + 1e-6;
        let granted = (1..).zip(&all);
        for (granted, time) in granted {
            assert!(
                f64::from(granted) <= most(*time),
                "{strategy}: {granted} at {time:?}"
            );
        }
    }
}

/// Nor does a wait that is dropped between its grant and its next poll.
#[tokio::test]
async fn waits_dropped_before_polling_take_nothing() {
    const WAITS: u32 = 10_000;
    let limiter = limiter(Strategy::Gcra, "100000/100d");
    let mut granted = 0;
    for i in 0..WAITS {
        let wait = limiter.wait(ANN, 1, Duration::from_secs(10));
        // The dispatcher takes on its own task, which progresses while this one yields.
        let impatient = async {
            for _ in 0..i % 4 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            () = impatient => {}
            decision = wait => granted += decision.unwrap().granted(),
        }
    }
    assert!(
        (1..WAITS).contains(&granted),
        "{granted} of {WAITS} were waited for"
    );
    until("the rest is refunded", async || {
        limiter.peek(ANN, 1).await.unwrap().remaining() == 100_000 - granted
    })
    .await;
}

#[tokio::test]
async fn a_store_error_ends_the_wait() {
    let store = RedisStore::connect_lazy(format!("redis://127.0.0.1:{}/", unused_port())).unwrap();
    let limiter = Limiter::new(store, policy(Strategy::Gcra, "1/s"));
    assert!(limiter.wait(ANN, 1, Duration::from_secs(10)).await.is_err());
}
