//! A store of bounded throughput that is far away or stalls.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::block::ann;
use crate::Leased;
use crate::error::StoreError;
use crate::limit::{Check, Decision, Key, Policies, Policy, Quota, Source, Strategy};
use crate::observe::{Event, Observer};
use crate::store::{Answer, Fallback, LocalStore, Store};
use crate::util::{instant, lock};

/// A store that decides one check at a time, in constant time, behind a constant network delay.
#[derive(Clone)]
struct Server {
    local: LocalStore,
    each: Duration,
    round_trip: Duration,
    free_at: Arc<Mutex<Instant>>,
    calls: Arc<AtomicU64>,
}

impl Server {
    fn new(per_second: u32, round_trip: Duration) -> Self {
        let (each, free_at) = (
            Duration::from_secs(1) / per_second,
            Arc::new(Mutex::new(instant())),
        );
        Self {
            local: LocalStore::default(),
            each,
            round_trip,
            free_at,
            calls: Arc::default(),
        }
    }

    /// Stops deciding for `time`.
    fn stall(&self, time: Duration) {
        let mut free_at = lock(&self.free_at);
        *free_at = instant().max(*free_at) + time;
    }

    /// Queueing delay of a check that is sent immediately.
    fn lag(&self) -> Duration {
        lock(&self.free_at).saturating_duration_since(instant())
    }
}

impl Store for Server {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        let Self {
            local,
            each,
            round_trip,
            ..
        } = self.clone();
        self.calls.fetch_add(1, Relaxed);
        let decided_at = {
            let mut free_at = lock(&self.free_at);
            *free_at = instant().max(*free_at) + each;
            *free_at + round_trip / 2
        };
        Answer::pending(Box::pin(async move {
            sleep_until(decided_at).await;
            let answer = local.check(check).await;
            sleep(round_trip / 2).await;
            answer
        }))
    }
}

#[derive(Debug, Default)]
struct Load {
    sent: AtomicU64,
    leased: AtomicU64,
    answered: AtomicU64,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sent,
            leased,
            answered,
        } = self;
        write!(
            f,
            "{} sent, {} answered, {} from memory",
            sent.load(Relaxed),
            answered.load(Relaxed),
            leased.load(Relaxed)
        )
    }
}

/// Sends `per_milli` checks in each millisecond of `time`, without awaiting the replies.
async fn load<S: Store>(
    store: &Leased<S>,
    policies: &Policies,
    key: Key,
    per_milli: u32,
    time: Duration,
) -> Arc<Load> {
    let (load, start) = (Arc::new(Load::default()), instant());
    for milli in 1.. {
        for _ in 0..per_milli {
            let (answer, load) = (
                store.check(Check::take(key, policies, 1)),
                Arc::clone(&load),
            );
            load.sent.fetch_add(1, Relaxed);
            tokio::spawn(async move {
                let decision = answer.await.unwrap();
                assert!(decision.is_allowed());
                load.answered.fetch_add(1, Relaxed);
                load.leased
                    .fetch_add((decision.source() == Source::Leased).into(), Relaxed);
            });
        }
        sleep_until(start + Duration::from_millis(milli)).await;
        if instant() - start >= time {
            break;
        }
    }
    load
}

const SECOND: Duration = Duration::from_secs(1);

fn policies(lease: Duration) -> Policies {
    let policy = Policy::new(
        "p",
        Strategy::Gcra,
        Quota::per_second(100_000).burst(400_000),
    )
    .unwrap();
    policy.leased(lease).unwrap().into()
}

#[tokio::test(start_paused = true)]
async fn round_trips_of_half_a_lease_save_most_calls() {
    for lease in [20, 100] {
        for sixteenths in 0..=8 {
            let (lease, server) = (
                Duration::from_millis(lease),
                Server::new(100_000, Duration::from_millis(lease) * sixteenths / 16),
            );
            let (store, policies) = (Leased::new(server.clone()), policies(lease));
            load(&store, &policies, ann(), 5, SECOND).await;
            let (before, load) = (
                server.calls.load(Relaxed),
                load(&store, &policies, ann(), 5, SECOND * 2).await,
            );
            let calls = server.calls.load(Relaxed) - before;
            println!(
                "{lease:?}, round trip of {:?}: {load}, {calls} calls",
                server.round_trip
            );
            // Up to a quarter, the next block is requested early enough.
            let least = if sixteenths <= 4 { 98 } else { 80 };
            assert!(
                load.leased.load(Relaxed) * 100 >= load.sent.load(Relaxed) * least,
                "{:?}: {load}",
                server.round_trip
            );
            assert!(
                calls * 100 <= load.sent.load(Relaxed) * 20,
                "{:?}: {calls}",
                server.round_trip
            );
        }
    }
}

