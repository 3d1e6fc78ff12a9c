//! `cargo bench -p benches --bench growth`
//!
//! Decisions per second, and the cost of a decision in Redis and in the client, as something grows:
//! the callers that Redis stores, the instances of a service, the concurrent requests, and the
//! masters of a cluster. All share the machine, so what grows is mainly the cost of a decision; a
//! dashed line shows what Redis alone could decide.
//!
//! `-- TEXT...` runs only the series whose name contains one of the texts. `-- --quick` is a short
//! trial, with at most a million callers. `-- --save` also writes the results into
//! `benches/RESULTS.md`, and draws its pictures.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a benchmark fails by panicking"
)]

use std::env;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::time::Duration;

use benches::cases::{Load, by_address, fill, limited, serve};
use benches::meter::{Amount, Measure};
use benches::nodes::Cluster;
use benches::page::{self, median};
use benches::picture::{Line, Picture};
use benches::support::RedisServer;
use futures_util::future::join_all;
use tokio::runtime;
use tower_redis_ratelimit::RedisStore;
use tower_redis_ratelimit::store::RedisStoreBuilder;

/// Number of rounds, and the amount per point in each.
const ROUNDS: (usize, Amount) = (3, Amount::Time(Duration::from_secs(1)));
const QUICK: (usize, Amount) = (1, Amount::Time(Duration::from_millis(100)));

/// A parameter that grows, and its values.
struct Series {
    name: &'static str,
    by: &'static str,
    at: &'static [u64],
    point: fn(u64) -> Point,
}

const SERIES: [Series; 4] = [
    Series {
        name: "callers",
        by: "callers that all live",
        at: &[1_000, 10_000, 100_000, 1_000_000, 10_000_000],
        point: |callers| Point {
            callers: callers as u32,
            ..Point::default()
        },
    },
    Series {
        name: "instances",
        by: "instances, which share 256 requests at a time",
        at: &[1, 2, 4, 8, 16],
        point: |instances| Point {
            instances: instances as usize,
            ..Point::default()
        },
    },
    Series {
        name: "requests",
        by: "requests at a time",
        at: &[1, 4, 16, 64, 128, 256, 512, 1_024],
        point: |requests| Point {
            requests,
            ..Point::default()
        },
    },
    Series {
        name: "masters",
        by: "masters of a cluster",
        at: &[1, 2, 3, 4, 6, 8, 12],
        point: |masters| Point {
            masters: Some(masters as usize),
            ..Point::default()
        },
    },
];

/// The parameters of a measurement.
#[derive(Clone, Copy)]
struct Point {
    callers: u32,
    instances: usize,
    requests: u64,
    /// Number of masters of a cluster; `None` for a single server.
    masters: Option<usize>,
}

impl Default for Point {
    fn default() -> Self {
        Self {
            callers: 100_000,
            instances: 1,
            requests: 256,
            masters: None,
        }
    }
}

