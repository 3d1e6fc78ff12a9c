//! Decisions per second as lines, by a parameter that grows.

use std::fmt::Write as _;

use crate::svg::{ROW, legend, strong, svg, text};

pub struct Picture<'a> {
    pub title: &'a str,
    /// The parameter that grows, and its values.
    pub by: &'a str,
    pub at: &'a [u64],
    pub lines: Vec<Line<'a>>,
}

pub struct Line<'a> {
    pub name: &'a str,
    /// A class of `xtask/src/svg.css`.
    pub color: &'a str,
    /// A limit or a comparison.
    pub is_dashed: bool,
    /// One point per value.
    pub points: Vec<f64>,
}

const LEFT: f64 = 76.0;
const RIGHT: f64 = 690.0;
const HEIGHT: f64 = 270.0;
/// The columns of the legend.
const COLUMNS: [f64; 2] = [12.0, 376.0];

impl Picture<'_> {
    /// Draws an SVG. The horizontal axis is logarithmic.
    pub fn draw(&self) -> String {
        let (first, last) = (self.at[0] as f64, self.at[self.at.len() - 1] as f64);
        let x = |at: u64| LEFT + (RIGHT - LEFT) * (at as f64 / first).ln() / (last / first).ln();
        let highest = self
            .lines
            .iter()
            .flat_map(|line| &line.points)
            .copied()
            .fold(0.0, f64::max);
        let step = step(highest);
        let top = (highest / step).ceil() * step;

        let legend = self.legend();
        let plot = 58.0 + ROW * self.lines.len().div_ceil(COLUMNS.len()) as f64;
        let y = |value: f64| plot + HEIGHT * (1.0 - value / top);

        let mut shapes = strong(10.0, 25.0, "start", self.title) + &legend;
        for i in 0..=(top / step).round() as u64 {
            let value = i * step as u64;
            let at = y(value as f64);
            shapes += &format!("<path class=\"axis\" d=\"M{LEFT:.1} {at:.1}H{RIGHT:.1}\"/>\n");
            shapes += &text(LEFT - 8.0, at + 6.0, "end", short(value));
        }
        for at in self.at {
            shapes += &text(x(*at), plot + HEIGHT + 24.0, "middle", short(*at));
        }
        for line in &self.lines {
            let mut path = String::new();
            for (at, value) in self.at.iter().zip(&line.points) {
                let to = if path.is_empty() { 'M' } else { 'L' };
                let _ = write!(path, "{to}{:.1} {:.1}", x(*at), y(*value));
            }
            let (shape, color) = (line.shape(), line.color);
            let _ = writeln!(shapes, "<path class=\"{shape} {color}\" d=\"{path}\"/>");
            if line.is_dashed {
                continue;
            }
            for (at, value) in self.at.iter().zip(&line.points) {
                let (x, y) = (x(*at), y(*value));
                let _ = writeln!(
                    shapes,
                    "<circle class=\"area {color}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>"
                );
            }
        }
        let bottom = plot + HEIGHT + 50.0;
        shapes += &text((LEFT + RIGHT) / 2.0, bottom, "middle", self.by);
        let title = format!("{} by {}", self.title, self.by);
        svg(bottom as u32 + 12, &title, &shapes)
    }

    fn legend(&self) -> String {
        let mut entries = vec![];
        for line in &self.lines {
            entries.push((line.shape(), line.color, line.name));
        }
        legend(54.0, &COLUMNS, &entries)
    }
}

impl Line<'_> {
    fn shape(&self) -> &'static str {
        if self.is_dashed { "dashed" } else { "curve" }
    }
}

/// Returns the smallest interval (1, 2 or 5 with zeros) that needs at most six steps to `value`.
fn step(value: f64) -> f64 {
    let steps = (3..).flat_map(|zeros| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(zeros)));
    steps.into_iter().find(|step| value / step <= 6.0).unwrap()
}

fn short(value: u64) -> String {
    match value {
        0 => "0".to_owned(),
        millions if millions >= 1_000_000 && millions.is_multiple_of(100_000) => {
            format!("{}M", millions as f64 / 1e6)
        }
        thousands if thousands.is_multiple_of(1_000) => format!("{}k", thousands / 1_000),
        other => other.to_string(),
    }
}
