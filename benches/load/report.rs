//! The results of the rounds: medians, ratios first, and a picture.

use std::fmt::Write as _;

use benches::cases::{CONCURRENCY, Case, Fields, HOURLY, Layers, Load, MANY, Subject};
use benches::cluster::{ClusterCase, Design};
use benches::meter::Measure;
use benches::page::median;
use benches::picture::{Line, Picture};
use benches::support;

/// All measurements.
pub(crate) struct Report {
    pub(crate) cases: Vec<Case>,
    /// Per case, one measure per round.
    pub(crate) measures: Vec<Vec<Measure>>,
    /// Per case, the allocations of a request, if they were counted.
    pub(crate) allocations: Vec<Option<f64>>,
}

const GET: Case = Case(Subject::Get, 64);
const REDIS: Case = Case(Subject::Redis(Load::Many), 256);
const MULTIPLEXED: Case = Case(Subject::Multiplexed(Load::Many), 256);

fn throughput(measure: &Measure) -> f64 {
    measure.per_second
}

/// The ratios that `docs/performance.md` has; `benches/RESULTS.md` has all.
const OF_THE_PAGE: [&str; 12] = [
    "`RedisStore`, of a script call each over one multiplexed connection",
    "`RedisStore`, of `tower-redis-cell`",
    "one caller, granted, of `redis-benchmark`",
    "one caller, denied",
    "callers by Zipf's law, leased, of not",
    "one at a time, p50, of a bare script call",
    "Redis's processor for a decision",
    "the slowest strategy, of `Gcra`, where Redis holds all 100,000 keys",
    "`LocalStore`",
    "`LocalStore`, of `tower_governor`",
    "3 masters: Redis's processor for a decision, of one server's",
    "axum over HTTP with the layer, of without",
];

/// Returns the head of the table of ratios, and the rows of the page.
pub(crate) fn of_the_page(ratios: &str) -> String {
    let is_of_page = |line: &&str| {
        let name = line.split('|').nth(1).map(str::trim);
        name.is_some_and(|name| OF_THE_PAGE.contains(&name))
    };
    let head = ratios.lines().take(2);
    let rows = ratios.lines().skip(2).filter(is_of_page);
    head.chain(rows).map(|line| format!("{line}\n")).collect()
}

