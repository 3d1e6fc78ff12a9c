use std::convert::Infallible;
use std::future::{Ready, pending, poll_fn, ready};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};

use super::queue::{Queue, Waiter};
use super::{Acquire, Bounds, BoxedReply, NoPermit, Permit, QueueId, QueueRef, WaitQueues};
use crate::error::{ErrorKind, StoreError};
use crate::held_slots::{InFlightTracker, Slot};
use crate::limit::{
    Charge, ChargedAt, Check, Decision, Extra, Key, MadeBy, Mode, Policies, Policy, PolicyCharge,
    Strategy,
};
use crate::simulation::in_redis;
use crate::store::{Answer, Backend, LocalStore, Store};
use crate::strategy::Align;
use crate::util::{instant, lock};
use crate::{CallLimitLayer, Limiter, ThrottleLayer};

/// Makes a take ahead a take, as a fallback does.
fn as_take(check: Check) -> Check {
    match check.mode() {
        Mode::TakeAhead => check.with_mode(Mode::Take),
        _ => check,
    }
}

/// A store that charges in Redis, or in this process.
#[derive(Clone, Default)]
struct Places {
    local: LocalStore,
    in_redis: Arc<AtomicBool>,
    refunds: Arc<Mutex<Vec<PolicyCharge>>>,
}

impl Store for Places {
    type Future = Ready<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        if check.mode() == Mode::Refund {
            lock(&self.refunds).push(match check.extra() {
                Some(Extra::Charged(each)) => each[0],
                _ => PolicyCharge::just_now(check.cost().into()),
            });
        }
        let decision = self.local.check(check).now_or_never().unwrap().unwrap();
        let decision = if self.in_redis.load(SeqCst) {
            in_redis(decision)
        } else {
            decision
        };
        Answer::pending(ready(Ok(decision)))
    }
}

/// The turn of a waiter that has left is refunded where it was charged, although the next waiter's turn is elsewhere.
#[tokio::test(start_paused = true)]
async fn turns_of_two_places_are_not_added() {
    let store = Places::default();
    let policy = Policy::new("test", Strategy::Gcra, "1/s burst 10").unwrap();
    let limiter = Limiter::new(store.clone(), policy);
    let wait = |cost| limiter.wait(Key::GLOBAL, cost, Duration::from_secs(60));
    assert!(limiter.take(Key::GLOBAL, 10).await.unwrap().is_allowed());

    store.in_redis.store(true, SeqCst);
    let mut first = Box::pin(wait(1));
    assert!(first.as_mut().now_or_never().is_none());
    store.in_redis.store(false, SeqCst);
    let mut second = Box::pin(wait(2));
    assert!(second.as_mut().now_or_never().is_none());
    drop(first);
    assert!(second.await.unwrap().is_allowed());
    sleep(Duration::from_millis(10)).await;
    let refunds = lock(&store.refunds).clone();
    let [refund] = refunds[..] else {
        panic!("{refunds:?}");
    };
    assert_eq!(refund.cost, 1);
    assert!(matches!(refund.at, ChargedAt::Redis(_)));
}

/// Takes no turns ahead while it is `away`, as a fallback with a share.
#[derive(Clone, Default)]
struct Away {
    local: LocalStore,
    is_away: Arc<AtomicBool>,
    turns: Arc<Mutex<u32>>,
}

impl Store for Away {
    type Future = Ready<Result<Decision, StoreError>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let is_away = self.is_away.load(SeqCst);
        let check = if check.mode() == Mode::TakeAhead && is_away {
            Check::take(*check.key(), check.policies(), check.cost())
        } else {
            *lock(&self.turns) += u32::from(check.mode() == Mode::TakeAhead);
            check
        };
        let decision = self.local.check(check).now_or_never().unwrap().unwrap();
        let decision = if is_away {
            decision.with_maker(MadeBy::Locally)
        } else {
            decision
        };
        Answer::pending(ready(Ok(decision)))
    }
}

/// A queue that always has a waiter reserves no turns in an outage, and does so again afterwards.
#[tokio::test(start_paused = true)]
async fn a_busy_queue_reserves_turns_after_an_outage() {
    let store = Away::default();
    store.is_away.store(true, SeqCst);
    let policy = Policy::new("test", Strategy::Gcra, "10/s burst 1").unwrap();
    let limiter = Arc::new(Limiter::new(store.clone(), policy));
    let waiters = (0..8).map(|_| {
        let limiter = Arc::clone(&limiter);
        tokio::spawn(async move {
            for _ in 0..10 {
                let wait = Duration::from_secs(60);
                let decision = limiter.wait(Key::GLOBAL, 1, wait).await.unwrap();
                assert!(decision.is_allowed());
            }
        })
    });
    let waiters: Vec<_> = waiters.collect();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(*lock(&store.turns), 0);
    store.is_away.store(false, SeqCst);
    for waiter in waiters {
        waiter.await.unwrap();
    }
    assert!(*lock(&store.turns) > 30, "{}", lock(&store.turns));
}

const ANN: Key = Key::GLOBAL;
const MINUTE: Duration = Duration::from_secs(60);
const WINDOW: Strategy = Strategy::FixedWindow(Align::FirstHit);

fn policies(strategy: Strategy, quota: &str) -> Policies {
    Policy::new("test", strategy, quota).unwrap().into()
}

/// A store with these answers.
#[derive(Clone)]
struct Scripted(Arc<dyn Fn(Check) -> BoxedReply + Send + Sync>);

impl Scripted {
    fn new(answer: impl Fn(Check) -> BoxedReply + Send + Sync + 'static) -> Self {
        Self(Arc::new(answer))
    }

