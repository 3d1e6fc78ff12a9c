//! A service whose handlers keep the worker threads of its runtime.

use std::fmt;
use std::ops::AddAssign;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, Key, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
};

pub struct Busy {
    /// Worker threads. None: a current-thread runtime.
    pub workers: usize,
    /// How long a handler keeps its thread after each check.
    pub keeps: Duration,
    pub clients: usize,
    pub work: Work,
    /// Whether a handler yields after it, as one does that reads its next request.
    pub yields: bool,
    /// The limit of the one caller, in ten hours.
    pub limit: u32,
}

/// The work of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A blocking call.
    Sleep,
    /// A computation.
    #[allow(dead_code, reason = "not all targets have it")]
    Spin,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sleep => "sleep",
            Self::Spin => "spin",
        })
    }
}

impl Work {
    pub fn keep(self, time: Duration) {
        match self {
            Self::Sleep => thread::sleep(time),
            Self::Spin => {
                let since = Instant::now();
                while since.elapsed() < time {
                    std::hint::spin_loop();
                }
            }
        }
    }
}

/// What the clients have seen.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    pub granted: u64,
    pub checks: u64,
    /// Checks that were decided locally.
    pub local: u64,
    /// Checks of a store without a fallback that failed.
    pub failed: u64,
    /// The longest time by which the runtime was late for one check.
    pub late: Duration,
    pub longest: Duration,
}

impl AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        self.granted += other.granted;
        self.checks += other.checks;
        self.local += other.local;
        self.failed += other.failed;
        self.late = self.late.max(other.late);
        self.longest = self.longest.max(other.longest);
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            granted,
            checks,
            local,
            failed,
            late,
            longest,
        } = self;
        let [late, longest] = [late, longest].map(Duration::as_micros);
        write!(f, "{granted} {checks} {local} {failed} {late} {longest}")
    }
}

impl FromStr for Seen {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [granted, checks, local, failed, late, longest] = numbers[..] else {
            panic!("{text}")
        };
        let [late, longest] = [late, longest].map(Duration::from_micros);
        Ok(Self {
            granted,
            checks,
            local,
            failed,
            late,
            longest,
        })
    }
}

/// The longest sum of the late notices of one check.
#[derive(Clone, Default)]
pub struct Late(Arc<Mutex<Duration>>);

impl Late {
    pub fn longest(&self) -> Duration {
        *self.0.lock().unwrap()
    }
}

impl Observer for Late {
    fn notify(&self, event: &Event<'_>) {
        if let Event::RuntimeLate { by, .. } = *event {
            let mut longest = self.0.lock().unwrap();
            *longest = by.max(*longest);
        }
    }
}

impl Busy {
    /// Runs the clients on a runtime of their own, while `during` runs on this thread.
    pub fn run<S: Store>(&self, store: S, during: impl FnOnce()) -> Seen {
        let mut builder = match self.workers {
            0 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = builder
            .worker_threads(self.workers.max(1))
            .enable_all()
            .build()
            .unwrap();
        let quota: Quota = format!("{}/10h", self.limit).parse().unwrap();
        let strategy = Strategy::FixedWindow(Default::default());
        let policies = Policies::from(Policy::new("busy", strategy, quota).unwrap());
        let ends = Arc::new(AtomicBool::new(false));
        let sum = Arc::new(Mutex::new(Seen::default()));
        let (work, keeps, yields) = (self.work, self.keeps, self.yields);
        let mut clients = vec![];
        for _ in 0..self.clients {
            let (store, policies, ends, sum) = (
                store.clone(),
                policies.clone(),
                Arc::clone(&ends),
                Arc::clone(&sum),
            );
            clients.push(async move {
                let mut seen = Seen::default();
                while !ends.load(SeqCst) {
                    let since = Instant::now();
                    let answer = store
                        .check(Check::take(Key::new("ann"), &policies, 1))
                        .await;
                    seen.longest = seen.longest.max(since.elapsed());
                    seen.checks += 1;
                    match answer {
                        Ok(decision) => {
                            seen.granted += u64::from(decision.granted());
                            seen.local += u64::from(decision.source() == Source::Local);
                        }
                        Err(_) => seen.failed += 1,
                    }
                    work.keep(keeps);
                    if yields {
                        tokio::task::yield_now().await;
                    }
                }
                *sum.lock().unwrap() += seen;
            });
        }
        let all = async {
            let clients: Vec<_> = clients.into_iter().map(tokio::spawn).collect();
            for client in clients {
                client.await.unwrap();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| runtime.block_on(all));
            during();
            ends.store(true, SeqCst);
        });
        runtime.shutdown_background();
        *sum.lock().unwrap()
    }
}

/// Four instances with a runtime each share one limit over a healthy Redis.
#[allow(dead_code, reason = "not all targets have it")]
pub fn keeps_the_limit(
    workers: usize,
    yields: bool,
    work: Work,
    redis: impl Fn() -> RedisStore + Sync,
) {
    const LIMIT: u32 = 400;
    let instance = || {
        let busy = Busy {
            workers,
            keeps: Duration::from_millis(20),
            clients: 32,
            work,
            yields,
            limit: LIMIT,
        };
        let late = Late::default();
        let store = Fallback::builder(redis(), LocalStore::default())
            .observer(late.clone())
            .build();
        let mut seen = busy.run(store, || thread::sleep(Duration::from_secs(4)));
        seen.late = late.longest();
        seen
    };
    let mut sum = Seen::default();
    thread::scope(|scope| {
        let instances: Vec<_> = (0..4).map(|_| scope.spawn(instance)).collect();
        for instance in instances {
            sum += instance.join().unwrap();
        }
    });
    println!("{workers} workers, {work}: {sum:?}");
    // Few checks have no reply within two deadlines and the delays of the runtime.
    assert!(sum.granted <= u64::from(LIMIT) + 20, "{sum:?}");
}
