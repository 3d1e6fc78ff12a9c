//! Finds dependencies that no file of a package names, as cargo-machete does, without its installation. A dependency that only
//! sets features of others is listed under `package.metadata.cargo-machete` in the manifest, as for that program.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Result;
use crate::command::root;
use crate::metadata::Metadata;

/// Checks all packages of the workspace.
pub(crate) fn check(metadata: &Metadata) -> Result {
    let mut unused = vec![];
    for package in metadata.members() {
        unused.extend(unused_of(package));
    }
    match &unused[..] {
        [] => Ok(()),
        unused => Err(format!(
            "these dependencies are unused: {}",
            unused.join(", ")
        )),
    }
}

/// Returns the unused dependencies of a package. Those of its library must be used by `src`, and those of its tests by any file.
fn unused_of(package: &Value) -> Vec<String> {
    let manifest = PathBuf::from(package["manifest_path"].as_str().unwrap_or_default());
    let folder = manifest.parent().unwrap_or(root());
    let mut all = BTreeSet::new();
    add(&mut all, folder);
    let library = all
        .iter()
        .filter(|path| path.starts_with(folder.join("src")));
    let library = text(library);
    let all = text(all.iter());

    let ignored = &package["metadata"]["cargo-machete"]["ignored"];
    let ignored = ignored.as_array().into_iter().flatten();
    let ignored: Vec<_> = ignored.filter_map(Value::as_str).collect();
    let mut unused = vec![];
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let name = dependency["rename"]
            .as_str()
            .or(dependency["name"].as_str());
        let name = name.unwrap_or_default();
        let is_of_library = dependency["kind"].is_null() && !library.is_empty();
        let text = if is_of_library { &library } else { &all };
        if !ignored.contains(&name) && !names(text, &name.replace('-', "_")) {
            unused.push(format!("{name} of {}", manifest.display()));
        }
    }
    unused
}

/// Adds the Rust files and the pages in a folder and, for files with `#[path]`, in others. A folder with a manifest is another
/// package.
fn add(files: &mut BTreeSet<PathBuf>, path: &Path) {
    if path.is_dir() {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        for entry in entries.map(|entry| entry.path()) {
            let is_hidden = entry
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes()[0] == b'.');
            if !is_hidden && !entry.ends_with("target") && !entry.join("Cargo.toml").exists() {
                add(files, &entry);
            }
        }
        return;
    }
    let is_read = path
        .extension()
        .is_some_and(|extension| extension == "rs" || extension == "md");
    if !is_read || !files.insert(path.to_owned()) {
        return;
    }
    let text = fs::read_to_string(path).unwrap_or_default();
    for part in text.split("#[path = \"").skip(1) {
        let other = part.split('"').next().unwrap_or_default();
        let Ok(other) = path.with_file_name(other).canonicalize() else {
            continue;
        };
        // Its modules are beside it.
        if other.ends_with("mod.rs") {
            other
                .parent()
                .into_iter()
                .for_each(|folder| add(files, folder));
        } else {
            add(files, &other);
        }
    }
}

fn text<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> String {
    paths
        .map(|path| fs::read_to_string(path).unwrap_or_default())
        .collect()
}

/// Returns `true` if a text has a path of this crate, such as `tokio::spawn`, or imports it.
fn names(text: &str, krate: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(krate).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + krate.len()..]);
        let is_import = before.ends_with("use ") || before.ends_with("extern crate ");
        !before.ends_with(is_part)
            && (after.starts_with("::") || is_import && !after.starts_with(is_part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_imports_name_a_crate() {
        for text in [
            "http::Request",
            "(::http::a)",
            "pub use http;",
            "use http as h;",
        ] {
            assert!(names(text, "http"), "{text}");
        }
        for text in [
            "my_http::a",
            "http_body::Body",
            "use http_body;",
            "\"http\"",
            "// http",
        ] {
            assert!(!names(text, "http"), "{text}");
        }
    }

    #[test]
    fn an_unused_dependency_is_found() {
        let dependency = |name: &str| serde_json::json!({ "name": name, "kind": null });
        let dependencies = ["serde_json", "public-api", "no-such", "listed"].map(dependency);
        let package = serde_json::json!({
            "manifest_path": root().join("xtask/Cargo.toml"),
            "dependencies": dependencies,
            "metadata": { "cargo-machete": { "ignored": ["listed"] } },
        });
        let unused = unused_of(&package);
        assert_eq!(unused.len(), 1, "{unused:?}");
        assert!(unused[0].starts_with("no-such of "), "{unused:?}");
    }
}
