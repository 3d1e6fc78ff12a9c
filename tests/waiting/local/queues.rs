//! Wait queues with waiters of any kind and all replies of a store.

use std::sync::Mutex;
use std::time::Duration;

use fastrand::Rng;
use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_redis_ratelimit::check::{Check, Mode};
use tower_redis_ratelimit::select::PolicySelector;
use tower_redis_ratelimit::store::{MockStore, Store};
use tower_redis_ratelimit::strategy::{Align, Refill};
use tower_redis_ratelimit::{Key, Limiter, LocalStore, Policies, Policy, Strategy};

use crate::late::Late;
use crate::mocks::watched;
use crate::support::policy;

const ANN: Key = Key::GLOBAL;
const LONG: Duration = Duration::from_secs(3_600);

fn named(name: &str, strategy: Strategy, quota: &str) -> Policy {
    Policy::new(name, strategy, quota).unwrap()
}

/// Returns the number of store calls until a waiter gets its permit.
async fn calls_of_a_wait(
    store: &MockStore,
    policies: impl PolicySelector<Key>,
    cost: u32,
) -> usize {
    let limiter = Limiter::new(store.clone(), policies);
    let before = store.asked().len();
    assert!(limiter.wait(ANN, cost, LONG).await.unwrap().is_allowed());
    store.asked().len() - before
}

/// A store that supports no debts, under any strategy.
#[tokio::test(start_paused = true)]
async fn a_debtless_store_is_not_polled_constantly() {
    for strategy in [
        Strategy::Gcra,
        Strategy::TokenBucket(Refill::Interval),
        Strategy::SlidingLog,
    ] {
        let store = MockStore::new();
        store.deny(Duration::from_millis(500));
        let again = async {
            sleep(Duration::from_millis(400)).await;
            store.allow();
        };
        let (calls, ()) = tokio::join!(calls_of_a_wait(&store, policy(strategy, "10/s"), 1), again);
        assert_eq!(calls, 2, "{strategy:?}");
    }
}

/// One policy of the list supports no debt.
#[tokio::test(start_paused = true)]
async fn debtless_policies_are_not_polled_constantly() {
    let (local, store) = watched();
    let policies = Policies::new([
        named("bucket", Strategy::Gcra, "10/m"),
        named("window", Strategy::FixedWindow(Align::FirstHit), "1000/h"),
    ])
    .unwrap();
    let _ = local.check(Check::take(ANN, &policies, 10)).await.unwrap();
    assert_eq!(calls_of_a_wait(&store, policies, 5).await, 2);
}

#[tokio::test(start_paused = true)]
async fn zero_costs_are_not_polled_constantly() {
    let (local, store) = watched();
    let policies = policy(Strategy::Gcra, "1/s burst 10");
    let _ = local
        .check(Check::charge(ANN, &policies, 15))
        .await
        .unwrap();
    assert_eq!(calls_of_a_wait(&store, policies, 0).await, 2);
}

/// At the maximum debt, the queue checks again when the debt has become smaller.
#[tokio::test(start_paused = true)]
async fn a_full_debt_is_waited_for() {
    for (strategy, quota) in [
        (Strategy::Gcra, "1/s burst 10"),
        (Strategy::LeakyBucket, "1/s burst 10"),
        (Strategy::TokenBucket(Refill::Greedy), "1/s burst 10"),
        (Strategy::TokenBucket(Refill::Interval), "10/10s burst 10"),
        (Strategy::TokenBucket(Refill::Interval), "10/10s burst 25"),
    ] {
        let (local, store) = watched();
        let policies = policy(strategy, quota);
        let _ = local
            .check(Check::charge(ANN, &policies, 100))
            .await
            .unwrap();
        let at = local
            .check(Check::peek(ANN, &policies, 1))
            .await
            .unwrap()
            .retry_after()
            .unwrap();
        let start = Instant::now();
        let calls = calls_of_a_wait(&store, policies, 1).await;
        assert!(calls <= 3, "{strategy:?} {quota}: {calls} calls");
        let late = start
            .elapsed()
            .checked_sub(at)
            .expect("not before its time");
        // The time of a check has jitter.
        let most = if quota.starts_with("10/10s") { 23 } else { 3 };
        assert!(
            late <= Duration::from_millis(most),
            "{strategy:?} {quota}: {late:?} late"
        );
    }
    // The first policy is at its maximum debt, which drains soon; the second has a longer wait.
    let (local, store) = watched();
    let (deep, shallow) = (
        named("a", Strategy::Gcra, "1/s burst 100"),
        named("b", Strategy::Gcra, "1/s burst 5"),
    );
    let _ = local
        .check(Check::charge(ANN, &deep.clone().into(), 150))
        .await
        .unwrap();
    let _ = local
        .check(Check::charge(ANN, &shallow.clone().into(), 10))
        .await
        .unwrap();
    assert!(calls_of_a_wait(&store, Policies::new([deep, shallow]).unwrap(), 1).await <= 3);
}

