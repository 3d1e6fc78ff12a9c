//! What the rounds say: medians, ratios first, and a picture.

use std::fmt::Write as _;

use crate::cases::{CONCURRENCY, Case, HOURLY, Layers, Load, What};
use crate::cluster::{Side, Who};
use crate::meter::Measure;

/// All that was measured.
pub struct Report {
    pub cases: Vec<Case>,
    /// For each case one of every round.
    pub measures: Vec<Vec<Measure>>,
    /// For each case how many allocations a request takes, where they were counted.
    pub allocations: Vec<Option<f64>>,
}

const GET: Case = Case(What::Get, 64);
const REDIS: Case = Case(What::Redis(Load::Many), 256);
const MULTIPLEXED: Case = Case(What::Multiplexed(Load::Many), 256);

fn throughput(measure: &Measure) -> f64 {
    measure.per_second
}

impl Report {
    /// The ratios that matter, each of two cases in the same round, and what was set as a goal.
    pub fn ratios(&self) -> String {
        let pool = Case(What::Pool(Load::Many), 256);
        let hourly = Case(What::Redis(HOURLY), 256);
        let local = Case(What::Local(HOURLY), 64);
        let mut text = String::from("| | measured | goal |\n|---|--:|--:|\n");
        let mut row = |what: &str, value: Option<f64>, unit: &str, goal: &str| {
            if let Some(value) = value {
                let digits = if value >= 100.0 { 0 } else { 2 };
                let _ = writeln!(text, "| {what} | {value:.digits$}{unit} | {goal} |");
            }
        };
        row("`RedisStore`, of `redis-benchmark -t get -c 64`", self.ratio(REDIS, GET, throughput), " x", "3.5 x");
        row(
            "`RedisStore`, of a script call each over a pool of 16",
            self.ratio(REDIS, pool, throughput),
            " x",
            "2.5 x",
        );
        row(
            "`RedisStore`, of a script call each over one multiplexed connection",
            self.ratio(REDIS, MULTIPLEXED, throughput),
            " x",
            "1.8 x",
        );
        row(
            "the same, where Redis holds all 100,000 keys",
            self.ratio(hourly, Case(What::Multiplexed(HOURLY), 256), throughput),
            " x",
            "",
        );
        let in_flight = self.ratio(Case(What::InFlight, 256), REDIS, throughput);
        row("requests in flight, of decisions by `Gcra`", in_flight, " x", "0.6 x");
        let granted = Case(What::Redis(Load::Granted), 256);
        row("one caller, granted, of `redis-benchmark`", self.ratio(granted, GET, throughput), " x", "6 x");
        let denied = self.median(Case(What::Redis(Load::Denied), 256), throughput).map(|value| value / 1e6);
        row("one caller, denied", denied, " M/s", "3 M/s");
        let one = |what| Case(what, 1);
        let latency = self.ratio(one(What::Redis(Load::Many)), one(What::Multiplexed(Load::Many)), |m| m.p50);
        row("one at a time, p50, of a bare script call", latency, " x", "at most 1.10 x");
        row("Redis's processor for a decision", self.median(REDIS, |m| m.server), " us", "at most 2.6 us");
        row("the same, where Redis holds all 100,000 keys", self.median(hourly, |m| m.server), " us", "");
        let slowest = crate::support::STRATEGIES
            .into_iter()
            .filter_map(|strategy| self.ratio(Case(What::Redis(Load::Hourly(strategy)), 256), hourly, throughput))
            .min_by(f64::total_cmp);
        row("the slowest strategy, of `Gcra`, where Redis holds all 100,000 keys", slowest, " x", "0.5 x");
        row("`LocalStore`", self.median(local, throughput).map(|value| value / 1e6), " M/s", "2 M/s");
        let governor = self.ratio(local, Case(What::Governor(HOURLY), 64), throughput);
        row("`LocalStore`, of `tower_governor`", governor, " x", "1 x");
        let [limited, idle, none] = [Layers::Limited, Layers::Idle, Layers::None].map(|l| Case(What::Http(l), 64));
        for (with, replicas) in [("", false), (", all with replicas", true)] {
            let side = |who| Case(What::Beside(Side { who, replicas }), 256);
            let [one, cluster, single_calls] = [Who::Single, Who::Cluster, Who::OneByOne].map(side);
            row(
                &format!("3 masters{with}: Redis's processor for a decision, of one server's"),
                self.ratio(cluster, one, |m| m.server),
                " x",
                "at most 1.3 x",
            );
            row(&format!("3 masters{with}: checks a script call"), self.median(cluster, |m| m.batch), "", "8");
            row(
                &format!("3 masters{with}: of a script call each, pipelined"),
                self.ratio(cluster, single_calls, throughput),
                " x",
                "2 x",
            );
        }
        row("axum over HTTP with the layer, of without", self.ratio(limited, none, throughput), " x", "0.97 x");
        row("the same, of with a layer that does nothing", self.ratio(limited, idle, throughput), " x", "");
        let [settled, kept] = [Layers::Settled, Layers::Shared].map(|l| Case(What::Http(l), 64));
        let p99 = self.ratio(settled, kept, |m| m.p99);
        row("axum over HTTP with a settlement, p99, of without", p99, " x", "at most 1.05 x");
        text
    }

