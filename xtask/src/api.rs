//! The public API of the library, in `xtask/api.txt`: every item with its signature, bounds and
//! trait implementations.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use public_api::Builder;
use serde_json::Value;

use crate::Result;
use crate::command::{root, run};

const LIST: &str = "xtask/api.txt";

/// Where `rustdoc` writes the JSON of the library.
const JSON: &str = "target/doc/tower_redis_ratelimit.json";

/// The version of rustdoc's JSON that `public-api` reads. Each Rust release writes one version.
const FORMAT: u64 = 57;

/// Implementations that no user relies on, omitted from the list. The auto traits `Send`, `Sync` and `Unpin` are
/// listed.
const OMITTED: [&str; 5] = [
    "core::marker::Freeze",
    "core::marker::StructuralPartialEq",
    "core::marker::UnsafeUnpin",
    "core::panic::unwind_safe::",
    // `pin-project-lite` writes these for the types that it projects.
    "pin_project_lite::__private",
];

/// Writes the list.
pub(crate) fn save() -> Result {
    let list = list()?.ok_or_else(|| {
        format!("this Rust does not write rustdoc format {FORMAT}: use the Rust release that does")
    })?;
    println!("{LIST}: {} types", types(&list).len());
    fs::write(root().join(LIST), list).map_err(|error| format!("{LIST}: {error}"))
}

/// Returns the names that a reader of the API meets: structs, enums, traits and aliases, each once
/// even if it has two paths. Associated types are none.
fn types(list: &str) -> BTreeSet<&str> {
    list.lines().filter_map(declared).collect()
}

fn declared(line: &str) -> Option<&str> {
    let (_, item) = line.split_once("pub ")?;
    let (kind, path) = item.split_once(' ')?;
    if !["struct", "enum", "trait", "type"].contains(&kind) {
        return None;
    }
    let start = path.find(char::is_uppercase)?;
    if !path[..start].chars().all(is_of_module) {
        return None;
    }
    let path = &path[start..];
    let length = path.find(|c: char| !c.is_alphanumeric());
    let (name, rest) = path.split_at(length.unwrap_or(path.len()));
    // The owner of an associated type, which may be a type of another crate.
    let is_owner = without_generics(rest).starts_with("::");
    (!is_owner).then_some(name)
}

fn is_of_module(c: char) -> bool {
    c.is_lowercase() || c == '_' || c == ':'
}

/// Returns what is behind the generics at the start.
fn without_generics(text: &str) -> &str {
    let mut depth = 0_i32;
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            let end = if c == '>' { at + 1 } else { at };
            return &text[end..];
        }
    }
    ""
}

/// Fails if the list differs from the API.
pub(crate) fn check() -> Result {
    let saved =
        fs::read_to_string(root().join(LIST)).map_err(|error| format!("{LIST}: {error}"))?;
    let Some(list) = list()? else {
        eprintln!("{LIST} is not compared: this Rust does not write rustdoc format {FORMAT}");
        return Ok(());
    };
    match first_difference(&list, &saved) {
        None => Ok(()),
        Some(line) => Err(format!(
            "the public API has changed, first at `{line}`: if this is intended, run `cargo xtask api` and commit {LIST}"
        )),
    }
}

/// Returns a line that only one of the lists has.
fn first_difference<'a>(list: &'a str, saved: &'a str) -> Option<&'a str> {
    let missing = |one: &'a str, other: &str| {
        one.lines()
            .find(|line| !other.lines().any(|other| other == *line))
    };
    missing(list, saved).or_else(|| missing(saved, list))
}

/// One line for each public item and each implementation. `None` if this Rust writes another
/// format.
fn list() -> Result<Option<String>> {
    let mut rustdoc = Command::new("cargo");
    rustdoc.args(["rustdoc", "--quiet", "--lib", "--all-features"]);
    rustdoc.args(["--package", "tower-redis-ratelimit", "--"]);
    rustdoc.args(["-Zunstable-options", "--output-format", "json"]);
    // Rustdoc's JSON is unstable, which `public-api` handles by its version.
    run(rustdoc.env("RUSTC_BOOTSTRAP", "1"))?;
    let path = root().join(JSON);
    let json = fs::read_to_string(&path).map_err(|error| format!("{JSON}: {error}"))?;
    let format =
        serde_json::from_str::<Value>(&json).map_err(|error| format!("{JSON}: {error}"))?;
    if format["format_version"] != FORMAT {
        return Ok(None);
    }
    let api = Builder::from_rustdoc_json(path)
        .omit_blanket_impls(true)
        .build()
        .map_err(|error| format!("{JSON}: {error}"))?;
    let mut list = String::new();
    for item in api.items() {
        let line = item.to_string();
        if !OMITTED.iter().any(|omitted| line.contains(omitted)) {
            list += &line.replace("tower_redis_ratelimit::", "");
            list.push('\n');
        }
    }
    Ok(Some(list))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_counts_once() {
        let list = "\
            pub mod store\n\
            #[non_exhaustive] pub enum store::Share\n\
            pub store::Share::Fixed(u32)\n\
            pub struct store::Fallback<P, F>\n\
            pub type store::Fallback<P, F>::Future = store::FallbackFuture<P, F>\n\
            pub trait store::Store: core::clone::Clone\n\
            pub type store::Store::Future: core::marker::Send\n\
            pub type store::Alias<P> = store::Fallback<P, P>\n\
            pub type alloc::sync::Arc<S>::Future = <S as store::Store>::Future\n\
            pub struct Fallback<P, F>\n\
            pub fn Fallback<P, F>::new(P, F) -> Self\n\
            pub struct Policies(_)\n\
            pub type &'a Policies::Item = &'a Policy\n";
        let expected = ["Alias", "Fallback", "Policies", "Share", "Store"];
        assert!(types(list).into_iter().eq(expected), "{:?}", types(list));
    }

    #[test]
    fn changed_signatures_are_found() {
        let saved = "pub fn Quota::per_second(u32) -> Quota\npub mod check\n";
        assert_eq!(first_difference(saved, saved), None);
        let changed = saved.replace("u32", "u64");
        let expected = Some("pub fn Quota::per_second(u64) -> Quota");
        assert_eq!(first_difference(&changed, saved), expected);
        let removed = "pub mod check\n";
        let expected = Some("pub fn Quota::per_second(u32) -> Quota");
        assert_eq!(first_difference(removed, saved), expected);
    }
}
