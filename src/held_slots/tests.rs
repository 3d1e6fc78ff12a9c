//! The store counts exactly the requests in flight, even if requests are cancelled and replies are
//! lost.

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use fastrand::Rng;
use tokio::time::{sleep, timeout};

use super::*;
use crate::error::ErrorKind;
use crate::limit::{Mode, Policy};
use crate::limiter::Limiter;
use crate::observe::Event;
use crate::settle::Reservation;
use crate::store::{Answer, Fallback, LocalStore, MockStore};
use crate::wait_queues::{Bounds, WaitQueues};

/// Behaves like a fallback over Redis: while Redis is unreachable, another store decides.
#[derive(Clone)]
struct FaultyStore {
    shared: LocalStore,
    fallback: LocalStore,
    /// [`REACHABLE`], [`UNREACHABLE`], [`LOSES_REPLIES`], [`REJECTS`] or [`UNSURE`].
    fault: Arc<AtomicU8>,
    /// The delay of each way. As with several connections, a later check may arrive first.
    delay: fn() -> Duration,
    received: Arc<Mutex<Vec<Mode>>>,
}

const REACHABLE: u8 = 0;
const UNREACHABLE: u8 = 1;
/// It counts the check, but the reply is lost.
const LOSES_REPLIES: u8 = 2;
/// The check is not sent.
const REJECTS: u8 = 3;
/// The check is sent and lost, and the error is that of a fallback, which has decided elsewhere.
const UNSURE: u8 = 4;

const LIMIT: u32 = 10;
const TTL: Duration = Duration::from_secs(30);

impl FaultyStore {
    fn new() -> Self {
        let (shared, fallback) = (LocalStore::default(), LocalStore::default());
        Self {
            shared,
            fallback,
            fault: Arc::default(),
            delay: || Duration::from_millis(2),
            received: Arc::default(),
        }
    }

    fn set(&self, fault: u8) {
        self.fault.store(fault, Ordering::SeqCst);
    }

    /// Returns the modes of the checks since the last call, except takes.
    fn take_received(&self) -> Vec<Mode> {
        std::mem::take(&mut *lock(&self.received))
            .into_iter()
            .filter(|mode| *mode != Mode::Take)
            .collect()
    }

    /// Returns the number of requests that the store counts for a caller.
    fn counted(&self, key: Key) -> u32 {
        LIMIT - decide(&self.shared, Check::peek(key, &policies(), 1)).remaining()
    }
}

fn decide(store: &LocalStore, check: Check) -> Decision {
    let Answer::Ready { answer } = store.check(check) else {
        unreachable!("it never waits")
    };
    answer.unwrap()
}

impl Store for FaultyStore {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        lock(&self.received).push(check.mode());
        let store = self.clone();
        // As with Redis, the decision and the reply are delayed.
        Answer::pending(Box::pin(async move {
            sleep((store.delay)()).await;
            let fault = store.fault.load(Ordering::SeqCst);
            let unsent = Err(StoreError::new(ErrorKind::Unreachable).not_sent());
            if fault == UNREACHABLE {
                let decision = decide(&store.fallback, check.clone());
                return if check.mode() == Mode::Release {
                    unsent
                } else {
                    Ok(decision)
                };
            }
            if fault == REJECTS {
                return unsent;
            }
            if fault == UNSURE {
                return Err(StoreError::new(ErrorKind::NotReady).check_only());
            }
            let decision = decide(&store.shared, check);
            sleep((store.delay)()).await;
            if fault == LOSES_REPLIES {
                Err(StoreError::new(ErrorKind::Timeout))
            } else {
                Ok(decision)
            }
        }))
    }
}

fn policies() -> Policies {
    static POLICIES: std::sync::LazyLock<Policies> = std::sync::LazyLock::new(|| {
        Policy::in_flight("streams", LIMIT)
            .unwrap()
            .slot_ttl(TTL)
            .unwrap()
            .into()
    });
    POLICIES.clone()
}

fn tracker(store: &FaultyStore) -> InFlightTracker {
    InFlightTracker::new(store, None)
}

