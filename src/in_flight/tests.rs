//! The tracker agrees with the store, whatever becomes of requests and answers.

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, AtomicU8};
use std::time::Duration;

use fastrand::Rng;
use tokio::time::{sleep, timeout};

use super::*;
use crate::error::ErrorKind;
use crate::limit::{Mode, Policy, Source, Verdict};
use crate::limiter::Limiter;
use crate::observe::event;
use crate::settle::Reservation;
use crate::store::{Answer, Fallback, LocalStore, MockStore};
use crate::wait_queues::{Bounds, WaitQueues, WaitRequest};

/// A store as a fallback over Redis is: while that is away, another store decides.
#[derive(Clone)]
struct Wavering {
    there: LocalStore,
    elsewhere: LocalStore,
    /// [`HERE`], [`AWAY`], [`LOSES`] or [`REFUSES`].
    mood: Arc<AtomicU8>,
    /// How long each way takes: as over several connections, what is asked later may come before.
    way: fn() -> Duration,
    asked: Arc<Mutex<Vec<(Mode, u32)>>>,
    /// How many it has decided.
    decided: Arc<AtomicI64>,
}

const HERE: u8 = 0;
const AWAY: u8 = 1;
/// It counts, and nobody hears of it.
const LOSES: u8 = 2;
/// It is not asked.
const REFUSES: u8 = 3;

const THERE: Source = Source::Other("there");
const LIMIT: u32 = 10;
const LEASE: Duration = Duration::from_secs(30);

impl Wavering {
    fn new() -> Self {
        let (there, elsewhere) = (LocalStore::default(), LocalStore::default());
        Self {
            there,
            elsewhere,
            mood: Arc::default(),
            way: || Duration::from_millis(2),
            asked: Arc::default(),
            decided: Arc::default(),
        }
    }

    fn is(&self, mood: u8) {
        self.mood.store(mood, Ordering::SeqCst);
    }

    /// What it has been asked since, but for takes.
    fn requests(&self) -> Vec<(Mode, u32)> {
        std::mem::take(&mut *lock(&self.asked)).into_iter().filter(|(mode, _)| *mode != Mode::Take).collect()
    }

    /// How many the store counts of a caller.
    fn counted(&self, key: Key) -> u32 {
        LIMIT - now(&self.there, Check::peek(key, &policies(), 1)).remaining()
    }
}

fn now(store: &LocalStore, check: Check) -> Decision {
    let Answer::Ready { answer } = store.check(check) else { unreachable!("it never waits") };
    answer.unwrap()
}

impl Store for Wavering {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        lock(&self.asked).push((check.mode(), check.cost()));
        let store = self.clone();
        // As with Redis, it is decided a little later, and answered later still.
        Answer::pending(Box::pin(async move {
            sleep((store.way)()).await;
            let mood = store.mood.load(Ordering::SeqCst);
            if mood == AWAY {
                return Ok(now(&store.elsewhere, check));
            }
            if mood == REFUSES {
                return Err(StoreError::new(ErrorKind::Unreachable).unsent());
            }
            let decision = now(&store.there, check.clone());
            let order = store.decided.fetch_add(1, Ordering::SeqCst) + 1;
            sleep((store.way)()).await;
            if mood == LOSES {
                return Err(StoreError::new(ErrorKind::Timeout));
            }
            let decided = check.decided(THERE, decision.granted(), |policy| {
                let each = decision.each().find(|each| each.policy() == policy).unwrap();
                let verdict = each.retry_after().map_or(Verdict::allowed(), Verdict::denied);
                verdict.with_remaining(each.remaining()).with_reset_after(each.reset_after())
            });
            Ok(decided.decided_at(order))
        }))
    }

    fn identity(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.mood) as usize)
    }

    fn is_authoritative(&self, decision: &Decision) -> bool {
        decision.source() == THERE
    }
}

fn policies() -> Policies {
    static POLICIES: std::sync::LazyLock<Policies> =
        std::sync::LazyLock::new(|| Policy::in_flight("streams", LIMIT).unwrap().lease_time(LEASE).unwrap().into());
    POLICIES.clone()
}

