//! The measurements, as tables.

use std::fmt::Write as _;
use std::time::Duration;

use benches::meter::Measure;
use benches::page::median;

use crate::exact::INSTANCES;
use crate::outage::{AFTER, Fault, Outage, PATIENCE};
use crate::speed::Load;

/// The measurements of peers in cases. The first peer is this crate.
pub struct Speeds {
    pub names: Vec<&'static str>,
    pub cases: &'static [(Load, u64)],
    /// Whether they count in Redis.
    pub shared: bool,
    /// For each peer and case one per round; none if the peer does not support it.
    pub measures: Vec<Vec<Vec<Measure>>>,
}

/// Where another peer decides more than this crate: the most first, and none that is within the noise.
pub fn faster(all: &[&Speeds]) -> String {
    const NOISE: f64 = 1.05;
    let mut faster = vec![];
    for speeds in all {
        for (peer, who) in speeds
            .names
            .iter()
            .enumerate()
            .filter(|(_, who)| !who.starts_with("this crate"))
        {
            for (case, (load, tasks)) in speeds.cases.iter().enumerate() {
                let ratio = speeds.of_ours(peer, case).unwrap_or_default();
                if ratio > NOISE {
                    faster.push((ratio, format!("{who} | {} | {tasks}", load.name())));
                }
            }
        }
    }
    faster.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let rows = faster
        .iter()
        .map(|(ratio, row)| format!("| {row} | {ratio:.2} x |\n"));
    format!(
        "| | case | at a time | times our decisions/s |\n|---|---|--:|--:|\n{}",
        rows.collect::<String>()
    )
}

impl Speeds {
    pub fn tables(&self) -> String {
        let mut text = self.table("decisions/s", |m| m.per_second, decisions);
        text += &self.table("p99", |m| m.p99, micros);
        if self.shared {
            text += &self.table(
                "Redis's processor for a decision, us",
                |m| m.server,
                |value| format!("{value:.1}"),
            );
        }
        text
    }

    fn table(&self, what: &str, value: fn(&Measure) -> f64, shown: fn(f64) -> String) -> String {
        let mut text = format!("| {what} |");
        for (load, tasks) in self.cases {
            let _ = write!(text, " {} x{tasks} |", load.name());
        }
        let _ = writeln!(text, "\n|---|{}", "--:|".repeat(self.cases.len()));
        for (name, measures) in self.names.iter().zip(&self.measures) {
            let _ = write!(text, "| {name} |");
            for measures in measures {
                let value =
                    (!measures.is_empty()).then(|| median(measures.iter().map(value).collect()));
                let _ = write!(text, " {} |", value.map_or("-".to_owned(), shown));
            }
            text += "\n";
        }
        text + "\n"
    }

    /// How many decisions a peer makes for each of ours, in the same round.
    fn of_ours(&self, peer: usize, case: usize) -> Option<f64> {
        let [theirs, ours] = [peer, 0].map(|peer| &self.measures[peer][case]);
        let ratios: Vec<f64> = theirs
            .iter()
            .zip(ours)
            .map(|(theirs, ours)| theirs.per_second / ours.per_second)
            .collect();
        (!ratios.is_empty()).then(|| median(ratios))
    }
}

pub fn outage(fault: Fault, outages: &[(&str, Outage)]) -> String {
    let mut text = format!(
        "| Redis {} | passed | denied | failed | no answer | p50 | p99 | longest | granted before, during, after | in sum | well after | granted again |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        fault.name()
    );
    for (name, outage) in outages {
        let count: u64 = outage.answers.iter().sum();
        let answers = outage
            .answers
            .map(|answers| format!("{:.0} %", 100.0 * answers as f64 / count.max(1) as f64));
        let wait = |share: f64| {
            let wait = outage
                .waits
                .get((outage.waits.len() as f64 * share) as usize)
                .or(outage.waits.last());
            wait.map_or("-".to_owned(), |wait| time(*wait))
        };
        let [before, during, after] = outage.granted;
        let well = match outage.well {
            None => format!("not in {}", time(AFTER)),
            Some(Duration::ZERO) => "immediately".to_owned(),
            Some(well) => time(well),
        };
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {before}, {during}, {after} | {} | {well} | {} |",
            answers.join(" | "),
            [wait(0.5), wait(0.99), wait(1.0)].join(" | "),
            before + during + after,
            outage.again,
        );
    }
    text + "\n"
}

pub fn exact(granted: &[(&str, [(u64, u64); INSTANCES.len()])]) -> String {
    let mut text = String::from("| granted, limit 100 |");
    for instances in INSTANCES {
        let _ = write!(
            text,
            " {instances} {} |",
            if instances == 1 {
                "instance"
            } else {
                "instances"
            }
        );
    }
    let _ = writeln!(text, "\n|---|{}", "--:|".repeat(INSTANCES.len()));
    for (name, counts) in granted {
        let counts = counts.map(|(least, most)| {
            if least == most {
                most.to_string()
            } else {
                format!("{least}-{most}")
            }
        });
        let _ = writeln!(text, "| {name} | {} |", counts.join(" | "));
    }
    text
}

fn decisions(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{:.2}M", value / 1e6),
        value => format!("{:.0}k", value / 1e3),
    }
}

fn micros(value: f64) -> String {
    time(Duration::from_nanos((value * 1e3) as u64))
}

fn time(time: Duration) -> String {
    match time.as_secs_f64() {
        _ if time >= PATIENCE => format!("> {} s", PATIENCE.as_secs()),
        seconds if seconds >= 1.0 => format!("{seconds:.1} s"),
        seconds if seconds >= 0.01 => format!("{:.0} ms", seconds * 1e3),
        seconds if seconds >= 0.001 => format!("{:.1} ms", seconds * 1e3),
        seconds if seconds >= 1e-5 => format!("{:.0} us", seconds * 1e6),
        seconds => format!("{:.1} us", seconds * 1e6),
    }
}