/// Takes a slot. Returns it if it was granted.
async fn request(store: &FaultyStore, tracker: &InFlightTracker, key: Key) -> Option<Slot> {
    request_under(store, tracker, key, &policies()).await
}

async fn request_under(
    store: &FaultyStore,
    tracker: &InFlightTracker,
    key: Key,
    policies: &Policies,
) -> Option<Slot> {
    let check = Check::take(key, policies, 1);
    let mut slot = tracker.track(&check).unwrap();
    let answer = store.check(check).await;
    slot.on_reply(answer.as_ref());
    answer
        .is_ok_and(|decision| decision.is_allowed())
        .then_some(slot)
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TTL / 2, wait)
        .await
        .unwrap_or_else(|_| panic!("timed out waiting until {what}"));
}

#[tokio::test(start_paused = true)]
async fn long_requests_are_counted_until_they_end() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let one = request(&store, &tracker, ann).await.unwrap();
    sleep(20 * TTL).await;
    assert_eq!(store.counted(ann), 1);
    let renewals = store.take_received();
    assert!(
        renewals.iter().all(|mode| *mode == Mode::Renew) && (60..=80).contains(&renewals.len()),
        "{renewals:?}"
    );
    drop(one);
    until("it is released", || store.counted(ann) == 0).await;
    assert_eq!(store.take_received(), [Mode::Release]);
    sleep(TTL).await;
    assert_eq!(
        store.take_received(),
        [],
        "no slot is renewed after its release"
    );
}

#[tokio::test(start_paused = true)]
async fn layers_over_one_store_keep_all_slots() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let layers = [tracker(&store), tracker(&store.clone())];
    let mut held = vec![];
    for (count, layer) in [2, 3].into_iter().zip(&layers) {
        for _ in 0..count {
            held.extend(request(&store, layer, ann).await);
        }
    }
    for layer in &layers {
        assert!(
            timeout(Duration::from_millis(3), request(&store, layer, ann))
                .await
                .is_err()
        );
        sleep(2 * TTL).await;
        assert_eq!(store.counted(ann), 5);
    }
    drop((layers, held));
    until("nothing is counted", || store.counted(ann) == 0).await;
}

#[tokio::test(start_paused = true)]
async fn denied_requests_are_not_released() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let mut held = vec![];
    for _ in 0..2 * LIMIT {
        held.extend(request(&store, &tracker, ann).await);
    }
    assert_eq!((held.len(), store.counted(ann)), (10, 10));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(store.take_received(), []);
}

/// A client may disconnect before the store has replied: its slot must be released.
#[tokio::test(start_paused = true)]
async fn requests_dropped_before_the_answer_are_released() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let _other = request(&store, &tracker, ann).await.unwrap();
    assert!(
        timeout(Duration::from_millis(3), request(&store, &tracker, ann))
            .await
            .is_err()
    );
    assert_eq!(store.counted(ann), 2);
    // The release does not wait for the next renewal.
    timeout(
        Duration::from_secs(1),
        until("it counts one", || store.counted(ann) == 1),
    )
    .await
    .expect("a release in time");
}

/// The release reaches the store before the take, on another connection.
#[tokio::test(start_paused = true)]
async fn a_take_overtaken_by_its_release_is_released() {
    let shortest = Policy::in_flight("streams", LIMIT).unwrap();
    let shortest = shortest.slot_ttl(Duration::from_secs(1)).unwrap().into();
    for (policies, delay) in [(policies(), 400), (policies(), 900), (shortest, 900)] {
        let (store, ann) = (FaultyStore::new(), Key::new("ann"));
        let (tracker, check) = (tracker(&store), Check::take(ann, &policies, 1));
        drop(tracker.track(&check));
        sleep(Duration::from_millis(delay)).await;
        assert!(store.take_received().contains(&Mode::Release));
        let _ = decide(&store.shared, check);
        assert_eq!(store.counted(ann), 1);
        timeout(
            Duration::from_millis(200),
            until("it counts none", || store.counted(ann) == 0),
        )
        .await
        .unwrap_or_else(|_| panic!("counted after {delay} ms"));
    }
}