    fn failing(after: Duration) -> Self {
        Self::new(move |_| {
            Box::pin(async move {
                sleep(after).await;
                Err(StoreError::new(ErrorKind::Unreachable))
            })
        })
    }
}

impl Store for Scripted {
    type Future = BoxedReply;

    fn check(&self, check: Check) -> Answer<BoxedReply> {
        Answer::pending((self.0)(check))
    }
}

fn local(store: &LocalStore, check: Check) -> Result<Decision, StoreError> {
    store.check(check).now_or_never().unwrap()
}

/// A request that was denied for longer than it may wait does not join a queue.
#[tokio::test(start_paused = true)]
async fn a_denial_that_is_too_late_is_immediate() {
    let (store, policies) = (LocalStore::default(), policies(WINDOW, "10/h"));
    let queues = WaitQueues::new(store.clone(), Bounds::DEFAULT);
    let _ = local(&store, Check::take(ANN, &policies, 10)).unwrap();
    let denied = local(&store, Check::take(ANN, &policies, 1)).unwrap();
    let join = |max| {
        let take = Check::take(ANN, &policies, 1);
        queues.join(&take, Some(instant() + max), Some(denied.clone()))
    };
    assert!(
        matches!(join(Duration::from_secs(2)), Err(NoPermit::Denied(refused)) if refused == denied)
    );
    assert!(join(Duration::from_secs(7_200)).is_ok());
}

/// The waiters that are late in an outage are denied, or get the error of the store.
#[tokio::test(start_paused = true)]
async fn late_waiters_in_an_outage_get_an_answer() {
    for (strategy, cost) in [(WINDOW, 2), (Strategy::Gcra, 1)] {
        let store = Scripted::failing(Duration::from_secs(1));
        let limiter = Limiter::new(store, policies(strategy, "10/s"));
        let max = Duration::from_millis(100);
        let waits = join_all((0..5).map(async |i| {
            sleep(Duration::from_millis(i * 300)).await;
            limiter.wait(ANN, cost, max).await
        }));
        for answer in waits.await {
            match answer {
                Ok(decision) => assert!(!decision.is_allowed()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{strategy:?}"),
            }
        }
    }
}

/// After a grant, the waiters of a store that reserves no turns still share one call.
#[tokio::test(start_paused = true)]
async fn a_store_without_debts_gets_two_calls_per_grant() {
    let (store, calls) = (LocalStore::default(), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&calls);
    let scripted = Scripted::new(move |check| {
        counted.fetch_add(1, SeqCst);
        let take = Check::take(*check.key(), check.policies(), check.cost());
        let answer = local(&store, take);
        Box::pin(ready(answer.map(in_redis)))
    });
    let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "10/s burst 1"));
    let waits = join_all((0..20).map(|_| limiter.wait(ANN, 1, MINUTE)));
    assert!(waits.await.iter().flatten().all(Decision::is_allowed));
    let calls = calls.load(SeqCst);
    println!("{calls} calls");
    assert!(calls <= 20 + 2 * 20, "{calls} calls");
}

/// Failing checks keep their interval although deadlines pass, and so do not soon end the waits with time left.
#[tokio::test(start_paused = true)]
async fn deadlines_do_not_hurry_failing_checks() {
    let store = Scripted::failing(Duration::from_millis(1));
    let limiter = Limiter::new(store, policies(WINDOW, "10/s"));
    let start = instant();
    let waits = [5, 5, 15, 25, 35, 60_000, 60_000].map(async |max| {
        let answer = limiter.wait(ANN, 1, Duration::from_millis(max)).await;
        (answer.is_ok(), start.elapsed().as_millis())
    });
    let ended = join_all(waits).await;
    for ((is_denied, after), most) in ended[1..5].iter().zip([6, 16, 26, 36]) {
        assert!(*is_denied && *after <= most, "{ended:?}");
    }
    let (_, last) = ended[6];
    assert!((200..300).contains(&last), "{ended:?}");
}

/// While a reply is pending, the waiters whose deadlines have passed are not woken constantly.
#[tokio::test(start_paused = true)]
async fn a_late_waiter_sleeps() {
    for strategy in [Strategy::Gcra, WINDOW] {
        let store = Scripted::failing(Duration::from_secs(10));
        let limiter = Limiter::new(store, policies(strategy, "10/s"));
        let mut wait = Box::pin(limiter.wait(ANN, 1, Duration::from_millis(10)));
        let mut polls = 0;
        let ended = poll_fn(|cx| {
            polls += 1;
            wait.as_mut().poll(cx)
        });
        assert!(ended.await.is_err());
        assert!(polls < 20, "{strategy:?}: {polls} polls");
    }
}

/// The end of a runtime gives no turn before it is due, and refunds none again.
#[test]
fn the_end_of_a_runtime_ends_its_turns() {
    let runtime = || {
        let mut builder = Builder::new_current_thread();
        builder.enable_time().start_paused(true).build().unwrap()
    };
    let (store, refunds) = (LocalStore::default(), Arc::new(AtomicU32::new(0)));
    let refunded = Arc::clone(&refunds);
    let scripted = Scripted::new(move |check| {
        if check.mode() == Mode::Refund {
            refunded.fetch_add(1, SeqCst);
            return Box::pin(pending());
        }
        Box::pin(ready(local(&store, check)))
    });
    let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "1/s burst 1"));
    let wait = || Box::pin(limiter.wait(ANN, 1, MINUTE));

    // A refund is pending.
    let first = runtime();
    first.block_on(async {
        assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
        let mut left = wait();
        assert!(left.as_mut().now_or_never().is_none());
        drop(left);
        sleep(Duration::from_millis(10)).await;
    });
    drop(first);
    assert_eq!(refunds.load(SeqCst), 1);

    // Turns are held.
    let second = runtime();
    let waits = second.block_on(async {
        // They join a queue of the runtime in which they are called.
        let mut waits = [wait(), wait()];
        for wait in &mut waits {
            assert!(wait.as_mut().now_or_never().is_none());
        }
        sleep(Duration::from_millis(10)).await;
        waits
    });
    assert_eq!(refunds.load(SeqCst), 1);
    drop(second);
    for wait in waits {
        let error = wait.now_or_never().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoRuntime);
    }
}

