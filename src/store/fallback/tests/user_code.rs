//! Custom observers and stores: the locks held while they run, and the effect of their panics.

use std::future::Pending;
use std::num::NonZeroU32;
use std::panic::panic_any;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::task::{Context, Wake as TaskWake, Waker};

use super::far::{Far, cut, recovery, take};
use super::*;
use crate::limit::Mode;
use crate::simulation::in_redis;
use crate::store::{Backend, Hooks, Instances, Waiters};
use crate::util::instant;
use crate::waiters::Wake;

/// Panics at each notification.
struct Panics(Arc<AtomicUsize>);

impl Panics {
    fn notified(&self) {
        self.0.fetch_add(1, SeqCst);
        // Panic without printing a message.
        panic_any(());
    }
}

impl Observer for Panics {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Failed { .. } | Event::Degraded { .. } => {
                self.notified();
            }
            Event::Recovered { .. } | Event::Reconciled { .. } => {
                self.notified();
            }
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panicking_observer_costs_only_its_events() {
    let notified = Arc::new(AtomicUsize::new(0));
    let far = Far::new(Duration::from_millis(2));
    let store = Fallback::builder(far.clone(), LocalStore::default())
        .observer(Panics(Arc::clone(&notified)))
        .build();
    let policies = policies(Strategy::Gcra, "100/100d");
    cut(&store, &far).await;
    for _ in 0..40 {
        assert!(take(&store, ann(), &policies).await.is_allowed());
    }
    far.set(Some(Duration::from_millis(2)));
    // No check starts the task again.
    recovery(&store).await;
    sleep(Duration::from_secs(1)).await;
    let peek = far
        .counts
        .check(Check::peek(ann(), &policies, 0))
        .await
        .unwrap();
    assert_eq!(peek.remaining(), 60);
    assert_eq!(
        notified.load(SeqCst),
        3 + 1 + 1 + 1,
        "failures, the outage, its end, and the reconciled cost"
    );
}

/// A primary store that panics once, on the task that probes.
#[derive(Clone)]
struct PanicsOnce(Far, Arc<AtomicUsize>);

impl Store for PanicsOnce {
    type Future = <Far as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        if *check.key() == probe::KEY
            && lock(&self.0.delay).is_some()
            && self.1.fetch_add(1, SeqCst) < 2
        {
            panic_any(());
        }
        self.0.check(check)
    }
}

#[tokio::test(start_paused = true)]
async fn a_panicking_store_does_not_end_recovery() {
    let far = Far::new(Duration::from_millis(2));
    let store = Fallback::new(
        PanicsOnce(far.clone(), Arc::default()),
        LocalStore::default(),
    );
    far.set(None);
    while !store.is_degraded() {
        assert!(
            store
                .check(Check::take(ann(), &policies(Strategy::Gcra, "100/100d"), 1))
                .await
                .unwrap()
                .is_allowed()
        );
    }
    far.set(Some(Duration::from_millis(2)));
    sleep(Duration::from_secs(2)).await;
    assert!(!store.is_degraded());
}

/// A custom fallback that sends checks to the `Fallback` which contains it. An observer might do
/// the same.
#[derive(Clone, Default)]
struct AsksBack {
    counts: LocalStore,
    whole: Arc<Mutex<Option<Fallback<Far, Self>>>>,
    asked: Arc<AtomicUsize>,
}

impl AsksBack {
    fn ask_back(&self, key: &Key) {
        // Do not recurse.
        let Some(whole) = lock(&self.whole).take() else {
            return;
        };
        self.asked.fetch_add(1, SeqCst);
        drop(whole.check(Check::take(*key, &policies(Strategy::Gcra, "100/100d"), 1)));
        *lock(&self.whole) = Some(whole);
    }
}

impl Store for AsksBack {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.ask_back(check.key());
        self.counts.check(check)
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::new(self)
    }
}

impl Hooks for AsksBack {
    fn warm(&self, key: &Key, decision: &Decision) {
        self.ask_back(key);
        self.counts.warm(key, decision);
    }
}

/// Runs a test on a separate thread, which hangs if a lock is held. The test reports each step that it has `done`.
fn finishes<T: Future<Output = ()>>(
    steps: &[&str],
    test: impl FnOnce(mpsc::Sender<()>) -> T + Send + 'static,
) {
    let (done, finished) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(test(done));
    });
    for what in steps {
        assert!(
            finished.recv_timeout(Duration::from_secs(20)).is_ok(),
            "it hangs when {what}"
        );
    }
}

