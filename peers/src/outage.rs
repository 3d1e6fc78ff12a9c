//! The responses to requests during and after an outage of Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use benches::support::RedisServer;
use futures_util::future::join_all;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use tower_redis_ratelimit::Quota;

use crate::peer::{Answer, Instance, Peer, Setup};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// Dead for [`OUTAGE`].
    Killed,
    /// Stopped with SIGSTOP for [`OUTAGE`].
    Frozen,
    /// Killed, and restarted immediately.
    Restarted,
}

impl Fault {
    pub const ALL: [Self; 3] = [Self::Killed, Self::Frozen, Self::Restarted];

    pub fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Frozen => "frozen",
            Self::Restarted => "restarted",
        }
    }

    /// From its begin to its end, on a thread that may wait.
    fn run(self, server: &mut RedisServer) {
        match self {
            Self::Killed | Self::Restarted => server.kill(),
            Self::Frozen => server.freeze(),
        }
        if self != Self::Restarted {
            thread::sleep(OUTAGE);
        }
        match self {
            Self::Killed | Self::Restarted => server.restart(),
            Self::Frozen => server.thaw(),
        }
    }
}

/// Keeps all acknowledged charges over a restart, so a limiter is the cause of each repeated grant. The data that a process has
/// written survives its kill, so it need not wait for the disk.
const KEEPS_ITS_DATA: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "no"];
pub const LIMIT: u32 = 1_000;
/// Requests of the one caller before the outage.
const BEFORE: u32 = 500;
pub const OUTAGE: Duration = Duration::from_secs(3);
pub const AFTER: Duration = Duration::from_secs(5);
const INSTANCES: u32 = 2;
const TASKS: usize = 16;
const PAUSE: Duration = Duration::from_millis(20);
/// Our default.
const DEADLINE: Duration = Duration::from_millis(100);
/// Maximum wait for a response.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Concurrent requests of another caller, at the end.
pub const AGAIN: u32 = 3_000;

#[derive(Clone, Debug)]
pub struct Outage {
    /// Requests of callers far from their limits, during the outage, for at least a second: passed, denied, failed, no answer.
    pub answers: [u64; 4],
    /// How long these waited, in order.
    pub waits: Vec<Duration>,
    /// Granted to the one caller before, during and after it.
    pub granted: [u64; 3],
    /// When the last request ended that was begun after the outage, and failed or waited; `None` if the last ones of
    /// all did.
    pub well: Option<Duration>,
    /// Grants of the last [`AGAIN`] concurrent requests.
    pub again: u64,
}

struct Asked {
    begun: Instant,
    wait: Duration,
    /// `None` if there was none within [`PATIENCE`].
    answer: Option<Answer>,
    /// Whether it is of the one caller whose grants are counted.
    counted: bool,
}

impl Asked {
    fn is_bad(&self) -> bool {
        self.wait > DEADLINE || matches!(self.answer, None | Some(Answer::Failed))
    }
}

