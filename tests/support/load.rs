//! Four instances of a service with 64 tasks each that send requests all the time, and the outcomes
//! of these requests.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{
    Fallback, Key, Leased, LocalStore, Policies, RedisStore, Strategy, redis,
};

use crate::support::{leased, policy};

const INSTANCES: usize = 4;
pub const TASKS: usize = 64;
/// Tasks of an instance whose handlers keep their threads, and for how long.
const BUSY_TASKS: usize = 16;
pub const HANDLER: Duration = Duration::from_millis(20);
pub const DEADLINE: Duration = Duration::from_millis(100);
/// Pause between two requests of a task, so that the load is not the outage; longer on a slow
/// machine.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The purpose of a caller's limit. No charge expires during a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Used up before the fault: an outage must grant no extra quota.
    Spent,
    /// Never used up, so that every charge can be found in Redis afterwards.
    Ample,
    /// Requested from the fault on, and used up during it: the instances must share it.
    Tight,
}

pub const CALLERS: [(&str, Kind); 6] = [
    ("spent-1", Kind::Spent),
    ("spent-2", Kind::Spent),
    ("ample-1", Kind::Ample),
    ("ample-2", Kind::Ample),
    ("tight-1", Kind::Tight),
    ("tight-2", Kind::Tight),
];

/// How the service is set up.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub instances: usize,
    /// Per instance.
    pub connections: usize,
    /// The timeout of the store, not of the fallback.
    pub timeout: Duration,
    /// Whether quota is leased.
    pub leased: bool,
    /// Whether each instance has a runtime of two worker threads, which its handlers keep.
    pub busy: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            instances: INSTANCES,
            connections: 2,
            timeout: Duration::from_millis(250),
            leased: false,
            busy: false,
        }
    }
}

impl Kind {
    pub const fn limit(self) -> u64 {
        match self {
            Self::Spent => 200,
            Self::Ample => 1_000_000,
            Self::Tight => 1_200,
        }
    }

    /// Leased and other policies count equally.
    fn policies(self, is_leased: bool) -> Policies {
        if !is_leased {
            return policy(Strategy::Gcra, &format!("{}/100d", self.limit()));
        }
        leased(
            Strategy::Gcra,
            self.limit() as u32,
            Duration::from_millis(400),
        )
    }
}

pub fn peek(caller: usize) -> Check {
    let (name, kind) = CALLERS[caller];
    Check::peek(Key::new(name), &kind.policies(false), 1)
}

/// The events that the store of an instance has reported.
#[derive(Default)]
pub struct Events {
    /// Also the checks whose reply came too late on a busy runtime.
    pub failed: AtomicU64,
    /// The longest time by which the runtime was late for one check, in microseconds.
    pub late: AtomicU64,
    /// The checks without a reply that ended when the runtime was late, which is no evidence about Redis.
    pub in_doubt: AtomicU64,
    /// The kinds of these failures.
    pub kinds: Mutex<HashSet<ErrorKind>>,
    pub degraded: AtomicU64,
    pub recovered: AtomicU64,
    pub charged: AtomicU64,
    pub dropped: AtomicU64,
    /// The unspent units of blocks, and the largest number of one report.
    pub left: AtomicU64,
    pub largest: AtomicU64,
}

#[derive(Clone, Default)]
struct Notes(Arc<Events>);

impl Observer for Notes {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Degraded { .. } => {
                self.0.degraded.fetch_add(1, SeqCst);
            }
            Event::Recovered { .. } => {
                self.0.recovered.fetch_add(1, SeqCst);
            }
            Event::Reconciled {
                charged, dropped, ..
            } => {
                self.0.charged.fetch_add(charged, SeqCst);
                self.0.dropped.fetch_add(dropped, SeqCst);
            }
            Event::LeasedBlockEnded {
                refunded,
                expired,
                charged,
                ..
            } => {
                self.0.left.fetch_add(refunded + expired, SeqCst);
                self.0.largest.fetch_max(charged, SeqCst);
            }
            Event::RuntimeLate { by, gave_up, .. } => {
                self.0.late.fetch_max(by.as_micros() as u64, SeqCst);
                self.0.in_doubt.fetch_add(u64::from(gave_up), SeqCst);
                self.0.failed.fetch_add(gave_up.into(), SeqCst);
            }
            Event::Failed { error, .. } => {
                self.0.failed.fetch_add(1, SeqCst);
                self.0.kinds.lock().unwrap().insert(error.kind());
            }
            _ => {}
        }
    }
}

