//! A store that is made with the public API alone, and how the others deal with such stores.

use std::collections::HashMap;
use std::future::Pending;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, advance};
use tower_redis_ratelimit::check::{Check, Decision, Mode, Outcome, Source, Verdict};
use tower_redis_ratelimit::observe::Observer;
use tower_redis_ratelimit::store::{Answer, ErrorKind, MockStore, Store, StoreError, WrapStore};
use tower_redis_ratelimit::{Fallback, Key, LocalStore, Policy};

use crate::support::{STRATEGIES, check, policy, until};

/// Counts in windows that begin with a caller's first charge, whatever the strategy.
#[derive(Debug, Clone, Default)]
pub(crate) struct Windows(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    /// By the caller and the name of the policy.
    windows: HashMap<(Key, String), Window>,
    /// By the caller and the id: until when which decision is repeated.
    answers: HashMap<(Key, Key), (Instant, Decision)>,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    /// Up to twice the capacity, in debt.
    used: u64,
    end: Instant,
}

pub(crate) const WINDOWS: Source = Source::Other("windows");

impl Store for Windows {
    /// It never waits.
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        // One lock for all callers: every check is atomic.
        let mut counts = self.0.lock().unwrap();
        Answer::ready(counts.decide_once(&check, Instant::now()))
    }
}

impl Counts {
    fn decide_once(&mut self, check: &Check, now: Instant) -> Result<Decision, StoreError> {
        let id = check.id().map(|id| (*check.key(), *id));
        if let Some((end, decision)) = id.and_then(|id| self.answers.get(&id))
            && *end > now
        {
            return Ok(decision.clone());
        }
        let decision = self.decide(check, now)?;
        if let Some(id) = id.filter(|_| decision.granted() > 0) {
            let longest = check.policies().iter().map(|policy| policy.quota().period()).max().unwrap();
            self.answers.insert(id, (now + longest, decision.clone()));
        }
        Ok(decision)
    }

    fn decide(&mut self, check: &Check, now: Instant) -> Result<Decision, StoreError> {
        let (mode, cost) = (check.mode(), u64::from(check.cost()));
        let windows: Vec<_> = check.policies().iter().map(|policy| self.window(check, policy, now)).collect();
        // How much each policy could grant, if it lets the check pass.
        let look = |(policy, window): (&Policy, &Window)| {
            let (used, capacity) = (window.used, capacity(policy));
            match mode {
                Mode::Take | Mode::TakeAhead | Mode::Peek => (used + cost <= capacity).then_some(cost),
                Mode::UpTo => (used + cost.min(1) <= capacity).then(|| cost.min(capacity - used)),
                Mode::Charge => (used + cost.min(1) <= 2 * capacity).then(|| cost.min(2 * capacity - used)),
                Mode::Refund => Some(cost.min(used)),
                _ => Some(used),
            }
        };
        let looks: Vec<Option<u64>> = check.policies().iter().zip(&windows).map(look).collect();
        let granted = match mode {
            Mode::Peek => 0,
            // Each what it has.
            Mode::Refund | Mode::Reset => looks.iter().flatten().copied().max().unwrap_or(0),
            Mode::Take | Mode::TakeAhead | Mode::UpTo | Mode::Charge => {
                looks.iter().copied().min().flatten().unwrap_or(0)
            }
            // A mode that it does not know.
            _ => return Err(StoreError::new(ErrorKind::Refused).of_check().unsent()),
        };
        for (policy, window) in check.policies().iter().zip(&windows).filter(|_| granted > 0) {
            let used = match mode {
                Mode::Refund => window.used.saturating_sub(cost),
                Mode::Reset => 0,
                _ => window.used + granted,
            };
            self.windows.insert((*check.key(), policy.name().to_owned()), Window { used, ..*window });
        }
        let mut looks = looks.into_iter();
        Ok(check.decided(WINDOWS, granted as u32, |policy| {
            let Window { used, end } = self.window(check, policy, now);
            let left = if used > 0 { end - now } else { Duration::ZERO };
            let verdict = match looks.next().flatten() {
                Some(_) => Verdict::allowed(),
                None if matches!(mode, Mode::Take | Mode::TakeAhead | Mode::Peek) && cost > capacity(policy) => {
                    Verdict::exceeds_capacity()
                }
                None => Verdict::denied(left),
            };
            verdict.with_remaining(capacity(policy).saturating_sub(used) as u32).with_reset_after(left)
        }))
    }

    /// The caller's window, or one that begins now.
    fn window(&self, check: &Check, policy: &Policy, now: Instant) -> Window {
        match self.windows.get(&(*check.key(), policy.name().to_owned())) {
            Some(window) if window.end > now => *window,
            _ => Window { used: 0, end: now + policy.quota().period() },
        }
    }
}

fn capacity(policy: &Policy) -> u64 {
    policy.quota().capacity().into()
}

fn ask<S: Store>(store: &S, check: Check) -> Result<Decision, StoreError> {
    store.check(check).now_or_never().expect("it never waits")
}

#[tokio::test(start_paused = true)]
async fn outside_windows_end_on_time() {
    let (store, policies) = (Windows::default(), policy(STRATEGIES[0], "3/m"));
    let take = || ask(&store, Check::take(Key::GLOBAL, &policies, 2)).unwrap();
    assert!(take().is_allowed());
    advance(Duration::from_secs(20)).await;
    assert_eq!(take().retry_after(), Some(Duration::from_secs(40)));
    advance(Duration::from_secs(40)).await;
    assert!(take().is_allowed());
}

