//! Each type of the library has a name of its own, so that a search for it finds one thing.

use std::collections::BTreeMap;

use crate::Result;
use crate::sources::{Source, sources};

/// Names of several types, with the reason.
const SEVERAL: &[(&str, &str)] = &[(
    "State",
    "one of each strategy, which the same macros read; of requests in flight, likewise",
)];
const KEYWORDS: [&str; 5] = ["struct ", "enum ", "trait ", "type ", "union "];

#[test]
fn each_type_has_a_name_of_its_own() -> Result {
    let mut places = BTreeMap::<String, Vec<String>>::new();
    for Source { path, text } in sources() {
        // The simulations model the library with the names of what they model.
        if path.starts_with("simulation/") {
            continue;
        }
        for name in text.lines().filter_map(declared) {
            let files = places.entry(name.to_owned()).or_default();
            files.push(path.clone());
        }
    }
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
