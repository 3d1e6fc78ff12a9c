//! Each type of the library has a name of its own, so that a search for it finds one thing.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::Result;
use crate::command::root;

/// Names of several types, with the reason.
const SEVERAL: &[(&str, &str)] = &[(
    "State",
    "one of each strategy, which the same macros read; of requests in flight, likewise",
)];
const KEYWORDS: [&str; 5] = ["struct ", "enum ", "trait ", "type ", "union "];

#[test]
fn each_type_has_a_name_of_its_own() -> Result {
    let mut places = BTreeMap::new();
    read(&root().join("src"), &mut places)?;
    let mut problems = vec![];
    for (name, files) in places {
        let is_listed = SEVERAL.iter().any(|(listed, _)| *listed == name);
        match (files.len() > 1, is_listed) {
            (true, false) => problems.push(format!("{name} names several types: {files:?}")),
            (false, true) => problems.push(format!("{name} names one type: unlist it")),
            _ => {}
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(problems.join("\n"))
}

/// Reads the types in the files of a folder. The simulations model the library with the names of what they model, and
/// tests are read on their own.
fn read(folder: &Path, places: &mut BTreeMap<String, Vec<String>>) -> Result {
    let list = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in list {
        let path = entry.map_err(|error| error.to_string())?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("tests") || name == "simulation" {
            continue;
        }
        if path.is_dir() {
            read(&path, places)?;
            continue;
        }
        let text =
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for line in text.lines() {
            if let Some(name) = declared(line) {
                places
                    .entry(name.to_owned())
                    .or_default()
                    .push(path.display().to_string());
            }
        }
    }
    Ok(())
}

/// Returns the name of the type that a line at the top of a module declares.
fn declared(line: &str) -> Option<&str> {
    let item = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line,
    };
    let rest = KEYWORDS
        .iter()
        .find_map(|keyword| item.strip_prefix(keyword))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()
}