/// The release reaches the store before a renewal whose reply was lost. The repeated release frees
/// the slot that this renewal takes again.
#[tokio::test(start_paused = true)]
async fn a_renewal_overtaken_by_its_release_is_released() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let (tracker, check) = (tracker(&store), Check::take(ann, &policies(), 1));
    let mut slot = tracker.track(&check).unwrap();
    slot.on_reply(store.check(check.clone()).await.as_ref());
    store.set(LOSES_REPLIES);
    sleep(TTL / 3).await;
    assert_eq!(store.take_received(), [Mode::Renew]);
    store.set(REACHABLE);
    drop(slot);
    sleep(Duration::from_millis(400)).await;
    let _ = decide(
        &store.shared,
        Check::renew(ann, &policies(), check.slot().unwrap()),
    );
    timeout(
        Duration::from_millis(200),
        until("it counts none", || store.counted(ann) == 0),
    )
    .await
    .expect("soon");
}

#[tokio::test(start_paused = true)]
async fn changes_during_an_outage_are_counted_afterwards() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let before = request(&store, &tracker, ann).await.unwrap();
    store.set(UNREACHABLE);
    let _during = (
        request(&store, &tracker, ann).await.unwrap(),
        request(&store, &tracker, ann).await.unwrap(),
    );
    drop(before);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(store.counted(ann), 1);
    store.set(REACHABLE);
    until("it counts both", || store.counted(ann) == 2).await;
}

/// Without the release, the slot would expire, but later.
#[tokio::test(start_paused = true)]
async fn a_release_in_an_outage_is_sent_after_it() {
    for fault in [UNREACHABLE, LOSES_REPLIES, REJECTS, UNSURE] {
        let (store, ann) = (FaultyStore::new(), Key::new("ann"));
        let tracker = tracker(&store);
        let one = request(&store, &tracker, ann).await.unwrap();
        store.set(fault);
        drop(one);
        sleep(Duration::from_secs(5)).await;
        store.set(REACHABLE);
        timeout(
            Duration::from_secs(2),
            until("it counts none", || store.counted(ann) == 0),
        )
        .await
        .expect("soon");
    }
}

/// The store loses slots without a sign, as in a failover or a `FLUSHALL`.
#[tokio::test(start_paused = true)]
async fn lost_slots_return_within_a_third_of_their_ttl() {
    let (store, ann, bob) = (FaultyStore::new(), Key::new("ann"), Key::new("bob"));
    let tracker = tracker(&store);
    let held = [
        request(&store, &tracker, ann).await,
        request(&store, &tracker, ann).await,
    ];
    let bobs = request(&store, &tracker, bob).await;
    for key in [ann, bob] {
        let _ = decide(&store.shared, Check::reset(key, &policies()));
    }
    // A new slot of the same caller must not prevent the return of the lost one.
    let _third = request(&store, &tracker, bob).await;
    assert_eq!((store.counted(ann), store.counted(bob)), (0, 1));
    sleep(TTL / 3 + Duration::from_secs(1)).await;
    assert_eq!((store.counted(ann), store.counted(bob)), (2, 2));
    drop((held, bobs));
}

/// Requests with every kind of ending, while the store replies, is unreachable, or loses replies.
/// At the end it counts none.
#[tokio::test(start_paused = true)]
async fn nothing_stays_counted_whatever_happens() {
    for seed in 0..30 {
        let (store, mut rng) = (FaultyStore::new(), Rng::with_seed(seed));
        let tracker = tracker(&store);
        let mut tasks = vec![];
        for _ in 0..300 {
            let (store, tracker) = (store.clone(), tracker.clone());
            let key = Key::new(rng.u8(..4).to_string());
            let (start, patience, work) = (rng.u64(..20_000), rng.u64(..10_000), rng.u64(..5_000));
            tasks.push(tokio::spawn(async move {
                sleep(Duration::from_millis(start)).await;
                // Some clients disconnect before the reply.
                let answer = timeout(
                    Duration::from_micros(patience),
                    request(&store, &tracker, key),
                )
                .await;
                if let Ok(Some(_slot)) = answer {
                    sleep(Duration::from_millis(work)).await;
                }
            }));
        }
        for _ in 0..10 {
            sleep(Duration::from_millis(rng.u64(..3_000))).await;
            store.set(rng.u8(..3));
        }
        store.set(REACHABLE);
        for task in tasks {
            task.await.unwrap();
        }
        let keys = || (0..4).map(|i| Key::new(i.to_string()));
        until("nothing is counted", || {
            keys().all(|key| store.counted(key) == 0)
        })
        .await;
    }
}

