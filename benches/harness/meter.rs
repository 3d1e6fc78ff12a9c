//! Measures a case: a number of tasks, each with one request after another.

use std::fs;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::join_all;

use crate::support::RedisServer;

/// One request of this number is timed.
const SAMPLE: u64 = 8;

/// The results of a case in one round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measure {
    pub per_second: f64,
    /// In microseconds.
    pub p50: f64,
    pub p99: f64,
    /// Microseconds of Redis's processor per decision.
    pub server: f64,
    /// Microseconds of this process per decision: middleware, Redis client and requesting tasks. 0 if unknown.
    pub client: f64,
    /// Decisions per script call.
    pub batch: f64,
    /// Decisions per read of a server from a connection.
    pub read: f64,
}

impl Measure {
    /// Converts a result per call to a result per decision, for calls that make this number of decisions.
    pub fn for_each_of(self, decisions: f64) -> Self {
        Self {
            per_second: self.per_second * decisions,
            server: self.server / decisions,
            client: self.client / decisions,
            batch: self.batch * decisions,
            read: self.read * decisions,
            ..self
        }
    }
}

/// The amount of requests of a case.
#[derive(Clone, Copy, Debug)]
pub enum Amount {
    /// The maximum number of requests in this time, after half of it to warm up.
    Time(Duration),
    /// This number of requests in total.
    Count(u64),
}

/// The results of one task.
pub struct Meter {
    /// The number of the task.
    pub task: usize,
    pub rng: Rng,
    end: Instant,
    max: u64,
    count: u64,
    start: Option<Instant>,
    /// In nanoseconds.
    times: Vec<u64>,
}

impl Meter {
    /// Returns `true` if the task should send another request.
    pub fn should_continue(&mut self) -> bool {
        if self.count.is_multiple_of(SAMPLE) {
            let now = Instant::now();
            if now >= self.end {
                return false;
            }
            self.start = Some(now);
        }
        self.count < self.max
    }

    pub fn record(&mut self) {
        self.count += 1;
        if let Some(start) = self.start.take() {
            self.times.push(start.elapsed().as_nanos() as u64);
        }
    }
}

/// Runs this number of tasks, whose requests these servers decide.
pub async fn load<F>(
    servers: &[&RedisServer],
    tasks: u64,
    amount: Amount,
    task: impl Fn(Meter) -> F,
) -> Measure
where
    F: Future<Output = Meter> + Send + 'static,
{
    if let Amount::Time(time) = amount {
        run(tasks, 0, time / 2, u64::MAX, &task).await;
    }
    let before = Used::by(servers).await;
    let start = Instant::now();
    let meters = match amount {
        Amount::Time(time) => run(tasks, tasks, time, u64::MAX, &task).await,
        Amount::Count(count) => {
            run(
                tasks,
                tasks,
                Duration::from_secs(60),
                count.div_ceil(tasks),
                &task,
            )
            .await
        }
    };
    let elapsed = start.elapsed().as_secs_f64();
    let after = Used::by(servers).await;

    let count = meters.iter().map(|meter| meter.count).sum::<u64>() as f64;
    let mut times: Vec<u64> = meters.into_iter().flat_map(|meter| meter.times).collect();
    times.sort_unstable();
    let quantile = |share: f64| {
        times
            .get((times.len() as f64 * share) as usize)
            .map_or(0.0, |time| *time as f64 / 1e3)
    };
    Measure {
        per_second: count / elapsed,
        p50: quantile(0.5),
        p99: quantile(0.99),
        server: (after.processor - before.processor) / count,
        client: (after.own_processor - before.own_processor) / count,
        batch: count_by(count, after.calls - before.calls),
        read: count_by(count, after.reads - before.reads),
    }
}

fn count_by(count: f64, times: u64) -> f64 {
    if times == 0 {
        0.0
    } else {
        count / times as f64
    }
}

/// Tasks with different seeds use different callers.
async fn run<F>(
    tasks: u64,
    seed: u64,
    time: Duration,
    max: u64,
    task: &impl Fn(Meter) -> F,
) -> Vec<Meter>
where
    F: Future<Output = Meter> + Send + 'static,
{
    let end = Instant::now() + time;
    // Allocated up front, so that allocations while it grows are not counted.
    let times = || Vec::with_capacity(1 << 10);
    let meter = |task| Meter {
        task: task as usize,
        rng: Rng::with_seed(seed + task),
        end,
        max,
        count: 0,
        start: None,
        times: times(),
    };
    let meters = join_all((0..tasks).map(|number| tokio::spawn(task(meter(number))))).await;
    meters.into_iter().map(Result::unwrap).collect()
}

/// Resources that servers have used since their start, in total, and this process.
struct Used {
    /// In microseconds, like the next field.
    processor: f64,
    own_processor: f64,
    /// Script calls.
    calls: u64,
    /// Reads from connections.
    reads: u64,
}

impl Used {
    async fn by(servers: &[&RedisServer]) -> Self {
        let mut used = Self {
            processor: 0.0,
            own_processor: own_processor(),
            calls: 0,
            reads: 0,
        };
        for server in servers {
            let info: String = server.command("INFO cpu").await;
            let of = |field: &str| -> f64 {
                info.lines()
                    .find_map(|line| line.strip_prefix(field))
                    .expect(field)
                    .trim()
                    .parse()
                    .expect("seconds")
            };
            used.processor += (of("used_cpu_user:") + of("used_cpu_sys:")) * 1e6;
            used.calls += server.calls("evalsha").await;
            used.reads += server.info("stats", "total_reads_processed").await;
        }
        used
    }
}

/// Returns the CPU time of this process's threads in microseconds, as counted by Linux.
fn own_processor() -> f64 {
    let threads = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let counts =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("schedstat")).ok());
    counts
        .filter_map(|count| count.split(' ').next()?.parse::<f64>().ok())
        .sum::<f64>()
        / 1e3
}
