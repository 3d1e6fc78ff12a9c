//! The library's own files, for the tests that read them.

use std::fs;
use std::path::Path;

use crate::command::root;

pub(crate) struct Source {
    /// Within `src`, such as `limit/quota.rs`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Returns the files of `src`, without its tests.
pub(crate) fn sources() -> Vec<Source> {
    let mut sources = vec![];
    add(&root().join("src"), "", &mut sources);
    sources
}

fn add(folder: &Path, parent: &str, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("tests") {
            continue;
        }
        let path = format!("{parent}{name}");
        if entry.path().is_dir() {
            add(&entry.path(), &format!("{path}/"), sources);
        } else {
            let text = fs::read_to_string(entry.path()).unwrap();
            sources.push(Source { path, text });
        }
    }
}
