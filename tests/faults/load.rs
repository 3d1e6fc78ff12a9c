//! Four instances of a service with 64 requests under way each, and what became of these requests.

use std::collections::{HashMap, HashSet};
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::observe::{Observer, event};
use tower_redis_ratelimit::store::{ErrorKind, Share, Store};
use tower_redis_ratelimit::{
    Fallback, Key, Leased, LocalStore, Policies, RedisStore, Strategy, redis,
};

use crate::support::{leased, policy};

const INSTANCES: usize = 4;
pub const TASKS: usize = 64;
pub const DEADLINE: Duration = Duration::from_millis(100);
/// Between two requests of a task, so that the load is not the outage; longer on a machine that is late.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// What a caller's limit is for. Under none of them does anything flow back while a test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Used up before the fault: an outage must not be a second helping.
    Spent,
    /// Never used up, so that every charge can be found in Redis afterwards.
    Ample,
    /// Asked for from the fault on, and used up while it lasts: the instances must share it.
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
    /// Of each instance.
    pub connections: usize,
    /// The store's, not the fallback's.
    pub timeout: Duration,
    /// Whether what callers will want is charged ahead.
    pub leased: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            instances: INSTANCES,
            connections: 2,
            timeout: Duration::from_millis(250),
            leased: false,
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

    /// Leased or not, they count alike.
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

/// What the store of an instance has reported to its observer.
#[derive(Default)]
pub struct Events {
    pub failed: AtomicU64,
    /// The kinds of these failures.
    pub kinds: Mutex<HashSet<ErrorKind>>,
    pub degraded: AtomicU64,
    pub recovered: AtomicU64,
    pub charged: AtomicU64,
    pub dropped: AtomicU64,
    /// What was left of blocks, and the largest of them.
    pub left: AtomicU64,
    pub largest: AtomicU64,
}

#[derive(Clone, Default)]
struct Notes(Arc<Events>);

impl Observer for Notes {
    fn degraded(&self, _: &event::Degraded<'_>) {
        self.0.degraded.fetch_add(1, SeqCst);
    }

    fn recovered(&self, _: &event::Recovered) {
        self.0.recovered.fetch_add(1, SeqCst);
    }

    fn reconciled(&self, event: &event::Reconciled) {
        self.0.charged.fetch_add(event.charged, SeqCst);
        self.0.dropped.fetch_add(event.dropped, SeqCst);
    }

    fn leased(&self, event: &event::Leased) {
        self.0
            .left
            .fetch_add(event.refunded + event.expired, SeqCst);
        self.0.largest.fetch_max(event.charged, SeqCst);
    }

    fn failed(&self, event: &event::Failed<'_>) {
        self.0.failed.fetch_add(1, SeqCst);
        self.0.kinds.lock().unwrap().insert(event.error.kind());
    }
}

/// One process of the service: a store with connections of its own.
pub struct Instance {
    pub store: Fallback<RedisStore, LocalStore>,
    /// Around it: the same under policies that are not leased.
    leased: Leased<Fallback<RedisStore, LocalStore>>,
    pub events: Arc<Events>,
    /// Whether a caller was denied by this instance alone, and by Redis.
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
        let share = Share::Fixed(NonZeroU32::new(instances as u32).unwrap());
        let redis = RedisStore::builder(url)
            .timeout(timeout)
            .connections(connections)
            .connect_lazy()
            .unwrap();
        let store = Fallback::new(redis, LocalStore::default())
            .deadline(DEADLINE)
            .share(share.clone())
            .observer(notes.clone());
        let leased = Leased::new(store.clone()).share(share);
        leased.observe(&(Arc::new(notes.clone()) as Arc<dyn Observer>));
        Self {
            store,
            leased,
            events: notes.0,
            denied: Default::default(),
            by_redis: AtomicU64::new(0),
        }
    }

    /// How many requests Redis has decided for it.
    pub fn by_redis(&self) -> u64 {
        self.by_redis.load(SeqCst)
    }

    /// Whether every caller of this kind was denied by this source.
    pub fn has_denied(&self, kind: Kind, source: Source) -> bool {
        (0..CALLERS.len())
            .filter(|caller| CALLERS[*caller].1 == kind)
            .all(|caller| self.denies(caller, source))
    }

    /// Whether a caller was denied by this source.
    pub fn denies(&self, caller: usize, source: Source) -> bool {
        self.denied[usize::from(source == Source::Local)][caller].load(SeqCst)
    }
}