impl Report {
    /// Returns the important ratios, each of two cases in the same round, with their goals.
    pub(crate) fn ratios(&self) -> String {
        let pool = Case(Subject::Pool(Load::Many), 256);
        let hourly = Case(Subject::Redis(HOURLY), 256);
        let local = |fields| Case(Subject::Local(HOURLY, fields), 64);
        let mut text = String::from("| | measured | goal |\n|---|--:|--:|\n");
        let mut row = |what: &str, value: Option<f64>, unit: &str, goal: &str| {
            if let Some(value) = value {
                let digits = if value >= 100.0 { 0 } else { 2 };
                let _ = writeln!(text, "| {what} | {value:.digits$}{unit} | {goal} |");
            }
        };
        row(
            "`RedisStore`, of a script call each over one multiplexed connection",
            self.ratio(REDIS, MULTIPLEXED, throughput),
            " x",
            "2.2 x",
        );
        row(
            "the same, where Redis holds all 100,000 keys",
            self.ratio(hourly, Case(Subject::Multiplexed(HOURLY), 256), throughput),
            " x",
            "2 x",
        );
        row(
            "`RedisStore`, of a script call each over a pool of 16",
            self.ratio(REDIS, pool, throughput),
            " x",
            "2.5 x",
        );
        for (what, load) in [
            ("`RedisStore`, of `tower-redis-cell`", Load::Many),
            ("the same, where Redis holds all 100,000 keys", HOURLY),
        ] {
            let [ours, theirs] =
                [Subject::RedisByHeader(load), Subject::Cell(load)].map(|what| Case(what, 256));
            row(what, self.ratio(ours, theirs, throughput), " x", "1.7 x");
        }
        row(
            "`RedisStore`, of `redis-benchmark -t get -c 64`",
            self.ratio(REDIS, GET, throughput),
            " x",
            "3.5 x",
        );
        let in_flight = self.ratio(Case(Subject::InFlight, 256), REDIS, throughput);
        row(
            "requests in flight, of decisions by `Gcra`",
            in_flight,
            " x",
            "0.6 x",
        );
        let granted = Case(Subject::Redis(Load::Granted), 256);
        row(
            "one caller, granted, of `redis-benchmark`",
            self.ratio(granted, GET, throughput),
            " x",
            "6 x",
        );
        let of_local = self.ratio(
            granted,
            Case(Subject::Local(Load::Granted, Fields::With), 256),
            throughput,
        );
        row("one caller, granted, of `LocalStore`", of_local, " x", "");
        let leased = |load| Case(Subject::Leased(load), 256);
        let of_local = self.ratio(
            leased(Load::Granted),
            Case(Subject::Local(Load::Granted, Fields::With), 256),
            throughput,
        );
        row("the same, leased, of `LocalStore`", of_local, " x", "0.7 x");
        row(
            "the same, leased, of `redis-benchmark`",
            self.ratio(leased(Load::Granted), GET, throughput),
            " x",
            "15 x",
        );
        let alone = self.median(Case(Subject::Leased(Load::Granted), 1), |m| m.p50);
        row(
            "the same, leased, one at a time, p50",
            alone,
            " us",
            "at most 2 us",
        );
        let zipf = Case(Subject::Redis(Load::Zipf), 256);
        row(
            "callers by Zipf's law, leased, of not",
            self.ratio(leased(Load::Zipf), zipf, throughput),
            " x",
            "1.5 x",
        );
        row(
            "callers with equal load, leased, of not",
            self.ratio(leased(Load::Many), REDIS, throughput),
            " x",
            "0.97 x",
        );
        let zipf = self.ratio(zipf, REDIS, throughput);
        row(
            "callers by Zipf's law, of callers with equal load",
            zipf,
            " x",
            "",
        );
        let denied = self
            .median(Case(Subject::Redis(Load::Denied), 256), throughput)
            .map(|value| value / 1e6);
        row("one caller, denied", denied, " M/s", "3 M/s");
        let one = |what| Case(what, 1);
        let latency = self.ratio(
            one(Subject::Redis(Load::Many)),
            one(Subject::Multiplexed(Load::Many)),
            |m| m.p50,
        );
        row(
            "one at a time, p50, of a bare script call",
            latency,
            " x",
            "at most 1.05 x",
        );
        row(
            "Redis's processor for a decision",
            self.median(REDIS, |m| m.server),
            " us",
            "at most 2.6 us",
        );
        row(
            "the same, where Redis holds all 100,000 keys",
            self.median(hourly, |m| m.server),
            " us",
            "",
        );
        let living = Case(Subject::Redis(Load::AllAlive(MANY)), 256);
        row(
            "the same, once all have been there for a while",
            self.median(living, |m| m.server),
            " us",
            "",
        );
        let bare = self.ratio(living, Case(Subject::Bare, 256), |m| m.server);
        row(
            "the same, of a GET and a SET with an expiry in a script that decides nothing",
            bare,
            " x",
            "at most 1.0 x",
        );
        let slowest = support::STRATEGIES
            .into_iter()
            .filter_map(|strategy| {
                self.ratio(
                    Case(Subject::Redis(Load::Hourly(strategy)), 256),
                    hourly,
                    throughput,
                )
            })
            .min_by(f64::total_cmp);
        row(
            "the slowest strategy, of `Gcra`, where Redis holds all 100,000 keys",
            slowest,
            " x",
            "0.5 x",
        );
        let local_speed = self
            .median(local(Fields::With), throughput)
            .map(|value| value / 1e6);
        row("`LocalStore`", local_speed, " M/s", "2 M/s");
        for (what, fields, goal) in [
            ("`LocalStore`, of `tower_governor`", Fields::With, "1.1 x"),
            (
                "the same, both without header fields",
                Fields::Without,
                "0.9 x",
            ),
        ] {
            let governor = Case(Subject::Governor(HOURLY, fields), 64);
            row(
                what,
                self.ratio(local(fields), governor, throughput),
                " x",
                goal,
            );
        }
        let [limited, idle, none] =
            [Layers::Limited, Layers::Idle, Layers::None].map(|l| Case(Subject::Http(l), 64));
        for (with, replicas) in [("", false), (", all with replicas", true)] {
            let case = |design| Case(Subject::Cluster(ClusterCase { design, replicas }), 256);
            let [one, cluster, single_calls] =
                [Design::Single, Design::Cluster, Design::OneByOne].map(case);
            row(
                &format!("3 masters{with}: Redis's processor for a decision, of one server's"),
                self.ratio(cluster, one, |m| m.server),
                " x",
                "",
            );
            row(
                &format!("3 masters{with}: the same, with the clients' processor"),
                self.ratio(cluster, one, |m| m.server + m.client),
                " x",
                "at most 1.2 x",
            );
            row(
                &format!("3 masters{with}: checks a script call"),
                self.median(cluster, |m| m.batch),
                "",
                "8",
            );
            row(
                &format!("3 masters{with}: of a script call each, pipelined"),
                self.ratio(cluster, single_calls, throughput),
                " x",
                "2 x",
            );
        }
        row(
            "axum over HTTP with the layer, of without",
            self.ratio(limited, none, throughput),
            " x",
            "0.98 x",
        );
        row(
            "the same, of with a layer that does nothing",
            self.ratio(limited, idle, throughput),
            " x",
            "",
        );
        let [settled, kept] = [Layers::Settled, Layers::Shared].map(|l| Case(Subject::Http(l), 64));
        let p99 = self.ratio(settled, kept, |m| m.p99);
        row(
            "axum over HTTP with a settlement, p99, of without",
            p99,
            " x",
            "at most 1.05 x",
        );
        text
    }