/// One instance of the service, with its own store and connections.
pub struct Instance {
    pub store: Fallback<RedisStore, LocalStore>,
    /// Wraps `store`; it behaves like `store` under policies that are not leased.
    leased: Leased<Fallback<RedisStore, LocalStore>>,
    pub events: Arc<Events>,
    /// Whether this instance alone has denied a caller, and whether Redis has.
    denied: [[AtomicBool; CALLERS.len()]; 2],
    by_redis: AtomicU64,
}

impl Instance {
    pub fn new(
        url: &str,
        Setup {
            instances,
            connections,
            timeout,
            ..
        }: Setup,
    ) -> Self {
        let notes = Notes::default();
        let connections = NonZeroUsize::new(connections).unwrap();
        let share = instances as u32;
        let redis = RedisStore::builder(url)
            .timeout(timeout)
            .connections(connections)
            .connect_lazy()
            .unwrap();
        let store = Fallback::builder(redis, LocalStore::default())
            .deadline(DEADLINE)
            .unwrap()
            .share(share)
            .observer(notes.clone())
            .build();
        let leased = Leased::builder(store.clone())
            .share(share)
            .observer(notes.clone())
            .build();
        Self {
            store,
            leased,
            events: notes.0,
            denied: Default::default(),
            by_redis: AtomicU64::new(0),
        }
    }

    /// Number of requests that Redis has decided for it.
    pub fn by_redis(&self) -> u64 {
        self.by_redis.load(SeqCst)
    }

    /// Returns `true` if this source has denied every caller of this kind.
    pub fn has_denied(&self, kind: Kind, source: Source) -> bool {
        (0..CALLERS.len())
            .filter(|caller| CALLERS[*caller].1 == kind)
            .all(|caller| self.denies(caller, source))
    }

    /// Returns `true` if this source has denied the caller.
    pub fn denies(&self, caller: usize, source: Source) -> bool {
        self.denied[usize::from(source == Source::Local)][caller].load(SeqCst)
    }
}

/// The outcomes of the requests.
#[derive(Default)]
pub struct Sums {
    pub requests: AtomicU64,
    /// Requests without a decision.
    pub errors: AtomicU64,
    /// In microseconds.
    pub worst: AtomicU64,
    /// Units per caller that Redis has granted, and units that the instances have granted.
    pub redis: [AtomicU64; CALLERS.len()],
    pub local: [AtomicU64; CALLERS.len()],
    /// Stalls of the machine, per slot of one deadline: the time by which it woke a task late, if
    /// that was at least half a deadline. Checks may have been late by that time for no fault of
    /// the crate.
    stalls: Mutex<HashMap<u64, Duration>>,
    /// The slots in which Redis was slow without a fault: see [`Pings`].
    slow: Mutex<HashSet<u64>>,
    /// Durations of requests before the fault, and after the breaker had opened; in microseconds.
    healthy: Mutex<Vec<u64>>,
    open: Mutex<Vec<u64>>,
}