/// The store is reachable, and only clients that cancel a request miss its reply.
#[tokio::test(start_paused = true)]
async fn cancellations_never_let_requests_exceed_the_limit() {
    assert_eq!(
        max_in_flight(|| Duration::from_millis(2), 64, 1.0).await,
        LIMIT as usize
    );
}

/// A later check may arrive at the store before an earlier one, on another connection.
#[tokio::test(start_paused = true)]
async fn overtaking_checks_never_exceed_the_limit() {
    fastrand::seed(7);
    let delay = || Duration::from_micros(fastrand::u64(..5_000));
    assert_eq!(max_in_flight(delay, 24, 0.1).await, LIMIT as usize);
}

/// The maximum number of requests in flight of this many clients. The fraction `cancelled` of the
/// requests is cancelled, possibly before the reply arrives.
async fn max_in_flight(delay: fn() -> Duration, clients: u32, cancelled: f64) -> usize {
    let (in_flight, max) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    for seed in 0..10 {
        let (store, mut rng) = (
            FaultyStore {
                delay,
                ..FaultyStore::new()
            },
            Rng::with_seed(seed),
        );
        let tracker = tracker(&store);
        let mut tasks = vec![];
        for _ in 0..clients {
            let (store, tracker, seed) = (store.clone(), tracker.clone(), rng.u64(..));
            let (in_flight, max) = (Arc::clone(&in_flight), Arc::clone(&max));
            tasks.push(tokio::spawn(async move {
                let mut rng = Rng::with_seed(seed);
                for _ in 0..100 {
                    let is_cancelled = rng.f64() < cancelled;
                    let patience = if is_cancelled {
                        Duration::from_micros(rng.u64(..10_000))
                    } else {
                        TTL
                    };
                    let answer =
                        timeout(patience, request(&store, &tracker, Key::new("ann"))).await;
                    if let Ok(Some(slot)) = answer {
                        max.fetch_max(
                            in_flight.fetch_add(1, Ordering::SeqCst) + 1,
                            Ordering::SeqCst,
                        );
                        sleep(Duration::from_millis(rng.u64(..50))).await;
                        in_flight.fetch_sub(1, Ordering::SeqCst);
                        drop(slot);
                    }
                    sleep(Duration::from_millis(rng.u64(..100))).await;
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
    max.load(Ordering::SeqCst)
}

/// The clients need more slots than there are. Slots of cancelled requests must be released in the
/// meantime, and not only after the flood.
#[tokio::test(start_paused = true)]
async fn a_cancelled_request_frees_capacity_under_flood() {
    fastrand::seed(7);
    let (store, ann) = (
        FaultyStore {
            delay: || Duration::from_micros(fastrand::u64(..5_000)),
            ..FaultyStore::new()
        },
        Key::new("ann"),
    );
    let tracker = tracker(&store);
    let in_flight = Arc::new(AtomicUsize::new(0));
    for seed in 0..24 {
        let (store, tracker, in_flight) = (store.clone(), tracker.clone(), Arc::clone(&in_flight));
        tokio::spawn(async move {
            let mut rng = Rng::with_seed(seed);
            loop {
                let patience = if rng.f64() < 0.1 {
                    Duration::from_micros(rng.u64(..10_000))
                } else {
                    TTL
                };
                if let Ok(Some(_slot)) = timeout(patience, request(&store, &tracker, ann)).await {
                    in_flight.fetch_add(1, Ordering::SeqCst);
                    sleep(Duration::from_millis(rng.u64(1..40))).await;
                    in_flight.fetch_sub(1, Ordering::SeqCst);
                }
                sleep(Duration::from_millis(rng.u64(1..20))).await;
            }
        });
    }
    for _ in 0..10 {
        let mut min = usize::MAX;
        for _ in 0..1_000 {
            sleep(Duration::from_millis(1)).await;
            min = min.min(
                (store.counted(ann) as usize).saturating_sub(in_flight.load(Ordering::SeqCst)),
            );
        }
        assert_eq!(min, 0, "within a second");
    }
}

#[tokio::test(start_paused = true)]
async fn a_distant_flood_releases_all_capacity() {
    let (store, ann) = (
        FaultyStore {
            delay: || Duration::from_millis(10),
            ..FaultyStore::new()
        },
        Key::new("ann"),
    );
    let tracker = tracker(&store);
    let (may_cancel, open) = (
        Arc::new(AtomicBool::new(true)),
        Arc::new(AtomicBool::new(true)),
    );
    let mut tasks = vec![];
    for seed in 0..5 * u64::from(LIMIT) {
        let (store, tracker, may_cancel, open) = (
            store.clone(),
            tracker.clone(),
            Arc::clone(&may_cancel),
            Arc::clone(&open),
        );
        tasks.push(tokio::spawn(async move {
            let mut rng = Rng::with_seed(seed);
            loop {
                let cancels = may_cancel.load(Ordering::SeqCst) && rng.f64() < 0.1;
                let patience = if cancels {
                    Duration::from_millis(rng.u64(..20))
                } else {
                    TTL
                };
                let slot = timeout(patience, request(&store, &tracker, ann))
                    .await
                    .ok()
                    .flatten();
                if slot.is_some() {
                    sleep(Duration::from_millis(rng.u64(1..20))).await;
                }
                if !open.load(Ordering::SeqCst) {
                    return slot;
                }
            }
        }));
    }
    sleep(Duration::from_secs(5)).await;
    may_cancel.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(1)).await;
    open.store(false, Ordering::SeqCst);
    // Every check sent before has a reply now, and no later one has.
    sleep(Duration::from_millis(22)).await;
    let counted = store.counted(ann);
    let mut held = vec![];
    for task in tasks {
        held.extend(task.await.unwrap());
    }
    assert_eq!(counted, held.len() as u32, "counted, and in flight");
}

/// If a request ends outside a runtime, or on one that has shut down, the next runtime sends the
/// release.
#[test]
fn nothing_is_lost_with_a_runtime() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let first = runtime();
    let slot = first.block_on(request(&store, &tracker, ann));
    assert!(slot.is_some());
    drop(first);
    drop(slot);
    let bob = Key::new("bob");
    runtime().block_on(async {
        let _bobs = request(&store, &tracker, bob).await;
        until("it counts none", || store.counted(ann) == 0).await;
        assert_eq!(store.counted(bob), 1);
    });
}

/// The next request on any runtime starts the renewals again, of all slots.
#[test]
fn renewals_move_to_another_runtime() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap()
    };
    let (store, ann, bob) = (FaultyStore::new(), Key::new("ann"), Key::new("bob"));
    let tracker = tracker(&store);
    let first = runtime();
    let _anns = first.block_on(request(&store, &tracker, ann)).unwrap();
    drop(first);
    runtime().block_on(async {
        let _bobs = request(&store, &tracker, bob).await.unwrap();
        sleep(20 * TTL).await;
        assert_eq!([ann, bob].map(|key| store.counted(key)), [1, 1]);
    });
}

/// Both TTLs are in use while a configuration changes, or with tiers of different TTLs.
#[tokio::test(start_paused = true)]
async fn slots_of_two_ttls_are_kept() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let short = Policy::in_flight("streams", 10)
        .unwrap()
        .slot_ttl(Duration::from_secs(2))
        .unwrap()
        .into();
    let _long = request(&store, &tracker, ann).await.unwrap();
    let _short = request_under(&store, &tracker, ann, &short).await.unwrap();
    let mut min = u32::MAX;
    for _ in 0..1_000 {
        sleep(Duration::from_millis(20)).await;
        min = min.min(store.counted(ann));
    }
    assert_eq!(min, 2);
}

/// A service that is not ready delays a request that already has a permit.
#[tokio::test(start_paused = true)]
async fn an_unused_permit_counts_until_dropped() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let turns = WaitQueues::new(store.clone(), Bounds::DEFAULT).with_tracker(tracker.clone());
    let _held = request(&store, &tracker, ann).await.unwrap();
    let take = Check::take(ann, &policies(), 1);
    let permit = turns.join(&take, None, None).unwrap().await.unwrap();
    sleep(2 * TTL).await;
    assert_eq!(store.counted(ann), 2);
    drop(permit);
    until("it is released", || store.counted(ann) == 1).await;

    let permit = turns.join(&take, None, None).unwrap().await.unwrap();
    let slot = permit.spend().slot;
    sleep(2 * TTL).await;
    assert_eq!(store.counted(ann), 2);
    drop(slot);
    until("it is released", || store.counted(ann) == 1).await;
}

