use std::future::{Ready, ready};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::sleep;

use crate::Limiter;
use crate::error::StoreError;
use crate::limit::{Charged, ChargedAt, Check, Decision, Key, Mode, Policy, Strategy};
use crate::store::{Answer, LocalStore, Store};
use crate::util::lock;

/// A store that charges in Redis, or in this process.
#[derive(Clone, Default)]
struct Places {
    local: LocalStore,
    in_redis: Arc<AtomicBool>,
    refunds: Arc<Mutex<Vec<Charged>>>,
}

impl Store for Places {
    type Future = Ready<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        if check.mode() == Mode::Refund {
            lock(&self.refunds).push(check.charged_under(0));
        }
        let decision = self.local.check(check).now_or_never().unwrap().unwrap();
        let decision = if self.in_redis.load(SeqCst) {
            decision.decided_at(1)
        } else {
            decision
        };
        Answer::pending(ready(Ok(decision)))
    }
}

/// The turn of a waiter that has left is refunded where it was charged, although the next waiter's turn is elsewhere.
#[tokio::test(start_paused = true)]
async fn turns_of_two_places_are_not_added() {
    let store = Places::default();
    let quota = "1/s burst 10".parse().unwrap();
    let policy = Policy::new("test", Strategy::Gcra, quota).unwrap();
    let limiter = Limiter::new(store.clone(), policy);
    let wait = |cost| limiter.wait(Key::GLOBAL, cost, Duration::from_secs(60));
    assert!(limiter.take(Key::GLOBAL, 10).await.unwrap().is_allowed());

    store.in_redis.store(true, SeqCst);
    let mut first = Box::pin(wait(1));
    assert!(first.as_mut().now_or_never().is_none());
    store.in_redis.store(false, SeqCst);
    let mut second = Box::pin(wait(2));
    assert!(second.as_mut().now_or_never().is_none());
    drop(first);
    assert!(second.await.unwrap().is_allowed());
    sleep(Duration::from_millis(10)).await;
    let refunds = lock(&store.refunds).clone();
    let places: Vec<_> = refunds
        .iter()
        .map(|refund| (refund.cost, refund.at))
        .collect();
    assert_eq!(places, [(1, ChargedAt::Redis(1))]);
}

/// Takes no turns ahead while it is `away`, as a fallback with a share.
#[derive(Clone, Default)]
struct Away {
    local: LocalStore,
    is_away: Arc<AtomicBool>,
    turns: Arc<Mutex<u32>>,
}

impl Store for Away {
    type Future = Ready<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let is_away = self.is_away.load(SeqCst);
        let check = if check.mode() == Mode::TakeAhead && is_away {
            Check::take(*check.key(), check.policies(), check.cost())
        } else {
            *lock(&self.turns) += u32::from(check.mode() == Mode::TakeAhead);
            check
        };
        let decision = self.local.check(check).now_or_never().unwrap().unwrap();
        let decision = if is_away {
            decision.charged_locally(1, false)
        } else {
            decision
        };
        Answer::pending(ready(Ok(decision)))
    }
}

/// A line that always has a waiter reserves no turns in an outage, and does so again afterwards.
#[tokio::test(start_paused = true)]
async fn a_busy_line_reserves_turns_after_an_outage() {
    let store = Away::default();
    store.is_away.store(true, SeqCst);
    let policy = Policy::new("test", Strategy::Gcra, "10/s burst 1".parse().unwrap()).unwrap();
    let limiter = Arc::new(Limiter::new(store.clone(), policy));
    let waiters = (0..8).map(|_| {
        let limiter = Arc::clone(&limiter);
        tokio::spawn(async move {
            for _ in 0..10 {
                let wait = Duration::from_secs(60);
                let decision = limiter.wait(Key::GLOBAL, 1, wait).await.unwrap();
                assert!(decision.is_allowed());
            }
        })
    });
    let waiters: Vec<_> = waiters.collect();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(*lock(&store.turns), 0);
    store.is_away.store(false, SeqCst);
    for waiter in waiters {
        waiter.await.unwrap();
    }
    assert!(*lock(&store.turns) > 30, "{}", lock(&store.turns));
}