pub struct Load {
    pub instances: Arc<[Instance]>,
    pub sums: Arc<Sums>,
    leased: bool,
    /// The runtime of each busy instance.
    runtimes: Vec<Runtime>,
    /// Whether the tight callers send requests too.
    tight: Arc<AtomicBool>,
    /// Whether they send many concurrent requests while their instance is degraded.
    burst: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Load {
    pub fn new(url: &str, setup: Setup) -> Self {
        Self {
            instances: (0..setup.instances)
                .map(|_| Instance::new(url, setup))
                .collect(),
            sums: Arc::default(),
            leased: setup.leased,
            runtimes: match setup.busy {
                false => vec![],
                true => (0..setup.instances).map(|_| two_workers()).collect(),
            },
            tight: Arc::default(),
            burst: Arc::default(),
            stop: Arc::default(),
            tasks: JoinSet::new(),
        }
    }

    /// Sends one request of every caller to every instance: each then has a count of each
    /// caller.
    pub async fn introduce(&self) {
        for instance in &*self.instances {
            for caller in 0..CALLERS.len() {
                ask(instance, &self.sums, caller, &take(caller, self.leased)).await;
            }
        }
    }

    /// Starts all tasks.
    pub fn start(&mut self) {
        let (count, leased) = (self.instances.len(), self.leased);
        let is_busy = !self.runtimes.is_empty();
        let all = count * if is_busy { BUSY_TASKS } else { TASKS };
        for i in 0..all {
            let own = self.runtimes.get(i % count);
            let runtime = own.map_or_else(Handle::current, |own| own.handle().clone());
            let (instances, sums) = (Arc::clone(&self.instances), Arc::clone(&self.sums));
            let (tight, burst, stop) = (
                Arc::clone(&self.tight),
                Arc::clone(&self.burst),
                Arc::clone(&self.stop),
            );
            let task = async move {
                let instance = &instances[i % count];
                let checks: Vec<Check> = (0..CALLERS.len())
                    .map(|caller| take(caller, leased))
                    .collect();
                let (mut healthy, mut open) = (vec![], vec![]);
                // Spread the first requests.
                let mut pause = sums.pause(LONGEST_PAUSE * i as u32 / all as u32).await;
                for turn in i / count.. {
                    if stop.load(SeqCst) {
                        break;
                    }
                    // With tight callers, every second request is one of theirs.
                    let caller = match turn % 8 {
                        place @ 0..4 => place,
                        place if tight.load(SeqCst) => 4 + place % 2,
                        place => 2 + place % 2,
                    };
                    let degraded = instance.store.is_degraded();
                    let took = ask(instance, &sums, caller, &checks[caller]).await;
                    if degraded && caller >= 4 && burst.load(SeqCst) {
                        for _ in 0..8 {
                            ask(instance, &sums, caller, &checks[caller]).await;
                        }
                    }
                    if degraded {
                        open.push(took);
                    } else if !tight.load(SeqCst) {
                        healthy.push(took);
                    }
                    if is_busy {
                        // The handler of a request with four checks.
                        if turn % 4 == 3 {
                            std::thread::sleep(HANDLER);
                            yield_now().await;
                        }
                    } else {
                        pause = sums.pause(pause).await;
                    }
                }
                sums.healthy.lock().unwrap().append(&mut healthy);
                sums.open.lock().unwrap().append(&mut open);
            };
            self.tasks.spawn_on(task, &runtime);
        }
    }

    /// Starts the requests of the tight callers.
    pub fn tighten(&self) {
        self.tight.store(true, SeqCst);
    }

    /// Lets the tight callers burst while their instance is degraded.
    pub fn burst(&self) {
        self.burst.store(true, SeqCst);
    }

    /// Lets every task finish its request, and refunds the unspent parts of blocks.
    pub async fn stop(&mut self) {
        self.stop.store(true, SeqCst);
        while let Some(task) = self.tasks.join_next().await {
            task.expect("a task of the load panicked");
        }
        for instance in &*self.instances {
            instance.leased.shutdown().await;
        }
    }

    /// A sum over all instances.
    pub fn total(&self, of: impl Fn(&Events) -> &AtomicU64) -> u64 {
        self.instances
            .iter()
            .map(|instance| of(&instance.events).load(SeqCst))
            .sum()
    }
}

fn two_workers() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// A runtime may not be dropped in another one without that.
impl Drop for Load {
    fn drop(&mut self) {
        for runtime in self.runtimes.drain(..) {
            runtime.shutdown_background();
        }
    }
}

impl Sums {
    /// Sleeps for `pause`. Returns the duration of the next pause.
    async fn pause(&self, pause: Duration) -> Duration {
        let since = Instant::now();
        sleep(pause).await;
        let late = since.elapsed() - pause;
        if late > DEADLINE / 2 {
            let mut stalls = self.stalls.lock().unwrap();
            let longest = stalls.entry(slot(SystemTime::now())).or_default();
            *longest = late.max(*longest);
        }
        (late * 4).clamp(PAUSE, LONGEST_PAUSE)
    }

    /// Number of times that the machine stalled, each for about a deadline.
    pub fn stalls(&self) -> u64 {
        self.stalls.lock().unwrap().len() as u64
    }