/// Without leases, the server would get 1.5 times the checks that it can decide. The lease time is below and above the
/// deadline of the fallback, if there is one.
#[tokio::test(start_paused = true)]
async fn stalls_heal() {
    for stall in [30, 60, 90, 150, 300, 500].map(Duration::from_millis) {
        let server = overloaded();
        let store = Leased::new(server.clone());
        heals(&store, &server, Duration::from_millis(100), stall).await;
        for lease in [20, 400].map(Duration::from_millis) {
            let server = overloaded();
            let store = Fallback::new(server.clone(), LocalStore::default());
            heals(&Leased::new(store), &server, lease, stall).await;
        }
    }
}

fn overloaded() -> Server {
    Server::new(20_000, Duration::from_micros(500))
}

async fn heals<S: Store>(store: &Leased<S>, server: &Server, lease: Duration, stall: Duration) {
    let policies = policies(lease);
    load(store, &policies, ann(), 30, SECOND).await;
    let before = server.calls.load(Relaxed);
    let first = load(store, &policies, ann(), 30, SECOND / 2).await;
    let usual = server.calls.load(Relaxed) - before;
    server.stall(stall);
    let meanwhile = load(store, &policies, ann(), 30, SECOND * 2).await;
    let sent = server.calls.load(Relaxed) - before - usual;
    let before = server.calls.load(Relaxed);
    let after = load(store, &policies, ann(), 30, SECOND / 2).await;
    let calls = server.calls.load(Relaxed) - before;
    println!(
        "{stall:?}, leased for {lease:?}: {usual} calls in half a second, {sent} in 2 s after it, and then {calls}; {first}; \
         {meanwhile}; {after}"
    );
    assert!(
        calls <= usual * 2 && server.lag() < lease / 4,
        "{stall:?}: {calls} calls, {usual} before, {:?}",
        server.lag()
    );
    // After an outage, no block is requested for a quarter of the lease time.
    let is_outage = stall >= store.inner.deadline;
    if !is_outage {
        // The checks of a quarter of the lease time, and a few.
        let max_sent = 30 * (lease.as_millis() / 4 + 10);
        assert!(u128::from(sent) <= max_sent, "{stall:?}: {sent} sent");
    }
    sleep(lease.max(SECOND)).await;
    assert_eq!(
        meanwhile.answered.load(Relaxed),
        meanwhile.sent.load(Relaxed),
        "{stall:?}"
    );
}

/// The task that requests blocks is on a runtime that runs only inside of `block_on`.
#[test]
fn no_check_waits_for_another_runtime() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
    };
    let (lease, trip) = (Duration::from_millis(100), Duration::from_millis(40));
    let (stalled, other) = (runtime(), runtime());
    let server = Server::new(1_000_000, trip);
    let store = Leased::new(Fallback::new(server, LocalStore::default()));
    let policies = policies(lease);
    let take = |cost| store.check(Check::take(ann(), &policies, cost));
    let stalled_at = stalled.block_on(async {
        load(&store, &policies, ann(), 5, SECOND).await;
        while let Answer::Ready { .. } = take(1) {}
        instant()
    });
    let max_wait = Fallback::<Server, LocalStore>::DEFAULT_DEADLINE;
    let took = |max: Duration| async move {
        let sent_at = instant();
        let answer = timeout(SECOND, take(1)).await;
        let took = instant() - sent_at;
        // Each of three timers is up to 1 ms late.
        assert!(
            answer.is_ok() && took <= max + Duration::from_millis(3),
            "{took:?}"
        );
        took
    };
    other.block_on(async {
        sleep_until(stalled_at).await;
        assert!(
            took(max_wait + trip).await > trip * 2,
            "it has waited for a block"
        );
        for _ in 0..200 {
            took(trip).await;
        }
    });
    drop(stalled);
    other.block_on(async {
        took(trip).await;
        load(&store, &policies, ann(), 5, SECOND).await;
        let load = load(&store, &policies, ann(), 5, SECOND).await;
        assert!(
            load.leased.load(Relaxed) * 100 >= load.sent.load(Relaxed) * 80,
            "{load}"
        );
    });
}