    pub fn table(&self) -> String {
        let mut text = String::from(
            "| case | at a time | of GET | decisions/s | p50 us | p99 us | Redis us | checks a call | checks a read | allocations |\n\
             |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        for (case, allocations) in self.cases.iter().zip(&self.allocations) {
            let value = |value: fn(&Measure) -> f64| self.median(*case, value).unwrap_or_default();
            let or_dash = |value: f64, text: String| if value > 0.005 { text } else { "-".to_owned() };
            let (server, batch, read) = (value(|m| m.server), value(|m| m.batch), value(|m| m.read));
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:.0} | {:.1} | {:.1} | {} | {} | {} | {} |",
                case.name(),
                case.1,
                self.ratio(*case, GET, throughput).map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                value(throughput),
                value(|m| m.p50),
                value(|m| m.p99),
                or_dash(server.min(batch), format!("{server:.2}")),
                or_dash(batch, format!("{batch:.1}")),
                or_dash(read.min(batch), format!("{read:.1}")),
                allocations.map_or("-".to_owned(), |count| format!("{count:.1}")),
            );
        }
        text
    }

    /// Decisions per second by how many are asked for at a time.
    pub fn picture(&self) -> Option<String> {
        const LINES: [(&str, &str, What); 4] = [
            ("RedisStore, one caller", "#009e73", What::Redis(Load::Granted)),
            ("RedisStore, 100k callers", "#0072b2", What::Redis(Load::Many)),
            ("a script call each, multiplexed", "#d55e00", What::Multiplexed(Load::Many)),
            ("a script call each, pool of 16", "#cc79a7", What::Pool(Load::Many)),
        ];
        let lines = LINES.map(|(name, color, what)| {
            let points = CONCURRENCY.map(|tasks| self.median(Case(what, tasks), throughput));
            (name, color, points)
        });
        let get = self.median(GET, throughput)?;
        let most = lines.iter().flat_map(|(_, _, points)| points).copied().collect::<Option<Vec<f64>>>()?;
        let step = 100_000.0;
        let most = (most.into_iter().fold(get, f64::max) / step).ceil() * step;

        let x = |tasks: u64| 60.0 + 46.0 * (tasks as f64).log2();
        let y = |value: f64| 310.0 - 270.0 * value / most;
        let mut marks = String::new();
        for i in 0..=(most / step) as u32 {
            let value = f64::from(i) * step;
            let _ = writeln!(
                marks,
                "<path d=\"M{:.1} {:.1}H{:.1}\" stroke=\"#ddd\"/><text x=\"52\" y=\"{:.1}\" text-anchor=\"end\">{}k</text>",
                x(1),
                y(value),
                x(1024),
                y(value) + 4.0,
                value / 1e3,
            );
        }
        for tasks in CONCURRENCY {
            let _ = writeln!(marks, "<text x=\"{:.1}\" y=\"328\" text-anchor=\"middle\">{tasks}</text>", x(tasks));
        }
        let _ = writeln!(
            marks,
            "<path d=\"M{:.1} {:.1}H{:.1}\" stroke=\"#555\" stroke-dasharray=\"4 3\"/>",
            x(1),
            y(get),
            x(1024),
        );
        let mut labels = vec![(y(get), "redis-benchmark GET, 64 at a time", "#555")];
        for (name, color, points) in lines {
            let points = points.map(Option::unwrap_or_default);
            let path: Vec<String> = CONCURRENCY
                .iter()
                .zip(points)
                .map(|(tasks, value)| format!("{:.1} {:.1}", x(*tasks), y(value)))
                .collect();
            let _ = writeln!(
                marks,
                "<path d=\"M{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>",
                path.join("L"),
            );
            for (tasks, value) in CONCURRENCY.iter().zip(points) {
                let _ = writeln!(
                    marks,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{color}\"/>",
                    x(*tasks),
                    y(value)
                );
            }
            labels.push((y(points[3]), name, color));
        }
        // From the lowest up, none on top of another.
        labels.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut above = f64::MAX;
        for (at, name, color) in labels {
            above = at.min(above - 14.0);
            let _ = writeln!(
                marks,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{color}\">{name}</text>",
                x(1024) + 8.0,
                above + 4.0
            );
        }
        Some(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"760\" height=\"350\" viewBox=\"0 0 760 350\" role=\"img\"\n \
             font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"11\" fill=\"#555\">\n\
             <title>Decisions per second by requests at a time</title>\n\
             <rect width=\"760\" height=\"350\" rx=\"4\" fill=\"#fff\"/>\n\
             <text x=\"10\" y=\"20\" font-size=\"14\" font-weight=\"bold\" fill=\"#222\">Decisions per second</text>\n\
             {marks}<text x=\"{:.1}\" y=\"344\" text-anchor=\"middle\">requests at a time</text>\n</svg>\n",
            (x(1) + x(1024)) / 2.0,
        ))
    }

    /// The median of a case.
    fn median(&self, case: Case, value: impl Fn(&Measure) -> f64) -> Option<f64> {
        Some(median(self.of(case)?.iter().map(value).collect()))
    }

    /// The median of what one case is of another, round by round.
    fn ratio(&self, case: Case, base: Case, value: impl Fn(&Measure) -> f64) -> Option<f64> {
        Some(median(self.of(case)?.iter().zip(self.of(base)?).map(|(case, base)| value(case) / value(base)).collect()))
    }

    fn of(&self, case: Case) -> Option<&Vec<Measure>> {
        self.cases.iter().position(|known| *known == case).map(|at| &self.measures[at])
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