    pub(crate) fn table(&self) -> String {
        let mut text = String::from(
            "| case | at a time | of GET | decisions/s | p50 us | p99 us | Redis us | client us | checks a call | checks a read | allocations |\n\
             |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        for (case, allocations) in self.cases.iter().zip(&self.allocations) {
            let value = |value: fn(&Measure) -> f64| self.median(*case, value).unwrap_or_default();
            let or_dash =
                |value: f64, text: String| if value > 0.05 { text } else { "-".to_owned() };
            let (server, client) = (value(|m| m.server), value(|m| m.client));
            let (batch, read) = (value(|m| m.batch), value(|m| m.read));
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:.0} | {:.1} | {:.1} | {} | {} | {} | {} | {} |",
                case.name(),
                case.1,
                self.ratio(*case, GET, throughput)
                    .map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                value(throughput),
                value(|m| m.p50),
                value(|m| m.p99),
                or_dash(server, format!("{server:.2}")),
                or_dash(client, format!("{client:.2}")),
                or_dash(batch, format!("{batch:.1}")),
                or_dash(read.min(batch), format!("{read:.1}")),
                allocations.map_or("-".to_owned(), |count| format!("{count:.1}")),
            );
        }
        text
    }

    /// Draws decisions per second by the number of concurrent requests.
    pub(crate) fn picture(&self) -> Option<String> {
        const LINES: [(&str, &str, Subject); 4] = [
            (
                "RedisStore, one caller",
                "green",
                Subject::Redis(Load::Granted),
            ),
            (
                "RedisStore, 100k callers",
                "blue",
                Subject::Redis(Load::Many),
            ),
            (
                "a script call each, multiplexed",
                "orange",
                Subject::Multiplexed(Load::Many),
            ),
            (
                "a script call each, pool of 16",
                "pink",
                Subject::Pool(Load::Many),
            ),
        ];
        let get = Line {
            name: "redis-benchmark GET, 64 at a time",
            color: "grey",
            is_dashed: true,
            points: vec![self.median(GET, throughput)?; CONCURRENCY.len()],
        };
        let mut lines = vec![get];
        for (name, color, what) in LINES {
            let points = CONCURRENCY.map(|tasks| self.median(Case(what, tasks), throughput));
            let points = points.into_iter().collect::<Option<_>>()?;
            lines.push(Line {
                name,
                color,
                is_dashed: false,
                points,
            });
        }
        let picture = Picture {
            title: "Decisions per second",
            by: "requests at a time",
            at: &CONCURRENCY,
            lines,
        };
        Some(picture.draw())
    }

    /// The median of a case.
    fn median(&self, case: Case, value: impl Fn(&Measure) -> f64) -> Option<f64> {
        Some(median(self.of(case)?.iter().map(value).collect()))
    }

    /// Returns the median of the ratios of two cases, round by round.
    fn ratio(&self, case: Case, base: Case, value: impl Fn(&Measure) -> f64) -> Option<f64> {
        Some(median(
            self.of(case)?
                .iter()
                .zip(self.of(base)?)
                .map(|(case, base)| value(case) / value(base))
                .collect(),
        ))
    }

    fn of(&self, case: Case) -> Option<&Vec<Measure>> {
        self.cases
            .iter()
            .position(|known| *known == case)
            .map(|at| &self.measures[at])
    }
}