/// Panics when it is notified of a failure.
struct Panics;

impl Observer for Panics {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { .. } = *event {
            panic!("a fault of the observer");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_observer_that_panics_ends_no_renewals() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let limiter = Limiter::new(store.clone(), policies()).observer(Panics);
    let _held = limiter.reserve(ann, 1).await.unwrap();
    store.set(LOSES_REPLIES);
    sleep(TTL / 2).await;
    store.set(REACHABLE);
    let mut min = u32::MAX;
    for _ in 0..400 {
        sleep(TTL / 100).await;
        min = min.min(store.counted(ann));
    }
    assert_eq!(min, 1);
}

/// An observer that drops a reservation when it is notified of a failure.
#[derive(Clone, Default)]
struct Drops(Arc<Mutex<Option<Reservation>>>);

impl Observer for Drops {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { .. } = *event {
            let kept = lock(&self.0).take();
            drop(kept);
        }
    }
}

/// The observer releases a slot of the caller whose slot is being taken.
#[test]
fn an_observer_may_drop_a_reservation() {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let (primary, observer) = (MockStore::new(), Drops::default());
            let store = Fallback::builder(primary.clone(), LocalStore::default())
                .failures(NonZeroU32::MAX)
                .build();
            let limiter = Limiter::new(store, policies()).observer(observer.clone());
            let ann = Key::new("ann");
            let kept = limiter.reserve(ann, 1).await.unwrap();
            primary.fail(StoreError::new(ErrorKind::Timeout));
            let _local = limiter.reserve(ann, 1).await.unwrap();
            *lock(&observer.0) = Some(kept);
            until("it is dropped", || lock(&observer.0).is_none()).await;
        });
        let _ = done.send(());
    });
    assert!(
        wait.recv_timeout(Duration::from_secs(20)).is_ok(),
        "it hangs"
    );
}

