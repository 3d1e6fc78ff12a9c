//! Decisions per second as lines, by a parameter that grows.

use std::fmt::Write as _;

pub struct Picture<'a> {
    pub title: &'a str,
    /// The parameter that grows, and its values.
    pub by: &'a str,
    pub at: &'a [u64],
    pub lines: Vec<Line<'a>>,
}

pub struct Line<'a> {
    pub name: &'a str,
    pub color: &'a str,
    /// A limit or a comparison.
    pub is_dashed: bool,
    /// One point per value.
    pub points: Vec<f64>,
}

const LEFT: f64 = 60.0;
const RIGHT: f64 = 520.0;

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
        let y = |value: f64| 310.0 - 270.0 * value / top;

        let mut marks = String::new();
        for i in 0..=(top / step).round() as u32 {
            let value = f64::from(i) * step;
            let _ = writeln!(
                marks,
                "<path d=\"M{LEFT:.1} {at:.1}H{RIGHT:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"52\" y=\"{:.1}\" text-anchor=\"end\">{}k</text>",
                y(value) + 4.0,
                value / 1e3,
                at = y(value),
            );
        }
        for at in self.at {
            let _ = writeln!(
                marks,
                "<text x=\"{:.1}\" y=\"328\" text-anchor=\"middle\">{}</text>",
                x(*at),
                short(*at)
            );
        }
        for Line {
            color,
            is_dashed,
            points,
            ..
        } in &self.lines
        {
            let points = || {
                self.at
                    .iter()
                    .zip(points)
                    .map(|(at, value)| (x(*at), y(*value)))
            };
            let path: Vec<String> = points().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
            let path = path.join("L");
            let style = if *is_dashed {
                "stroke-dasharray=\"4 3\""
            } else {
                "stroke-width=\"2\""
            };
            let _ = writeln!(
                marks,
                "<path d=\"M{path}\" fill=\"none\" stroke=\"{color}\" {style}/>"
            );
            for (x, y) in points().filter(|_| !is_dashed) {
                let _ = writeln!(
                    marks,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>"
                );
            }
        }
        // From the lowest up, without overlaps.
        let mut labels: Vec<_> = self
            .lines
            .iter()
            .map(|line| (y(line.points[line.points.len() - 1]), line))
            .collect();
        labels.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut above = f64::MAX;
        for (at, Line { name, color, .. }) in labels {
            above = at.min(above - 14.0);
            let (x, y) = (RIGHT + 8.0, above + 4.0);
            let _ = writeln!(
                marks,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"{color}\">{name}</text>"
            );
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"760\" height=\"350\" viewBox=\"0 0 760 350\" role=\"img\"\n \
             font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"11\" fill=\"#555\">\n\
             <title>{title} by {by}</title>\n\
             <rect width=\"760\" height=\"350\" rx=\"4\" fill=\"#fff\"/>\n\
             <text x=\"10\" y=\"20\" font-size=\"14\" font-weight=\"bold\" fill=\"#222\">{title}</text>\n\
             {marks}<text x=\"{:.1}\" y=\"344\" text-anchor=\"middle\">{by}</text>\n</svg>\n",
            (LEFT + RIGHT) / 2.0,
            title = self.title,
            by = self.by,
        )
    }
}

/// Returns the smallest interval (1, 2 or 5 with zeros) that needs at most twelve steps to `value`.
fn step(value: f64) -> f64 {
    let steps = (3..).flat_map(|zeros| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(zeros)));
    steps.into_iter().find(|step| value / step <= 12.0).unwrap()
}

fn short(value: u64) -> String {
    match value {
        millions if millions.is_multiple_of(1_000_000) => format!("{}M", millions / 1_000_000),
        thousands if thousands.is_multiple_of(1_000) => format!("{}k", thousands / 1_000),
        other => other.to_string(),
    }
}
