//! The public API of the library, in `xtask/api.txt`: every item with its signature, bounds and
//! trait implementations.

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
    fs::write(root().join(LIST), list).map_err(|error| format!("{LIST}: {error}"))
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