/// Rejects all checks, as in an outage in which a fallback decides.
#[derive(Clone)]
struct Refusing;

impl Store for Refusing {
    type Future = <FaultyStore as Store>::Future;

    fn check(&self, _: Check) -> Answer<Self::Future> {
        Answer::ready(Err(StoreError::new(ErrorKind::Unreachable).not_sent()))
    }
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_renewal_does_not_delay_others() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let [first, second] = [InFlightTracker::new(&Refusing, None), tracker(&store)];
    let _first = first
        .track(&Check::take(ann, &policies(), 1))
        .unwrap()
        .admitted_after_error();
    let _second = request(&store, &second, ann).await.unwrap();
    let mut min = u32::MAX;
    for _ in 0..1_000 {
        sleep(TTL / 100).await;
        min = min.min(store.counted(ann));
    }
    assert!(min > 0);
}

/// Takes this many slots without delay, [`LIMIT`] for each caller.
fn take_all(store: &FaultyStore, tracker: &InFlightTracker, count: u32) -> Vec<Slot> {
    let take = |i| {
        let check = Check::take(Key::from(u64::from(i / LIMIT)), &policies(), 1);
        let mut slot = tracker.track(&check).unwrap();
        slot.on_reply(Ok(&decide(&store.shared, check)));
        slot
    };
    (0..count).map(take).collect()
}

/// Returns the number of requests that the store counts for the callers of this many slots.
fn all_counted(store: &FaultyStore, count: u32) -> u32 {
    let keys = (0..u64::from(count / LIMIT)).map(Key::from);
    keys.map(|key| store.counted(key)).sum()
}

