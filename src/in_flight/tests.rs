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
use crate::observe::event;
use crate::settle::Reservation;
use crate::store::{Answer, Fallback, LocalStore, MockStore};
use crate::wait_queues::{Bounds, WaitQueues, WaitRequest};

/// Behaves like a fallback over Redis: while Redis is unreachable, another store decides.
#[derive(Clone)]
struct Wavering {
    there: LocalStore,
    elsewhere: LocalStore,
    /// [`HERE`], [`AWAY`], [`LOSES`], [`REFUSES`] or [`UNSURE`].
    mood: Arc<AtomicU8>,
    /// The delay of each way. As with several connections, a later check may arrive first.
    way: fn() -> Duration,
    asked: Arc<Mutex<Vec<Mode>>>,
}

const HERE: u8 = 0;
const AWAY: u8 = 1;
/// It counts the check, but the reply is lost.
const LOSES: u8 = 2;
/// The check is not sent.
const REFUSES: u8 = 3;
/// The check is sent and lost, and the error is that of a fallback, which has decided elsewhere.
const UNSURE: u8 = 4;

const LIMIT: u32 = 10;
const TTL: Duration = Duration::from_secs(30);

impl Wavering {
    fn new() -> Self {
        let (there, elsewhere) = (LocalStore::default(), LocalStore::default());
        Self {
            there,
            elsewhere,
            mood: Arc::default(),
            way: || Duration::from_millis(2),
            asked: Arc::default(),
        }
    }

    fn is(&self, mood: u8) {
        self.mood.store(mood, Ordering::SeqCst);
    }

    /// Returns the modes of the checks since the last call, except takes.
    fn requests(&self) -> Vec<Mode> {
        std::mem::take(&mut *lock(&self.asked))
            .into_iter()
            .filter(|mode| *mode != Mode::Take)
            .collect()
    }

    /// Returns the number of requests that the store counts for a caller.
    fn counted(&self, key: Key) -> u32 {
        LIMIT - now(&self.there, Check::peek(key, &policies(), 1)).remaining()
    }
}

fn now(store: &LocalStore, check: Check) -> Decision {
    let Answer::Ready { answer } = store.check(check) else {
        unreachable!("it never waits")
    };
    answer.unwrap()
}

