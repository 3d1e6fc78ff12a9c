//! Slots and waits that must end.

use super::*;
use crate::in_flight::InFlightTracker;
use crate::util::instant;

/// The primary store grants a slot, its reply is lost, and the fallback denies the request.
#[tokio::test(start_paused = true)]
async fn a_denied_slot_is_released() {
    let (store, primary, _) = pair(1);
    let policies: Policies = Policy::in_flight("streams", 2)
        .unwrap()
        .slot_ttl(Duration::from_secs(30))
        .unwrap()
        .into();
    let tracker = InFlightTracker::new(&store, None);
    // Two slots of this instance exhaust the limit in both stores.
    let mut held = vec![];
    for _ in 0..2 {
        let check = Check::take(ann(), &policies, 1);
        let mut slot = tracker.track(&check).unwrap();
        let a = store.check(check).await;
        slot.on_reply(a.as_ref());
        assert!(a.unwrap().is_allowed());
        held.push(slot);
    }
    // Now the primary store executes checks and does not reply.
    primary.set(Manner::Swallows);
    let drop_first = held.pop().unwrap();
    // Only the primary store has room again, so that it grants the third slot.
    let _ = primary.counts.check(Check::reset(ann(), &policies)).await;
    let check = Check::take(ann(), &policies, 1);
    let mut slot = tracker.track(&check).unwrap();
    let a = store.check(check).await;
    slot.on_reply(a.as_ref());
    assert!(!a.unwrap().is_allowed(), "the fallback denies");
    drop(slot);
    primary.set(Manner::AtOnce);
    drop(drop_first);
    drop(held);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(primary.used(&policies).await, 0, "nothing is in flight");
}

#[tokio::test(start_paused = true)]
async fn a_long_deadline_ends() {
    let (store, primary, _) = pair(2);
    let store = store.deadline(Duration::from_secs(3600));
    open(&store, &primary).await;
    let at = instant();
    close(&store, &primary).await;
    assert!(at.elapsed() < Duration::from_secs(12), "{:?}", at.elapsed());
}
