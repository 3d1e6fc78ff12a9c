//! `cargo bench -p benches --bench cluster_sizes`
//!
//! Redis Clusters of any size: instances and masters are simulated, without a network, and each run
//! gives the same figures. Prints the tables of `benches/RESULTS.md`: the traffic, and the number of
//! queries of the map of slots. `-- --save` writes them there.
//!
//! It follows the rules of `src/store/redis` (workers, batches, cached denials, refreshes of the
//! map) and of the breaker's probes. Redis's processing times are measured: see [`READ`].

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a benchmark fails by panicking"
)]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::mem;

use benches::page::Table;
use fastrand::Rng;

/// Number of callers. The n-th sends 1/n of the first one's requests (Zipf's law).
const CALLERS: usize = 1_000_000;
/// The limit of each caller, in checks per second; the burst is the same number.
const LIMIT: f64 = 100.0;

/// Round trip from an instance to a server. All times are in microseconds.
const ROUND_TRIP: f64 = 500.0;
/// A server's time for reading a batch and replying to it. Add [`CALL`] for each script call in the
/// batch, and [`CHECK`] for each caller.
const READ: f64 = 8.0;
const CALL: f64 = 7.0;
const CHECK: f64 = 2.2;
/// A store's `batch`.
const BATCH: usize = 128;

/// Measured time, after a warm-up of the same length.
const TIME: f64 = 250_000.0;

#[derive(Clone, Copy)]
struct Size {
    instances: usize,
    masters: usize,
    partitions: usize,
    /// Requests per second of each instance.
    rate: f64,
}