fn main() {
    let (options, texts): (Vec<String>, Vec<String>) =
        env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let has = |option: &str| options.iter().any(|given| given == option);
    let most = if has("--quick") { 1_000_000 } else { u64::MAX };
    let (rounds, amount) = if has("--quick") { QUICK } else { ROUNDS };
    for series in SERIES {
        if !texts.is_empty() && !texts.iter().any(|text| series.name.contains(text.as_str())) {
            continue;
        }
        let at: Vec<u64> = series
            .at
            .iter()
            .copied()
            .filter(|value| *value <= most)
            .collect();
        let sites: Vec<Site> = at
            .iter()
            .map(|value| block_on(Site::start((series.point)(*value))))
            .collect();
        let mut measures = vec![vec![]; sites.len()];
        for round in 1..=rounds {
            eprintln!("{}, round {round} of {rounds}", series.name);
            for (site, measures) in sites.iter().zip(&mut measures) {
                // On a separate runtime, so that no task affects another measurement.
                measures.push(block_on(site.measure(amount)));
            }
        }
        let report = Report {
            series,
            at,
            sites,
            measures,
        };
        let table = report.table();
        println!("{table}");
        if has("--save") {
            page::save_table("benches/RESULTS.md", report.series.name, &table);
            page::save_picture(
                &format!("benches/growth-{}.svg", report.series.name),
                &report.picture(),
            );
        }
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// The servers of a point, filled with all its callers.
struct Site {
    point: Point,
    servers: Servers,
    /// Redis's memory per caller.
    bytes: f64,
}

enum Servers {
    Single(RedisServer),
    Cluster(Cluster),
}

impl Site {
    async fn start(point: Point) -> Self {
        let servers = match point.masters {
            None => Servers::Single(RedisServer::start()),
            Some(masters) => {
                Servers::Cluster(Cluster::start_sized(masters, false, |port| port).await)
            }
        };
        let mut site = Self {
            point,
            servers,
            bytes: 0.0,
        };
        // Create the store first: its own keys are not callers.
        let store = site.store().await;
        let (empty, _) = site.memory().await;
        fill(store, site.load()).await;
        let (full, keys) = site.memory().await;
        assert!(
            keys >= point.callers.into(),
            "{keys} keys of {} callers",
            point.callers
        );
        site.bytes = (full - empty) as f64 / f64::from(point.callers);
        site
    }

    fn load(&self) -> Load {
        Load::AllAlive(self.point.callers)
    }

    fn servers(&self) -> Vec<&RedisServer> {
        match &self.servers {
            Servers::Single(server) => vec![server],
            Servers::Cluster(cluster) => cluster.nodes.iter().map(|node| &node.server).collect(),
        }
    }

    fn builder(&self) -> RedisStoreBuilder {
        match &self.servers {
            Servers::Single(server) => RedisStore::builder(server.url()),
            // As its documentation recommends.
            Servers::Cluster(cluster) => {
                let masters = cluster.nodes.len();
                let partitions = if masters > 6 { 4 * masters } else { 12 };
                cluster
                    .builder()
                    .partitions(NonZeroUsize::new(partitions).unwrap())
            }
        }
    }

    async fn store(&self) -> RedisStore {
        // Redis does not respond for a while when a table of ten million keys grows.
        self.builder()
            .timeout(Duration::from_secs(20))
            .connect()
            .await
            .unwrap()
    }

    /// Returns the used bytes, and the number of keys.
    async fn memory(&self) -> (u64, u64) {
        let (mut bytes, mut keys) = (0, 0);
        for server in self.servers() {
            bytes += server.info("memory", "used_memory").await;
            keys += server.command::<u64>("DBSIZE").await;
        }
        (bytes, keys)
    }

    async fn measure(&self, amount: Amount) -> Measure {
        let Point {
            instances,
            requests,
            ..
        } = self.point;
        let instances =
            join_all((0..instances).map(async |_| limited(self.store().await, self.load()))).await;
        serve(
            &self.servers(),
            &instances,
            by_address,
            self.load(),
            requests,
            amount,
        )
        .await
    }
}

struct Report {
    series: Series,
    at: Vec<u64>,
    sites: Vec<Site>,
    /// For each value in `at`, one measure per round.
    measures: Vec<Vec<Measure>>,
}

impl Report {
    fn medians(&self, value: impl Fn(&Measure) -> f64) -> Vec<f64> {
        self.measures
            .iter()
            .map(|rounds| median(rounds.iter().map(&value).collect()))
            .collect()
    }

    fn table(&self) -> String {
        let mut text = format!(
            "| {} | decisions/s | of the first | p50 us | p99 us | Redis us | client us | checks a call | bytes a caller |\n\
             |--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
            self.series.by,
        );
        let per_second = self.medians(|m| m.per_second);
        let [p50, p99] = [self.medians(|m| m.p50), self.medians(|m| m.p99)];
        let [server, client, batch] = [
            self.medians(|m| m.server),
            self.medians(|m| m.client),
            self.medians(|m| m.batch),
        ];
        for (i, (at, site)) in self.at.iter().zip(&self.sites).enumerate() {
            // Ratio of two cases in the same round.
            let of_first = self.measures[i]
                .iter()
                .zip(&self.measures[0])
                .map(|(m, first)| m.per_second / first.per_second);
            // With fewer callers, most of the memory is connection buffers.
            let bytes = if site.point.callers < 10_000 {
                "-".to_owned()
            } else {
                format!("{:.0}", site.bytes)
            };
            let _ = writeln!(
                text,
                "| {at} | {:.0} | {:.2} | {:.1} | {:.1} | {:.2} | {:.2} | {:.1} | {bytes} |",
                per_second[i],
                median(of_first.collect()),
                p50[i],
                p99[i],
                server[i],
                client[i],
                batch[i],
            );
        }
        text
    }

    fn picture(&self) -> String {
        let processors = self
            .sites
            .iter()
            .map(|site| site.servers().len() as f64 * 1e6);
        let alone = processors
            .zip(self.medians(|m| m.server))
            .map(|(processors, time)| processors / time)
            .collect();
        let line = |name, color, is_dashed, points| Line {
            name,
            color,
            is_dashed,
            points,
        };
        let lines = vec![
            line("measured", "blue", false, self.medians(|m| m.per_second)),
            line("Redis, always busy", "grey", true, alone),
        ];
        Picture {
            title: "Decisions per second",
            by: self.series.by,
            at: &self.at,
            lines,
        }
        .draw()
    }
}
