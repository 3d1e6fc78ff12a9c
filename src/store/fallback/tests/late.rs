//! Replies that arrive after grants of the fallback were charged, or in the next outage.

use std::num::NonZeroU32;

use super::runtimes::runtime;
use super::*;

/// The charge of a reconciliation has no reply. A reply that was decided before it arrives after it.
#[tokio::test(start_paused = true)]
async fn a_late_reply_lacks_an_unanswered_charge() {
    let (store, primary, reconciled) = pair(1);
    let store = rebuild(&store)
        .deadline(Duration::from_secs(60))
        .unwrap()
        .build();
    let policies = policies(Strategy::Gcra, "100/100d");
    primary.set(Manner::After(Duration::from_secs(30)));
    let late = tokio::spawn(store.check(Check::take(ann(), &policies, 1)));
    sleep(Duration::from_millis(1)).await;
    primary.set(Manner::Each(queue_full));
    assert_eq!(burst(&store, &policies, 60).await, 60);
    primary.set(Manner::Each(unreachable));
    sleep(Duration::from_secs(31)).await;
    assert!(late.await.unwrap().is_ok() && !store.is_degraded());
    assert_eq!(reconciled.events(), [(0, 60)]);
    open(&store, &primary).await;
    let granted = burst(&store, &policies, 100).await;
    assert!(granted <= 40, "{granted} granted of 40");
}

/// A reply to an earlier check arrives in an outage that began with lost replies.
#[tokio::test(start_paused = true)]
async fn a_late_reply_lacks_grants_in_doubt() {
    let (store, primary, _) = pair(1);
    let store = rebuild(&store).failures(NonZeroU32::MIN).build();
    let policies = policies(Strategy::Gcra, "100/100d");
    primary.set(Manner::Late(unreachable));
    let doubtful: Vec<_> = (0..60)
        .map(|_| tokio::spawn(store.check(Check::take(ann(), &policies, 1))))
        .collect();
    primary.set(Manner::After(Duration::from_millis(30)));
    let late = tokio::spawn(store.check(Check::take(ann(), &policies, 1)));
    sleep(Duration::from_millis(1)).await;
    primary.set(Manner::Each(unreachable));
    let mut granted = 0;
    for each in doubtful {
        granted += each.await.unwrap().unwrap().granted();
    }
    assert!(store.is_degraded());
    sleep(Duration::from_millis(20)).await;
    granted += late.await.unwrap().unwrap().granted();
    granted += burst(&store, &policies, 100).await;
    assert!(
        granted <= 101,
        "{granted} granted of 100, with one late answer"
    );
}

/// The runtime of the recovery ends with a charge in flight. A reply that was decided before it arrives on another runtime.
#[test]
fn a_late_reply_lacks_a_charge_whose_runtime_ended() {
    let (first, second) = (runtime(), runtime());
    let (store, primary, reconciled) = pair(1);
    let store = rebuild(&store)
        .deadline(Duration::from_secs(60))
        .unwrap()
        .build();
    let policies = policies(Strategy::Gcra, "100/100d");
    primary.set(Manner::After(Duration::from_secs(30)));
    let mut late = None;
    second.block_on(async {
        late = Some(tokio::spawn(store.check(Check::take(ann(), &policies, 1))));
        sleep(Duration::from_millis(1)).await;
    });
    first.block_on(async {
        primary.set(Manner::Each(queue_full));
        assert_eq!(burst(&store, &policies, 60).await, 60);
        primary.set(Manner::Silent);
        let asked = primary.asked();
        while primary.asked() == asked {
            advance(Duration::from_millis(1)).await;
        }
    });
    drop(first);
    second.block_on(async {
        primary.set(Manner::AtOnce);
        let _ = store
            .check(Check::peek(Key::new("bob"), &policies, 1))
            .await
            .unwrap();
        sleep(Duration::from_secs(31)).await;
        assert!(late.unwrap().await.unwrap().is_ok() && !store.is_degraded());
        assert_eq!(reconciled.events(), [(0, 60)]);
        open(&store, &primary).await;
        let granted = burst(&store, &policies, 100).await;
        assert!(granted <= 40, "{granted} granted of 40");
    });
}