fn entries(leases: &InFlightTracker) -> usize {
    leases.tracker().len.load(Ordering::Acquire)
}

fn leases(store: &Wavering) -> InFlightTracker {
    InFlightTracker::new(store, None)
}

/// Asks for a request, and holds it if that is granted.
async fn request(store: &Wavering, leases: &InFlightTracker, key: Key) -> Option<Lease> {
    request_under(store, leases, key, &policies()).await
}

async fn request_under(store: &Wavering, leases: &InFlightTracker, key: Key, policies: &Policies) -> Option<Lease> {
    let mut lease = leases.hold(key, policies).unwrap();
    let answer = store.check(Check::take(key, policies, 1)).await;
    lease.answered(answer.as_ref());
    answer.is_ok_and(|decision| decision.is_allowed()).then_some(lease)
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LEASE / 2, wait).await.unwrap_or_else(|_| panic!("waited in vain until {what}"));
}

#[tokio::test(start_paused = true)]
async fn long_requests_are_counted_until_they_end() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let one = request(&store, &leases, ann).await.unwrap();
    sleep(20 * LEASE).await;
    assert_eq!(store.counted(ann), 1);
    let renewals = store.requests();
    assert!(
        renewals.iter().all(|request| *request == (Mode::Renew, 1)) && (60..=80).contains(&renewals.len()),
        "{renewals:?}"
    );
    drop(one);
    until("it is released", || store.counted(ann) == 0 && entries(&leases) == 0).await;
    assert_eq!(store.requests(), [(Mode::Refund, 1)]);
    sleep(LEASE).await;
    assert_eq!(store.requests(), [], "nobody is left to renew");
}

/// Layers over one store are one instance to it: what one of them reports must not leave out what the other holds.
#[tokio::test(start_paused = true)]
async fn layers_over_one_store_share_a_tracker() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let layers = [leases(&store), leases(&store.clone())];
    let mut held = vec![];
    for (count, layer) in [2, 3].into_iter().zip(&layers) {
        for _ in 0..count {
            held.extend(request(&store, layer, ann).await);
        }
    }
    for layer in &layers {
        assert!(timeout(Duration::from_millis(3), request(&store, layer, ann)).await.is_err());
        sleep(2 * LEASE).await;
        assert_eq!(store.counted(ann), 5);
    }
    let [first, second] = layers;
    drop((first, held));
    until("nothing is counted", || store.counted(ann) == 0 && entries(&second) == 0).await;
}

#[tokio::test(start_paused = true)]
async fn denied_requests_are_not_released() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let mut held = vec![];
    for _ in 0..2 * LIMIT {
        held.extend(request(&store, &leases, ann).await);
    }
    assert_eq!((held.len(), store.counted(ann)), (10, 10));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(store.requests(), []);
}

/// A client may go away before the store has answered: what was taken then is nobody's.
#[tokio::test(start_paused = true)]
async fn requests_dropped_before_the_answer_are_released() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let _other = request(&store, &leases, ann).await.unwrap();
    assert!(timeout(Duration::from_millis(3), request(&store, &leases, ann)).await.is_err());
    assert_eq!(store.counted(ann), 2);
    // And not only when it is renewed.
    timeout(Duration::from_secs(1), until("it counts one", || store.counted(ann) == 1)).await.expect("at once");
}

/// As of what the network lost and repeated. The store counts it for as long as the caller keeps coming.
#[tokio::test(start_paused = true)]
async fn a_take_delivered_late_is_released() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    drop(leases.hold(ann, &policies()));
    for i in 0..100 {
        if i == 75 {
            let _ = now(&store.there, Check::take(ann, &policies(), 1));
        }
        drop(request(&store, &leases, ann).await);
        sleep(Duration::from_millis(25)).await;
    }
    until("it counts none", || store.counted(ann) == 0 && entries(&leases) == 0).await;
}

