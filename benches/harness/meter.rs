//! How a case is measured: so many tasks, each with one request after the other.

use std::fs;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::join_all;

use crate::support::RedisServer;

/// One request in so many is timed.
const SAMPLE: u64 = 8;

/// What a case measured in one round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measure {
    pub per_second: f64,
    /// In microseconds.
    pub p50: f64,
    pub p99: f64,
    /// Microseconds of Redis's processor for each decision.
    pub server: f64,
    /// The same of this process: the middleware, its client of Redis, and the tasks that ask. 0 where it is not known.
    pub client: f64,
    /// Decisions for each script call.
    pub batch: f64,
    /// Decisions each time that a server has read from a connection.
    pub read: f64,
}

impl Measure {
    /// What was measured of calls that decide so many each, for each decision.
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

/// How much a case is asked for.
#[derive(Clone, Copy, Debug)]
pub enum Amount {
    /// As much as it can in a while, after half as long to warm up.
    Time(Duration),
    /// So many requests in all.
    Count(u64),
}

/// What one task measures.
pub struct Meter {
    /// Which of the tasks it is.
    pub task: usize,
    pub rng: Rng,
    end: Instant,
    most: u64,
    count: u64,
    start: Option<Instant>,
    /// In nanoseconds.
    times: Vec<u64>,
}

impl Meter {
    /// Whether there is one more to do.
    pub fn goes_on(&mut self) -> bool {
        if self.count.is_multiple_of(SAMPLE) {
            let now = Instant::now();
            if now >= self.end {
                return false;
            }
            self.start = Some(now);
        }
        self.count < self.most
    }

    pub fn done(&mut self) {
        self.count += 1;
        if let Some(start) = self.start.take() {
            self.times.push(start.elapsed().as_nanos() as u64);
        }
    }
}

/// Runs so many tasks, which have these servers decide.
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
        client: (after.own - before.own) / count,
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

/// Tasks of other seeds ask for other callers.
async fn run<F>(
    tasks: u64,
    seed: u64,
    time: Duration,
    most: u64,
    task: &impl Fn(Meter) -> F,
) -> Vec<Meter>
where
    F: Future<Output = Meter> + Send + 'static,
{
    let end = Instant::now() + time;
    // Whatever is counted, it is not the growth of these.
    let times = || Vec::with_capacity(1 << 10);
    let meter = |task| Meter {
        task: task as usize,
        rng: Rng::with_seed(seed + task),
        end,
        most,
        count: 0,
        start: None,
        times: times(),
    };
    let meters = join_all((0..tasks).map(|number| tokio::spawn(task(meter(number))))).await;
    meters.into_iter().map(Result::unwrap).collect()
}

/// What servers have done since they were started, all together, and this process.
struct Used {
    /// In microseconds, as the next.
    processor: f64,
    own: f64,
    /// Script calls.
    calls: u64,
    /// Reads from connections.
    reads: u64,
}

impl Used {
    async fn by(servers: &[&RedisServer]) -> Self {
        let mut used = Self {
            processor: 0.0,
            own: own_processor(),
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

/// For how many microseconds the threads of this process have run, as Linux counts them.
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
