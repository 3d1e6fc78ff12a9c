//! The reports of an outage.

use std::num::NonZeroU32;

use super::*;

/// Records the reports of outages.
#[derive(Clone, Default)]
struct Reports {
    still: Arc<Mutex<Vec<event::StillDegraded<'static>>>>,
    /// Why the last probe before each of them failed.
    errors: Arc<Mutex<Vec<ErrorKind>>>,
    recovered: Arc<Mutex<Vec<event::Recovered>>>,
}

impl Observer for Reports {
    fn still_degraded(&self, event: &event::StillDegraded<'_>) {
        let still = event::StillDegraded::new(event.after, event.checks, event.share);
        lock(&self.still).push(still);
        lock(&self.errors).extend(event.error.map(StoreError::kind));
    }

    fn recovered(&self, event: &event::Recovered) {
        lock(&self.recovered).push(*event);
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_outage_is_reported_each_minute() {
    let (primary, reports) = (Primary::default(), Reports::default());
    let share = Share::Fixed(NonZeroU32::new(4).unwrap());
    let store = Fallback::builder(primary.clone(), LocalStore::default())
        .share(share)
        .observer(reports.clone())
        .build();
    open(&store, &primary).await;
    let limit = policies(Strategy::Gcra, "400/100d");
    for _ in 0..7 {
        let check = Check::take(ann(), &limit, 2);
        assert!(store.check(check).await.unwrap().is_allowed());
    }
    sleep(Duration::from_secs(59)).await;
    assert!(lock(&reports.still).is_empty());
    sleep(Duration::from_secs(2)).await;
    let first = lock(&reports.still)[0];
    assert_eq!(first.after.as_secs(), 60);
    assert_eq!(first.share.get(), 4);
    // The checks before the breaker opened are included.
    let before = first.checks - 7;
    assert!((1..=3).contains(&before), "{first:?}");

    // The reason may change.
    primary.set(Manner::Each(|| StoreError::new(ErrorKind::Authentication)));
    // The runtime pauses for ten minutes, which is one report of the whole time.
    advance(Duration::from_secs(600)).await;
    sleep(Duration::from_secs(1)).await;
    let minutes = |still: &event::StillDegraded<'_>| still.after.as_secs() / 60;
    assert_eq!(
        lock(&reports.still).iter().map(minutes).collect::<Vec<_>>(),
        [1, 11]
    );
    assert_eq!(
        *lock(&reports.errors),
        [ErrorKind::Unreachable, ErrorKind::Authentication]
    );

    primary.set(Manner::AtOnce);
    while store.is_degraded() {
        sleep(Duration::from_millis(50)).await;
    }
    let [recovered] = lock(&reports.recovered)[..] else {
        panic!("not one recovery");
    };
    assert_eq!(recovered.checks, first.checks);
    // The other caller's units have refilled.
    assert_eq!(
        (recovered.granted, recovered.charged, recovered.dropped),
        (14 + before, 14, 0)
    );
    sleep(Duration::from_secs(120)).await;
    assert_eq!(
        lock(&reports.still).len(),
        2,
        "no report follows the outage"
    );
}

#[tokio::test(start_paused = true)]
async fn failures_before_an_outage_are_no_part_of_it() {
    let (primary, reports) = (Primary::default(), Reports::default());
    let store = Fallback::builder(primary.clone(), LocalStore::default())
        .observer(reports.clone())
        .build();
    let limit = policies(Strategy::Gcra, "400/100d");
    primary.set(Manner::Each(|| unreachable().not_sent()));
    let check = Check::take(ann(), &limit, 5);
    assert!(store.check(check).await.unwrap().is_allowed());
    primary.set(Manner::AtOnce);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(primary.used(&limit).await, 5, "the failure is reconciled");

    open(&store, &primary).await;
    primary.set(Manner::AtOnce);
    while store.is_degraded() {
        sleep(Duration::from_millis(50)).await;
    }
    let [recovered] = lock(&reports.recovered)[..] else {
        panic!("not one recovery");
    };
    assert!(
        recovered.granted <= 3 && recovered.charged == 0,
        "{recovered:?}"
    );
}
