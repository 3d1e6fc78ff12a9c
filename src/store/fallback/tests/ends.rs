//! Slots and waits that must end.

use super::*;
use crate::held_slots::InFlightTracker;
use crate::limit::Mode;
use crate::limiter::Limiter;
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

/// The reply to a take is lost, and the fallback decides a renewal, which reaches the primary store neither before the
/// take nor after it.
#[tokio::test(start_paused = true)]
async fn a_local_renewal_confirms_no_take() {
    for held in [100, 1_500] {
        let (store, primary, _) = pair(1);
        let policy = Policy::in_flight("jobs", 3).unwrap();
        let policy = policy.slot_ttl(Duration::from_secs(3)).unwrap();
        let jobs = Limiter::new(store.clone(), policy);
        primary.set(Manner::Swallows);
        let one = jobs.reserve(ann(), 1).await.unwrap();
        open(&store, &primary).await;
        sleep(Duration::from_millis(held)).await;
        drop(one);
        close(&store, &primary).await;
        sleep(Duration::from_millis(1_500)).await;
        let asked = &lock(&primary.script).asked;
        let releases = asked.iter().filter(|check| check.mode() == Mode::Release);
        assert_eq!(releases.count(), 3, "repeated twice, after {held} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_deadline_ends() {
    let (store, primary, _) = pair(2);
    let store = rebuild(&store)
        .deadline(Duration::from_secs(3600))
        .unwrap()
        .build();
    open(&store, &primary).await;
    let at = instant();
    close(&store, &primary).await;
    assert!(at.elapsed() < Duration::from_secs(12), "{:?}", at.elapsed());
}