    /// How many times the machine, or only the process of Redis, stalled for about a deadline.
    pub fn late_slots(&self) -> u64 {
        let mut slots = self.slow.lock().unwrap().clone();
        slots.extend(self.stalls.lock().unwrap().keys());
        slots.len() as u64
    }

    pub fn longest_stall(&self) -> Duration {
        self.stalls
            .lock()
            .unwrap()
            .values()
            .max()
            .copied()
            .unwrap_or_default()
    }

    /// Returns the 99th percentiles before the fault, and after the breaker had opened, if there
    /// were requests.
    pub fn p99(&self) -> (Option<Duration>, Option<Duration>) {
        let of = |times: &Mutex<Vec<u64>>| {
            let mut times = times.lock().unwrap();
            times.sort_unstable();
            times
                .get(times.len() * 99 / 100)
                .map(|micros| Duration::from_micros(*micros))
        };
        (of(&self.healthy), of(&self.open))
    }
}

/// The slot that contains `time`.
fn slot(time: SystemTime) -> u64 {
    (time.duration_since(UNIX_EPOCH).unwrap().as_millis() / DEADLINE.as_millis()) as u64
}

/// A thread that pings Redis on a separate connection. On a busy machine the process of Redis may have to wait though
/// the tasks of the load do not: then checks miss their deadline regardless of the crate.
pub struct Pings {
    /// Odd during a fault, which is not recorded.
    phase: Arc<AtomicU64>,
}

impl Pings {
    /// Pings until this is dropped.
    pub fn start(url: &str, sums: &Arc<Sums>) -> Self {
        let phase = Arc::new(AtomicU64::new(0));
        let client = redis::Client::open(url).unwrap();
        let (alive, sums) = (Arc::downgrade(&phase), Arc::clone(sums));
        std::thread::spawn(move || {
            let mut connection = None;
            while let Some(before) = alive.upgrade().map(|phase| phase.load(SeqCst)) {
                std::thread::sleep(PAUSE);
                let open = match &mut connection {
                    Some(open) => open,
                    none => match client.get_connection_with_timeout(DEADLINE) {
                        Ok(open) => none.insert(open),
                        Err(_) => continue,
                    },
                };
                let (sent, clock) = (SystemTime::now(), Instant::now());
                let reply: redis::RedisResult<String> = redis::cmd("PING").query(open);
                let after = alive.upgrade().map(|phase| phase.load(SeqCst));
                match reply {
                    Ok(_) if after == Some(before) && before % 2 == 0 => {
                        if clock.elapsed() > DEADLINE / 2 {
                            let slots = slot(sent)..=slot(sent + clock.elapsed());
                            sums.slow.lock().unwrap().extend(slots);
                        }
                    }
                    Ok(_) => {}
                    Err(_) => connection = None,
                }
            }
        });
        Self { phase }
    }

    /// A fault begins, or has been put right.
    pub fn turn(&self) {
        self.phase.fetch_add(1, SeqCst);
    }
}

pub fn take(caller: usize, leased: bool) -> Check {
    let (name, kind) = CALLERS[caller];
    Check::take(Key::new(name), &kind.policies(leased), 1)
}

/// Sends a request. Returns its duration in microseconds.
async fn ask(instance: &Instance, sums: &Sums, caller: usize, check: &Check) -> u64 {
    let since = Instant::now();
    let decision = instance.leased.check(check.clone()).await;
    let took = since.elapsed().as_micros() as u64;
    sums.requests.fetch_add(1, SeqCst);
    sums.worst.fetch_max(took, SeqCst);
    match decision {
        Err(_) => drop(sums.errors.fetch_add(1, SeqCst)),
        Ok(decision) => {
            let granted = match decision.source() {
                Source::Local => &sums.local,
                _ => &sums.redis,
            };
            granted[caller].fetch_add(u64::from(decision.granted()), SeqCst);
            if decision.source() == Source::Redis {
                instance.by_redis.fetch_add(1, SeqCst);
            }
            if !decision.is_allowed() {
                instance.denied[usize::from(decision.source() == Source::Local)][caller]
                    .store(true, SeqCst);
            }
        }
    }
    took
}