/// A runtime without timers grants what is free, and a wait that panics there leaves nothing behind.
#[test]
fn a_panic_leaves_nothing_behind() {
    for (strategy, quota) in [(Strategy::Gcra, "1/s burst 1"), (WINDOW, "1/s")] {
        for max in [MINUTE, Duration::MAX] {
            let runtime = Builder::new_current_thread().build().unwrap();
            let limiter = Limiter::new(LocalStore::default(), policies(strategy, quota));
            runtime.block_on(async {
                let free = limiter.wait(ANN, 1, max).now_or_never();
                assert!(free.unwrap().unwrap().is_allowed());
                let wait = AssertUnwindSafe(|| limiter.wait(ANN, 1, max).now_or_never());
                assert!(catch_unwind(wait).is_err(), "no timers");
            });
            let queues = format!("{limiter:?}");
            assert!(queues.contains("waiting: 0"), "{strategy:?}: {queues}");
        }
    }
}

/// A turn that the store does not reserve is not overtaken by the later ones that it has reserved.
#[tokio::test(start_paused = true)]
async fn a_waiter_without_a_turn_is_not_overtaken() {
    let (store, turns) = (LocalStore::default(), AtomicU32::new(0));
    let scripted = Scripted::new(move |check| {
        let is_second = check.mode() == Mode::TakeAhead && turns.fetch_add(1, SeqCst) == 1;
        let check = if is_second {
            Check::take(*check.key(), check.policies(), check.cost())
        } else {
            check
        };
        let answer = local(&store, check);
        Box::pin(async move {
            sleep(Duration::from_millis(if is_second { 10 } else { 1 })).await;
            answer
        })
    });
    let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "10/s burst 1"));
    assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
    let served = Mutex::new(vec![]);
    let waits = (0..5).map(async |i| {
        assert!(limiter.wait(ANN, 1, MINUTE).await.unwrap().is_allowed());
        lock(&served).push(i);
    });
    join_all(waits).await;
    assert_eq!(*lock(&served), [0, 1, 2, 3, 4]);
}

/// After a partial grant, the next check is not after the end of the window.
#[tokio::test(start_paused = true)]
async fn the_next_window_is_used_at_its_start() {
    let store = LocalStore::default();
    let scripted = Scripted::new(move |check| {
        let answer = local(&store, check);
        Box::pin(async move {
            sleep(Duration::from_millis(1)).await;
            answer
        })
    });
    let limiter = Limiter::new(scripted, policies(WINDOW, "10/m"));
    assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
    sleep(Duration::from_secs(59)).await;
    let start = instant();
    let waits = join_all((0..15).map(|_| limiter.wait(ANN, 1, 2 * MINUTE)));
    assert!(waits.await.iter().flatten().all(Decision::is_allowed));
    let took = start.elapsed();
    assert!(took < Duration::from_millis(1_030), "{took:?}");
}

/// A check for a waiter without a turn is not granted to it before an earlier waiter, whose turn is delayed or lost.
#[tokio::test(start_paused = true)]
async fn a_check_does_not_overtake_a_delayed_turn() {
    for is_lost in [false, true] {
        let (store, turns) = (LocalStore::default(), AtomicU32::new(0));
        let scripted = Scripted::new(move |check| {
            let number = match check.mode() {
                Mode::TakeAhead => turns.fetch_add(1, SeqCst),
                _ => 0,
            };
            let check = match number {
                2.. => as_take(check),
                _ => check,
            };
            let answer = local(&store, check);
            Box::pin(async move {
                sleep(Duration::from_millis(if number == 1 { 350 } else { 1 })).await;
                match number {
                    1 if is_lost => Err(StoreError::new(ErrorKind::Timeout)),
                    _ => answer,
                }
            })
        });
        let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "10/s burst 1"));
        assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
        let served = Mutex::new(vec![]);
        let waits = (0..5).map(async |i| {
            let answer = limiter.wait(ANN, 1, MINUTE).await;
            lock(&served).push((i, answer.is_ok()));
        });
        join_all(waits).await;
        let served = lock(&served);
        assert!(served.is_sorted(), "{served:?}");
        let failed = served.iter().filter(|(_, is_ok)| !is_ok).count();
        assert_eq!(failed, usize::from(is_lost));
    }
}

/// A thousand waiters that join together do not flood the store.
#[tokio::test(start_paused = true)]
async fn few_requests_are_pending() {
    let store = LocalStore::default();
    let (pending, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&most);
    let scripted = Scripted::new(move |check| {
        counted.fetch_max(pending.fetch_add(1, SeqCst) + 1, SeqCst);
        let (answer, pending) = (local(&store, check), Arc::clone(&pending));
        Box::pin(async move {
            sleep(Duration::from_millis(5)).await;
            pending.fetch_sub(1, SeqCst);
            answer
        })
    });
    let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "1000/s burst 1"));
    let start = instant();
    let waits = join_all((0..1_000).map(|_| limiter.wait(ANN, 1, MINUTE)));
    assert!(waits.await.iter().flatten().all(Decision::is_allowed));
    let took = start.elapsed();
    assert!(took < Duration::from_millis(1_100), "{took:?}");
    assert_eq!(most.load(SeqCst), 128);
}

