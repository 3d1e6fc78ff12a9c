//! Long reconciliations: their order and concurrency, the instances that wait for them, and other tasks.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;

use futures_util::future::join_all;

use super::far::{Far, caller, cut, recovery, take};
use super::*;
use crate::store::RedisStore;
use crate::support::{RedisServer, until};
use crate::util::instant;

/// Two instances together have exhausted some limits. The first must charge other callers before these, which takes
/// about a second, and the second has almost nothing to charge.
#[tokio::test(start_paused = true)]
async fn others_wait_while_an_instance_reconciles() {
    const DELAY: Duration = Duration::from_millis(40);
    let second = Far::new(DELAY);
    let far = [second.another(DELAY), second];
    let [first, second] = far
        .each_ref()
        .map(|far| far.builder(2).deadline(5 * DELAY).unwrap().build());
    let (limit, two) = (
        policies(Strategy::Gcra, "60/100d"),
        policies(Strategy::Gcra, "2/100d"),
    );
    cut(&first, &far[0]).await;
    cut(&second, &far[1]).await;
    for i in 0..20_000 {
        let _ = take(&second, Key::new(format!("other-{i}")), &two).await;
    }
    let ask = async |store| {
        let answers = join_all((0..50).map(|i| take(store, caller(i), &limit))).await;
        answers.iter().map(Decision::granted).sum::<u32>()
    };
    let mut granted = 0;
    for _ in 0..30 {
        granted += ask(&first).await;
    }
    for _ in 0..20 {
        granted += ask(&second).await;
    }
    assert_eq!(granted, 50 * (30 + 20));

    far.iter().for_each(|far| far.set(Some(DELAY)));
    let (start, mut took) = (instant(), [None; 2]);
    while took.contains(&None) {
        for (store, took) in [&first, &second].into_iter().zip(&mut took) {
            if !store.is_degraded() {
                took.get_or_insert(start.elapsed());
            }
        }
        granted += ask(&first).await;
        sleep(Duration::from_millis(10)).await;
    }
    for _ in 0..60 {
        granted += ask(&first).await + ask(&second).await;
    }
    assert_eq!(
        granted,
        50 * 60,
        "the sum of the limits, with recoveries after {took:?}"
    );
    let [first, second] = took.map(Option::unwrap);
    assert!(
        first.abs_diff(second) < Duration::from_millis(300),
        "the instances recover one after the other: {took:?}"
    );
}

/// The announcements are counted by a Redis server.
#[tokio::test]
async fn instances_see_each_other_reconcile() {
    let server = RedisServer::start();
    let instance = || {
        let redis = RedisStore::builder(server.url())
            .timeout(Duration::from_secs(20))
            .connect_lazy()
            .unwrap();
        Fallback::builder(redis, LocalStore::default())
            .deadline(Duration::from_secs(20))
            .unwrap()
            .build()
    };
    let [one, two, other] = [instance(), instance(), instance()];
    let reconciling = async || other.partitions[0].reconciling().await.unwrap();
    assert_eq!(reconciling().await, None);
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let long = Duration::from_secs(2);
    let first = tokio::spawn(async move { one.partitions[0].announced(long, ended).await });
    until("it is announced", async || reconciling().await.is_some()).await;
    // A shorter announcement of another instance does not shorten the first one.
    let short = Duration::from_millis(100);
    let second = two.partitions[0].announced(short, sleep(short)).await;
    let () = second;
    assert!(reconciling().await > Some(short));
    end.send(()).unwrap();
    first.await.unwrap().unwrap();
    let left = reconciling().await.unwrap();
    assert!(left <= long, "{left:?}");
    until("it has expired", async || reconciling().await.is_none()).await;
}

/// The announcements of the waiting instance are lost. It still waits for the other one.
#[tokio::test(start_paused = true)]
async fn a_lost_announcement_does_not_end_the_wait() {
    let mut far = Far::new(Duration::from_millis(2));
    let other = far.another(Duration::ZERO);
    far.is_mute = true;
    let store = far.fallback(2);
    cut(&store, &far).await;
    let _ = take(&store, caller(0), &policies(Strategy::Gcra, "60/100d")).await;
    far.set(Some(Duration::from_millis(2)));
    let reconciles = tokio::spawn(async move {
        for _ in 0..30 {
            other.announce(Duration::from_millis(200));
            sleep(Duration::from_millis(100)).await;
        }
    });
    let took = recovery(&store).await;
    assert!(
        (Duration::from_millis(3_000)..Duration::from_millis(3_500)).contains(&took),
        "{took:?}"
    );
    reconciles.await.unwrap();
}

