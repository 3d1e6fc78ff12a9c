//! Reservations of a `Limiter`.

use std::time::Duration;

use tokio::time::{advance, sleep};
use tower_redis_ratelimit::settle::{Reservation, ReserveError};
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policy, RedisStore, Strategy};

use crate::mocks::limiter;
use crate::support::{STRATEGIES, is_gradual, policy, unused_port};

const ANN: Key = Key::GLOBAL;

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

/// A faster quota has drained a reservation of the old one: nothing of it is left to refund, and the charges that
/// were made since stay.
#[tokio::test(start_paused = true)]
async fn a_reservation_across_a_change_frees_no_others() {
    for strategy in STRATEGIES
        .into_iter()
        .filter(|strategy| is_gradual(*strategy))
    {
        let store = LocalStore::default();
        let [old, new] = ["1/m burst 10", "10/s"]
            .map(|quota| Limiter::new(store.clone(), policy(strategy, quota)));
        let [early, late] = [
            old.reserve(ANN, 4).await.unwrap(),
            old.reserve(ANN, 6).await.unwrap(),
        ];
        assert!(!new.take(ANN, 1).await.unwrap().is_allowed(), "{strategy}");
        // The denied take of the faster quota drains from then on: half of the later reservation counts.
        advance(Duration::from_millis(300)).await;
        drop(late);
        // The refund is rounded down by less than what drains in this time.
        advance(Duration::from_millis(1)).await;
        assert_eq!(left(&new).await, 6, "{strategy}");
        advance(Duration::from_millis(699)).await;
        assert_eq!(new.take(ANN, 10).await.unwrap().granted(), 10, "{strategy}");
        drop(early);
        assert_eq!(left(&new).await, 0, "{strategy}: others' charges");
        // A reservation of the new quota is refunded whole.
        advance(Duration::from_secs(1)).await;
        drop(new.reserve(ANN, 10).await.unwrap());
        assert_eq!(left(&new).await, 10, "{strategy}");
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
        RedisStore::connect_lazy(format!("redis://127.0.0.1:{}/", unused_port())).unwrap();
    let limiter = Limiter::new(unreachable, policy(Strategy::Gcra, "10/h"));
    let error = limiter.reserve(ANN, 1).await.unwrap_err();
    assert!(
        matches!(&error, ReserveError::Failed(error) if error.is_not_sent()),
        "{error:?}"
    );
    assert!(error.to_string().contains("cannot be reached"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_reservation_waits_for_its_turn() {
    for strategy in STRATEGIES {
        let limiter = limiter(strategy, "10/s");
        limiter.reserve(ANN, 10).await.unwrap().keep();
        let within = |time| limiter.reserve_within(ANN, 4, time);
        let denied = within(Duration::from_millis(1)).await.unwrap_err();
        assert!(matches!(denied, ReserveError::Denied(_)), "{strategy:?}");
        let waited = within(Duration::from_secs(2)).await.unwrap();
        assert_eq!(waited.decision().granted(), 4, "{strategy:?}");
        let before = left(&limiter).await;
        waited.settle(1);
        assert_eq!(left(&limiter).await, before + 3, "{strategy:?}");
        let never = limiter.reserve_within(ANN, 11, Duration::MAX).await;
        assert!(never.is_err(), "{strategy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waited_slot_is_held_and_released() {
    let jobs = Policy::in_flight("jobs", 1).unwrap();
    let limiter = Limiter::new(LocalStore::default(), jobs);
    let within = || limiter.reserve_within(ANN, 1, Duration::from_secs(300));
    let first = limiter.reserve(ANN, 1).await.unwrap();
    let second = within();
    drop(first);
    let second = second.await.unwrap();
    // Longer than a slot that is not renewed.
    sleep(Duration::from_secs(200)).await;
    assert_eq!(left(&limiter).await, 0);
    drop(second);
    assert!(limiter.reserve(ANN, 1).await.is_ok());
}