/// A denied request gets the turn that is left for it, although the denial is for longer than it may wait.
#[tokio::test(start_paused = true)]
async fn a_denied_request_gets_a_turn_that_is_left() {
    let (store, policies) = (
        LocalStore::default(),
        policies(Strategy::Gcra, "1/s burst 1"),
    );
    let [here, there] = [(); 2].map(|()| WaitQueues::new(store.clone(), Bounds::DEFAULT));
    let join = |queues: &WaitQueues, max, denied| {
        let take = Check::take(ANN, &policies, 1);
        queues.join(&take, Some(instant() + max), denied)
    };
    let take = || local(&store, Check::take(ANN, &policies, 1)).unwrap();
    assert!(take().is_allowed());
    let left = join(&here, MINUTE, None).unwrap();
    let mut later = join(&there, MINUTE, None).unwrap();
    drop(left);
    sleep(Duration::from_millis(10)).await;
    // The refund of the turn is rejected, since there is a later one.
    let denied = take();
    assert!(denied.retry_after().unwrap() > Duration::from_millis(1_900));
    let check = Check::take(ANN, &policies, 1);
    assert!(!here.has_queue(&check) && there.has_queue(&check));
    let start = instant();
    // Before the turn is due.
    let shorter = Duration::from_millis(500);
    let refused = join(&here, shorter, Some(denied.clone())).unwrap();
    assert!(refused.await.is_err());
    let short = Duration::from_millis(1_200);
    assert!(
        join(&here, short, Some(denied.clone()))
            .unwrap()
            .await
            .is_ok()
    );
    assert!(start.elapsed() < Duration::from_secs(1));
    assert!(join(&here, short, Some(denied)).is_err());
    assert!((&mut later).await.is_ok());
}

/// Two waiters leave before a later one of another cost, the last first: their turns serve the next two.
#[tokio::test(start_paused = true)]
async fn turns_given_up_keep_the_burst() {
    let limiter = Limiter::new(
        LocalStore::default(),
        policies(Strategy::Gcra, "100/s burst 100"),
    );
    let start = instant();
    // The time at which a request passes, in milliseconds.
    let passes = async |cost| {
        let decision = limiter.wait(ANN, cost, MINUTE).await;
        assert!(decision.unwrap().is_allowed());
        start.elapsed().as_millis()
    };
    assert_eq!(passes(100).await, 0);
    let mut waiters = [100, 100, 25].map(|cost| Box::pin(passes(cost)));
    for waiter in &mut waiters {
        assert!(waiter.now_or_never().is_none());
        // Its turn is reserved in this time.
        sleep(Duration::from_millis(10)).await;
    }
    let [first, second, later] = waiters;
    for left in [second, first] {
        drop(left);
        sleep(Duration::from_millis(10)).await;
    }
    let passed = tokio::join!(passes(100), passes(100), later);
    assert_eq!(passed, (1_000, 2_000, 2_250));
}

/// A task does not outlive its turns, although the store never replies to a refund.
#[tokio::test(start_paused = true)]
async fn a_queue_does_not_wait_for_a_late_refund() {
    let store = LocalStore::default();
    let scripted = Scripted::new(move |check| match check.mode() {
        Mode::Refund => Box::pin(pending()),
        _ => Box::pin(ready(local(&store, check))),
    });
    let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "1/s burst 1"));
    assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
    let mut left = Box::pin(limiter.wait(ANN, 1, MINUTE));
    assert!(left.as_mut().now_or_never().is_none());
    drop(left);
    let tasks = || Handle::current().metrics().num_alive_tasks();
    sleep(Duration::from_millis(10)).await;
    assert_eq!(tasks(), 2, "the queue and the refund");
    sleep(Duration::from_secs(2)).await;
    assert_eq!(tasks(), 1, "the refund");
}

/// A store that replies after a millisecond, and wakes its waiters. Counts the checks that charge.
#[derive(Clone, Default)]
struct Slow {
    local: LocalStore,
    takes: Arc<AtomicU32>,
}

impl Store for Slow {
    type Future = BoxedReply;

    fn check(&self, check: Check) -> Answer<BoxedReply> {
        let is_take = matches!(check.mode(), Mode::Take | Mode::TakeAhead);
        self.takes.fetch_add(u32::from(is_take), SeqCst);
        let answer = local(&self.local, check);
        Answer::pending(Box::pin(async move {
            sleep(Duration::from_millis(1)).await;
            answer
        }))
    }

    fn backend(&self) -> Backend<'_, BoxedReply> {
        self.local.backend().of_other_future()
    }
}

/// An instance whose requests need a slot, and units of a rate.
struct InFlight {
    store: Slow,
    tracker: InFlightTracker,
    queues: WaitQueues,
    policies: Policies,
}

impl InFlight {
    fn new(limit: u32, strategy: Strategy, quota: &str) -> Self {
        let rate = Policy::new("rate", strategy, quota).unwrap();
        let store = Slow::default();
        let tracker = InFlightTracker::new(&store, None);
        let queues = WaitQueues::new(store.clone(), Bounds::DEFAULT);
        Self {
            queues: queues.with_tracker(tracker.clone()),
            store,
            tracker,
            policies: Policies::new([Policy::in_flight("jobs", limit).unwrap(), rate]).unwrap(),
        }
    }

    /// Takes a slot with a unit.
    fn hold(&self) -> Slot {
        let check = Check::take(ANN, &self.policies, 1);
        let mut slot = self.tracker.track(&check).unwrap();
        let answer = local(&self.store.local, check);
        assert!(answer.as_ref().unwrap().is_allowed());
        slot.on_reply(answer.as_ref());
        slot
    }