/// What became of the requests.
#[derive(Default)]
pub struct Sums {
    pub requests: AtomicU64,
    /// Those that got no decision.
    pub errors: AtomicU64,
    /// In microseconds.
    pub worst: AtomicU64,
    /// For each caller what Redis granted it, and what the instances did.
    pub redis: [AtomicU64; CALLERS.len()],
    pub local: [AtomicU64; CALLERS.len()],
    /// When the machine let a task wait for half a deadline, in slots as long as a deadline, and for how long: checks may
    /// have been late by that, whatever the crate does.
    stalls: Mutex<HashMap<u64, Duration>>,
    /// The slots in which Redis was slow though nothing was wrong with it: see [`Pings`].
    slow: Mutex<HashSet<u64>>,
    /// How long requests took before the fault, and once the breaker was open; in microseconds.
    healthy: Mutex<Vec<u64>>,
    open: Mutex<Vec<u64>>,
}

pub struct Load {
    pub instances: Arc<[Instance]>,
    pub sums: Arc<Sums>,
    leased: bool,
    /// Whether the tight callers ask too.
    tight: Arc<AtomicBool>,
    /// Whether they ask many times at once while their instance goes on by itself.
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
            tight: Arc::default(),
            burst: Arc::default(),
            stop: Arc::default(),
            tasks: JoinSet::new(),
        }
    }

    /// One request of every caller at every instance, so that all have heard of all callers.
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
        for i in 0..count * TASKS {
            let (instances, sums) = (Arc::clone(&self.instances), Arc::clone(&self.sums));
            let (tight, burst, stop) = (
                Arc::clone(&self.tight),
                Arc::clone(&self.burst),
                Arc::clone(&self.stop),
            );
            self.tasks.spawn(async move {
                let instance = &instances[i % count];
                let checks: Vec<Check> = (0..CALLERS.len())
                    .map(|caller| take(caller, leased))
                    .collect();
                let (mut healthy, mut open) = (vec![], vec![]);
                // Not all at once.
                let mut pause = sums
                    .pause(LONGEST_PAUSE * i as u32 / (count * TASKS) as u32)
                    .await;
                for turn in i / count.. {
                    if stop.load(SeqCst) {
                        break;
                    }
                    // Every second request is of a tight caller, once these ask.
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
                    pause = sums.pause(pause).await;
                }
                sums.healthy.lock().unwrap().append(&mut healthy);
                sums.open.lock().unwrap().append(&mut open);
            });
        }
    }

    /// From now on the tight callers ask too.
    pub fn tighten(&self) {
        self.tight.store(true, SeqCst);
    }

    /// From now on they burst while their instance goes on by itself.
    pub fn burst(&self) {
        self.burst.store(true, SeqCst);
    }

    /// Lets every task finish its request, and refunds what is left of blocks.
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

impl Sums {
    /// Sleeps for so long. Returns for how long to sleep the next time.
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

    /// How many times the machine stalled, each for about a deadline.
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

    /// The 99th percentiles before the fault and once the breaker was open, if requests came then.
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

/// The slot of a time.
fn slot(time: SystemTime) -> u64 {
    (time.duration_since(UNIX_EPOCH).unwrap().as_millis() / DEADLINE.as_millis()) as u64
}

/// A thread that pings Redis on a connection of its own. On a busy machine the process of Redis may have to wait though
/// the tasks of the load do not: then checks miss their deadline, whatever the crate does.
pub struct Pings {
    /// Odd during a fault, of which nothing is recorded.
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

/// How long it took, in microseconds.
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