#[test]
fn user_code_runs_under_no_lock() {
    let steps = ["an answer is followed", "the fallback decides"];
    finishes(&steps, |done| async move {
        let far = Far::new(Duration::from_millis(2));
        let local = AsksBack::default();
        let store = Fallback::new(far.clone(), local.clone());
        *lock(&local.whole) = Some(store.clone());
        let check = || store.check(Check::take(ann(), &policies(Strategy::Gcra, "100/100d"), 1));
        assert!(check().await.unwrap().is_allowed());
        done.send(()).unwrap();
        far.set(None);
        assert!(check().await.unwrap().is_allowed());
        done.send(()).unwrap();
        assert_eq!(local.asked.load(SeqCst), 2);
        lock(&local.whole).take();
    });
}

/// The number of instances is read by a closure, which checks the store.
#[test]
fn the_instances_are_counted_under_no_lock() {
    finishes(&["the instances are counted"], |done| async move {
        let far = Far::new(Duration::from_millis(2));
        let whole = Arc::new(Mutex::new(None::<Fallback<Far, LocalStore>>));
        let policies = policies(Strategy::Gcra, "100/100d");
        let (counted, checked) = (Arc::clone(&whole), policies.clone());
        let alive = move || {
            // Do not recurse.
            let store = lock(&counted).take();
            if let Some(store) = store {
                drop(store.check(Check::take(ann(), &checked, 1)));
                *lock(&counted) = Some(store);
            }
            NonZeroU32::MIN
        };
        let store = Fallback::builder(far.clone(), LocalStore::default())
            .share(Instances::new(alive))
            .build();
        cut(&store, &far).await;
        *lock(&whole) = Some(store.clone());
        let takes = [
            Check::take(ann(), &policies, 1),
            Check::reset(ann(), &policies),
        ];
        for check in takes {
            assert!(store.check(check).await.unwrap().is_allowed());
        }
        lock(&whole).take();
        done.send(()).unwrap();
    });
}

/// Fails each check.
#[derive(Clone, Default)]
struct Down(Waiters);

impl Store for Down {
    type Future = Pending<Result<Decision, StoreError>>;

    fn check(&self, _: Check) -> Answer<Self::Future> {
        Answer::ready(Err(unsent()))
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::new(&self.0)
    }
}

/// The task of a waiter on another thread, which checks the fallback when it is woken.
struct ChecksImmediately {
    counts: LocalStore,
    policies: Policies,
    remaining: Mutex<Vec<u32>>,
}

