//! Output of a bench: tables in a page of `docs/`, and pictures next to it.

use std::fs;
use std::path::{Path, PathBuf};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// Replaces the table between two marks of a page.
pub fn save_table(page: &str, mark: &str, table: &str) {
    let path = docs().join(page);
    let page = fs::read_to_string(&path).unwrap();
    let (open, close) = (
        format!("<!-- {mark} -->\n"),
        format!("<!-- end of {mark} -->"),
    );
    let start = page.find(&open).expect(&open) + open.len();
    let end = page.find(&close).expect(&close);
    fs::write(path, format!("{}{table}{}", &page[..start], &page[end..])).unwrap();
}

pub fn save_picture(name: &str, picture: &str) {
    fs::write(docs().join(name).with_extension("svg"), picture).unwrap();
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