impl Store for Wavering {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        lock(&self.asked).push(check.mode());
        let store = self.clone();
        // As with Redis, the decision and the reply are delayed.
        Answer::pending(Box::pin(async move {
            sleep((store.way)()).await;
            let mood = store.mood.load(Ordering::SeqCst);
            let unsent = Err(StoreError::new(ErrorKind::Unreachable).not_sent());
            if mood == AWAY {
                let decision = now(&store.elsewhere, check.clone());
                return if check.mode() == Mode::Release {
                    unsent
                } else {
                    Ok(decision)
                };
            }
            if mood == REFUSES {
                return unsent;
            }
            if mood == UNSURE {
                return Err(StoreError::new(ErrorKind::NotReady).check_only());
            }
            let decision = now(&store.there, check);
            sleep((store.way)()).await;
            if mood == LOSES {
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

fn slots(store: &Wavering) -> InFlightTracker {
    InFlightTracker::new(store, None)
}

/// Takes a slot. Returns it if it was granted.
async fn request(store: &Wavering, slots: &InFlightTracker, key: Key) -> Option<Slot> {
    request_under(store, slots, key, &policies()).await
}

async fn request_under(
    store: &Wavering,
    slots: &InFlightTracker,
    key: Key,
    policies: &Policies,
) -> Option<Slot> {
    let check = Check::take(key, policies, 1);
    let mut slot = slots.hold(&check).unwrap();
    let answer = store.check(check).await;
    slot.answered(answer.as_ref());
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
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let slots = slots(&store);
    let one = request(&store, &slots, ann).await.unwrap();
    sleep(20 * TTL).await;
    assert_eq!(store.counted(ann), 1);
    let renewals = store.requests();
    assert!(
        renewals.iter().all(|mode| *mode == Mode::Renew) && (60..=80).contains(&renewals.len()),
        "{renewals:?}"
    );
    drop(one);
    until("it is released", || store.counted(ann) == 0).await;
    assert_eq!(store.requests(), [Mode::Release]);
    sleep(TTL).await;
    assert_eq!(store.requests(), [], "no slot is renewed after its release");
}

#[tokio::test(start_paused = true)]
async fn layers_over_one_store_keep_all_slots() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let layers = [slots(&store), slots(&store.clone())];
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
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let slots = slots(&store);
    let mut held = vec![];
    for _ in 0..2 * LIMIT {
        held.extend(request(&store, &slots, ann).await);
    }
    assert_eq!((held.len(), store.counted(ann)), (10, 10));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(store.requests(), []);
}

/// A client may disconnect before the store has replied: its slot must be released.
#[tokio::test(start_paused = true)]
async fn requests_dropped_before_the_answer_are_released() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let slots = slots(&store);
    let _other = request(&store, &slots, ann).await.unwrap();
    assert!(
        timeout(Duration::from_millis(3), request(&store, &slots, ann))
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
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let (slots, check) = (slots(&store), Check::take(ann, &policies(), 1));
    drop(slots.hold(&check));
    sleep(Duration::from_millis(400)).await;
    assert_eq!(store.requests(), [Mode::Release]);
    let _ = now(&store.there, check);
    assert_eq!(store.counted(ann), 1);
    timeout(
        Duration::from_millis(200),
        until("it counts none", || store.counted(ann) == 0),
    )
    .await
    .expect("soon");
}

/// The release reaches the store before a renewal whose reply was lost. The repeated release frees
/// the slot that this renewal takes again.
#[tokio::test(start_paused = true)]
async fn a_renewal_overtaken_by_its_release_is_released() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let (slots, check) = (slots(&store), Check::take(ann, &policies(), 1));
    let mut slot = slots.hold(&check).unwrap();
    slot.answered(store.check(check.clone()).await.as_ref());
    store.is(LOSES);
    sleep(TTL / 3).await;
    assert_eq!(store.requests(), [Mode::Renew]);
    store.is(HERE);
    drop(slot);
    sleep(Duration::from_millis(400)).await;
    let _ = now(
        &store.there,
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
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let slots = slots(&store);
    let before = request(&store, &slots, ann).await.unwrap();
    store.is(AWAY);
    let _during = (
        request(&store, &slots, ann).await.unwrap(),
        request(&store, &slots, ann).await.unwrap(),
    );
    drop(before);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(store.counted(ann), 1);
    store.is(HERE);
    until("it counts both", || store.counted(ann) == 2).await;
}

/// Without the release, the slot would expire, but later.
#[tokio::test(start_paused = true)]
async fn a_release_in_an_outage_is_sent_after_it() {
    for mood in [AWAY, LOSES, REFUSES, UNSURE] {
        let (store, ann) = (Wavering::new(), Key::new("ann"));
        let slots = slots(&store);
        let one = request(&store, &slots, ann).await.unwrap();
        store.is(mood);
        drop(one);
        sleep(Duration::from_secs(5)).await;
        store.is(HERE);
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
    let (store, ann, bob) = (Wavering::new(), Key::new("ann"), Key::new("bob"));
    let slots = slots(&store);
    let held = [
        request(&store, &slots, ann).await,
        request(&store, &slots, ann).await,
    ];
    let bobs = request(&store, &slots, bob).await;
    for key in [ann, bob] {
        let _ = now(&store.there, Check::reset(key, &policies()));
    }
    // A new slot of the same caller must not prevent the return of the lost one.
    let _third = request(&store, &slots, bob).await;
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
        let (store, mut rng) = (Wavering::new(), Rng::with_seed(seed));
        let slots = slots(&store);
        let mut tasks = vec![];
        for _ in 0..300 {
            let (store, slots) = (store.clone(), slots.clone());
            let key = Key::new(rng.u8(..4).to_string());
            let (start, patience, work) = (rng.u64(..20_000), rng.u64(..10_000), rng.u64(..5_000));
            tasks.push(tokio::spawn(async move {
                sleep(Duration::from_millis(start)).await;
                // Some clients disconnect before the reply.
                let answer = timeout(
                    Duration::from_micros(patience),
                    request(&store, &slots, key),
                )
                .await;
                if let Ok(Some(_slot)) = answer {
                    sleep(Duration::from_millis(work)).await;
                }
            }));
        }
        for _ in 0..10 {
            sleep(Duration::from_millis(rng.u64(..3_000))).await;
            store.is(rng.u8(..3));
        }
        store.is(HERE);
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
        most_in_flight(|| Duration::from_millis(2), 64, 1.0).await,
        LIMIT as usize
    );
}

/// A later check may arrive at the store before an earlier one, on another connection.
#[tokio::test(start_paused = true)]
async fn overtaking_checks_never_exceed_the_limit() {
    fastrand::seed(7);
    let way = || Duration::from_micros(fastrand::u64(..5_000));
    assert_eq!(most_in_flight(way, 24, 0.1).await, LIMIT as usize);
}

/// The maximum number of requests in flight of this many clients. The fraction `hasty` of the
/// requests is cancelled, possibly before the reply arrives.
async fn most_in_flight(way: fn() -> Duration, clients: u32, hasty: f64) -> usize {
    let (in_flight, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    for seed in 0..10 {
        let (store, mut rng) = (
            Wavering {
                way,
                ..Wavering::new()
            },
            Rng::with_seed(seed),
        );
        let slots = slots(&store);
        let mut tasks = vec![];
        for _ in 0..clients {
            let (store, slots, seed) = (store.clone(), slots.clone(), rng.u64(..));
            let (in_flight, most) = (Arc::clone(&in_flight), Arc::clone(&most));
            tasks.push(tokio::spawn(async move {
                let mut rng = Rng::with_seed(seed);
                for _ in 0..100 {
                    let is_hasty = rng.f64() < hasty;
                    let patience = if is_hasty {
                        Duration::from_micros(rng.u64(..10_000))
                    } else {
                        TTL
                    };
                    let answer = timeout(patience, request(&store, &slots, Key::new("ann"))).await;
                    if let Ok(Some(slot)) = answer {
                        most.fetch_max(
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
    most.load(Ordering::SeqCst)
}

/// The clients need more slots than there are. Slots of cancelled requests must be released in the
/// meantime, and not only after the flood.
#[tokio::test(start_paused = true)]
async fn a_cancelled_request_frees_capacity_under_flood() {
    fastrand::seed(7);
    let (store, ann) = (
        Wavering {
            way: || Duration::from_micros(fastrand::u64(..5_000)),
            ..Wavering::new()
        },
        Key::new("ann"),
    );
    let slots = slots(&store);
    let in_flight = Arc::new(AtomicUsize::new(0));
    for seed in 0..24 {
        let (store, slots, in_flight) = (store.clone(), slots.clone(), Arc::clone(&in_flight));
        tokio::spawn(async move {
            let mut rng = Rng::with_seed(seed);
            loop {
                let patience = if rng.f64() < 0.1 {
                    Duration::from_micros(rng.u64(..10_000))
                } else {
                    TTL
                };
                if let Ok(Some(_slot)) = timeout(patience, request(&store, &slots, ann)).await {
                    in_flight.fetch_add(1, Ordering::SeqCst);
                    sleep(Duration::from_millis(rng.u64(1..40))).await;
                    in_flight.fetch_sub(1, Ordering::SeqCst);
                }
                sleep(Duration::from_millis(rng.u64(1..20))).await;
            }
        });
    }
    for _ in 0..10 {
        let mut least = usize::MAX;
        for _ in 0..1_000 {
            sleep(Duration::from_millis(1)).await;
            least = least.min(
                (store.counted(ann) as usize).saturating_sub(in_flight.load(Ordering::SeqCst)),
            );
        }
        assert_eq!(least, 0, "within a second");
    }
}

#[tokio::test(start_paused = true)]
async fn a_distant_flood_releases_all_capacity() {
    let (store, ann) = (
        Wavering {
            way: || Duration::from_millis(10),
            ..Wavering::new()
        },
        Key::new("ann"),
    );
    let slots = slots(&store);
    let (hasty, open) = (
        Arc::new(AtomicBool::new(true)),
        Arc::new(AtomicBool::new(true)),
    );
    let mut tasks = vec![];
    for seed in 0..5 * u64::from(LIMIT) {
        let (store, slots, hasty, open) = (
            store.clone(),
            slots.clone(),
            Arc::clone(&hasty),
            Arc::clone(&open),
        );
        tasks.push(tokio::spawn(async move {
            let mut rng = Rng::with_seed(seed);
            loop {
                let goes = hasty.load(Ordering::SeqCst) && rng.f64() < 0.1;
                let patience = if goes {
                    Duration::from_millis(rng.u64(..20))
                } else {
                    TTL
                };
                let slot = timeout(patience, request(&store, &slots, ann))
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
    hasty.store(false, Ordering::SeqCst);
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
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let slots = slots(&store);
    let first = runtime();
    let slot = first.block_on(request(&store, &slots, ann));
    assert!(slot.is_some());
    drop(first);
    drop(slot);
    let bob = Key::new("bob");
    runtime().block_on(async {
        let _bobs = request(&store, &slots, bob).await;
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
    let (store, ann, bob) = (Wavering::new(), Key::new("ann"), Key::new("bob"));
    let slots = slots(&store);
    let first = runtime();
    let _anns = first.block_on(request(&store, &slots, ann)).unwrap();
    drop(first);
    runtime().block_on(async {
        let _bobs = request(&store, &slots, bob).await.unwrap();
        sleep(20 * TTL).await;
        assert_eq!([ann, bob].map(|key| store.counted(key)), [1, 1]);
    });
}

/// Both TTLs are in use while a configuration changes, or with tiers of different TTLs.
#[tokio::test(start_paused = true)]
async fn slots_of_two_ttls_are_kept() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let slots = slots(&store);
    let short = Policy::in_flight("streams", 10)
        .unwrap()
        .slot_ttl(Duration::from_secs(2))
        .unwrap()
        .into();
    let _long = request(&store, &slots, ann).await.unwrap();
    let _short = request_under(&store, &slots, ann, &short).await.unwrap();
    let mut least = u32::MAX;
    for _ in 0..1_000 {
        sleep(Duration::from_millis(20)).await;
        least = least.min(store.counted(ann));
    }
    assert_eq!(least, 2);
}

/// A service that is not ready delays a request that already has a permit.
#[tokio::test(start_paused = true)]
async fn an_unused_permit_counts_until_dropped() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let slots = slots(&store);
    let turns = WaitQueues::new(store.clone(), Bounds::DEFAULT).with_tracker(slots.clone());
    let _held = request(&store, &slots, ann).await.unwrap();
    let wanted = || WaitRequest {
        key: ann,
        policies: policies(),
        cost: 1,
        deadline: None,
    };
    let permit = turns.join(wanted(), None).unwrap().await.unwrap();
    sleep(2 * TTL).await;
    assert_eq!(store.counted(ann), 2);
    drop(permit);
    until("it is released", || store.counted(ann) == 1).await;

    let permit = turns.join(wanted(), None).unwrap().await.unwrap();
    let slot = permit.spend().slot;
    sleep(2 * TTL).await;
    assert_eq!(store.counted(ann), 2);
    drop(slot);
    until("it is released", || store.counted(ann) == 1).await;
}

/// Panics when it is notified of a failure.
struct Panics;

impl Observer for Panics {
    fn failed(&self, _: &event::Failed<'_>) {
        panic!("a fault of the observer");
    }
}

#[tokio::test(start_paused = true)]
async fn an_observer_that_panics_ends_no_renewals() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let limiter = Limiter::new(store.clone(), policies()).observer(Panics);
    let _held = limiter.reserve(ann, 1).await.unwrap();
    store.is(LOSES);
    sleep(TTL / 2).await;
    store.is(HERE);
    let mut least = u32::MAX;
    for _ in 0..400 {
        sleep(TTL / 100).await;
        least = least.min(store.counted(ann));
    }
    assert_eq!(least, 1);
}

/// An observer that drops a reservation when it is notified of a failure.
#[derive(Clone, Default)]
struct Drops(Arc<Mutex<Option<Reservation>>>);

impl Observer for Drops {
    fn failed(&self, _: &event::Failed<'_>) {
        let kept = lock(&self.0).take();
        drop(kept);
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
            let store =
                Fallback::new(primary.clone(), LocalStore::default()).failures(NonZeroU32::MAX);
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
    type Future = <Wavering as Store>::Future;

    fn check(&self, _: Check) -> Answer<Self::Future> {
        Answer::ready(Err(StoreError::new(ErrorKind::Unreachable).not_sent()))
    }
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_renewal_does_not_delay_others() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let [first, second] = [InFlightTracker::new(&Refusing, None), slots(&store)];
    let _first = first
        .hold(&Check::take(ann, &policies(), 1))
        .unwrap()
        .passed();
    let _second = request(&store, &second, ann).await.unwrap();
    let mut least = u32::MAX;
    for _ in 0..1_000 {
        sleep(TTL / 100).await;
        least = least.min(store.counted(ann));
    }
    assert!(least > 0);
}
