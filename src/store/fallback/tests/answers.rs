//! Which store decides, when, and which replies warm the fallback.

use std::pin::pin;

use super::*;
use crate::limit::Outcome;
use crate::util::instant;

/// Replies arrive while the breaker is open, between bursts of a degraded caller.
#[tokio::test(start_paused = true)]
async fn late_answers_keep_local_grants() {
    for (share, part) in [(1, 100), (4, 25)] {
        let (store, primary, _) = pair(share);
        let policies = policies(Strategy::Gcra, "100/100d");
        let spawn =
            |policies: &Policies| tokio::spawn(store.check(Check::take(ann(), policies, 1)));
        primary.set(Manner::Silent);
        let mut unanswered = vec![];
        for _ in 0..3 {
            unanswered.push(spawn(&policies));
            sleep(Duration::from_millis(5)).await;
        }
        // Decided immediately, and reported after the breaker has opened.
        primary.set(Manner::After(Duration::from_millis(95)));
        let mut late = vec![];
        for _ in 0..20 {
            late.push(spawn(&policies));
            sleep(Duration::from_millis(1)).await;
        }
        open(&store, &primary).await;
        primary.set(Manner::Silent);
        let mut granted = 0;
        for _ in 0..40 {
            granted += burst(&store, &policies, 100).await;
            sleep(Duration::from_millis(1)).await;
        }
        for answer in late.into_iter().chain(unanswered) {
            granted += answer.await.unwrap().unwrap().granted();
        }
        assert!(
            granted <= part + 20 + 3,
            "{granted} granted of {part}, with 20 late answers and 3 unanswered"
        );
    }
}

/// A reply that was decided before the outage and arrives after it lacks the reconciled charges.
#[tokio::test(start_paused = true)]
async fn answers_from_before_an_outage_are_ignored() {
    for share in [1, 4] {
        let (store, primary, _) = pair(share);
        let store = rebuild(&store)
            .deadline(Duration::from_secs(60))
            .unwrap()
            .build();
        let policies = policies(Strategy::Gcra, "100/100d");
        primary.set(Manner::After(Duration::from_secs(30)));
        let late = tokio::spawn(store.check(Check::take(ann(), &policies, 1)));
        sleep(Duration::from_millis(1)).await;
        open(&store, &primary).await;
        let first = burst(&store, &policies, 200).await;
        close(&store, &primary).await;
        sleep(Duration::from_secs(31)).await;
        assert!(late.await.unwrap().unwrap().is_allowed());
        // The primary store has denied no check since, so the instance only knows its own grants.
        open(&store, &primary).await;
        let second = burst(&store, &policies, 200).await;
        assert_eq!(
            (first, second),
            (100 / share, 0),
            "a second helping of {second}"
        );
    }
}

/// Grants of the fallback while the queue was full are missing in the replies before the reconciliation.
#[tokio::test(start_paused = true)]
async fn answers_keep_unreconciled_grants() {
    let (store, primary, _) = pair(1);
    let policies = policies(Strategy::Gcra, "100/100d");
    primary.set(Manner::AtOnce);
    burst(&store, &policies, 1).await;
    primary.set(Manner::After(Duration::from_millis(10)));
    let answer = tokio::spawn(store.check(Check::take(ann(), &policies, 1)));
    sleep(Duration::from_millis(1)).await;
    // A full queue does not open the breaker.
    primary.set(Manner::Fails(queue_full()));
    let granted = 2 + burst(&store, &policies, 60).await;
    assert!(answer.await.unwrap().is_ok() && !store.is_degraded());
    open(&store, &primary).await;
    let granted = granted + burst(&store, &policies, 200).await;
    assert!(
        granted <= 100 + 1,
        "{granted} granted of 100, with one in flight"
    );
}

/// The breaker stays closed. A reply that was decided before a reconciliation arrives after it.
#[tokio::test(start_paused = true)]
async fn answers_without_reconciled_grants_are_ignored() {
    let (store, primary, _) = pair(1);
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
    primary.set(Manner::AtOnce);
    sleep(Duration::from_secs(31)).await;
    assert!(late.await.unwrap().is_ok() && !store.is_degraded());
    assert_eq!(primary.used(&policies).await, 61);
    open(&store, &primary).await;
    let granted = burst(&store, &policies, 100).await;
    assert!(granted <= 40, "{granted} granted of 40");
}

/// The units that other instances may grant count as used.
#[tokio::test(start_paused = true)]
async fn usage_in_an_outage_is_of_the_whole_policy() {
    let (store, primary, _) = pair(4);
    let policies = policies(Strategy::SlidingLog, "100/d");
    let usage = async || {
        let peek = store.check(Check::peek(ann(), &policies, 0)).await.unwrap();
        (peek.used(), peek.capacity())
    };
    assert_eq!(burst(&store, &policies, 20).await, 20);
    assert_eq!(usage().await, (20, 100));
    open(&store, &primary).await;
    // 5 of this instance's 25, and the 75 of the others.
    assert_eq!(usage().await, (80, 100));
}

