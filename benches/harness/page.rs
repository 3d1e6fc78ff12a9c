//! Output of a bench: tables in pages of the repository, and pictures.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the path of a file of the repository.
fn repository(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file)
}

/// Replaces the table between two marks of a page, such as `docs/performance.md`.
pub fn save_table(page: &str, mark: &str, table: &str) {
    let path = repository(page);
    let page = fs::read_to_string(&path).unwrap();
    let (open, close) = (
        format!("<!-- {mark} -->\n"),
        format!("<!-- end of {mark} -->"),
    );
    let start = page.find(&open).expect(&open) + open.len();
    let end = page.find(&close).expect(&close);
    fs::write(path, format!("{}{table}{}", &page[..start], &page[end..])).unwrap();
}

/// A table that is printed line by line.
pub struct Table(String);

impl Table {
    pub fn new(head: &str) -> Self {
        println!("{head}");
        Self(format!("{head}\n"))
    }

    pub fn add(&mut self, line: &str) {
        println!("{line}");
        self.0 += line;
        self.0 += "\n";
    }

    /// Writes the table between two marks of `benches/RESULTS.md`, if the bench runs with `--save`.
    pub fn save(&self, mark: &str) {
        if env::args().any(|arg| arg == "--save") {
            save_table("benches/RESULTS.md", mark, &self.0);
        }
    }
}

/// Writes a picture, such as `docs/throughput.svg`.
pub fn save_picture(file: &str, picture: &str) {
    fs::write(repository(file), picture).unwrap();
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
