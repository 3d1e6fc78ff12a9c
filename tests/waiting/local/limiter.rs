//! `Limiter`: FIFO waits, deadlines, and reservations, without losing a grant.

use std::sync::Mutex;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;
use tower_redis_ratelimit::check::{Outcome, Source};
use tower_redis_ratelimit::settle::{Reservation, ReserveError};
use tower_redis_ratelimit::strategy::Refill;
use tower_redis_ratelimit::{
    Key, Limiter, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
};

use crate::support::{RedisServer, STRATEGIES, free_port, policy, until};

const ANN: Key = Key::GLOBAL;

fn limiter(strategy: Strategy, quota: &str) -> Limiter<LocalStore> {
    Limiter::new(LocalStore::default(), policy(strategy, quota))
}

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

/// A dropped wait leaves the queue and charges nothing, at whichever moment it is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_wait_takes_nothing() {
    let server = RedisServer::start();
    let limiter = Limiter::new(
        RedisStore::connect(server.url()).await.unwrap(),
        policy(Strategy::Gcra, "1000/100d"),
    );
    let mut granted = 0;
    for micros in 0..200 {
        let wait = limiter.wait(ANN, 1, Duration::from_secs(10));
        if let Ok(decision) = tokio::time::timeout(Duration::from_micros(micros * 5), wait).await {
            granted += decision.unwrap().granted();
        }
    }
    until("the rest is refunded", async || {
        limiter.peek(ANN, 1).await.unwrap().remaining() == 1000 - granted
    })
    .await;
    let shown = format!("{limiter:?}");
    assert!(
        shown.contains("WaitQueues { waiting: 0, .. }"),
        "a request still waits: {shown}"
    );
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_works_with_redis() {
    let server = RedisServer::start();
    let store = RedisStore::connect(server.url()).await.unwrap();
    let limiter = Limiter::new(store, policy(Strategy::Gcra, "100/s burst 10"));
    let waits = (0..40).map(|_| limiter.wait(ANN, 1, Duration::from_secs(20)));
    let decisions: Vec<_> = join_all(waits)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(
        decisions
            .iter()
            .all(|decision| decision.is_allowed() && decision.source() == Source::Redis)
    );
}

#[tokio::test]
async fn a_store_error_ends_the_wait() {
    let store = RedisStore::connect_lazy(format!("redis://127.0.0.1:{}/", free_port())).unwrap();
    let limiter = Limiter::new(store, policy(Strategy::Gcra, "1/s"));
    assert!(limiter.wait(ANN, 1, Duration::from_secs(10)).await.is_err());
}

const LOG: &str = "1000/h";

async fn left(limiter: &Limiter<LocalStore>) -> u32 {
    limiter.peek(ANN, 0).await.unwrap().remaining()
}

#[tokio::test(start_paused = true)]
async fn reservations_can_be_settled_kept_refunded() {
    for strategy in STRATEGIES {
        let limiter = limiter(strategy, LOG);
        let reserve = async |cost| limiter.reserve(ANN, cost).await.unwrap();
        let first = reserve(600).await;
        assert_eq!(
            (first.decision().granted(), left(&limiter).await),
            (600, 400),
            "{strategy:?}"
        );
        first.settle(100);
        assert_eq!(left(&limiter).await, 900, "{strategy:?}");
        drop(reserve(50).await);
        assert_eq!(left(&limiter).await, 900, "{strategy:?}");
        reserve(100).await.keep();
        assert_eq!(left(&limiter).await, 800, "{strategy:?}");
        reserve(10).await.settle(300);
        assert_eq!(left(&limiter).await, 500, "{strategy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_reservation_costs_what_was_counted() {
    let limiter = limiter(Strategy::SlidingLog, LOG);
    for (count, left_over) in [
        (
            (|reservation| (0..30).for_each(|_| reservation.add(1))) as fn(&Reservation),
            970,
        ),
        (|reservation| reservation.add(150), 820),
        (|reservation| reservation.set(0), 820),
        (
            |reservation| (reservation.add(99), reservation.set(10)).1,
            810,
        ),
    ] {
        let reservation = limiter.reserve(ANN, 100).await.unwrap();
        count(&reservation);
        drop(reservation);
        assert_eq!(left(&limiter).await, left_over);
    }
    for (end, left_over) in [
        (Reservation::keep as fn(Reservation), 710),
        (|reservation| reservation.settle(5), 705),
    ] {
        let reservation = limiter.reserve(ANN, 100).await.unwrap();
        reservation.add(50);
        end(reservation);
        assert_eq!(
            left(&limiter).await,
            left_over,
            "independent of the counted cost"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn failed_reservations_report_the_reason() {
    let limiter = limiter(Strategy::SlidingLog, "10/h");
    let first = limiter.reserve(ANN, 8).await.unwrap();
    let ReserveError::Denied(denied) = limiter.reserve(ANN, 8).await.unwrap_err() else {
        panic!("a denial")
    };
    assert_eq!(
        (denied.decision().remaining(), denied.retry_after()),
        (2, Some(Duration::from_secs(3_600)))
    );
    drop(first);
    assert!(limiter.reserve(ANN, 8).await.is_ok());

    let unreachable =
        RedisStore::connect_lazy(format!("redis://127.0.0.1:{}/", free_port())).unwrap();
    let limiter = Limiter::new(unreachable, policy(Strategy::Gcra, "10/h"));
    let error = limiter.reserve(ANN, 1).await.unwrap_err();
    assert!(
        matches!(&error, ReserveError::Failed(error) if error.is_not_sent()),
        "{error:?}"
    );
    assert!(error.to_string().contains("cannot be reached"), "{error}");
}

/// A reservation that is dropped outside of a runtime is refunded with the next request on a runtime.
#[test]
fn a_reservation_outlives_its_runtime() {
    let server = RedisServer::start();
    let limiter = Limiter::new(
        RedisStore::connect_lazy(server.url()).unwrap(),
        policy(Strategy::SlidingLog, "10/h"),
    );
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let first = runtime();
    let reserved = first.block_on(limiter.reserve(ANN, 10)).unwrap();
    drop(first);
    drop(reserved);
    runtime().block_on(async {
        // A denied reservation also makes the queue send the refund.
        let refunded = async || limiter.reserve(ANN, 10).await.is_ok();
        until("it is refunded", refunded).await;
    });
}

/// Otherwise, refunding five tokens would free requests in flight, and charging 300 tokens would
/// count 300 requests.
#[tokio::test]
async fn charges_and_refunds_are_not_in_flight() {
    let tokens = Policy::new("tokens", Strategy::SlidingLog, Quota::per_minute(1_000)).unwrap();
    let both = Policies::new([tokens, Policy::in_flight("streams", 4).unwrap()]).unwrap();
    let limiter = Limiter::new(LocalStore::default(), both);
    let user = Key::new("user");
    let _held = [
        limiter.reserve(user, 10).await.unwrap(),
        limiter.reserve(user, 10).await.unwrap(),
    ];
    assert_eq!(
        limiter.refund(user, 5).await.unwrap().decision().granted(),
        5
    );
    assert_eq!(
        limiter
            .charge(user, 300)
            .await
            .unwrap()
            .decision()
            .granted(),
        300
    );
    let each: Vec<u32> = limiter
        .peek(user, 0)
        .await
        .unwrap()
        .each()
        .map(|each| each.remaining())
        .collect();
    assert_eq!(each, [685, 2]);
}
