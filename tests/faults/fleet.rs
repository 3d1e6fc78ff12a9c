//! A fleet whose Redis stalls for a while: the time until all counts are shared again, and the lost charges.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Fallback, Key, LocalStore, RedisStore, Strategy};

use crate::support::{RedisServer, policy};

type Instance = Fallback<RedisStore, LocalStore>;

/// Callers of the whole fleet.
const CALLERS: u32 = 1_000;
const GIVE_UP: Duration = Duration::from_secs(12);

/// How it went.
#[derive(Debug)]
pub struct Row {
    /// How many instances were degraded while Redis stood still.
    pub degraded: usize,
    /// How long after Redis went on the first and the last instance had it decide again. `None` if some never did.
    pub back: Option<[Duration; 2]>,
    /// Granted by the instances.
    pub local: u64,
    pub charged: u64,
    pub dropped: u64,
    /// Calls of scripts that Redis has run from the moment at which it went on until all were back.
    pub calls: u64,
}

#[derive(Debug, Default)]
struct Sums {
    local: AtomicU64,
    charged: AtomicU64,
    dropped: AtomicU64,
}

#[derive(Clone)]
struct Notes(Arc<Sums>);

impl Observer for Notes {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Reconciled {
            charged, dropped, ..
        } = *event
        {
            self.0.charged.fetch_add(charged, SeqCst);
            self.0.dropped.fetch_add(dropped, SeqCst);
        }
    }
}

/// Runs a fleet that gets this many requests a second together, while Redis is stopped for a time.
pub async fn run(count: u32, per_second: u32, stopped: Duration, deadline: Duration) -> Row {
    let server = RedisServer::start();
    let sums = Arc::new(Sums::default());
    let instances: Vec<Instance> = (0..count)
        .map(|_| {
            let redis = RedisStore::builder(server.url())
                .timeout(deadline * 5 / 2)
                .connect_lazy()
                .unwrap();
            Fallback::builder(redis, LocalStore::default())
                .deadline(deadline)
                .unwrap()
                .share(count)
                .observer(Notes(Arc::clone(&sums)))
                .build()
        })
        .collect();
    let is_over = Arc::new(AtomicBool::new(false));
    let every = Duration::from_secs(1) * count / per_second;
    let mut load = JoinSet::new();
    for (number, instance) in instances.iter().enumerate() {
        let (instance, sums, is_over) = (instance.clone(), Arc::clone(&sums), Arc::clone(&is_over));
        // They connect one after the other.
        let start = Duration::from_millis(number as u64);
        load.spawn(requests(instance, sums, is_over, start, every));
    }
    // All are connected, and it is calm.
    sleep(Duration::from_millis(count.into()) + Duration::from_secs(1)).await;
    wait_until(|| instances.iter().all(|instance| !instance.is_degraded())).await;

    server.freeze();
    sleep(stopped).await;
    let degraded = degraded(&instances);
    let before = Instant::now();
    server.thaw();
    let first = wait_until(|| self::degraded(&instances) < degraded.max(1)).await;
    let first = first.then(|| before.elapsed());
    let last = wait_until(|| self::degraded(&instances) == 0).await;
    let last = last.then(|| before.elapsed());
    let calls = server.calls("evalsha").await;
    // The grants of the outage are reconciled.
    is_over.store(true, SeqCst);
    while load.join_next().await.is_some() {}
    let all = || {
        let [local, charged, dropped] =
            [&sums.local, &sums.charged, &sums.dropped].map(|sum| sum.load(SeqCst));
        charged + dropped >= local
    };
    let _ = timeout(Duration::from_secs(5), async {
        while !all() {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    Row {
        degraded,
        back: first.zip(last).map(|(first, last)| [first, last]),
        local: sums.local.load(SeqCst),
        charged: sums.charged.load(SeqCst),
        dropped: sums.dropped.load(SeqCst),
        calls,
    }
}

async fn requests(
    instance: Instance,
    sums: Arc<Sums>,
    is_over: Arc<AtomicBool>,
    start: Duration,
    every: Duration,
) {
    let limit = policy(Strategy::Gcra, "1000000/100d");
    sleep(start).await;
    let mut next = tokio::time::Instant::now();
    while !is_over.load(SeqCst) {
        let key = Key::new(fastrand::u32(..CALLERS).to_be_bytes());
        let decision = instance.check(Check::take(key, &limit, 1)).await.unwrap();
        if decision.source() == Source::Local {
            sums.local.fetch_add(decision.granted().into(), SeqCst);
        }
        next = (next + every).max(tokio::time::Instant::now() - every);
        sleep_until(next).await;
    }
}

fn degraded(instances: &[Instance]) -> usize {
    instances
        .iter()
        .filter(|instance| instance.is_degraded())
        .count()
}

/// Whether it came true in time.
async fn wait_until(condition: impl Fn() -> bool) -> bool {
    let looking = async {
        while !condition() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(GIVE_UP, looking).await.is_ok()
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            degraded,
            back,
            local,
            charged,
            dropped,
            calls,
        } = self;
        write!(
            f,
            "{degraded} degraded, back {back:.2?}; {local} granted locally, {charged} charged, {dropped} dropped; {calls} calls"
        )
    }
}