    fn join(&self, cost: u32, max: Duration) -> Acquire {
        let take = Check::take(ANN, &self.policies, cost);
        self.queues
            .join(&take, Some(instant() + max), None)
            .unwrap()
    }

    fn takes(&self) -> u32 {
        self.store.takes.load(SeqCst)
    }
}

/// A waiter whose cost does not fit the rate is checked alone: a grant to a later one would be refunded.
#[tokio::test(start_paused = true)]
async fn in_flight_a_large_cost_is_refused_in_time() {
    let jobs = InFlight::new(10, WINDOW, "13/m");
    let mut held: Vec<_> = (0..10).map(|_| jobs.hold()).collect();
    let start = instant();
    let large = jobs.join(5, Duration::from_millis(500));
    let small = [(); 3].map(|()| jobs.join(1, MINUTE));
    sleep(Duration::from_millis(50)).await;
    let before = jobs.takes();
    held.truncate(7);
    assert!(large.await.is_err());
    let (took, takes) = (start.elapsed(), jobs.takes() - before);
    assert!(took < Duration::from_millis(510), "{took:?}");
    assert!(takes < 10, "{takes} takes");
    for permit in join_all(small).await {
        drop(permit.unwrap().spend());
    }
}

/// After a grant under a rate, not all free slots are checked.
#[tokio::test(start_paused = true)]
async fn in_flight_free_slots_flood_no_rate() {
    let jobs = InFlight::new(100, Strategy::Gcra, "10/s burst 1");
    let waits = join_all((0..50).map(|_| jobs.join(1, MINUTE)));
    let start = instant();
    let held = waits.await;
    assert!(held.iter().all(Result::is_ok));
    assert!(start.elapsed() < Duration::from_secs(6));
    assert!(jobs.takes() <= 3 * 50, "{} takes", jobs.takes());
}

/// A deadline ends the wait although slots are freed constantly.
#[tokio::test(start_paused = true)]
async fn in_flight_freed_slots_extend_no_wait() {
    let jobs = InFlight::new(10, WINDOW, "1/h");
    let _held = jobs.hold();
    let slots = jobs.policies.in_flight().unwrap().clone();
    let store = jobs.store.local.clone();
    let freeing = tokio::spawn(async move {
        for _ in 0..300 {
            sleep(Duration::from_millis(1)).await;
            let _ = local(&store, Check::reset(ANN, &slots)).unwrap();
        }
    });
    let start = instant();
    assert!(jobs.join(1, Duration::from_millis(100)).await.is_err());
    let took = start.elapsed();
    assert!(took < Duration::from_millis(110), "{took:?}");
    freeing.abort();
}

/// A check for many waiters is for no more than a window allows.
#[tokio::test(start_paused = true)]
async fn a_check_takes_at_most_the_capacity() {
    let (store, most) = (LocalStore::default(), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&most);
    let scripted = Scripted::new(move |check| {
        counted.fetch_max(check.cost(), SeqCst);
        Box::pin(ready(local(&store, check)))
    });
    let limiter = Limiter::new(scripted, policies(WINDOW, "10/m"));
    let waits = join_all((0..50).map(|_| limiter.wait(ANN, 1, 10 * MINUTE)));
    assert!(waits.await.iter().flatten().all(Decision::is_allowed));
    assert_eq!(most.load(SeqCst), 10);
}

/// By checks, the last check of a waiter is sent at its deadline, although the next one is due later by the jitter.
#[tokio::test(start_paused = true)]
async fn a_check_at_the_deadline_decides() {
    for _ in 0..20 {
        let limiter = Limiter::new(Slow::default(), policies(WINDOW, "1/s"));
        let wait = |max| limiter.wait(ANN, 1, Duration::from_millis(max));
        assert!(wait(0).await.unwrap().is_allowed());
        assert!(wait(1_000).await.unwrap().is_allowed());
    }
}

/// A waiter keeps the turn of an earlier waiter that has left, although a new turn would be due too late.
#[tokio::test(start_paused = true)]
async fn a_denial_of_a_turn_refuses_none_that_has_one() {
    let (store, turns) = (LocalStore::default(), AtomicU32::new(0));
    let scripted = Scripted::new(move |check| {
        let is_second = check.mode() == Mode::TakeAhead && turns.fetch_add(1, SeqCst) == 1;
        let answer = local(&store, check);
        Box::pin(async move {
            sleep(Duration::from_millis(if is_second { 10 } else { 1 })).await;
            answer
        })
    });
    let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "1/s burst 1"));
    assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
    let start = instant();
    let mut left = Box::pin(limiter.wait(ANN, 1, MINUTE));
    assert!(left.as_mut().now_or_never().is_none());
    sleep(Duration::from_millis(5)).await;
    let mut next = Box::pin(limiter.wait(ANN, 1, Duration::from_millis(1_500)));
    assert!(next.as_mut().now_or_never().is_none());
    sleep(Duration::from_millis(2)).await;
    drop(left);
    assert!(next.await.unwrap().is_allowed());
    assert!(start.elapsed() < Duration::from_millis(1_010));
}

/// A grant whose reply overtakes that of an earlier waiter of another cost is not refunded.
#[tokio::test(start_paused = true)]
async fn a_grant_waits_for_earlier_replies() {
    let (store, calls) = (LocalStore::default(), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&calls);
    let scripted = Scripted::new(move |check| {
        counted.fetch_add(1, SeqCst);
        let delay = if check.cost() == 2 { 10 } else { 1 };
        let answer = local(&store, check);
        Box::pin(async move {
            sleep(Duration::from_millis(delay)).await;
            answer
        })
    });
    let limiter = Limiter::new(scripted, policies(WINDOW, "10/m"));
    let (start, served) = (instant(), Mutex::new(vec![]));
    let waits = [3, 2, 1].map(async |cost| {
        assert!(limiter.wait(ANN, cost, MINUTE).await.unwrap().is_allowed());
        lock(&served).push(cost);
    });
    join_all(waits).await;
    assert_eq!(*lock(&served), [3, 2, 1]);
    assert_eq!(calls.load(SeqCst), 3);
    assert!(start.elapsed() < Duration::from_millis(15));
}