#[tokio::test(start_paused = true)]
async fn changes_during_an_outage_are_synced_afterwards() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let before = request(&store, &leases, ann).await.unwrap();
    store.is(AWAY);
    let _during = (request(&store, &leases, ann).await.unwrap(), request(&store, &leases, ann).await.unwrap());
    drop(before);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(store.counted(ann), 1);
    store.is(HERE);
    until("it counts both", || store.counted(ann) == 2).await;
}

/// The lease time would free it too, but only then.
#[tokio::test(start_paused = true)]
async fn an_idle_tracker_syncs_after_an_outage() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let one = request(&store, &leases, ann).await.unwrap();
    store.is(LOSES);
    // It is back before anything was answered, and counts it anew.
    drop(one);
    sleep(Duration::from_secs(1)).await;
    let _ = now(&store.there, Check::hold(ann, &policies(), 3));
    store.is(HERE);
    until("it counts none", || store.counted(ann) == 0 && entries(&leases) == 0).await;
}

/// As by a failover, or a FLUSHALL: with nothing that shows it.
#[tokio::test(start_paused = true)]
async fn forgotten_counts_return_within_a_third_lease() {
    let (store, ann, bob) = (Wavering::new(), Key::new("ann"), Key::new("bob"));
    let leases = leases(&store);
    let held = [request(&store, &leases, ann).await, request(&store, &leases, ann).await];
    let bobs = request(&store, &leases, bob).await;
    for key in [ann, bob] {
        let _ = now(&store.there, Check::reset(key, &policies()));
    }
    // What is taken after that does not hide it.
    let _third = request(&store, &leases, bob).await;
    assert_eq!((store.counted(ann), store.counted(bob)), (0, 1));
    sleep(LEASE / 3 + Duration::from_secs(1)).await;
    assert_eq!((store.counted(ann), store.counted(bob)), (2, 2));
    drop((held, bobs));
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_followed_by_immediate_renewal() {
    let (store, bob) = (Wavering::new(), Key::new("bob"));
    let leases = leases(&store);
    let keys: Vec<Key> = (0..50).map(|i| Key::new(i.to_string())).collect();
    let mut held = vec![];
    for key in &keys {
        held.extend(request(&store, &leases, *key).await);
    }
    store.is(AWAY);
    let _bobs = request(&store, &leases, bob).await;
    for key in &keys {
        let _ = now(&store.there, Check::reset(*key, &policies()));
    }
    store.is(HERE);
    let wait = until("all are counted", || keys.iter().all(|key| store.counted(*key) == 1));
    timeout(Duration::from_secs(1), wait).await.expect("within a second");
}

/// Requests of every ending, while the store is there, away, or does not answer. In the end it counts none.
#[tokio::test(start_paused = true)]
async fn nothing_stays_counted_whatever_happens() {
    for seed in 0..30 {
        let (store, mut rng) = (Wavering::new(), Rng::with_seed(seed));
        let leases = leases(&store);
        let mut tasks = vec![];
        for _ in 0..300 {
            let (store, leases) = (store.clone(), leases.clone());
            let key = Key::new(rng.u8(..4).to_string());
            let (start, patience, work) = (rng.u64(..20_000), rng.u64(..10_000), rng.u64(..5_000));
            tasks.push(tokio::spawn(async move {
                sleep(Duration::from_millis(start)).await;
                // Some go away before they are answered.
                let answer = timeout(Duration::from_micros(patience), request(&store, &leases, key)).await;
                if let Ok(Some(_lease)) = answer {
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
        until("nothing is counted", || keys().all(|key| store.counted(key) == 0) && entries(&leases) == 0).await;
    }
}

/// While the store is there, and nothing is lost but answers that nobody waits for, no more than the limit is in
/// flight.
#[tokio::test(start_paused = true)]
async fn cancellations_never_let_requests_exceed_the_limit() {
    assert_eq!(most_in_flight(|| Duration::from_millis(2), 64, 1.0).await, LIMIT as usize);
}

/// What is asked later may come to the store before what was asked first, on another connection.
#[tokio::test(start_paused = true)]
async fn a_sync_never_undoes_an_overtaking_take() {
    fastrand::seed(7);
    let way = || Duration::from_micros(fastrand::u64(..5_000));
    assert_eq!(most_in_flight(way, 24, 0.1).await, LIMIT as usize);
}

/// The most that so many clients have in flight at once, of whose requests a part goes away before the answer may be
/// there.
async fn most_in_flight(way: fn() -> Duration, clients: u32, hasty: f64) -> usize {
    let (in_flight, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    for seed in 0..10 {
        let (store, mut rng) = (Wavering { way, ..Wavering::new() }, Rng::with_seed(seed));
        let leases = leases(&store);
        let mut tasks = vec![];
        for _ in 0..clients {
            let (store, leases, seed) = (store.clone(), leases.clone(), rng.u64(..));
            let (in_flight, most) = (Arc::clone(&in_flight), Arc::clone(&most));
            tasks.push(tokio::spawn(async move {
                let mut rng = Rng::with_seed(seed);
                for _ in 0..100 {
                    let is_hasty = rng.f64() < hasty;
                    let patience = if is_hasty { Duration::from_micros(rng.u64(..10_000)) } else { LEASE };
                    let answer = timeout(patience, request(&store, &leases, Key::new("ann"))).await;
                    if let Ok(Some(lease)) = answer {
                        most.fetch_max(in_flight.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        sleep(Duration::from_millis(rng.u64(..50))).await;
                        in_flight.fetch_sub(1, Ordering::SeqCst);
                        drop(lease);
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

/// As many as they like ask for a place, so that there is never a moment in which nothing begins or ends.
#[tokio::test(start_paused = true)]
async fn a_cancelled_request_frees_capacity_under_flood() {
    fastrand::seed(7);
    let (store, ann) =
        (Wavering { way: || Duration::from_micros(fastrand::u64(..5_000)), ..Wavering::new() }, Key::new("ann"));
    let leases = leases(&store);
    let in_flight = Arc::new(AtomicUsize::new(0));
    for seed in 0..24 {
        let (store, leases, in_flight) = (store.clone(), leases.clone(), Arc::clone(&in_flight));
        tokio::spawn(async move {
            let mut rng = Rng::with_seed(seed);
            loop {
                let patience = if rng.f64() < 0.1 { Duration::from_micros(rng.u64(..10_000)) } else { LEASE };
                if let Ok(Some(_lease)) = timeout(patience, request(&store, &leases, ann)).await {
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
        for _ in 0..500 {
            sleep(Duration::from_millis(1)).await;
            least = least.min((store.counted(ann) as usize).saturating_sub(in_flight.load(Ordering::SeqCst)));
        }
        assert_eq!(least, 0, "within half a second");
    }
}

/// From far away, so that some begin and some end in each sync, and some of each may have come
/// before it.
#[tokio::test(start_paused = true)]
async fn a_distant_flood_releases_all_capacity() {
    let (store, ann) = (Wavering { way: || Duration::from_millis(10), ..Wavering::new() }, Key::new("ann"));
    let leases = leases(&store);
    let (hasty, open) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(true)));
    let mut tasks = vec![];
    for seed in 0..5 * u64::from(LIMIT) {
        let (store, leases, hasty, open) = (store.clone(), leases.clone(), Arc::clone(&hasty), Arc::clone(&open));
        tasks.push(tokio::spawn(async move {
            let mut rng = Rng::with_seed(seed);
            loop {
                let goes = hasty.load(Ordering::SeqCst) && rng.f64() < 0.1;
                let patience = if goes { Duration::from_millis(rng.u64(..20)) } else { LEASE };
                let lease = timeout(patience, request(&store, &leases, ann)).await.ok().flatten();
                if lease.is_some() {
                    sleep(Duration::from_millis(rng.u64(1..20))).await;
                }
                if !open.load(Ordering::SeqCst) {
                    return lease;
                }
            }
        }));
    }
    sleep(Duration::from_secs(5)).await;
    hasty.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(1)).await;
    open.store(false, Ordering::SeqCst);
    // All that was asked is answered by then, and nothing that was asked later is.
    sleep(Duration::from_millis(22)).await;
    let counted = store.counted(ann);
    let mut held = vec![];
    for task in tasks {
        held.extend(task.await.unwrap());
    }
    assert_eq!(counted, held.len() as u32, "counted, and in flight");
}

/// What ends outside of a runtime, or on one that has ended, is reported by the next one.
#[test]
fn nothing_is_lost_with_a_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let first = runtime();
    let lease = first.block_on(request(&store, &leases, ann));
    assert!(lease.is_some());
    drop(first);
    drop(lease);
    let bob = Key::new("bob");
    runtime().block_on(async {
        let _bobs = request(&store, &leases, bob).await;
        until("it counts none", || store.counted(ann) == 0).await;
        assert_eq!(store.counted(bob), 1);
    });
}

/// As while a configuration changes, or with tiers that differ in it.
#[tokio::test(start_paused = true)]
async fn the_shorter_of_two_lease_times_holds() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let short = Policy::in_flight("streams", 10).unwrap().lease_time(Duration::from_secs(2)).unwrap().into();
    let _long = request(&store, &leases, ann).await.unwrap();
    let _short = request_under(&store, &leases, ann, &short).await.unwrap();
    let mut least = u32::MAX;
    for _ in 0..1_000 {
        sleep(Duration::from_millis(20)).await;
        least = least.min(store.counted(ann));
    }
    assert_eq!(least, 2);
}

/// What was taken is still on its way on one connection, and what is held goes by another.
#[tokio::test(start_paused = true)]
async fn a_sync_waits_for_takes_in_transit() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let asked = request(&store, &leases, ann);
    assert!(timeout(Duration::from_millis(1), asked).await.is_err());
    // Nobody hears of it, but it was sent.
    sleep(Duration::from_millis(50)).await;
    let _ = now(&store.there, Check::take(ann, &policies(), 1));
    assert_eq!(store.counted(ann), 1);
    until("it counts none", || store.counted(ann) == 0 && entries(&leases) == 0).await;
    let waited = store.requests();
    let (sync, refund) = ((Mode::Renew, 0), (Mode::Refund, 1));
    assert_eq!(waited, [sync, sync, refund, sync, sync], "and once more when all must have come");
}

/// What was counted for the requests that ended has run out, and others are counted by then.
#[tokio::test(start_paused = true)]
async fn a_late_release_frees_no_other_request() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let first = [request(&store, &leases, ann).await, request(&store, &leases, ann).await];
    store.is(REFUSES);
    sleep(Duration::from_secs(10)).await;
    drop(first);
    sleep(Duration::from_millis(22_500)).await;
    store.is(HERE);
    let _others = [request(&store, &leases, ann).await.unwrap(), request(&store, &leases, ann).await.unwrap()];
    assert_eq!(store.counted(ann), 2);
    let mut least = u32::MAX;
    for second in 0..150 {
        sleep(Duration::from_millis(20)).await;
        least = if second < 75 { u32::MAX } else { least.min(store.counted(ann)) };
    }
    assert_eq!(least, 2, "{:?}", store.requests());
}

/// A service that is not ready keeps a request waiting whose turn has come.
#[tokio::test(start_paused = true)]
async fn an_unused_permit_counts_until_dropped() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let leases = leases(&store);
    let turns = WaitQueues::new(store.clone(), leases.clone(), Bounds::DEFAULT);
    let _held = request(&store, &leases, ann).await.unwrap();
    let wanted = || WaitRequest { key: ann, policies: policies(), cost: 1, deadline: None };
    let permit = turns.join(wanted(), None).unwrap().await.unwrap();
    // Somebody hangs up, so that a sync is due.
    assert!(timeout(Duration::from_millis(3), request(&store, &leases, ann)).await.is_err());
    sleep(2 * LEASE).await;
    assert_eq!(store.counted(ann), 2);
    drop(permit);
    until("it is released", || store.counted(ann) == 1).await;

    let permit = turns.join(wanted(), None).unwrap().await.unwrap();
    let lease = permit.spend().lease;
    sleep(2 * LEASE).await;
    assert_eq!(store.counted(ann), 2);
    drop(lease);
    until("it is released", || store.counted(ann) == 1).await;
}

/// The primary store of a fallback, which other code asks by itself. Its decisions are always its own.
#[derive(Clone)]
struct Primary(Wavering);

impl Store for Primary {
    type Future = <Wavering as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.0.check(check)
    }

    fn identity(&self) -> Option<usize> {
        self.0.identity()
    }
}

#[tokio::test(start_paused = true)]
async fn fallback_grants_sync_beside_primary_store_users() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let primary = Primary(store.clone());
    let [others, leases] = [InFlightTracker::new(&primary, None), leases(&store)];
    let _others = request(&store, &others, ann).await.unwrap();
    store.is(AWAY);
    let _during = request(&store, &leases, ann).await.unwrap();
    store.is(HERE);
    timeout(Duration::from_secs(1), until("it counts both", || store.counted(ann) == 2)).await.expect("soon");
}

/// A store of a user's own, which may not name what it shares with its clones.
#[derive(Clone)]
struct Nameless(Wavering);

impl Store for Nameless {
    type Future = <Wavering as Store>::Future;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        self.0.check(check)
    }
}

#[tokio::test(start_paused = true)]
async fn a_limiter_without_store_identity_tracks_once() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let limiter = Limiter::new(Nameless(store.clone()), policies());
    let mut held = vec![];
    for _ in 0..LIMIT {
        held.push(limiter.reserve(ann, 1).await.unwrap());
    }
    // Each of them has asked about a request, and does not know what came of it.
    store.is(LOSES);
    assert!(limiter.wait(ann, 1, LEASE).await.is_err());
    assert!(limiter.clone().observer(()).reserve(ann, 1).await.is_err());
    store.is(HERE);
    let mut least = u32::MAX;
    for _ in 0..500 {
        sleep(Duration::from_millis(10)).await;
        least = least.min(store.counted(ann));
        held.extend(limiter.reserve(ann, 1).await);
    }
    assert_eq!((held.len(), least), (10, 10));
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
    sleep(LEASE / 2).await;
    store.is(HERE);
    let mut least = u32::MAX;
    for _ in 0..400 {
        sleep(LEASE / 100).await;
        least = least.min(store.counted(ann));
    }
    assert_eq!(least, 1);
}

/// Drops what it keeps when it is notified of a failure.
#[derive(Clone, Default)]
struct Drops(Arc<Mutex<Option<Reservation>>>);

impl Observer for Drops {
    fn failed(&self, _: &event::Failed<'_>) {
        let kept = lock(&self.0).take();
        drop(kept);
    }
}

/// It releases a request of the caller who is being synced.
#[test]
fn an_observer_may_drop_a_reservation() {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let (primary, observer) = (MockStore::new(), Drops::default());
            let store = Fallback::new(primary.clone(), LocalStore::default()).failures(NonZeroU32::MAX);
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
    assert!(wait.recv_timeout(Duration::from_secs(20)).is_ok(), "it hangs");
}

/// What others ask, in an outage in which a fallback goes on.
#[derive(Clone)]
struct Refusing(Wavering);

impl Store for Refusing {
    type Future = <Wavering as Store>::Future;

    fn check(&self, _: Check) -> Answer<Self::Future> {
        Answer::ready(Err(StoreError::new(ErrorKind::Unreachable).unsent()))
    }

    fn identity(&self) -> Option<usize> {
        self.0.identity()
    }
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_renewal_does_not_delay_others() {
    let (store, ann) = (Wavering::new(), Key::new("ann"));
    let [first, second] = [InFlightTracker::new(&Refusing(store.clone()), None), leases(&store)];
    let _first = first.hold(ann, &policies()).unwrap().passed();
    let _second = request(&store, &second, ann).await.unwrap();
    let mut least = u32::MAX;
    for _ in 0..1_000 {
        sleep(LEASE / 100).await;
        least = least.min(store.counted(ann));
    }
    assert!(least > 0);
}
