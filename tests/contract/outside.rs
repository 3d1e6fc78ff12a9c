//! A store written with the public API only, and how other stores treat it.

use std::collections::HashMap;
use std::future::Pending;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use tokio::time::{Instant, advance};
use tower_redis_ratelimit::check::{Check, Decision, Mode, Outcome, Source, Verdict};
use tower_redis_ratelimit::store::{
    Answer, Backend, Counts, ErrorKind, MockStore, Store, StoreError,
};
use tower_redis_ratelimit::strategy::Align;
use tower_redis_ratelimit::{Fallback, Key, LocalStore, Policies, Policy, Strategy};

use crate::support::{STRATEGIES, check, policy, until};

/// Counts in a map, with the crate's strategies.
#[derive(Debug, Clone)]
pub(crate) struct InMemory {
    callers: Arc<Mutex<HashMap<Key, Counts>>>,
    start: (SystemTime, Instant),
}

pub(crate) const MEMORY: Source = Source::Other("memory");

impl InMemory {
    pub(crate) fn new() -> Self {
        Self {
            callers: Arc::default(),
            start: (SystemTime::now(), Instant::now()),
        }
    }

    /// Returns the time of Tokio's clock, which is paused.
    fn now(&self) -> SystemTime {
        self.start.0 + self.start.1.elapsed()
    }
}

impl Store for InMemory {
    /// The store never waits.
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        // One lock for all callers: every check is atomic.
        let mut callers = self.callers.lock().unwrap();
        let counts = callers.entry(*check.key()).or_default();
        Answer::ready(Ok(counts.decide(&check, self.now(), MEMORY)))
    }
}

fn check_now<S: Store>(store: &S, check: Check) -> Result<Decision, StoreError> {
    store
        .check(check)
        .now_or_never()
        .expect("the store never waits")
}

/// Each decision equals that of the local store, and in the end the counts have expired.
#[tokio::test(start_paused = true)]
async fn counts_agree_with_the_local_store() {
    // Not with windows of the clock: the stores would have to read it at the same moment.
    let of_clock = |strategy: &Strategy| match strategy {
        Strategy::FixedWindow(align) => matches!(align, Align::Clock { .. }),
        strategy => matches!(
            strategy,
            Strategy::SlidingWindow { .. } | Strategy::SlidingCounter
        ),
    };
    for strategy in STRATEGIES
        .into_iter()
        .filter(|strategy| !of_clock(strategy))
    {
        let (local, ours) = (LocalStore::default(), InMemory::new());
        let policies = policy(strategy, "10/m");
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..500 {
            let check = match rng.u32(0..6) {
                0 => Check::peek(Key::GLOBAL, &policies, rng.u32(0..12)),
                1 => Check::up_to(Key::GLOBAL, &policies, rng.u32(0..12)),
                2 => Check::refund(Key::GLOBAL, &policies, rng.u32(0..3)),
                3 => Check::take(Key::GLOBAL, &policies, 1).with_id(rng.u32(0..5).to_string()),
                _ => Check::take(Key::GLOBAL, &policies, rng.u32(0..4)),
            };
            let [expected, decision] =
                [check_now(&local, check.clone()), check_now(&ours, check)].map(Result::unwrap);
            let seen = |decision: &Decision| {
                (decision.outcome(), decision.granted(), decision.remaining())
            };
            assert_eq!(seen(&decision), seen(&expected), "{strategy:?}");
            advance(Duration::from_millis(rng.u64(0..1_000))).await;
        }
        let has_expired = || ours.callers.lock().unwrap()[&Key::GLOBAL].is_expired(ours.now());
        let _ = check_now(&ours, Check::take(Key::GLOBAL, &policies, 1));
        assert!(!has_expired(), "{strategy:?}");
        advance(Duration::from_secs(600)).await;
        assert!(has_expired(), "{strategy:?}");
    }
}

#[test]
fn types_for_outside_stores_are_send() {
    fn shared<T: Send + Sync + Clone + std::fmt::Debug + 'static>() {}
    shared::<(MockStore, Verdict, Source, Decision, StoreError)>();
}

#[test]
fn a_mock_answers_as_configured() {
    let store = MockStore::new();
    let (mock, take) = (store.clone(), || check_now(&store, check("ann", "10/s")));
    let first = take().unwrap();
    assert_eq!(
        (first.outcome(), first.granted(), first.remaining()),
        (Outcome::Allowed, 1, 9)
    );
    assert_eq!(first.source(), Source::Other("mock"));
    mock.deny(Duration::from_secs(30));
    for _ in 0..2 {
        assert_eq!(take().unwrap().retry_after(), Some(Duration::from_secs(30)));
    }
    mock.fail(StoreError::new(ErrorKind::Timeout));
    assert_eq!(take().unwrap_err().kind(), ErrorKind::Timeout);
    mock.allow();
    assert!(take().unwrap().is_allowed());
    mock.answer(|check| Ok(check.decided(Source::Local, 0, |_| Verdict::exceeds_capacity())));
    assert_eq!(take().unwrap().outcome(), Outcome::ExceedsCapacity);
    assert_eq!(mock.asked().len(), 6);
    assert!(
        mock.asked()
            .iter()
            .all(|check| *check.key() == Key::new("ann") && check.cost() == 1)
    );
}