/// The raised quota has capacity for all waiters.
#[tokio::test(start_paused = true)]
async fn a_zero_wait_is_a_take() {
    for strategy in [Strategy::Gcra, Strategy::SlidingLog] {
        let limiter = Limiter::new(LocalStore::default(), policy(strategy, "10/s"));
        let waits = join_all((0..12).map(|_| limiter.wait(ANN, 1, Duration::ZERO))).await;
        let allowed = waits
            .into_iter()
            .filter(|decision| decision.as_ref().unwrap().is_allowed())
            .count();
        assert_eq!(allowed, 10, "{strategy:?}");
    }
}

/// A lack of capacity under one policy is no evidence about the others.
#[tokio::test(start_paused = true)]
async fn only_exhausted_policies_lengthen_the_queue() {
    let policies = Policies::new([
        named("second", Strategy::Gcra, "10/s burst 1"),
        named("hour", Strategy::Gcra, "100/h burst 100"),
    ]);
    let limiter = Limiter::new(LocalStore::default(), policies.unwrap());
    let _ = limiter.wait(ANN, 1, Duration::ZERO).await.unwrap();
    let waits = (0..8).map(|i| {
        let limiter = limiter.clone();
        async move {
            sleep(Duration::from_millis(i)).await;
            limiter.wait(ANN, 1, Duration::from_secs(1)).await.unwrap()
        }
    });
    for decision in join_all(waits).await {
        assert!(decision.is_allowed(), "{decision:?}");
    }
}

/// Waiters that would be too late do not delay the waiters behind them.
#[tokio::test(start_paused = true)]
async fn expired_waiters_do_not_delay_others() {
    let limiter = Limiter::new(
        LocalStore::default(),
        policy(Strategy::Gcra, "1/s burst 100"),
    );
    let _ = limiter.take(ANN, 100).await.unwrap();
    let first = limiter.wait(ANN, 1, Duration::from_secs(5));
    let later = async |cost, max| {
        sleep(Duration::from_millis(10)).await;
        limiter
            .wait(ANN, cost, Duration::from_secs(max))
            .await
            .unwrap()
    };
    let (first, large, small) = tokio::join!(first, later(100, 2), later(1, 10));
    assert!(first.unwrap().is_allowed() && !large.is_allowed());
    assert!(small.is_allowed(), "{small:?}");
}

/// A waiter is not refused because a later turn, which it does not need, would be too late.
#[tokio::test(start_paused = true)]
async fn only_a_waiters_own_turn_decides() {
    let local = LocalStore::default();
    let limiter = || Limiter::new(local.clone(), policy(Strategy::Gcra, "1/s burst 1"));
    let (here, elsewhere) = (limiter(), limiter());
    assert!(here.take(ANN, 1).await.unwrap().is_allowed());
    let wait = |limiter: &Limiter<LocalStore>, max| {
        let limiter = limiter.clone();
        let wait = async move { limiter.wait(ANN, 1, max).await.unwrap().is_allowed() };
        Box::pin(wait)
    };
    let [mut first, mut second, mut third] = [(); 3].map(|()| wait(&here, LONG));
    for turn in [&mut first, &mut second, &mut third] {
        assert!(turn.now_or_never().is_none());
    }
    sleep(Duration::from_millis(1)).await;
    // The turn of the other instance keeps those of this one.
    let mut other = wait(&elsewhere, LONG);
    assert!(other.as_mut().now_or_never().is_none());
    drop((first, second));
    sleep(Duration::from_millis(10)).await;
    // The turns are due after one, two and three seconds.
    let start = Instant::now();
    let fourth = wait(&here, Duration::from_millis(2_500));
    assert_eq!(tokio::join!(third, fourth), (true, true));
    assert!(start.elapsed() < Duration::from_millis(2_010));
    assert!(other.await);
}

