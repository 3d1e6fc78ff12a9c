//! A runtime that is late, since its handlers keep its threads: its clock jumps.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::task::yield_now;

use super::*;
use crate::limit::Source;
use crate::util::instant;

/// Delay that a handler causes.
const HANDLER: Duration = Duration::from_millis(300);

/// Records the late notices, and how many failures the store has reported.
#[derive(Clone, Default)]
struct Notices {
    late: Arc<Mutex<Vec<(Duration, bool)>>>,
    failures: Arc<AtomicUsize>,
}

impl Observer for Notices {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::RuntimeLate { by, gave_up } => {
                lock(&self.late).push((by, gave_up));
            }
            Event::Failed { .. } => {
                self.failures.fetch_add(1, Relaxed);
            }
            _ => {}
        }
    }
}

impl Notices {
    fn failures(&self) -> usize {
        self.failures.load(Relaxed)
    }

    /// Returns the time of the only late notice, and whether the check gave up.
    fn only(&self) -> (Duration, bool) {
        match lock(&self.late)[..] {
            [notice] => notice,
            ref notices => panic!("{notices:?}"),
        }
    }
}

fn busy() -> (Tested, Primary, Notices) {
    let (store, primary, _) = pair(1);
    let notices = Notices::default();
    let store = rebuild(&store).observer(notices.clone()).build();
    (store, primary, notices)
}

fn take(quota: &str) -> Check {
    Check::take(ann(), &policies(Strategy::Gcra, quota), 1)
}

/// Lets handlers keep the thread, one after the other, until a check is decided.
async fn decided_while_busy(
    answer: impl Future<Output = Result<Decision, StoreError>> + Send + 'static,
) -> (Decision, Duration) {
    let since = instant();
    let check = tokio::spawn(answer);
    yield_now().await;
    while !check.is_finished() {
        advance(HANDLER).await;
        yield_now().await;
    }
    (check.await.unwrap().unwrap(), since.elapsed())
}

/// The reply has arrived when the deadline is noticed, but the task that reads it has not run.
#[tokio::test(start_paused = true)]
async fn a_late_notice_waits_for_the_reply() {
    let (store, primary, notices) = busy();
    // It arrives at the deadline, and is read one handler later.
    primary.set(Manner::After(Duration::from_millis(310)));
    let (decision, _) = decided_while_busy(store.check(take("10/100d"))).await;
    assert_eq!(decision.source(), Source::Redis);
    let (by, gave_up) = notices.only();
    assert!(by >= HANDLER / 2 && !gave_up, "{by:?}");
    assert_eq!(notices.failures(), 0);
}

/// Without evidence about the primary store, the check itself is decided, and a probe is sent.
#[tokio::test(start_paused = true)]
async fn a_runtime_that_is_always_late_opens_nothing() {
    let (store, primary, notices) = busy();
    let store = rebuild(&store).failures(NonZeroU32::MIN).build();
    primary.set(Manner::Swallows);
    let (decision, took) = decided_while_busy(store.check(take("10/100d"))).await;
    assert_eq!(decision.source(), Source::Local);
    assert_eq!((notices.failures(), store.is_degraded()), (0, false));
    let (by, gave_up) = notices.only();
    assert!(gave_up);
    let deadline = Duration::from_millis(100);
    assert!(took <= 2 * deadline + by, "{took:?}, late by {by:?}");
    // The probe finds that the primary store replies.
    primary.set(Manner::AtOnce);
    sleep(Duration::from_secs(1)).await;
    assert!(!store.is_degraded());
    // The charge is not repeated.
    assert_eq!(primary.used(&policies(Strategy::Gcra, "10/100d")).await, 1);
}

/// A probe, which delays no request, finds an outage on a runtime that is always late.
#[tokio::test(start_paused = true)]
async fn an_outage_is_found_on_a_late_runtime() {
    let (store, primary, _) = busy();
    primary.set(Manner::Silent);
    let since = instant();
    while !store.is_degraded() {
        assert!(since.elapsed() < Duration::from_secs(60), "no outage found");
        let _ = decided_while_busy(store.check(take("1000/s"))).await;
        yield_now().await;
    }
    let local = store.check(take("1000/s"));
    assert!(matches!(local, Answer::Ready { .. }), "no check waits");
}

/// The runtime was late at first, and then in time for a whole deadline.
#[tokio::test(start_paused = true)]
async fn a_silence_after_a_late_notice_is_a_failure() {
    let (store, primary, notices) = busy();
    primary.set(Manner::Silent);
    let since = instant();
    let check = tokio::spawn(store.check(take("10/100d")));
    yield_now().await;
    advance(HANDLER).await;
    let decision = check.await.unwrap().unwrap();
    assert_eq!((decision.source(), notices.failures()), (Source::Local, 1));
    let (_, gave_up) = notices.only();
    assert!(!gave_up, "it is reported once, as a failure");
    let took = since.elapsed();
    assert!(
        took <= HANDLER + Duration::from_millis(110),
        "one deadline after the handler, and the rounding of timers: {took:?}"
    );
}

/// A trial without evidence is followed by another one immediately.
#[tokio::test(start_paused = true)]
async fn a_late_trial_is_followed_by_another() {
    let (store, primary, notices) = busy();
    let store = rebuild(&store)
        .failures(NonZeroU32::new(10).unwrap())
        .build();
    primary.set(Manner::Each(unreachable));
    burst(&store, &policies(Strategy::Gcra, "10/100d"), 1).await;
    primary.set(Manner::Swallows);
    let _ = decided_while_busy(store.check(take("10/100d"))).await;
    assert_eq!((notices.failures(), store.is_degraded()), (1, false));
    primary.set(Manner::AtOnce);
    let decision = store.check(take("10/100d")).await.unwrap();
    assert_eq!(decision.source(), Source::Redis);
}

/// No check waits.
#[tokio::test(start_paused = true)]
async fn a_deadline_of_zero_is_no_late_notice() {
    let (store, primary, notices) = busy();
    let store = rebuild(&store).deadline(Duration::ZERO).unwrap().build();
    primary.set(Manner::Silent);
    let since = instant();
    assert_eq!(
        burst(&store, &policies(Strategy::Gcra, "10/100d"), 3).await,
        3
    );
    assert!(store.is_degraded() && since.elapsed() < Duration::from_millis(10));
    assert_eq!(lock(&notices.late).len(), 0);
}