/// The announcement of the recovered instance has expired.
#[tokio::test(start_paused = true)]
async fn a_recovered_instance_delays_no_others() {
    let far = Far::new(Duration::from_millis(2));
    let store = far.fallback(2);
    cut(&store, &far).await;
    far.set(Some(Duration::from_millis(2)));
    let took = recovery(&store).await;
    assert!(!far.is_announced().await, "after {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
}

/// An instance that announces repeatedly delays the others for no longer than the maximum wait.
#[tokio::test(start_paused = true)]
async fn no_instance_is_waited_for_forever() {
    let far = Far::new(Duration::from_millis(2));
    let store = far.fallback(2);
    cut(&store, &far).await;
    let _ = take(&store, caller(0), &policies(Strategy::Gcra, "60/100d")).await;
    far.set(Some(Duration::from_millis(2)));
    let forever = far.another(Duration::ZERO);
    let announcing = tokio::spawn(async move {
        loop {
            forever.announce(Duration::from_millis(200));
            sleep(Duration::from_millis(100)).await;
        }
    });
    let took = recovery(&store).await;
    assert!(
        (Duration::from_secs(10)..Duration::from_secs(12)).contains(&took),
        "{took:?}"
    );
    announcing.abort();
}

/// Another instance reconciles for three seconds. The primary store misses one reply, or fails again.
#[tokio::test(start_paused = true)]
async fn recovery_notices_a_new_failure() {
    for fails in [false, true] {
        let far = Far::new(Duration::from_millis(2));
        let store = far.fallback(2);
        cut(&store, &far).await;
        far.set(Some(Duration::from_millis(2)));
        let other = far.another(Duration::ZERO);
        for tenth in 0..30 {
            other.announce(Duration::from_millis(200));
            match tenth {
                15 if fails => far.set(None),
                15 => far.unanswered.store(1, Relaxed),
                _ => {}
            }
            sleep(Duration::from_millis(100)).await;
            assert!(store.is_degraded(), "after {tenth} tenths of a second");
        }
        assert_eq!(far.unanswered.load(Relaxed), 0);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(store.is_degraded(), fails);
    }
}

/// An instance grants more while it reconciles.
#[tokio::test(start_paused = true)]
async fn steady_traffic_does_not_delay_recovery() {
    let far = Far::new(Duration::from_millis(20));
    let store = far.fallback(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    cut(&store, &far).await;
    far.set(Some(Duration::from_millis(20)));
    let start = instant();
    for i in 0.. {
        if !store.is_degraded() {
            break;
        }
        let _ = take(&store, caller(i), &policies).await;
        assert!(start.elapsed() < Duration::from_secs(1));
        sleep(Duration::from_millis(1)).await;
    }
}

/// A unit counts for 3.6 s, and the reconciliation takes longer.
#[tokio::test(start_paused = true)]
async fn charges_expiring_during_reconciliation_are_skipped() {
    const COUNTS: Duration = Duration::from_millis(3_600);
    let far = Far::new(Duration::from_millis(90));
    let store = far.fallback(1);
    let policies = policies(Strategy::Gcra, "1000/h");
    cut(&store, &far).await;
    for i in 0..6_000 {
        let _ = take(&store, caller(i), &policies).await;
    }
    let granted = instant();
    far.set(Some(Duration::from_millis(90)));
    recovery(&store).await;
    sleep(Duration::from_secs(20)).await;
    let seen = lock(&far.seen);
    let late = seen
        .charged
        .values()
        .flatten()
        .filter(|at| **at - granted > COUNTS)
        .count();
    let sent = seen.charged.len();
    assert!(sent > 100, "{sent} are charged");
    assert_eq!(late, 0, "expired charges of {sent} that were sent");
}

/// Exhausted callers come first, since another instance could exceed their limits.
#[tokio::test(start_paused = true)]
async fn the_most_exhausted_callers_are_reconciled_first() {
    let far = Far::new(Duration::from_millis(50));
    let store = far.fallback(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    cut(&store, &far).await;
    for i in 0..1_000 {
        for _ in 0..if i % 10 == 3 { 100 } else { 1 + i % 50 } {
            let _ = take(&store, caller(i), &policies).await;
        }
    }
    far.set(Some(Duration::from_millis(50)));
    recovery(&store).await;
    let seen = lock(&far.seen);
    let spent = |key: &Key| (0..1_000).any(|i| i % 10 == 3 && caller(i) == *key);
    let last = seen.order.iter().rposition(spent).unwrap();
    assert_eq!(seen.order.len(), 1_000);
    assert!(
        last < 110,
        "{last} are charged before the last of 100 who have used up their limits"
    );
}

/// A near store gets far more concurrent charges than a distant one, whose last replies would be late.
#[tokio::test(start_paused = true)]
async fn concurrency_follows_the_distance_of_the_store() {
    let far = Far::new(Duration::from_millis(2));
    let store = far.fallback(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    let mut most = vec![];
    for delay in [2, 90].map(Duration::from_millis) {
        cut(&store, &far).await;
        for i in 0..6_000 {
            let _ = take(&store, caller(i), &policies).await;
        }
        lock(&far.seen).most = 0;
        far.set(Some(delay));
        recovery(&store).await;
        most.push(lock(&far.seen).most);
    }
    assert!(
        most[0] >= 512 && most[1] <= 64,
        "{most:?} concurrent charges, 2 ms and 90 ms away"
    );
}

/// A large reconciliation lets other tasks of the runtime run in between.
#[tokio::test(start_paused = true)]
async fn reconciliation_yields_to_other_tasks() {
    const CALLERS: usize = 20_000;
    let far = Far::new(Duration::ZERO);
    let store = far.fallback(1);
    let policies = policies(Strategy::Gcra, "1000/s");
    cut(&store, &far).await;
    for i in 0..CALLERS {
        let _ = take(&store, caller(i), &policies).await;
    }
    // All have expired, so nothing is sent or awaited.
    advance(Duration::from_secs(2)).await;
    let partition = &store.partitions[0];
    let mut reconciling = pin!(partition.reconcile());
    let mut polls = 0;
    assert!(
        poll_fn(|cx| {
            polls += 1;
            reconciling.as_mut().poll(cx)
        })
        .await
    );
    assert!(partition.accounts.is_empty());
    assert!(
        polls >= CALLERS / 1_000,
        "{CALLERS} callers in {polls} goes"
    );
}

/// If the primary store fails again, the rest of the accounts is skipped.
#[tokio::test(start_paused = true)]
async fn a_failed_reconciliation_keeps_unsent_charges() {
    let far = Far::new(Duration::ZERO);
    let store = far.fallback(1);
    let policies = policies(Strategy::Gcra, "1000/100d");
    cut(&store, &far).await;
    for i in 0..5_000 {
        let _ = take(&store, caller(i), &policies).await;
    }
    let partition = &store.partitions[0];
    assert!(!partition.reconcile().await);
    far.set(Some(Duration::from_millis(1)));
    recovery(&store).await;
    assert_eq!(lock(&far.seen).order.len(), 5_000);
}

/// Grants before a reset are dropped, and grants after it are charged.
#[tokio::test(start_paused = true)]
async fn one_reconciliation_resets_and_charges() {
    let far = Far::new(Duration::from_millis(2));
    let store = far.fallback(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    let _ = take(&store, ann(), &policies).await;
    cut(&store, &far).await;
    let take = |cost| Check::take(ann(), &policies, cost);
    for check in [
        take(20),
        Check::reset(ann(), &policies),
        take(15),
        Check::refund(ann(), &policies, 8),
    ] {
        let _ = store.check(check).await.unwrap();
    }
    far.set(Some(Duration::from_millis(2)));
    let partition = &store.partitions[0];
    assert!(partition.reconcile().await && partition.accounts.is_empty());
    let peek = far
        .counts
        .check(Check::peek(ann(), &policies, 0))
        .await
        .unwrap();
    assert_eq!(peek.capacity() - peek.remaining(), 15 - 8);
}