#[test]
fn types_for_outside_stores_are_send() {
    fn shared<T: Send + Sync + Clone + std::fmt::Debug + 'static>() {}
    shared::<(MockStore, Verdict, Source, Decision, StoreError)>();
}

#[test]
fn a_mock_answers_as_configured() {
    let store = MockStore::new();
    let (mock, take) = (store.clone(), || ask(&store, check("ann", "10/s")));
    let first = take().unwrap();
    assert_eq!((first.outcome(), first.granted(), first.remaining()), (Outcome::Allowed, 1, 9));
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
    assert!(mock.asked().iter().all(|check| *check.key() == Key::new("ann") && check.cost() == 1));
}

/// What the fallback granted instead is charged to a store of another crate as well, unless that may have charged it.
#[tokio::test(start_paused = true)]
async fn unsent_grants_are_charged_to_outside_stores() {
    for unsent in [true, false] {
        let primary = MockStore::new();
        let store = Fallback::new(primary.clone(), LocalStore::default());
        let error = StoreError::new(ErrorKind::Unreachable);
        primary.fail(if unsent { error.unsent() } else { error });
        let take = |caller| store.check(check(caller, "10/h"));
        assert_eq!(take("ann").await.unwrap().source(), Source::Local);
        primary.fail(StoreError::new(ErrorKind::Unreachable).unsent());
        assert_eq!(take("bob").await.unwrap().source(), Source::Local);
        primary.allow();
        let charged = |caller| {
            let charge = |check: &Check| check.mode() == Mode::Charge && *check.key() == Key::new(caller);
            primary.asked().iter().any(charge)
        };
        until("bob is charged", async || charged("bob")).await;
        assert_eq!(charged("ann"), unsent);
    }
}

/// An error of one check alone opens no breaker.
#[tokio::test(start_paused = true)]
async fn outside_stores_may_fail_single_checks() {
    for of_check in [true, false] {
        let primary = MockStore::new();
        let store = Fallback::new(primary.clone(), LocalStore::default());
        let error = StoreError::new(ErrorKind::Refused);
        primary.fail(if of_check { error.of_check() } else { error });
        for _ in 0..10 {
            assert_eq!(store.check(check("ann", "10/h")).await.unwrap().source(), Source::Local);
        }
        assert_eq!(store.is_degraded(), !of_check);
    }
}

/// Whatever an outside store returns, nobody is locked out for longer than by a policy of the local store's own.
#[tokio::test(start_paused = true)]
async fn local_counts_continue_from_any_outside_answer() {
    for strategy in STRATEGIES {
        for wait in [Duration::ZERO, Duration::from_secs(1), Duration::MAX] {
            let primary = MockStore::new();
            primary.answer(move |check| {
                Ok(check.decided(Source::Other("far"), 0, |_| Verdict::denied(wait).with_reset_after(Duration::MAX)))
            });
            let store = Fallback::new(primary.clone(), LocalStore::default());
            let policies = policy(strategy, "10/s");
            let take = async || store.check(Check::take(Key::GLOBAL, &policies, 1)).await.unwrap();
            assert!(!take().await.is_allowed());
            primary.fail(StoreError::new(ErrorKind::Unreachable).unsent());
            let denied = take().await;
            assert_eq!(denied.source(), Source::Local);
            assert!(!denied.is_allowed(), "{strategy:?}");
            advance(Duration::from_secs(30)).await;
            assert!(take().await.is_allowed(), "{strategy:?} after {wait:?}: {denied:?}");
        }
    }
}

/// Has an answer for every hook that is not the default one.
#[derive(Clone, Default)]
struct Hooks(Arc<Mutex<Vec<&'static str>>>);

impl Store for Hooks {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, _: Check) -> Answer<Self::Future> {
        Answer::pending(std::future::pending())
    }

    fn withdraw(&self, _: Pin<&mut Self::Future>) -> bool {
        true
    }

    fn warm(&self, _: &Key, _: &Decision) {
        self.0.lock().unwrap().push("warm");
    }

    fn partitions(&self) -> usize {
        12
    }

    fn partition(&self, _: &Key) -> usize {
        7
    }

    fn is_authoritative(&self, _: &Decision) -> bool {
        false
    }

    fn identity(&self) -> Option<usize> {
        Some(3)
    }

    fn observe(&self, _: &Arc<dyn Observer>) {
        self.0.lock().unwrap().push("observe");
    }
}

#[derive(Clone, Default)]
struct Wrapped(Hooks);

impl WrapStore for Wrapped {
    type Inner = Hooks;

    fn inner(&self) -> &Hooks {
        &self.0
    }

    fn decide(&self, check: Check) -> Answer<<Hooks as Store>::Future> {
        Answer::ready(Ok(check.decided(WINDOWS, check.cost(), |_| Verdict::allowed())))
    }
}

#[test]
fn a_wrapped_store_keeps_its_hooks() {
    let store = Wrapped::default();
    let decision = ask(&store, check("ann", "10/h")).unwrap();
    assert_eq!(decision.source(), WINDOWS);
    assert!(store.withdraw(pin!(std::future::pending())));
    assert_eq!((store.partitions(), store.partition(&Key::GLOBAL), store.identity()), (12, 7, Some(3)));
    assert!(!store.is_authoritative(&decision));
    store.warm(&Key::GLOBAL, &decision);
    store.observe(&(Arc::new(()) as Arc<dyn Observer>));
    assert_eq!(*store.0.0.lock().unwrap(), ["warm", "observe"]);
}
