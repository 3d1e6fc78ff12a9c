//! The frame, the legend and the style of all pictures of the documentation. The tests, the benches and the commands that draw
//! them include this file.

use std::fmt::{Display, Write as _};

/// Width of a picture. A phone shows it in 358 pixels, so that its text is half as high as in `svg.css`.
pub(crate) const WIDTH: f64 = 720.0;

/// One style for all pictures. It follows the color scheme of the reader's system: a picture in an `<img>` does not see the theme
/// that a site lets its readers choose.
const STYLE: &str = include_str!("svg.css");

/// Returns a picture.
pub(crate) fn svg(height: u32, title: &str, shapes: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n{shapes}</svg>\n",
    )
}

/// Returns a text whose `anchor` (start, middle or end) is at a place.
pub(crate) fn text(x: f64, y: f64, anchor: &str, text: impl Display) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>\n")
}

/// Returns a text that stands out.
pub(crate) fn strong(x: f64, y: f64, anchor: &str, text: impl Display) -> String {
    format!(
        "<text class=\"strong\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>\n"
    )
}

/// Height of a row of a legend.
pub(crate) const ROW: f64 = 25.0;

/// Returns a legend: per entry the class of its shape (`area`, `curve` or `dashed`), its color, and its name.
pub(crate) fn legend(top: f64, columns: &[f64], entries: &[(&str, &str, &str)]) -> String {
    let mut shapes = String::new();
    for (i, (shape, color, name)) in entries.iter().enumerate() {
        let x = columns[i % columns.len()];
        let y = top + ROW * (i / columns.len()) as f64;
        let path = match *shape {
            "area" => format!("M{x:.1} {:.1}h22v13h-22z", y - 12.0),
            _ => format!("M{x:.1} {:.1}h22", y - 5.5),
        };
        let _ = writeln!(shapes, "<path class=\"{shape} {color}\" d=\"{path}\"/>");
        shapes += &text(x + 30.0, y, "start", name);
    }
    shapes
}