/// After a refund, a store that reserves no turns gets no more checks than it has units.
#[tokio::test(start_paused = true)]
async fn a_store_without_debts_gets_few_takes_after_a_reset() {
    let (store, calls) = (LocalStore::default(), Arc::new(AtomicU32::new(0)));
    let (counted, inner) = (Arc::clone(&calls), store.clone());
    let scripted = Scripted::new(move |check| {
        counted.fetch_add(1, SeqCst);
        let answer = local(&inner, as_take(check));
        Box::pin(ready(answer.map(in_redis)))
    });
    let policies = policies(Strategy::Gcra, "1/s burst 5");
    let limiter = Limiter::new(scripted, policies.clone());
    let waits = tokio::spawn(async move {
        join_all((0..50).map(|_| limiter.wait(ANN, 1, MINUTE))).await;
    });
    sleep(Duration::from_millis(500)).await;
    let _ = local(&store, Check::reset(ANN, &policies)).unwrap();
    let before = calls.load(SeqCst);
    sleep(Duration::from_secs(1)).await;
    let calls = calls.load(SeqCst) - before;
    assert!((5..=10).contains(&calls), "{calls} calls");
    waits.abort();
}

/// The waiters that lack a turn are the last ones without a request. Their number is that of all waiters less the turns
/// and the requests.
#[tokio::test(start_paused = true)]
async fn the_first_that_lack_a_turn_are_found() {
    let policies = policies(Strategy::Gcra, "1/s burst 1");
    let (store, runtime) = (LocalStore::default(), Handle::current());
    let queue_ref = QueueRef {
        queues: WaitQueues::new(store.clone(), Bounds::DEFAULT),
        id: QueueId::new(&runtime, &Check::take(ANN, &policies, 1)),
        policies: policies.clone(),
    };
    let decision = local(&store, Check::take(ANN, &policies, 1)).unwrap();
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..2_000 {
        let mut queue = Queue::default();
        for number in 0..rng.u64(0..12) {
            let waiter = Waiter {
                cost: 1,
                deadline: None,
                answer: oneshot::channel().0,
            };
            queue.add(number, waiter);
        }
        for _ in 0..rng.u8(0..6) {
            // Some of their waiters have left.
            queue.requested.insert(rng.u64(0..12));
        }
        for _ in 0..rng.u8(0..12) {
            let charge = Charge::new(ANN, decision.clone(), 1, instant(), instant());
            queue.add_turn(Permit::new(queue_ref.clone(), charge, instant(), None));
        }
        let (most, turns) = (rng.usize(0..8), queue.turns.len());
        let waiting: Vec<_> = queue.waiters.keys().copied().collect();
        let without: Vec<_> = queue.without_turn().map(|(number, _)| *number).collect();
        assert_eq!(without, waiting[turns.min(waiting.len())..]);
        let count = waiting.len().saturating_sub(turns + queue.requested.len());
        let mut lacking = waiting;
        lacking.retain(|number| !queue.requested.contains(number));
        let lacking: Vec<_> = lacking.split_off(lacking.len() - count);
        let found: Vec<_> = queue.to_request().take(most).map(|(n, _)| *n).collect();
        assert_eq!(found, lacking[..most.min(count)]);
    }
}

/// A store that panics fails one wait.
#[tokio::test(start_paused = true)]
async fn a_panicking_store_fails_one_wait() {
    for in_future in [false, true] {
        let (store, calls) = (LocalStore::default(), AtomicU32::new(0));
        let scripted = Scripted::new(move |check| {
            let panics = calls.fetch_add(1, SeqCst) == 1;
            assert!(!panics || in_future, "in the call");
            let answer = local(&store, check);
            Box::pin(async move {
                sleep(Duration::from_millis(1)).await;
                assert!(!panics, "in the future");
                answer
            })
        });
        let limiter = Limiter::new(scripted, policies(Strategy::Gcra, "10/s burst 5"));
        let answers = join_all((0..3).map(|_| limiter.wait(ANN, 1, MINUTE))).await;
        let are_ok: Vec<_> = answers.iter().map(Result::is_ok).collect();
        assert_eq!(are_ok, [true, false, true]);
    }
}

/// Capacity that is freed between a denial and its wait is used immediately.
#[tokio::test(start_paused = true)]
async fn a_refund_before_the_wait_is_not_missed() {
    let (store, policies) = (LocalStore::default(), policies(WINDOW, "10/h"));
    let queues = WaitQueues::new(store.clone(), Bounds::DEFAULT);
    let taken = local(&store, Check::take(ANN, &policies, 10)).unwrap();
    let denied = local(&store, Check::take(ANN, &policies, 1)).unwrap();
    if let Some(refund) = taken.refund(ANN, 10, Duration::ZERO) {
        let _ = local(&store, refund).unwrap();
    }
    let take = Check::take(ANN, &policies, 1);
    let start = instant();
    assert!(
        queues
            .join(&take, None, Some(denied))
            .unwrap()
            .await
            .is_ok()
    );
    assert!(start.elapsed() < Duration::from_millis(100));
}

/// A store that replies after a delay.
fn delayed(
    delay: Duration,
    answer: impl Fn(Check) -> Result<Decision, StoreError> + Send + Sync + 'static,
) -> Scripted {
    Scripted::new(move |check| {
        let answer = answer(check);
        Box::pin(async move {
            sleep(delay).await;
            answer
        })
    })
}

