//! The picture of an outage, `docs/outage.svg`, drawn from what `cargo xtask screenshots` has recorded on the page of
//! `examples/dashboard`.

use std::fmt::Write as _;

use serde_json::Value;

use crate::svg::{WIDTH, legend, strong, svg, text};

/// A JavaScript expression: the seconds around the first outage on the page, as [`draw`] reads them.
pub(crate) const RECORDS: &str = "(() => {
    const kill = records.findIndex(({ notes }) => notes.some(({ mark }) => mark === 'killed'));
    return records.slice(kill - 10).map(({ allowed, denied, local, notes }) => ({
        redis: [allowed.redis || 0, (denied.redis || 0) + (denied.cached || 0)],
        fallback: [allowed.local || 0, denied.local || 0],
        local: local > 0,
        marks: notes.map(({ mark }) => mark).filter(mark => mark),
    }));
})()";

const LEFT: f64 = 84.0;
const RIGHT: f64 = WIDTH - 12.0;
const TOP: f64 = 100.0;
const BOTTOM: f64 = 270.0;

/// The decisions of one second.
struct Second {
    /// Granted and denied by Redis, and by the fallbacks.
    redis: [f64; 2],
    fallback: [f64; 2],
    is_local: bool,
    marks: Vec<String>,
}

impl Second {
    fn new(record: &Value) -> Self {
        let counts = |source: &str| [0, 1].map(|i| record[source][i].as_f64().unwrap_or_default());
        let marks = record["marks"].as_array().into_iter().flatten();
        Self {
            redis: counts("redis"),
            fallback: counts("fallback"),
            is_local: record["local"] == true,
            marks: marks.filter_map(Value::as_str).map(str::to_owned).collect(),
        }
    }

    fn sum(&self, outcome: usize) -> f64 {
        self.redis[outcome] + self.fallback[outcome]
    }
}

/// Draws the decisions: above the line those allowed, below it those denied.
pub(crate) fn draw(records: &Value) -> String {
    let seconds: Vec<Second> = records
        .as_array()
        .into_iter()
        .flatten()
        .map(Second::new)
        .collect();
    let step = (RIGHT - LEFT) / seconds.len().max(1) as f64;
    let x = |second: usize| LEFT + step * second as f64;
    let [up, down] = [0, 1].map(|outcome| {
        let highest = seconds
            .iter()
            .map(|second| second.sum(outcome))
            .fold(0.0, f64::max);
        (highest / 250.0).ceil() * 250.0
    });
    let unit = (BOTTOM - TOP) / (up + down);
    let ground = TOP + up * unit;

    let title = "Three instances, one limit in Redis: decisions per second";
    let mut shapes = strong(10.0, 25.0, "start", title);
    let entries = [
        ("area", "blue", "Redis decides"),
        ("area", "amber", "each instance decides"),
    ];
    shapes += &legend(54.0, &[12.0, 182.0], &entries);
    for (first, end) in outages(&seconds) {
        let (from, to) = (x(first), x(end));
        let _ = writeln!(
            shapes,
            "<rect class=\"band\" x=\"{from:.1}\" y=\"68\" width=\"{:.1}\" height=\"{:.1}\"/>",
            to - from,
            BOTTOM - 68.0
        );
        let length = format!("no Redis for {} s", end - first);
        shapes += &text((from + to) / 2.0, 87.0, "middle", length);
    }
    for (value, y) in [(up, TOP), (0.0, ground), (down, BOTTOM)] {
        let _ = writeln!(
            shapes,
            "<path class=\"axis\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>"
        );
        shapes += &text(LEFT - 8.0, y + 6.0, "end", value);
    }
    shapes += &text(10.0, (TOP + ground) / 2.0 + 6.0, "start", "allowed");
    shapes += &text(10.0, (ground + BOTTOM) / 2.0 + 6.0, "start", "denied");
    shapes += &bars(
        &seconds,
        "blue",
        |second| (second.redis, [0.0; 2]),
        x,
        (ground, unit),
    );
    shapes += &bars(
        &seconds,
        "amber",
        |second| (second.fallback, second.redis),
        x,
        (ground, unit),
    );
    for second in (0..=seconds.len()).step_by(10) {
        shapes += &text(x(second), BOTTOM + 22.0, "middle", second);
    }
    shapes += &text((LEFT + RIGHT) / 2.0, BOTTOM + 44.0, "middle", "seconds");
    shapes += &marks(&seconds, x);
    svg(326, title, &shapes)
}

/// Returns the first second of each outage, and the first one after it.
fn outages(seconds: &[Second]) -> Vec<(usize, usize)> {
    let mut outages: Vec<(usize, usize)> = vec![];
    for (i, second) in seconds.iter().enumerate() {
        if !second.is_local {
            continue;
        }
        match outages.last_mut() {
            Some((_, end)) if *end == i => *end += 1,
            _ => outages.push((i, i + 1)),
        }
    }
    outages
}

/// Returns the bars of one source, which stand on those of another: `of` returns both.
fn bars(
    seconds: &[Second],
    color: &str,
    of: fn(&Second) -> ([f64; 2], [f64; 2]),
    x: impl Fn(usize) -> f64,
    (ground, unit): (f64, f64),
) -> String {
    let mut shapes = String::new();
    for (outcome, shade, unit) in [(0, "", -unit), (1, " faint", unit)] {
        let mut path = String::new();
        for (i, second) in seconds.iter().enumerate() {
            let (counts, below) = of(second);
            let (left, width) = (x(i), 0.8 * (x(i + 1) - x(i)));
            let from = ground + unit * below[outcome];
            let to = from + unit * counts[outcome];
            if counts[outcome] > 0.0 {
                let _ = write!(path, "M{left:.1} {from:.1}V{to:.1}h{width:.1}V{from:.1}z");
            }
        }
        let _ = writeln!(shapes, "<path class=\"area {color}{shade}\" d=\"{path}\"/>");
    }
    shapes
}

/// Returns lines at the seconds in which something was done, with its name: before the line when Redis is killed, and after it
/// later.
fn marks(seconds: &[Second], x: impl Fn(usize) -> f64) -> String {
    let mut shapes = String::new();
    for (i, second) in seconds.iter().enumerate() {
        if second.marks.is_empty() {
            continue;
        }
        let x = x(i);
        let _ = writeln!(shapes, "<path class=\"border\" d=\"M{x:.1} 68V{BOTTOM}\"/>");
        shapes += &match second.marks.join(", ") {
            killed if killed == "killed" => strong(x - 6.0, 87.0, "end", "Redis killed"),
            later => strong(x + 6.0, 87.0, "start", later),
        };
    }
    shapes
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;

    use crate::command::root;

    use super::*;

    #[test]
    fn the_picture_is_what_was_recorded() {
        let records = serde_json::from_str(include_str!("outage.json")).unwrap();
        let (path, picture) = (root().join("docs/outage.svg"), draw(&records));
        if env::var_os("SAVE").is_some() {
            fs::write(&path, &picture).unwrap();
        }
        assert!(
            fs::read_to_string(path).unwrap() == picture,
            "docs/outage.svg is out of date: run `SAVE=1 cargo test --package xtask outage`"
        );
    }
}