/// The turn was asked for a waiter that has left, and would have been too late for that one.
#[tokio::test(start_paused = true)]
async fn a_turn_that_a_leaver_was_denied_is_asked_again() {
    let store = Late::new(&LocalStore::default(), Duration::from_millis(10));
    let limiter = Limiter::new(store, policy(Strategy::Gcra, "1/s burst 1"));
    assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
    let start = Instant::now();
    let mut first = Box::pin(limiter.wait(ANN, 1, Duration::from_millis(50)));
    assert!(first.as_mut().now_or_never().is_none());
    sleep(Duration::from_millis(5)).await;
    drop(first);
    assert!(limiter.wait(ANN, 1, LONG).await.unwrap().is_allowed());
    assert!(
        start.elapsed() < Duration::from_millis(1_100),
        "{:?}",
        start.elapsed()
    );
}

/// A store that reserves no turn for the first waiter might reserve one for the next.
#[tokio::test(start_paused = true)]
async fn nobody_overtakes_a_waiter_without_a_turn() {
    let store = MockStore::new();
    let limiter = Limiter::new(store.clone(), policy(Strategy::Gcra, "10/s"));
    let order = Mutex::new(vec![]);
    let wait = async |name, after| {
        sleep(Duration::from_millis(after)).await;
        assert!(limiter.wait(ANN, 1, LONG).await.unwrap().is_allowed());
        order.lock().unwrap().push(name);
    };
    let allows = async {
        store.deny(Duration::from_millis(500));
        sleep(Duration::from_millis(50)).await;
        store.allow();
    };
    tokio::join!(allows, wait("first", 10), wait("second", 100));
    assert_eq!(*order.lock().unwrap(), ["first", "second"]);
}

/// All costs count in the queue, but the cost of the first waiter only until it is granted.
#[tokio::test(start_paused = true)]
async fn waiters_that_fit_are_never_refused() {
    // The maximum debt is taken: the first waiter, of cost 5, waits for its turn.
    let limiter = Limiter::new(LocalStore::default(), policy(Strategy::Gcra, "1/s burst 5"));
    limiter.charge(ANN, 10).await.unwrap();
    let first = limiter.wait(ANN, 5, LONG);
    let second = async {
        sleep(Duration::from_millis(10)).await;
        limiter
            .wait(ANN, 1, Duration::from_millis(11_500))
            .await
            .unwrap()
    };
    let (first, second) = tokio::join!(first, second);
    assert!(
        first.unwrap().is_allowed() && second.is_allowed(),
        "{second:?}"
    );
}

/// A denied client gets no longer `retry_after` than from the store alone.
#[tokio::test(start_paused = true)]
async fn the_returned_wait_is_never_too_long() {
    let (local, _) = watched();
    let policies = policy(Strategy::FixedWindow(Align::FirstHit), "1/h");
    let limiter = Limiter::new(local.clone(), policies.clone());
    assert!(
        limiter
            .wait(ANN, 1, Duration::ZERO)
            .await
            .unwrap()
            .is_allowed()
    );
    let long = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.wait(ANN, 1, LONG * 2).await }
    });
    sleep(LONG * 3 / 4).await;
    let returned = limiter.wait(ANN, 1, Duration::ZERO).await.unwrap();
    let real = local.check(Check::peek(ANN, &policies, 1)).await.unwrap();
    assert!(
        returned.retry_after().unwrap() <= real.retry_after().unwrap(),
        "{returned:?} of {real:?}"
    );
    assert!(
        returned.reset_after() <= real.reset_after(),
        "{returned:?} of {real:?}"
    );
    long.abort();
}

/// A smaller cost need not wait for a larger one.
#[tokio::test(start_paused = true)]
async fn a_leaving_waiter_takes_its_cost_along() {
    for strategy in [
        Strategy::FixedWindow(Align::FirstHit),
        Strategy::TokenBucket(Refill::Interval),
    ] {
        let (_, store) = watched();
        let limiter = Limiter::new(store.clone(), policy(strategy, "100/h"));
        let _ = limiter.take(ANN, 90).await.unwrap();
        let mut large = Box::pin(limiter.wait(ANN, 50, LONG * 2));
        assert!(large.as_mut().now_or_never().is_none());
        sleep(Duration::from_millis(10)).await;
        let mut small = Box::pin(limiter.wait(ANN, 2, LONG * 2));
        assert!(small.as_mut().now_or_never().is_none());
        sleep(Duration::from_secs(1)).await;
        drop(large);
        let start = Instant::now();
        assert!(small.await.unwrap().is_allowed());
        assert!(
            start.elapsed() < Duration::from_millis(5),
            "{strategy:?}: {:?}",
            start.elapsed()
        );
        let charges = store
            .asked()
            .iter()
            .filter(|check| check.mode() == Mode::Charge)
            .count();
        assert_eq!(charges, 0);
    }
}