/// The reported misconfigurations.
#[derive(Default)]
struct Problems(Mutex<Vec<String>>);

impl Observer for Arc<Problems> {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Misconfigured { problem } = *event {
            lock(&self.0).push(problem.to_owned());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn short_leases_are_reported() {
    let lease = Duration::from_millis(100);
    for (trip, stall) in [(20, 0), (20, 400), (30, 0), (60, 0), (120, 0)] {
        let (server, problems) = (
            Server::new(100_000, Duration::from_millis(trip)),
            Arc::new(Problems::default()),
        );
        let (store, policies) = (Leased::new(server.clone()), policies(lease));
        store
            .backend()
            .observe(&(Arc::new(Arc::clone(&problems)) as Arc<dyn Observer>));
        load(&store, &policies, ann(), 5, SECOND).await;
        server.stall(Duration::from_millis(stall));
        load(&store, &policies, ann(), 5, SECOND * 5).await;
        let problems = lock(&problems.0);
        if trip <= 25 {
            assert_eq!(*problems, [""; 0], "{trip} ms, and a stall of {stall} ms");
        } else {
            // Two timers of Tokio, each up to 1 ms late.
            let figures =
                (4 * trip..=4 * trip + 8).map(|millis| format!("for at least {millis}.0ms"));
            assert!(
                problems.len() == 1 && problems[0].contains("(short-lease: "),
                "{trip} ms: {problems:?}"
            );
            assert!(
                { figures }.any(|figure| problems[0].contains(&figure)),
                "{trip} ms: {problems:?}"
            );
        }
    }
}

/// Once no block has arrived in time for a while, checks do not wait for the next one.
#[tokio::test(start_paused = true)]
async fn short_leases_delay_no_check() {
    let (lease, trip) = (Duration::from_millis(100), Duration::from_millis(120));
    let server = Server::new(100_000, trip);
    let (store, policies) = (Leased::new(server.clone()), policies(lease));
    load(&store, &policies, ann(), 5, SECOND * 5).await;
    for _ in 0..500 {
        let sent_at = instant();
        let answer = store.check(Check::take(ann(), &policies, 1)).await;
        assert_eq!(answer.unwrap().source(), Source::Local);
        let took = instant() - sent_at;
        assert!(took <= trip + Duration::from_millis(4), "{took:?}");
    }
}

/// A client that sends many keys must not evict the busiest caller's block.
#[tokio::test(start_paused = true)]
async fn the_busiest_caller_keeps_its_blocks() {
    let (server, policies) = (
        Server::new(1_000_000, Duration::from_millis(1)),
        policies(Duration::from_millis(100)),
    );
    let store = Leased::builder(server.clone())
        .max_callers(64.try_into().unwrap())
        .build();
    let flood = {
        let (store, policies) = (store.clone(), policies.clone());
        tokio::spawn(async move {
            for n in 0u64.. {
                for i in 0..40 {
                    let key = Key::from((n * 40 + i) / 20 % 3_000);
                    tokio::spawn(store.check(Check::take(key, &policies, 1)));
                }
                sleep(Duration::from_millis(1)).await;
            }
        })
    };
    sleep(SECOND).await;
    assert!((32..=64).contains(&store.callers()), "{}", store.callers());
    load(&store, &policies, ann(), 20, SECOND / 4).await;
    let load = load(&store, &policies, ann(), 20, SECOND).await;
    println!("{load}, {} callers", store.callers());
    assert!(
        load.leased.load(Relaxed) * 100 >= load.sent.load(Relaxed) * 95,
        "{load}"
    );
    assert!(store.callers() <= 64);
    flood.abort();
}