impl TaskWake for ChecksImmediately {
    fn wake(self: Arc<Self>) {
        let peek = Check::peek(ann(), &self.policies, 1);
        let Answer::Ready { answer } = self.counts.check(peek) else {
            unreachable!("it never waits")
        };
        lock(&self.remaining).push(answer.unwrap().remaining());
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_are_woken_after_the_effect() {
    let policies = policies(Strategy::SlidingLog, "10/100d");
    let in_flight: Policies = Policy::in_flight("streams", 1).unwrap().into();
    let took = Check::take(ann(), &in_flight, 1);
    let release = Check::release(ann(), &in_flight, took.slot().unwrap());
    let refund = Check::refund(ann(), &policies, 4);
    let reset = Check::reset(ann(), &policies);
    for (take, freeing, seen) in [
        (Check::take(ann(), &policies, 10), refund.clone(), &[4][..]),
        (Check::take(ann(), &policies, 10), reset, &[10]),
        (took, release, &[1]),
        // No grant is refunded.
        (Check::take(ann(), &policies, 0), refund, &[]),
    ] {
        let (primary, counts) = (Down::default(), LocalStore::default());
        let store = Fallback::new(primary.clone(), counts.clone());
        assert!(store.check(take).await.unwrap().is_allowed());
        let policies = freeing.policies().clone();
        let wake = Arc::new(Wake::default());
        let listener = primary.0.listen(ann(), policies.clone(), Arc::clone(&wake));
        let waiter = Arc::new(ChecksImmediately {
            counts,
            policies,
            remaining: Mutex::default(),
        });
        let waker = Waker::from(Arc::clone(&waiter));
        let mut woken = pin!(wake.notify.notified());
        assert!(
            woken
                .as_mut()
                .poll(&mut Context::from_waker(&waker))
                .is_pending()
        );
        let _ = store.check(freeing.clone()).await;
        assert_eq!(*lock(&waiter.remaining), seen, "{:?}", freeing.mode());
        drop(listener);
    }
}

/// Fails this many refunds as unsent, after a while.
#[derive(Clone, Default)]
struct FailsRefunds {
    counts: LocalStore,
    left: Arc<AtomicUsize>,
}

impl Store for FailsRefunds {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let one_less = |left: usize| left.checked_sub(1);
        if check.mode() == Mode::Refund && self.left.fetch_update(SeqCst, SeqCst, one_less).is_ok()
        {
            return Answer::pending(Box::pin(async {
                sleep(Duration::from_millis(1)).await;
                Err(unsent())
            }));
        }
        Answer::pending(Box::pin(self.counts.check(check)))
    }
}

/// The primary store is charged without the refund, so its owner must not repeat it.
#[tokio::test(start_paused = true)]
async fn a_refund_that_fails_locally_is_final() {
    let (primary, fallback) = (Primary::default(), FailsRefunds::default());
    let store = Fallback::new(primary.clone(), fallback.clone());
    let policies = policies(Strategy::SlidingLog, "10/100s");
    primary.set(Manner::Each(unreachable));
    while !store.is_degraded() {
        let somebody = Check::take(Key::new("somebody"), &policies, 1);
        let _ = store.check(somebody).await;
    }
    let at = instant();
    let granted = take(&store, ann(), &policies).await;
    for _ in 0..9 {
        assert!(take(&store, ann(), &policies).await.is_allowed());
    }
    fallback.left.store(1, SeqCst);
    let refund = granted.refund(ann(), 1, at.elapsed()).unwrap();
    let error = store.check(refund).await.unwrap_err();
    assert!(!error.is_not_sent(), "{error}");
    primary.set(Manner::AtOnce);
    while store.is_degraded() {
        sleep(Duration::from_millis(5)).await;
    }
    sleep(Duration::from_secs(1)).await;
    assert_eq!(primary.used(&policies).await, 9);
}

/// Fails checks of two policies, as while their slot moves to another node.
#[derive(Clone, Default)]
struct Split(LocalStore);

impl Store for Split {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        if check.policies().iter().len() == 2 && *check.key() == ann() {
            let moving = StoreError::new(ErrorKind::NotReady).check_only().not_sent();
            return Answer::pending(Box::pin(std::future::ready(Err(moving))));
        }
        let answer = self.0.check(check);
        Answer::pending(Box::pin(async { answer.await.map(in_redis) }))
    }
}

/// The primary store decides checks under one list, and rejects those under another with the same
/// policy. Its replies lack the grants under the latter.
#[tokio::test(start_paused = true)]
async fn a_reply_hides_no_grants_under_another_list() {
    let store = Fallback::new(Split::default(), LocalStore::default());
    let policy = |name, quota: &str| Policy::new(name, Strategy::SlidingLog, quota).unwrap();
    let one: Policies = policy("a", "100/h").into();
    let two = Policies::new([policy("a", "100/h"), policy("b", "100000/h")]).unwrap();
    let (mut by_one, mut by_two) = (0, 0);
    for _ in 0..200 {
        by_one += take(&store, ann(), &one).await.granted();
        while take(&store, ann(), &two).await.is_allowed() {
            by_two += 1;
        }
        sleep(Duration::from_millis(10)).await;
    }
    assert!(
        by_one <= 100 && by_two <= 100,
        "{by_one} and {by_two} of 100"
    );
}

/// The reported misconfigurations.
#[derive(Clone, Default)]
struct Problems(Arc<Mutex<Vec<String>>>);

impl Observer for Problems {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Misconfigured { problem } = *event {
            lock(&self.0).push(problem.to_owned());
        }
    }
}

/// A wrapper that forwards all to a local store.
#[derive(Clone, Default)]
struct Wrapped(LocalStore);

impl Store for Wrapped {
    type Future = <LocalStore as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.0.check(check)
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        self.0.backend()
    }
}

#[tokio::test(start_paused = true)]
async fn a_wrapper_of_a_local_store_is_reported() {
    async fn problems_of<F: Store>(fallback: F) -> Vec<String> {
        let (far, problems) = (Far::new(Duration::from_millis(2)), Problems::default());
        let store = Fallback::builder(far, fallback)
            .observer(problems.clone())
            .build();
        for _ in 0..2 {
            let _ = take(&store, ann(), &policies(Strategy::Gcra, "100/100d")).await;
        }
        std::mem::take(&mut lock(&problems.0))
    }
    assert_eq!(problems_of(LocalStore::default()).await, [""; 0]);
    let problems = problems_of(Wrapped::default()).await;
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains("(other-fallback: "), "{problems:?}");
}