/// Counts the reports of renewals that have no room.
#[derive(Clone, Default)]
struct Full(Arc<AtomicUsize>);

impl Observer for Full {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { error, .. } = *event {
            assert_eq!(error.kind(), ErrorKind::QueueFull);
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn observed(store: &FaultyStore) -> (InFlightTracker, Full) {
    let full = Full::default();
    let observer = Arc::new(full.clone()) as Arc<dyn Observer>;
    (InFlightTracker::new(store, Some(observer)), full)
}

#[tokio::test(start_paused = true)]
async fn a_great_many_slots_stay_counted() {
    const SLOTS: u32 = 150_000;
    let store = FaultyStore::new();
    let (tracker, full) = observed(&store);
    let _held = take_all(&store, &tracker, SLOTS);
    sleep(TTL + Duration::from_secs(1)).await;
    assert_eq!(all_counted(&store, SLOTS), SLOTS);
    assert_eq!(full.0.load(Ordering::SeqCst), 0);
}

/// A store that replies after two seconds renews 256 slots a second.
fn slow() -> FaultyStore {
    FaultyStore {
        delay: || Duration::from_secs(1),
        ..FaultyStore::new()
    }
}

/// The slots were taken together, so all must be renewed within two thirds of their TTL.
#[tokio::test(start_paused = true)]
async fn a_slow_store_keeps_what_it_can_renew() {
    const SLOTS: u32 = 4_500;
    let store = slow();
    let (tracker, full) = observed(&store);
    let _held = take_all(&store, &tracker, SLOTS);
    for _ in 0..75 {
        sleep(Duration::from_secs(2)).await;
        assert_eq!(all_counted(&store, SLOTS), SLOTS);
    }
    assert_eq!(full.0.load(Ordering::SeqCst), 0);
}

/// The oldest slots are renewed first, so most of them stay counted.
#[tokio::test(start_paused = true)]
async fn too_many_slots_are_reported_once() {
    const SLOTS: u32 = 10_000;
    let store = slow();
    let (tracker, full) = observed(&store);
    for _ in 0..2 {
        let before = full.0.load(Ordering::SeqCst);
        let mut held = take_all(&store, &tracker, SLOTS);
        let mut lost = false;
        for _ in 0..50 {
            sleep(Duration::from_secs(2)).await;
            let counted = all_counted(&store, SLOTS);
            assert!(counted > 4_700, "{counted}");
            let reports = full.0.load(Ordering::SeqCst) - before;
            // The report of the first loss comes with the next tick.
            assert!(reports == 1 || reports == 0 && !lost, "{reports} reports");
            lost |= counted < SLOTS;
        }
        assert!(lost);
        held.truncate(2_500);
        sleep(2 * TTL).await;
        assert_eq!(all_counted(&store, SLOTS), 2_500);
        drop(held);
        sleep(2 * TTL).await;
        assert_eq!(all_counted(&store, SLOTS), 0);
    }
}

/// As a layer admits it with `OnError::Allow`.
#[tokio::test(start_paused = true)]
async fn a_request_admitted_after_an_error_counts_soon() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    store.set(REJECTS);
    let check = Check::take(ann, &policies(), 1);
    let mut slot = tracker.track(&check).unwrap();
    slot.on_reply(store.check(check).await.as_ref());
    let slot = slot.admitted_after_error();
    store.set(REACHABLE);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(store.counted(ann), 1);
    drop(slot);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(store.counted(ann), 0);
}

/// The take is late: it arrives after the early renewal, and after the end of the request.
#[tokio::test(start_paused = true)]
async fn a_late_take_of_a_request_admitted_after_an_error_is_released() {
    let (store, ann) = (FaultyStore::new(), Key::new("ann"));
    let tracker = tracker(&store);
    let take = Check::take(ann, &policies(), 1);
    let mut slot = tracker.track(&take).unwrap();
    slot.on_reply(Err(&StoreError::new(ErrorKind::Timeout)));
    let slot = slot.admitted_after_error();
    sleep(Duration::from_millis(600)).await;
    assert_eq!(store.take_received(), [Mode::Renew]);
    drop(slot);
    let _late = decide(&store.shared, take);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(store.counted(ann), 0);
}
