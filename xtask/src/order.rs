//! The order of the library's modules, which `CONTRIBUTING.md` lists.

use std::fs;

use crate::command::root;
use crate::sources::{Source, sources};

/// Returns the imports of a module below the importing one: `<file>: <module>`.
fn violations() -> Vec<String> {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let (_, list) = page.split_once("```text\n").unwrap();
    let (list, _) = list.split_once("```").unwrap();
    let mut order = vec![];
    for line in list.lines() {
        let path = line.split_whitespace().next().unwrap_or_default();
        order.push(module(path.trim_start_matches("src/")));
    }
    let mut found = vec![];
    for source in sources() {
        // Models of the tests use what they need.
        if source.path.ends_with("/definitions.rs") || source.path.ends_with("/model.rs") {
            continue;
        }
        let of = module(&source.path);
        // The modules that only sort public items are not listed.
        if let Some(place) = order.iter().position(|listed| *listed == of) {
            check(&source, &order[place + 1..], &mut found);
        }
    }
    found
}

/// Returns the module of a file or a folder.
fn module(path: &str) -> &str {
    let first = path.split('/').next().unwrap_or_default();
    first.trim_end_matches(".rs")
}

fn check(source: &Source, below: &[&str], found: &mut Vec<String>) {
    let code = source.text.split("#[cfg(test)]\nmod tests {").next();
    for line in code.unwrap_or_default().lines() {
        // A link of the docs is no import.
        let line = line.split("//").next().unwrap_or_default();
        for import in line.split("crate::").skip(1) {
            let end = import.find(|c: char| !c.is_alphanumeric() && c != '_');
            let module = &import[..end.unwrap_or(import.len())];
            if below.contains(&module) {
                found.push(format!("{}: {module}", source.path));
            }
        }
    }
}

#[test]
fn modules_import_only_modules_above() {
    assert_eq!(violations(), [""; 0]);
}
