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