/// Checks that are granted in part extend no wait, although each round trip frees a unit.
#[tokio::test(start_paused = true)]
async fn a_partial_grant_extends_no_wait() {
    for strategy in [Strategy::SlidingLog, Strategy::SlidingCounter] {
        let (store, policies) = (LocalStore::default(), policies(strategy, "20/s"));
        for _ in 0..40 {
            let _ = local(&store, Check::take(ANN, &policies, 1)).unwrap();
            sleep(Duration::from_millis(50)).await;
        }
        let store = delayed(Duration::from_millis(50), move |check| local(&store, check));
        let limiter = Limiter::new(store, policies);
        let start = instant();
        let waits = (0..60).map(async |_| {
            let decision = limiter.wait(ANN, 1, Duration::from_millis(300)).await;
            (decision.unwrap(), start.elapsed().as_millis())
        });
        let ended = join_all(waits).await;
        let allowed = ended.iter().filter(|(decision, _)| decision.is_allowed());
        assert!(allowed.count() >= 4, "{strategy:?}");
        let last = ended.iter().map(|(_, after)| *after).max().unwrap();
        // A check may be pending at the deadline, and the last one follows.
        assert!(last <= 300 + 2 * 50 + 1, "{strategy:?}: {last} ms");
        for (decision, _) in ended {
            let wait = decision.retry_after();
            // At most the time of a unit, but not the least wait, as if a check would be granted immediately.
            let is_true = wait.is_none_or(|wait| wait > Duration::from_micros(1));
            assert!(is_true, "{strategy:?}: {wait:?}");
        }
    }
}

/// The denial of a large cost refuses no smaller one, and each refused waiter gets the wait of its cost.
#[tokio::test(start_paused = true)]
async fn a_large_denial_refuses_no_smaller_cost() {
    for strategy in [WINDOW, Strategy::SlidingLog] {
        let (store, policies) = (LocalStore::default(), policies(strategy, "10/m"));
        let used = local(&store, Check::take(ANN, &policies, 6)).unwrap();
        assert!(used.is_allowed());
        let store = delayed(Duration::from_millis(1), move |check| local(&store, check));
        let limiter = Limiter::new(store, policies);
        let (start, max) = (instant(), Duration::from_secs(1));
        let waits = [5, 1, 1, 1, 1, 1, 6].map(|cost| limiter.wait(ANN, cost, max));
        let answers = join_all(waits).await;
        let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
        let are_allowed: Vec<_> = answers.iter().map(Decision::is_allowed).collect();
        let expected = [false, true, true, true, true, false, false];
        assert_eq!(are_allowed, expected, "{strategy:?}");
        for denied in answers.iter().filter_map(Decision::retry_after) {
            assert!(denied > Duration::from_secs(58), "{strategy:?}: {denied:?}");
        }
        assert!(
            start.elapsed() < Duration::from_millis(1_010),
            "{strategy:?}"
        );
    }
}

/// A full queue reports no shorter wait for a larger cost than the store, if that depends on its next charges only.
#[tokio::test(start_paused = true)]
async fn a_full_queue_reports_the_wait_of_each_cost() {
    for (strategy, larger) in [(Strategy::SlidingLog, 2), (WINDOW, 8), (Strategy::Gcra, 2)] {
        let (store, policies) = (LocalStore::default(), policies(strategy, "10/m"));
        for cost in [6, 3] {
            let used = local(&store, Check::take(ANN, &policies, cost)).unwrap();
            assert!(used.is_allowed());
            sleep(Duration::from_secs(1)).await;
        }
        let limiter = Limiter::new(store.clone(), policies.clone()).max_waiting(NonZeroUsize::MIN);
        let mut waiting = pin!(limiter.wait(ANN, 2, MINUTE * 5));
        assert!(waiting.as_mut().now_or_never().is_none());
        for cost in [2, larger] {
            let refused = limiter.wait(ANN, cost, MINUTE * 5).await.unwrap();
            let peek = local(&store, Check::peek(ANN, &policies, cost)).unwrap();
            assert!(
                refused.retry_after() >= peek.retry_after(),
                "{strategy:?}: {refused:?} of {peek:?}"
            );
        }
    }
}

/// A turn that the store has reserved within the longest wait is granted, although it is due a round trip after the
/// deadline.
#[tokio::test(start_paused = true)]
async fn a_reserved_turn_outlives_the_deadline() {
    for (quota, rtt, max, every) in [("1/s burst 1", 20, 990, 400), ("50/s burst 1", 25, 500, 5)] {
        let store = LocalStore::default();
        let later = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&later);
        let store = delayed(Duration::from_millis(rtt), move |check| {
            let answer = local(&store, check);
            let due = answer.as_ref().ok().and_then(Decision::due_in);
            counted.fetch_add(u32::from(due.is_some()), SeqCst);
            answer
        });
        let limiter = Arc::new(Limiter::new(store, policies(Strategy::Gcra, quota)));
        assert!(limiter.take(ANN, 1).await.unwrap().is_allowed());
        let waits = (0..400).map(async |i| {
            sleep(Duration::from_millis(i * every)).await;
            let start = instant();
            let answer = limiter.wait(ANN, 1, Duration::from_millis(max)).await;
            (answer.unwrap().is_allowed(), start.elapsed())
        });
        let ended = join_all(waits).await;
        let allowed = ended.iter().filter(|(is_allowed, _)| *is_allowed).count();
        assert!(allowed >= later.load(SeqCst) as usize, "{quota}: {allowed}");
        let longest = ended.iter().map(|(_, took)| *took).max().unwrap();
        assert!(
            longest <= Duration::from_millis(max + rtt + 2),
            "{quota}: {longest:?}"
        );
    }
}

