//! A primary store whose partitions fail separately.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use super::*;
use crate::store::{Backend, Hooks};

#[derive(Clone, Default)]
struct Parted([Primary; 3]);

impl Store for Parted {
    type Future = <Primary as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.0[self.partition(check.key())].check(check)
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::new(self)
    }
}

impl Hooks for Parted {
    fn partitions(&self) -> usize {
        self.0.len()
    }

    fn partition(&self, key: &Key) -> usize {
        usize::from(key.as_bytes()[key.as_bytes().len() - 1]) % 3
    }
}

/// Counts outages.
#[derive(Clone, Default)]
struct OutageCounter(Arc<(AtomicUsize, AtomicUsize)>);

impl Observer for OutageCounter {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Degraded { .. } => {
                self.0.0.fetch_add(1, SeqCst);
            }
            Event::Recovered { .. } => {
                self.0.1.fetch_add(1, SeqCst);
            }
            _ => {}
        }
    }
}

impl OutageCounter {
    fn counts(&self) -> (usize, usize) {
        (self.0.0.load(SeqCst), self.0.1.load(SeqCst))
    }
}

fn away() -> StoreError {
    unreachable().not_sent()
}

/// Checks the callers `0`, `1` and `2`, which are in different partitions.
async fn ask(store: &Fallback<Parted, LocalStore>) {
    let policies = policies(Strategy::Gcra, "1000/d");
    for caller in ["0", "1", "2"] {
        assert!(
            store
                .check(Check::take(Key::new(caller), &policies, 1))
                .await
                .unwrap()
                .is_allowed()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_failing_partition_degrades_only_its_callers() {
    let (primary, outages) = (Parted::default(), OutageCounter::default());
    let store = Fallback::builder(primary.clone(), LocalStore::default())
        .observer(outages.clone())
        .build();
    ask(&store).await;
    let partition = |caller| primary.partition(&Key::new(caller));
    let asked = |partition: usize| primary.0[partition].asked();

    primary.0[partition("1")].set(Manner::Each(away));
    while !store.is_degraded() {
        ask(&store).await;
        advance(Duration::from_millis(2)).await;
    }
    assert_eq!(outages.counts(), (1, 0));
    let before = [0, 1, 2].map(asked);
    for _ in 0..10 {
        ask(&store).await;
    }
    let more: Vec<usize> = (0..3)
        .map(|partition| asked(partition) - before[partition])
        .collect();
    assert_eq!(
        (
            more[partition("0")],
            more[partition("1")],
            more[partition("2")]
        ),
        (10, 0, 10),
        "only the failed partition gets no checks"
    );

    // A second partition fails: this is still one outage.
    primary.0[partition("2")].set(Manner::Each(away));
    let before = asked(partition("2"));
    for _ in 0..100 {
        ask(&store).await;
        advance(Duration::from_millis(2)).await;
    }
    assert!(
        asked(partition("2")) - before < 10,
        "it gets no more checks"
    );
    assert_eq!(outages.counts(), (1, 0));
    primary.0[partition("1")].set(Manner::AtOnce);
    sleep(Duration::from_secs(2)).await;
    let before = asked(partition("1"));
    ask(&store).await;
    assert_eq!(
        asked(partition("1")) - before,
        1,
        "it recovers without a check"
    );
    assert!(store.is_degraded() && outages.counts() == (1, 0));
    primary.0[partition("2")].set(Manner::AtOnce);
    sleep(Duration::from_secs(2)).await;
    assert!(!store.is_degraded() && outages.counts() == (1, 1));

    // The grants of the fallback are reconciled with the partition that failed.
    let used = |caller: &'static str| {
        let counts = primary.0[partition(caller)].counts.clone();
        async move {
            let peek = counts
                .check(Check::peek(
                    Key::new(caller),
                    &policies(Strategy::Gcra, "1000/d"),
                    0,
                ))
                .await
                .unwrap();
            peek.capacity() - peek.remaining()
        }
    };
    let (zero, one, two) = (used("0").await, used("1").await, used("2").await);
    assert!(
        zero > 100 && zero == one && one == two,
        "{zero}, {one}, {two}"
    );
}

/// One partition fails, with more callers than its part of the maximum number of accounts.
#[tokio::test(start_paused = true)]
async fn partitions_share_the_bound_of_accounts() {
    let (primary, reconciled) = (Parted::default(), Reconciled::default());
    let store = Fallback::builder(primary.clone(), LocalStore::default())
        .observer(reconciled.clone())
        .build();
    let policies = policies(Strategy::Gcra, "1000/100d");
    let take =
        |caller: usize| store.check(Check::take(Key::new(format!("{caller}-0")), &policies, 1));
    let partition = &primary.0[primary.partition(&Key::new("0"))];
    partition.set(Manner::Each(away));
    for i in 0..40_000 {
        assert!(take(i).await.unwrap().is_allowed());
    }
    partition.set(Manner::AtOnce);
    while store.is_degraded() || reconciled.events().is_empty() {
        sleep(Duration::from_millis(5)).await;
    }
    let (charged, dropped) = reconciled
        .events()
        .iter()
        .fold((0, 0), |sum, event| (sum.0 + event.0, sum.1 + event.1));
    assert_eq!((charged, dropped), (40_000, 0));
}
