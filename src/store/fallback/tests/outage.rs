//! The reports of an outage.

use std::num::NonZeroU32;

use super::*;

/// Records the reports of outages.
#[derive(Clone, Default)]
struct Reports {
    still: Arc<Mutex<Vec<Still>>>,
    /// Why the last probe before each of them failed.
    errors: Arc<Mutex<Vec<ErrorKind>>>,
    /// The checks, and the cost granted, charged and dropped.
    recovered: Arc<Mutex<Vec<[u64; 4]>>>,
}

/// A report of an outage that continues.
#[derive(Debug, Clone, Copy)]
struct Still {
    after: Duration,
    checks: u64,
    share: NonZeroU32,
}

impl Observer for Reports {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::StillDegraded {
                after,
                checks,
                share,
                error,
            } => {
                lock(&self.still).push(Still {
                    after,
                    checks,
                    share,
                });
                lock(&self.errors).extend(error.map(StoreError::kind));
            }
            Event::Recovered {
                checks,
                granted,
                charged,
                dropped,
                ..
            } => {
                lock(&self.recovered).push([checks, granted, charged, dropped]);
            }
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_outage_is_reported_each_minute() {
    let (primary, reports) = (Primary::default(), Reports::default());
    let store = Fallback::builder(primary.clone(), LocalStore::default())
        .share(4)
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
    let minutes = |still: &Still| still.after.as_secs() / 60;
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
    // The other caller's units have refilled.
    let recovered = [first.checks, 14 + before, 14, 0];
    assert_eq!(*lock(&reports.recovered), [recovered]);
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
    let [[_, granted, charged, _]] = lock(&reports.recovered)[..] else {
        panic!("not one recovery");
    };
    assert!(granted <= 3 && charged == 0, "{granted} {charged}");
}