/// A failed wait under requests in flight releases no slot, if its request does not pass.
#[tokio::test(start_paused = true)]
async fn in_flight_failed_waits_release_no_slots() {
    let store = LocalStore::default();
    let (fails, released) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(Mutex::new(vec![])),
    );
    let (failing, releases) = (Arc::clone(&fails), Arc::clone(&released));
    let store = delayed(Duration::from_millis(1), move |check| {
        if failing.load(SeqCst) {
            lock(&releases).push(check.mode());
            return Err(StoreError::new(ErrorKind::Timeout));
        }
        local(&store, check)
    });
    let jobs = Policy::in_flight("jobs", 1).unwrap();
    let service = CallLimitLayer::new(store, |_: &()| Some(ANN), jobs)
        .wait(MINUTE)
        .layer(service_fn(|(): ()| async {
            sleep(MINUTE).await;
            Ok::<_, Infallible>(())
        }));
    let calls = (0..100).map(|_| tokio::spawn(service.clone().oneshot(())));
    let calls: Vec<_> = calls.collect();
    sleep(Duration::from_secs(1)).await;
    fails.store(true, SeqCst);
    sleep(Duration::from_secs(1)).await;
    let failed = calls.iter().filter(|call| call.is_finished()).count();
    assert_eq!(failed, 99);
    let modes = lock(&released).clone();
    let takes = modes.iter().filter(|mode| **mode == Mode::Take).count();
    // The slots of the takes, whose replies were lost, are released repeatedly.
    let releases = modes.len() - takes;
    assert!(
        releases <= 10 * takes,
        "{releases} releases of {takes} takes"
    );
    calls.iter().for_each(tokio::task::JoinHandle::abort);
}

/// The throttles that start together in an outage share a call, although they all pause together.
#[tokio::test(start_paused = true)]
async fn throttles_that_start_together_rarely_retry() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let store = delayed(Duration::from_millis(1), move |_| {
        counted.fetch_add(1, SeqCst);
        Err(StoreError::new(ErrorKind::Unreachable))
    });
    let layer = ThrottleLayer::new(store, ANN, policies(Strategy::Gcra, "10000/s"));
    let tasks = (0..100).map(|_| {
        let mut service = layer.layer(service_fn(|(): ()| ready(Ok::<_, Infallible>(()))));
        tokio::spawn(async move { service.ready().await.is_ok() })
    });
    let tasks: Vec<_> = tasks.collect();
    sleep(Duration::from_secs(1)).await;
    let before = calls.load(SeqCst);
    sleep(Duration::from_secs(10)).await;
    let calls = calls.load(SeqCst) - before;
    // A call every 100 ms, and at least one in each pause.
    assert!((20..=100).contains(&calls), "{calls} calls in 10 s");
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

/// A store that reserves no turns gets one check at a time for requests of cost 0 in a debt.
#[tokio::test(start_paused = true)]
async fn requests_of_cost_zero_share_checks() {
    let (store, policies) = (
        LocalStore::default(),
        policies(Strategy::Gcra, "1/h burst 1"),
    );
    let _ = local(&store, Check::charge(ANN, &policies, 20)).unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let store = delayed(Duration::from_millis(1), move |check| {
        counted.fetch_add(1, SeqCst);
        local(&store, as_take(check))
    });
    let limiter = Limiter::new(store, policies);
    let waits = tokio::spawn(timeout(20 * MINUTE, async move {
        join_all((0..100).map(|_| limiter.wait(ANN, 0, Duration::MAX))).await;
    }));
    sleep(MINUTE).await;
    let before = calls.load(SeqCst);
    assert!(waits.await.unwrap().is_err());
    // One every 225 s: a sixteenth of the wait.
    let calls = calls.load(SeqCst) - before;
    assert!((2..=10).contains(&calls), "{calls} calls");
}

/// As tower requires, a throttle that is ready to fail stays ready, and its call fails.
#[tokio::test(start_paused = true)]
async fn a_refused_throttle_stays_ready() {
    let policies = policies(Strategy::Gcra, "1/m burst 1");
    let layer = ThrottleLayer::new(Slow::default(), ANN, policies).max_wait(Duration::from_secs(1));
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let mut service = layer.layer(service_fn(move |(): ()| {
        counted.fetch_add(1, SeqCst);
        ready(Ok::<_, Infallible>(()))
    }));
    service.ready().await.unwrap().call(()).await.unwrap();
    for _ in 0..2 {
        service.ready().await.unwrap();
        let again = poll_fn(|cx| Poll::Ready(service.poll_ready(cx).is_ready()));
        assert!(again.await);
        assert!(service.call(()).await.is_err());
    }
    assert_eq!(calls.load(SeqCst), 1);
}

/// Waits that fail together, and are repeated together after the pause of a throttle, share checks.
#[tokio::test(start_paused = true)]
async fn repeated_waits_in_an_outage_share_checks() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let store = delayed(Duration::from_millis(1), move |_| {
        counted.fetch_add(1, SeqCst);
        Err(StoreError::new(ErrorKind::Unreachable))
    });
    let limiter = Limiter::new(store, policies(Strategy::Gcra, "10000/s"));
    for round in 0..10 {
        let before = calls.load(SeqCst);
        let waits = join_all((0..100).map(|_| limiter.wait(ANN, 1, MINUTE)));
        assert!(waits.await.iter().all(Result::is_err));
        let calls = calls.load(SeqCst) - before;
        assert!(round == 0 || calls <= 3, "{calls} calls");
        sleep(Duration::from_millis(300)).await;
    }
}