/// An id belongs to its list of policies, as in every other store.
#[test]
fn an_id_is_kept_for_each_list() {
    let policies = |name| Policies::from(Policy::new(name, Strategy::Gcra, "10/h").unwrap());
    let (store, one, other) = (InMemory::new(), policies("one"), policies("other"));
    let take = |policies| {
        check_now(&store, Check::take(Key::GLOBAL, policies, 4).with_id("id"))
            .unwrap()
            .remaining()
    };
    assert_eq!([take(&one), take(&other), take(&one), take(&other)], [6; 4]);
    assert_eq!(
        check_now(&store, Check::peek(Key::GLOBAL, &one, 0))
            .unwrap()
            .remaining(),
        6
    );
}

/// A grant of the fallback is charged to the outside store, unless that may already have charged
/// it.
#[tokio::test(start_paused = true)]
async fn unsent_grants_are_charged_to_outside_stores() {
    for unsent in [true, false] {
        let primary = MockStore::new();
        let store = Fallback::new(primary.clone(), LocalStore::default());
        let error = StoreError::new(ErrorKind::Unreachable);
        primary.fail(if unsent { error.not_sent() } else { error });
        let take = |caller| store.check(check(caller, "10/h"));
        assert_eq!(take("ann").await.unwrap().source(), Source::Local);
        primary.fail(StoreError::new(ErrorKind::Unreachable).not_sent());
        assert_eq!(take("bob").await.unwrap().source(), Source::Local);
        primary.allow();
        let charged = |caller| {
            let charge =
                |check: &Check| check.mode() == Mode::Charge && *check.key() == Key::new(caller);
            primary.asked().iter().any(charge)
        };
        until("bob is charged", async || charged("bob")).await;
        assert_eq!(charged("ann"), unsent);
    }
}

/// An error of a single check does not open the breaker.
#[tokio::test(start_paused = true)]
async fn outside_stores_may_fail_single_checks() {
    for of_check in [true, false] {
        let primary = MockStore::new();
        let store = Fallback::new(primary.clone(), LocalStore::default());
        let error = StoreError::new(ErrorKind::Refused);
        primary.fail(if of_check { error.check_only() } else { error });
        for _ in 0..10 {
            assert_eq!(
                store.check(check("ann", "10/h")).await.unwrap().source(),
                Source::Local
            );
        }
        assert_eq!(store.is_degraded(), !of_check);
    }
}

/// No answer of an outside store locks a caller out for longer than the local store's own policy
/// would.
#[tokio::test(start_paused = true)]
async fn local_counts_continue_from_any_outside_answer() {
    for strategy in STRATEGIES {
        for wait in [Duration::ZERO, Duration::from_secs(1), Duration::MAX] {
            let primary = MockStore::new();
            primary.answer(move |check| {
                Ok(check.decided(Source::Other("far"), 0, |_| {
                    Verdict::denied(wait).with_reset_after(Duration::MAX)
                }))
            });
            let store = Fallback::new(primary.clone(), LocalStore::default());
            let policies = policy(strategy, "10/s");
            let take = async || {
                store
                    .check(Check::take(Key::GLOBAL, &policies, 1))
                    .await
                    .unwrap()
            };
            assert!(!take().await.is_allowed());
            primary.fail(StoreError::new(ErrorKind::Unreachable).not_sent());
            let denied = take().await;
            assert_eq!(denied.source(), Source::Local);
            assert!(!denied.is_allowed(), "{strategy:?}");
            advance(Duration::from_secs(30)).await;
            assert!(
                take().await.is_allowed(),
                "{strategy:?} after {wait:?}: {denied:?}"
            );
        }
    }
}

/// Grants a caller everything, and leaves the others to the inner store.
#[derive(Clone)]
struct Exempt<S>(S, Key);

impl<S: Store> Store for Exempt<S> {
    type Future = S::Future;

    fn check(&self, check: Check) -> Answer<S::Future> {
        if *check.key() == self.1 {
            let cost = check.cost();
            return Answer::ready(Ok(check.decided(MEMORY, cost, |_| Verdict::allowed())));
        }
        self.0.check(check)
    }

    fn backend(&self) -> Backend<'_, S::Future> {
        self.0.backend()
    }
}

/// The fallback tells its second store what the first one has counted.
#[tokio::test(start_paused = true)]
async fn a_wrapped_store_keeps_its_hooks() {
    let primary = MockStore::new();
    primary.answer(|check| {
        Ok(check.decided(Source::Other("far"), check.cost(), |_| {
            Verdict::allowed()
                .with_remaining(3)
                .with_reset_after(Duration::from_secs(70 * 86_400))
        }))
    });
    let store = Fallback::new(
        primary.clone(),
        Exempt(LocalStore::default(), Key::new("bob")),
    );
    let take = async |caller| store.check(check(caller, "10/100d")).await.unwrap();
    for caller in ["ann", "bob"] {
        assert_eq!(take(caller).await.source(), Source::Other("far"));
    }
    primary.fail(StoreError::new(ErrorKind::Unreachable).not_sent());
    let (ann, bob) = (take("ann").await, take("bob").await);
    assert_eq!((ann.source(), ann.remaining()), (Source::Local, 2));
    assert_eq!(bob.source(), MEMORY);
}