/// A cost that fits the whole policy may be retried, whichever store decides then.
#[tokio::test(start_paused = true)]
async fn costs_above_a_share_are_denied_temporarily() {
    for &strategy in Strategy::ALL {
        let (store, primary, _) = pair(4);
        let policies = policies(strategy, "100/100s");
        let take = |cost| store.check(Check::take(ann(), &policies, cost));
        let _ = take(80).await.unwrap();
        open(&store, &primary).await;

        let decision = take(50).await.unwrap();
        assert_eq!(decision.granted(), 0);
        assert_eq!(
            decision.outcome(),
            Outcome::Denied {
                retry_after: Duration::from_millis(250)
            },
            "{strategy:?}"
        );
        // The whole policy has capacity, but other instances may grant it, at least until the next probe.
        let fresh = store
            .check(Check::peek(Key::new("bob"), &policies, 50))
            .await
            .unwrap();
        assert_eq!(
            fresh.outcome(),
            Outcome::Denied {
                retry_after: Duration::from_millis(250)
            },
            "{strategy:?}"
        );
        let carol = async |cost| {
            store
                .check(Check::take(Key::new("carol"), &policies, cost))
                .await
                .unwrap()
        };
        assert!(carol(1).await.is_allowed());
        assert_eq!(
            carol(50).await.outcome(),
            Outcome::Denied {
                retry_after: Duration::from_millis(250)
            },
            "{strategy:?}"
        );
        assert_eq!(
            take(101).await.unwrap().outcome(),
            Outcome::ExceedsCapacity,
            "{strategy:?}"
        );
        assert!(
            store
                .check(Check::take(Key::new("bob"), &policies, 25))
                .await
                .unwrap()
                .is_allowed()
        );
    }
}

/// The fallback knows the slots of this instance's requests.
#[tokio::test(start_paused = true)]
async fn in_flight_requests_count_in_an_outage() {
    let (store, primary, _) = pair(1);
    let uploads = Policies::from(Policy::in_flight("uploads", 2).unwrap());
    let first = Check::take(ann(), &uploads, 1);
    let take = async |check: Check| store.check(check).await.unwrap().is_allowed();
    let another = || Check::take(ann(), &uploads, 1);
    assert_eq!(
        [
            take(first.clone()).await,
            take(another()).await,
            take(another()).await
        ],
        [true, true, false]
    );
    open(&store, &primary).await;
    assert!(take(first.clone()).await && !take(another()).await);
    // The primary store still counts the slot, so the release must be sent again.
    let release = Check::release(ann(), &uploads, first.slot().unwrap());
    assert!(store.check(release).await.unwrap_err().is_not_sent());
    assert_eq!(
        [take(another()).await, take(another()).await],
        [true, false]
    );
}

/// A charge of the primary store is not withdrawn.
#[tokio::test(start_paused = true)]
async fn sent_checks_are_not_withdrawn() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Swallows);
    let check = Check::take(ann(), &policies(Strategy::Gcra, "10/s"), 1);
    let Answer::Pending { future } = store.check(check) else {
        unreachable!()
    };
    assert!(!store.backend().withdraw(pin!(future)));
}

#[tokio::test(start_paused = true)]
async fn the_deadline_begins_with_the_check() {
    let (store, primary, _) = pair(1);
    primary.set(Manner::Silent);
    let start = instant();
    let answer = store.check(Check::take(ann(), &policies(Strategy::Gcra, "10/s"), 1));
    sleep(Duration::from_millis(80)).await;
    let _ = answer.await.unwrap();
    assert_eq!(
        start.elapsed(),
        Tested::DEFAULT_DEADLINE,
        "from the check to its answer"
    );
}

#[tokio::test(start_paused = true)]
async fn a_deadline_of_forever_is_none() {
    let (store, primary, _) = pair(1);
    let store = rebuild(&store).deadline(Duration::MAX).unwrap().build();
    primary.set(Manner::After(Duration::from_secs(3_600)));
    assert!(
        store
            .check(Check::take(ann(), &policies(Strategy::Gcra, "10/s"), 1))
            .await
            .unwrap()
            .is_allowed()
    );
}

/// After any kind of reply.
#[tokio::test(start_paused = true)]
async fn polling_a_finished_future_panics() {
    let manners = [
        Manner::AtOnce,
        Manner::After(Duration::from_millis(1)),
        Manner::Each(unreachable),
        Manner::Silent,
    ];
    for manner in manners {
        let (store, primary, _) = pair(1);
        primary.set(manner);
        let polling = tokio::spawn(async move {
            let mut answer =
                Box::pin(store.check(Check::take(ann(), &policies(Strategy::Gcra, "10/s"), 1)));
            let _ = answer.as_mut().await.unwrap();
            futures_util::future::poll_immediate(answer.as_mut()).await;
        });
        let panicked = polling.await.unwrap_err().into_panic();
        let expected = "`FallbackFuture` polled after completion".to_owned();
        assert_eq!(panicked.downcast_ref(), Some(&expected));
    }
}
