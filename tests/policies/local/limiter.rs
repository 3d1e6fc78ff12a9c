//! The policies of a `Limiter`.

use std::time::Duration;

use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::select::{Live, Tiers};
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policies, Policy, Strategy};

const ANN: Key = Key::GLOBAL;

fn log(quota: &str) -> Policy {
    Policy::new("mails", Strategy::SlidingLog, quota).unwrap()
}

async fn left(limiter: &Limiter<LocalStore>, caller: Key) -> u32 {
    limiter.peek(caller, 0).await.unwrap().remaining()
}

#[tokio::test(start_paused = true)]
async fn tiers_limit_callers_and_networks() {
    let tiers = Tiers::new(log("10/h"))
        .caller(Key::new("large"), log("100/h"))
        .exempt_caller(Key::new("us"))
        .network("192.0.2.0/24".parse().unwrap(), log("50/h"))
        .unwrap();
    let live = Live::new(tiers);
    let limiter = Limiter::new(LocalStore::default(), live.clone());
    let callers = [
        (Key::new("ann"), 10),
        (Key::new("large"), 100),
        (Key::ip([192, 0, 2, 7].into()), 50),
        (Key::ip([192, 0, 3, 7].into()), 10),
    ];
    for (caller, limit) in callers {
        assert_eq!(left(&limiter, caller).await, limit, "{}", caller.reveal());
    }
    let _ = limiter.take(Key::new("large"), 30).await.unwrap();
    live.replace(Tiers::new(log("40/h")));
    assert_eq!(left(&limiter, Key::new("large")).await, 10);
}

#[tokio::test(start_paused = true)]
async fn exempt_callers_are_never_counted() {
    let few: Policies = log("1/h").into();
    let of_key = move |key: &Key| (*key == ANN).then(|| few.clone());
    let store = LocalStore::default();
    let limiter = Limiter::new(store.clone(), of_key);
    let us = Key::new("us");
    for decision in [
        limiter.take(us, 1_000).await.unwrap(),
        limiter.up_to(us, 1_000).await.unwrap(),
        limiter.wait(us, 1_000, Duration::ZERO).await.unwrap(),
        limiter.charge(us, 1_000).await.unwrap().into_decision(),
        limiter.reserve(us, 1_000).await.unwrap().decision().clone(),
    ] {
        assert!(decision.is_allowed());
        assert_eq!(decision.granted(), 1_000);
        assert_eq!(decision.source(), Source::Other("exempt"));
    }
    limiter.reserve(us, 2).await.unwrap().settle(7);
    assert!(limiter.flush().await);
    assert_eq!(store.len(), 0);
    assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
    assert!(!limiter.take(ANN, 1).await.unwrap().is_allowed());
    assert_eq!(store.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn each_call_may_have_its_policies() {
    let limiter = Limiter::new(LocalStore::default(), log("10/h"));
    let bought: Policies = log("500/h").into();
    let large = limiter.under(&bought);
    let _ = limiter.take(ANN, 10).await.unwrap();
    assert_eq!(left(&large, ANN).await, 490);
    let owned = {
        let id = String::from("message-7");
        limiter.under(&bought).take_with_id(ANN, 90, &id)
    };
    let spawned = tokio::spawn(owned).await.unwrap().unwrap();
    assert_eq!(spawned.remaining(), 400);
    assert_eq!(left(&limiter, ANN).await, 0);
}