fn main() {
    let mut table = Table::new(
        "| instances | masters | partitions | requests/s, each | of these to Redis | connections of a master | checks a call | calls a pipeline | \
         busy, mean and most | p50, p99 us |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    );
    let size = |instances, masters, partitions, rate| Size {
        instances,
        masters,
        partitions,
        rate,
    };
    for size in [
        size(1, 3, 12, 150_000.0),
        size(4, 3, 12, 60_000.0),
        size(50, 3, 12, 2_000.0),
        size(50, 6, 24, 2_000.0),
        size(1_000, 100, 400, 500.0),
        size(1_000, 100, 400, 2_000.0),
        size(1_000, 100, 100, 2_000.0),
        size(10, 100, 400, 200_000.0),
    ] {
        table.add(&Traffic::new(size).run());
    }
    table.save("cluster sizes");
    println!();
    let mut table = Table::new(
        "| 1,000 instances, 100 masters with a replica each | queries for the slot map | in the busiest second | of one node, at most |\n\
         |---|--:|--:|--:|",
    );
    let size = size(1_000, 100, 400, 2_000.0);
    table.add(&queries_row(
        "one partition's slot moves",
        &reshard(size, &[0.0]),
    ));
    let each_second: Vec<f64> = (0..16)
        .map(|partition| f64::from(partition) * 1e6)
        .collect();
    table.add(&queries_row(
        "16 of them move, one every second",
        &reshard(size, &each_second),
    ));
    for seconds in [5.0, 20.0] {
        let (queries, attempts) = failover(size, seconds * 1e6);
        table.add(&queries_row(
            &format!("a master fails, its replica takes over after {seconds} s"),
            &queries,
        ));
        let max = busiest(attempts.iter().copied(), 100_000.0);
        table.add(&format!(
            "| its successor until then: attempts of its partitions | {} in all, {max} in the busiest 100 ms | | |",
            attempts.len()
        ));
    }
    table.save("slot map");
}

/// An event of an instance: a request arrives, or a master replies to one of its workers.
#[derive(Clone, Copy, PartialEq)]
enum Event {
    Request,
    Reply { master: usize, pipeline: usize },
}

/// The workers of an instance for a master: at most two, the second only if more than a batch waits.
#[derive(Default)]
struct Workers {
    /// The waiting callers, each with the start of its wait.
    waiting: Vec<(usize, f64)>,
    running: usize,
    connections: usize,
}

struct Traffic {
    size: Size,
    rng: Rng,
    /// Cumulative shares of the requests, by caller.
    shares: Vec<f64>,
    /// Per instance and master.
    workers: Vec<Workers>,
    /// Per instance, the callers with a cached denial and its expiry.
    denied: Vec<HashMap<usize, f64>>,
    /// Time at which each caller's limit is full again.
    full_at: Vec<f64>,
    /// Per master, the end of its current work, and its total busy time.
    busy: Vec<(f64, f64)>,
    /// Pipelines in flight: per check, the caller and its result.
    pipelines: Vec<Vec<(usize, f64)>>,
    events: BinaryHeap<Reverse<(u64, usize, usize)>>,
    event_data: Vec<(usize, Event)>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    requests: usize,
    checks: usize,
    calls: usize,
    pipelines: usize,
    times: Vec<f64>,
}

impl Traffic {
    fn new(size: Size) -> Self {
        let mut sum = 0.0;
        let mut shares: Vec<f64> = (1..=CALLERS)
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        shares.iter_mut().for_each(|share| *share /= sum);
        let mut workers = vec![];
        workers.resize_with(size.instances * size.masters, Workers::default);
        Self {
            size,
            rng: Rng::with_seed(14),
            shares,
            workers,
            denied: vec![HashMap::new(); size.instances],
            full_at: vec![f64::MIN; CALLERS],
            busy: vec![(0.0, 0.0); size.masters],
            pipelines: vec![],
            events: BinaryHeap::new(),
            event_data: vec![],
            counts: Counts::default(),
        }
    }

    fn schedule(&mut self, at: f64, instance: usize, event: Event) {
        self.event_data.push((instance, event));
        self.events.push(Reverse((
            (at * 1e3) as u64,
            self.event_data.len() - 1,
            instance,
        )));
    }

    fn run(mut self) -> String {
        for instance in 0..self.size.instances {
            let at = self.next_interval();
            self.schedule(at, instance, Event::Request);
        }
        let mut is_counted = false;
        while let Some(Reverse((nanos, event, instance))) = self.events.pop() {
            let now = nanos as f64 / 1e3;
            if now > 2.0 * TIME {
                break;
            } else if !is_counted && now > TIME {
                is_counted = true;
                self.counts = Counts::default();
                self.busy.iter_mut().for_each(|busy| busy.1 = 0.0);
            }
            match self.event_data[event].1 {
                Event::Request => {
                    let next = now + self.next_interval();
                    self.schedule(next, instance, Event::Request);
                    self.request(instance, now);
                }
                Event::Reply { master, pipeline } => {
                    for (_, since) in mem::take(&mut self.pipelines[pipeline]) {
                        self.counts.times.push(now - since);
                    }
                    self.workers[instance * self.size.masters + master].running -= 1;
                    self.send(instance, master, now);
                }
            }
        }
        self.row()
    }

    /// Time until the next request of an instance.
    fn next_interval(&mut self) -> f64 {
        -(1.0 - self.rng.f64()).ln() * 1e6 / self.size.rate
    }

    fn request(&mut self, instance: usize, now: f64) {
        self.counts.requests += 1;
        let share = self.rng.f64();
        let caller = self
            .shares
            .partition_point(|sum| *sum < share)
            .min(CALLERS - 1);
        if self.denied[instance]
            .get(&caller)
            .is_some_and(|until| now < *until)
        {
            return;
        }
        let master = self.partition(caller) * self.size.masters / self.size.partitions;
        self.workers[instance * self.size.masters + master]
            .waiting
            .push((caller, now));
        self.send(instance, master, now);
    }

    fn partition(&self, caller: usize) -> usize {
        // Any hash function will do.
        Rng::with_seed(caller as u64).usize(..self.size.partitions)
    }

    fn send(&mut self, instance: usize, master: usize, now: f64) {
        let workers = &mut self.workers[instance * self.size.masters + master];
        let starts = workers.running == 0 || workers.running == 1 && workers.waiting.len() > BATCH;
        if workers.waiting.is_empty() || !starts {
            return;
        }
        workers.running += 1;
        workers.connections = workers.connections.max(workers.running);
        let rest = workers.waiting.split_off(workers.waiting.len().min(BATCH));
        let jobs = mem::replace(&mut workers.waiting, rest);

        let callers: HashSet<usize> = jobs.iter().map(|job| job.0).collect();
        let calls = callers
            .iter()
            .map(|caller| self.partition(*caller))
            .collect::<HashSet<_>>()
            .len();
        let work = READ + CALL * calls as f64 + CHECK * callers.len() as f64;
        let busy = &mut self.busy[master];
        let start = busy.0.max(now + ROUND_TRIP / 2.0);
        *busy = (start + work, busy.1 + work);
        for (caller, _) in &jobs {
            let full_at = &mut self.full_at[*caller];
            let next = full_at.max(start) + 1e6 / LIMIT;
            let wait = next - start - 1e6;
            if wait <= 0.0 {
                *full_at = next;
            } else {
                // From the time of the reply, slightly late, as in the code.
                self.denied[instance].insert(*caller, now + wait);
            }
        }
        self.counts.pipelines += 1;
        self.counts.calls += calls;
        self.counts.checks += jobs.len();
        self.pipelines.push(jobs);
        let answer = Event::Reply {
            master,
            pipeline: self.pipelines.len() - 1,
        };
        self.schedule(start + work + ROUND_TRIP / 2.0, instance, answer);
    }

    fn row(self) -> String {
        let Self {
            size,
            mut counts,
            workers,
            busy,
            ..
        } = self;
        counts.times.sort_by(f64::total_cmp);
        let quantile = |share: f64| counts.times[(counts.times.len() as f64 * share) as usize];
        let each = |master: usize| {
            workers
                .iter()
                .skip(master)
                .step_by(size.masters)
                .map(|workers| workers.connections)
                .sum()
        };
        let connections: usize = (0..size.masters).map(each).max().unwrap_or(0);
        let busy: Vec<f64> = busy.iter().map(|busy| busy.1 / TIME * 100.0).collect();
        format!(
            "| {} | {} | {} | {} | {:.0} % | {connections} | {:.1} | {:.1} | {:.0} %, {:.0} % | {:.0}, {:.0} |",
            size.instances,
            size.masters,
            size.partitions,
            size.rate,
            100.0 * counts.checks as f64 / counts.requests as f64,
            counts.checks as f64 / counts.calls as f64,
            counts.calls as f64 / counts.pipelines as f64,
            busy.iter().sum::<f64>() / busy.len() as f64,
            busy.iter().copied().fold(0.0, f64::max),
            quantile(0.5),
            quantile(0.99),
        )
    }
}

/// A random delay between half of `delay` and `delay`.
fn jitter(rng: &mut Rng, delay: f64) -> f64 {
    delay * (1.0 + rng.f64()) / 2.0
}

/// An instance's queries of the slots, as `Refresher` schedules them: one at a time, and less often while nothing changes.
#[derive(Default)]
struct Refresher {
    last: Option<f64>,
    idle: i32,
    queries: Vec<f64>,
}

impl Refresher {
    /// Plans a query after about `delay`, unless one is planned already, which covers this event too. `changed` returns
    /// `true` if a query at this time finds another map.
    fn start(&mut self, rng: &mut Rng, now: f64, delay: f64, changed: impl Fn(f64) -> bool) {
        let gap = jitter(
            rng,
            (100_000.0 * f64::powi(2.0, self.idle.min(10))).min(400_000.0),
        );
        if self.last.is_some_and(|last| last > now) {
            return;
        }
        let at = (now + jitter(rng, delay)).max(self.last.map_or(now, |last| last + gap));
        self.idle = if changed(at) { 0 } else { self.idle + 1 };
        self.last = Some(at);
        self.queries.push(at);
    }
}

/// Slots of partitions move at these times: each instance is redirected by its next check for the partition.
fn reshard(size: Size, moves: &[f64]) -> Vec<f64> {
    let mut rng = Rng::with_seed(14);
    let mut queries = vec![];
    for _ in 0..size.instances {
        let mut refresher = Refresher::default();
        for moved in moves {
            let next = -(1.0 - rng.f64()).ln() * 1e6 / size.rate * size.partitions as f64;
            refresher.start(&mut rng, moved + next, 500_000.0, |_| true);
        }
        queries.append(&mut refresher.queries);
    }
    queries
}

/// A master fails until its replica takes over. Each of its partitions is tried repeatedly, and
/// each failure requests a query of the slots. Returns the times of these queries, and of the
/// attempts at the replica afterwards.
fn failover(size: Size, until: f64) -> (Vec<f64>, Vec<f64>) {
    /// Time after which a connection without a reply is given up.
    const TIMEOUT: f64 = 250_000.0;
    let mut rng = Rng::with_seed(14);
    let (mut queries, mut attempts) = (vec![], vec![]);
    for _ in 0..size.instances {
        let mut refresher = Refresher::default();
        let mut probes: Vec<(f64, u32)> = vec![];
        for _ in 0..size.partitions / size.masters {
            let next = -(1.0 - rng.f64()).ln() * 1e6 / size.rate * size.partitions as f64;
            probes.push((next, 0));
        }
        loop {
            let (at, count) = probes
                .iter_mut()
                .min_by(|a, b| a.0.total_cmp(&b.0))
                .unwrap();
            let now = *at;
            if refresher
                .queries
                .iter()
                .any(|query| (until..now).contains(query))
            {
                // The map has the new master.
                attempts.extend(probes.iter().map(|probe| probe.0));
                break;
            }
            let delay = (50_000.0 * f64::powi(2.0, (*count).min(10) as i32)).min(250_000.0);
            (*at, *count) = (now + TIMEOUT + delay * (1.0 - rng.f64() / 2.0), *count + 1);
            refresher.start(&mut rng, now + TIMEOUT, 50_000.0, |at| at > until);
        }
        queries.append(&mut refresher.queries);
    }
    (queries, attempts)
}

/// Splits the time into intervals of this length, and returns the number of events in the busiest one.
fn busiest(times: impl Iterator<Item = f64>, length: f64) -> usize {
    let mut slots: HashMap<u64, usize> = HashMap::new();
    times.for_each(|at| *slots.entry((at / length) as u64).or_default() += 1);
    slots.into_values().max().unwrap_or(0)
}

/// Formats a row of the table. Each query is sent to one of 200 nodes.
fn queries_row(what: &str, queries: &[f64]) -> String {
    let mut rng = Rng::with_seed(14);
    let nodes: Vec<usize> = queries.iter().map(|_| rng.usize(..200)).collect();
    let max_of_one = (0..200)
        .map(|node| {
            busiest(
                queries
                    .iter()
                    .zip(&nodes)
                    .filter(|(_, of)| **of == node)
                    .map(|(at, _)| *at),
                1e6,
            )
        })
        .max()
        .unwrap_or(0);
    format!(
        "| {what} | {} | {} | {max_of_one} |",
        queries.len(),
        busiest(queries.iter().copied(), 1e6)
    )
}
