//! When the breaker opens, and when the store is probed, by the checks of a store. `breaker_states` has the breaker alone.

use tokio::time::timeout;

use super::*;
use crate::store::MockStore;
use crate::util::{instant, lock};

fn take(store: &Tested) -> Answer<<Tested as Store>::Future> {
    store.check(Check::take(ann(), &policies(Strategy::Gcra, "100000/s"), 1))
}

async fn all(store: &Tested, count: usize) {
    let answers: Vec<_> = (0..count).map(|_| tokio::spawn(take(store))).collect();
    for answer in answers {
        let _ = answer.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn one_failed_call_counts_once() {
    let (store, primary, _) = pair(1);
    let mut opened_by = 0;
    while !store.is_degraded() {
        primary.set(Manner::Fails(unreachable()));
        all(&store, 64).await;
        opened_by += 1;
    }
    assert_eq!(opened_by, 3, "calls that failed until the breaker opened");
    assert!(primary.asked() <= 64 + 3, "{} checks", primary.asked());
}

/// Only the checks in flight when the primary store stalls wait for the deadline, and three more.
#[tokio::test(start_paused = true)]
async fn simultaneous_timeouts_count_as_one_failure() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Silent);
    let mut rounds = 0;
    while !store.is_degraded() {
        all(&store, 64).await;
        rounds += 1;
    }
    assert_eq!(rounds, 3, "rounds of checks until the breaker opened");
    assert!(
        primary.asked() <= 64 + 3,
        "{} checks waited for the deadline",
        primary.asked()
    );
}

#[tokio::test(start_paused = true)]
async fn a_brief_full_queue_never_counts() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Answers(10, queue_full));
    all(&store, 100).await;
    assert!(!store.is_degraded());
}

/// A client gives up while the queue is full, so a probe follows, and finds the full queue.
#[tokio::test(start_paused = true)]
async fn a_full_queue_fails_no_probe() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Silent);
    let cancelled = timeout(Duration::from_millis(20), take(&store)).await;
    assert!(cancelled.is_err());
    primary.set(Manner::Each(queue_full));
    for _ in 0..200 {
        sleep(Duration::from_millis(10)).await;
        assert!(!store.is_degraded());
    }
    primary.set(Manner::After(Duration::from_millis(5)));
    let asked = primary.asked();
    all(&store, 64).await;
    assert_eq!(primary.asked() - asked, 64, "no trials one at a time");
}

/// Neither waits for a probe.
#[tokio::test(start_paused = true)]
async fn a_dropped_trial_does_not_block_the_next() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Each(unreachable));
    let _ = take(&store).await.unwrap();
    primary.set(Manner::Silent);
    drop(take(&store));
    primary.set(Manner::AtOnce);
    let asked = primary.asked();
    for _ in 0..10 {
        let _ = take(&store).await.unwrap();
    }
    assert_eq!(primary.asked() - asked, 10);
}

/// No check follows the failure for a while: a probe in the background finds that the store has recovered.
#[tokio::test(start_paused = true)]
async fn an_old_failure_delays_no_check() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Each(unreachable));
    let _ = take(&store).await.unwrap();
    primary.set(Manner::After(Duration::from_millis(1)));
    sleep(Duration::from_secs(1)).await;
    let asked = primary.asked();
    all(&store, 64).await;
    assert_eq!(primary.asked() - asked, 64);
}

/// Before and after the breaker opens. The intervals have jitter, so that the instances do not all probe
/// simultaneously.
#[tokio::test(start_paused = true)]
async fn probes_become_rarer() {
    for failures in [1, 1_000] {
        let (primary, probes) = (MockStore::new(), Arc::new(Mutex::new(vec![])));
        let sent = Arc::clone(&probes);
        primary.answer(move |check| {
            if *check.key() == probe::KEY {
                lock(&sent).push(instant());
            }
            Err(unreachable())
        });
        let store = Fallback::builder(primary, LocalStore::default())
            .failures(failures.try_into().unwrap())
            .build();
        let _ = store
            .check(Check::take(ann(), &policies(Strategy::Gcra, "10/s"), 1))
            .await
            .unwrap();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(store.is_degraded(), failures == 1);
        let delays: Vec<_> = lock(&probes)
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .skip(3)
            .collect();
        assert!(
            delays
                .iter()
                .all(|delay| (125..=251).contains(&delay.as_millis())),
            "{failures}: {delays:?}"
        );
        assert!(
            delays.windows(2).any(|pair| pair[0] != pair[1]),
            "{failures}: {delays:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn errors_of_one_check_alone_never_count() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Each(|| {
        StoreError::new(ErrorKind::Refused).check_only()
    }));
    for _ in 0..10 {
        all(&store, 10).await;
    }
    assert!(!store.is_degraded());
    assert_eq!(lock(&primary.script).asked.len(), 100);
}

/// All clients give up before the deadline.
#[tokio::test(start_paused = true)]
async fn abandoned_checks_reveal_an_outage() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Silent);
    let since = instant();
    while !store.is_degraded() {
        let _ = timeout(Duration::from_millis(20), take(&store)).await;
        assert!(since.elapsed() < Duration::from_secs(2));
        sleep(Duration::from_millis(1)).await;
    }
    close(&store, &primary).await;
}

/// Some clients give up while the primary store replies.
#[tokio::test(start_paused = true)]
async fn abandoned_checks_alone_change_nothing() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::After(Duration::from_millis(50)));
    for _ in 0..100 {
        let _ = timeout(Duration::from_millis(20), take(&store)).await;
    }
    assert_eq!(primary.asked(), 100, "the primary store gets every check");
    assert!(!store.is_degraded());
}