/// A waiter that joins at the moment when the last one leaves is denied in time.
#[tokio::test(start_paused = true)]
async fn a_replacing_waiter_is_answered_in_time() {
    let limiter = Limiter::new(LocalStore::default(), policy(Strategy::Gcra, "1/h"));
    let _ = limiter.take(ANN, 1).await.unwrap();
    let mut first = Box::pin(limiter.wait(ANN, 1, LONG));
    assert!(first.as_mut().now_or_never().is_none());
    sleep(Duration::from_secs(1)).await;
    drop(first);
    let start = Instant::now();
    assert!(
        !limiter
            .wait(ANN, 1, Duration::from_secs(5))
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(
        start.elapsed() <= Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}

/// Random costs, deadlines, quotas and cancellations: each request is answered in time, the quota is kept, the store
/// gets no needless checks, and no queue is left.
#[tokio::test(start_paused = true)]
async fn any_waiters_are_answered_in_time() {
    for seed in 0..300 {
        let mut rng = Rng::with_seed(seed);
        let (_, store) = watched();
        let strategy = Strategy::ALL[rng.usize(..Strategy::ALL.len())];
        let quotas = [
            ["10/s", "20/s"],
            ["100000/s", "100000/s"],
            ["1/d", "1/d"],
            ["5/s", "5/s"],
        ][rng.usize(..4)];
        let limiters = quotas.map(|quota| Limiter::new(store.clone(), policy(strategy, quota)));
        let most = policy(strategy, quotas[1])[0].quota().limit();
        let waits: Vec<_> = (0..rng.usize(1..60))
            .map(|_| {
                let limiter = limiters[usize::from(rng.u8(..4) == 0)].clone();
                let cost = [0, 1, 1, 1, 2, most.min(5), most][rng.usize(..7)];
                let at = Duration::from_micros(rng.u64(..2_000_000));
                let max = [0, 1, 999, 50_000, 400_000, 3_000_000][rng.usize(..6)];
                let max = Duration::from_micros(max);
                let patience = if rng.u8(..4) == 0 {
                    Duration::from_micros(rng.u64(..500_000))
                } else {
                    LONG
                };
                tokio::spawn(async move {
                    sleep(at).await;
                    let start = Instant::now();
                    let answer = tokio::time::timeout(patience, limiter.wait(ANN, cost, max)).await;
                    let late = start.elapsed().saturating_sub(max.min(patience));
                    assert!(
                        late <= Duration::from_millis(30),
                        "{cost} for {max:?}: {late:?} late, {answer:?}"
                    );
                    let passed = answer.is_ok_and(|decision| decision.unwrap().is_allowed());
                    passed.then(|| (Instant::now(), cost))
                })
            })
            .collect();
        let count = waits.len();
        let mut passed: Vec<_> = join_all(waits)
            .await
            .into_iter()
            .filter_map(|wait| wait.expect("in time"))
            .collect();
        passed.sort();
        let what = format!("seed {seed}: {strategy:?} {quotas:?}");
        if quotas[0] == quotas[1] && matches!(strategy, Strategy::Gcra | Strategy::LeakyBucket) {
            for (i, (from, _)) in passed.iter().enumerate() {
                for (at, _) in &passed[i..] {
                    let costs: u32 = passed[i..]
                        .iter()
                        .take_while(|(time, _)| time <= at)
                        .map(|(_, cost)| cost)
                        .sum();
                    let quota = policy(strategy, quotas[1])[0].quota();
                    // Timers may be up to a millisecond late.
                    let may = f64::from(quota.capacity())
                        + (*at - *from + Duration::from_millis(1)).as_secs_f64()
                            / quota.period().as_secs_f64()
                            * f64::from(quota.limit());
                    assert!(
                        f64::from(costs) <= may + 1.0,
                        "{what}: {costs} of {may} in {:?}",
                        *at - *from
                    );
                }
            }
        }
        sleep(Duration::from_secs(10)).await;
        let asked = store
            .asked()
            .iter()
            .filter(|check| check.mode() == Mode::TakeAhead)
            .count();
        assert!(
            asked <= 6 * count + 10,
            "{what}: {asked} calls for {count} waits"
        );
        assert!(
            limiters
                .iter()
                .all(|it| format!("{it:?}").contains("WaitQueues { waiting: 0, .. }")),
            "{what}"
        );
    }
}