pub async fn run(peer: impl Peer, fault: Fault) -> Outage {
    // Connect one peer after the other, so that each waits only for its server.
    static STARTING: Mutex<()> = Mutex::const_new(());
    let starting = STARTING.lock().await;
    // Wait for servers on threads that run no requests.
    let mut server = spawn_blocking(move || peer.server(&KEEPS_ITS_DATA))
        .await
        .unwrap();
    let setup = Setup {
        server: &server,
        quota: Quota::per_hour(LIMIT),
        limits: 1,
        instances: INSTANCES,
        deadline: DEADLINE,
    };
    let instances = join_all((0..INSTANCES).map(|_| peer.instance(setup))).await;
    drop(starting);
    let before = at_once(&instances, 0, BEFORE).await;
    // Limiters that charge Redis afterwards have done so.
    sleep(Duration::from_secs(1)).await;

    let goes_on = Arc::new(AtomicBool::new(true));
    let next = Arc::new(AtomicU32::new(10));
    let tasks = (0..TASKS).map(|task| {
        let (instance, goes_on, next) = (
            instances[task % instances.len()].clone(),
            goes_on.clone(),
            next.clone(),
        );
        tokio::spawn(async move {
            let mut all = vec![];
            while goes_on.load(Ordering::Relaxed) {
                all.push(ask(instance.clone(), 0).await);
                all.push(ask(instance.clone(), next.fetch_add(1, Ordering::Relaxed)).await);
                sleep(PAUSE).await;
            }
            all
        })
    });
    let tasks: Vec<_> = tasks.collect();
    // The first of them.
    sleep(PAUSE / 2).await;
    let start = Instant::now();
    let _server = spawn_blocking(move || {
        fault.run(&mut server);
        server
    })
    .await
    .unwrap();
    let end = Instant::now();
    sleep(AFTER).await;
    goes_on.store(false, Ordering::Relaxed);
    let all: Vec<Asked> = join_all(tasks)
        .await
        .into_iter()
        .flat_map(Result::unwrap)
        .collect();
    let again = at_once(&instances, 1, AGAIN).await;
    judge(&all, before, start, end, again)
}

fn judge(all: &[Asked], before: u64, start: Instant, end: Instant, again: u64) -> Outage {
    let granted = |asked: &&Asked| asked.counted && asked.answer == Some(Answer::Passed);
    let count = |from: Option<Instant>, to: Option<Instant>| {
        let within = |asked: &&Asked| {
            from.is_none_or(|from| asked.begun >= from) && to.is_none_or(|to| asked.begun < to)
        };
        all.iter().filter(within).filter(granted).count() as u64
    };
    // A restart is too short for many requests.
    let until = end.max(start + Duration::from_secs(1));
    let others = || {
        all.iter()
            .filter(|asked| !asked.counted && asked.begun >= start && asked.begun < until)
    };
    let answers = [
        Some(Answer::Passed),
        Some(Answer::Denied),
        Some(Answer::Failed),
        None,
    ];
    let mut waits: Vec<Duration> = others().map(|asked| asked.wait).collect();
    waits.sort_unstable();
    let after = || all.iter().filter(|asked| asked.begun >= end);
    let bad = after()
        .filter(|asked| asked.is_bad())
        .map(|asked| asked.begun + asked.wait - end)
        .max();
    let last = after()
        .map(|asked| asked.begun + asked.wait - end)
        .max()
        .unwrap_or_default();
    let bad = bad.unwrap_or_default();
    Outage {
        answers: answers
            .map(|answer| others().filter(|asked| asked.answer == answer).count() as u64),
        waits,
        granted: [
            before + count(None, Some(start)),
            count(Some(start), Some(end)),
            count(Some(end), None),
        ],
        well: (bad + 10 * PAUSE < last).then_some(bad),
        again,
    }
}

async fn ask(mut instance: impl Instance, caller: u32) -> Asked {
    let begun = Instant::now();
    let answer = timeout(PATIENCE, instance.ask(caller)).await.ok();
    Asked {
        begun,
        wait: begun.elapsed(),
        answer,
        counted: caller == 0,
    }
}

/// Returns the number of granted requests of a caller, with 64 concurrent ones.
async fn at_once<I: Instance>(instances: &[I], caller: u32, requests: u32) -> u64 {
    const TASKS: u32 = 64;
    let tasks = (0..TASKS).map(|task| {
        let instance = instances[task as usize % instances.len()].clone();
        tokio::spawn(async move {
            let mut granted = 0;
            for _ in (task..requests).step_by(TASKS as usize) {
                let asked = ask(instance.clone(), caller).await;
                granted += u64::from(asked.answer == Some(Answer::Passed));
                // It will not be better for the next.
                if asked.answer.is_none() {
                    break;
                }
            }
            granted
        })
    });
    join_all(tasks).await.into_iter().map(Result::unwrap).sum()
}
