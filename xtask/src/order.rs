//! The order of the library's modules, which `CONTRIBUTING.md` lists.

use std::fs;
use std::path::Path;

use crate::command::root;

/// Returns the imports of a module below the importing one: `<file>: <module>`.
fn violations() -> Vec<String> {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let (_, list) = page.split_once("```text\n").unwrap();
    let (list, _) = list.split_once("```").unwrap();
    let mut order = vec![];
    for line in list.lines() {
        let path = line.split_whitespace().next().unwrap_or_default();
        let module = path.trim_start_matches("src/").trim_end_matches('/');
        order.push(module.trim_end_matches(".rs"));
    }
    let mut found = vec![];
    let source = root().join("src");
    for (place, module) in order.iter().enumerate() {
        let below = &order[place + 1..];
        let file = source.join(module).with_extension("rs");
        if file.is_file() {
            check_file(&file, below, &mut found);
        } else {
            check_folder(&source.join(module), below, &mut found);
        }
    }
    found
}

fn check_folder(folder: &Path, below: &[&str], found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            check_folder(&path, below, found);
        } else {
            check_file(&path, below, found);
        }
    }
}

fn check_file(file: &Path, below: &[&str], found: &mut Vec<String>) {
    let path = file.display().to_string();
    // Tests use what they need.
    if path.contains("/tests") || path.ends_with("/definitions.rs") || path.ends_with("/model.rs") {
        return;
    }
    let text = fs::read_to_string(file).unwrap();
    let code = text.split("#[cfg(test)]\nmod tests {").next();
    for line in code.unwrap_or_default().lines() {
        // A link of the docs is no import.
        let line = line.split("//").next().unwrap_or_default();
        for import in line.split("crate::").skip(1) {
            let end = import.find(|c: char| !c.is_alphanumeric() && c != '_');
            let module = &import[..end.unwrap_or(import.len())];
            if below.contains(&module) {
                found.push(format!("{path}: {module}"));
            }
        }
    }
}

#[test]
fn modules_import_only_modules_above() {
    assert_eq!(violations(), [""; 0]);
}
