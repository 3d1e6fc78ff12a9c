//! The flush of a store whose primary store fails: its end, and its reports.

use std::error::Error;

use super::*;
use crate::limiter::Limiter;
use crate::settle::Reservation;
use crate::util::instant;

/// Records what would be lost.
#[derive(Clone, Default)]
struct Unflushed(Arc<Mutex<Vec<String>>>);

impl Observer for Unflushed {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { error, .. } = *event {
            let source = error.source().map(ToString::to_string);
            let text = source.unwrap_or_default();
            if text.contains("would lose") {
                lock(&self.0).push(text);
            }
        }
    }
}

impl Unflushed {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.0))
    }
}

fn text(operations: u32, callers: u32) -> String {
    format!(
        "the end of the process would lose {operations} charges, refunds and releases, and the local grants of {callers} \
         callers: flush again before it ends"
    )
}

fn observed() -> (Tested, Primary, Unflushed) {
    let (primary, unflushed) = (Primary::default(), Unflushed::default());
    let store = Fallback::builder(primary.clone(), LocalStore::default())
        .observer(unflushed.clone())
        .build();
    (store, primary, unflushed)
}

/// A limiter with two reservations.
async fn two_jobs(store: &Tested) -> (Limiter<Tested>, [Reservation; 2]) {
    let rows = Limiter::new(store.clone(), policies(Strategy::SlidingLog, "100/d"));
    let jobs = [
        rows.reserve(ann(), 10).await.unwrap(),
        rows.reserve(ann(), 10).await.unwrap(),
    ];
    (rows, jobs)
}

#[tokio::test(start_paused = true)]
async fn an_outage_ends_a_flush_immediately() {
    let (store, primary, unflushed) = observed();
    let (rows, jobs) = two_jobs(&store).await;
    open(&store, &primary).await;
    for caller in ["bob", "cho", "dan"] {
        let taken = rows.take(Key::new(caller), 1).await.unwrap();
        assert!(taken.is_allowed());
    }
    drop(jobs);
    let start = instant();
    assert!(!rows.flush().await);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(unflushed.take(), [text(2, 3)]);

    close(&store, &primary).await;
    assert!(rows.flush().await);
    assert_eq!(unflushed.take(), [] as [String; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_flush_waits_a_second_at_most() {
    let (store, primary, unflushed) = observed();
    let store = rebuild(&store)
        .deadline(Duration::from_secs(3_600))
        .unwrap()
        .build();
    let (rows, jobs) = two_jobs(&store).await;
    primary.set(Manner::Silent);
    drop(jobs);
    let start = instant();
    assert!(!rows.flush().await);
    assert_eq!(start.elapsed(), Duration::from_secs(1));
    assert_eq!(unflushed.take(), [text(2, 0)]);
}

/// Single checks fail, and the breaker stays closed: their grants are charged to the primary store in the background.
#[tokio::test(start_paused = true)]
async fn a_flush_waits_for_the_reconciliation() {
    let (store, primary, reconciled) = pair(1);
    let rows = policies(Strategy::SlidingLog, "100/d");
    primary.set(Manner::Each(unsent));
    assert_eq!(burst(&store, &rows, 2).await, 2);
    primary.set(Manner::After(Duration::from_millis(50)));
    assert!(!store.is_degraded());
    assert_eq!(primary.used(&rows).await, 0, "it is not reconciled yet");
    assert!(store.flush().await);
    assert_eq!(primary.used(&rows).await, 2);
    assert_eq!(reconciled.events(), [(2, 0)]);
}

/// An operation that may have been executed is not sent again.
#[tokio::test(start_paused = true)]
async fn a_flush_notices_what_is_given_up() {
    let (store, primary, unflushed) = observed();
    let (rows, jobs) = two_jobs(&store).await;
    primary.set(Manner::Silent);
    drop(jobs);
    assert!(!rows.flush().await);
    assert!(rows.flush().await, "nothing is left");
    assert_eq!(unflushed.take(), [] as [String; 0]);
}
