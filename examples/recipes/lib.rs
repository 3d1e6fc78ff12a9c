//! `cargo test --package recipes`
//!
//! The programs of `docs/recipes.md`, one per file: limits, and a test with requests that shows their effect.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

mod api_key;
mod bandwidth;
mod block;
mod body_key;
mod client;
mod denied_upload;
mod failures;
mod grpc;
mod internal_callers;
mod job_cost;
mod jobs;
mod json;
mod legacy_headers;
mod limiter;
mod log;
mod login_attempts;
mod mock_store;
mod monthly_plan;
mod openapi;
mod paused_time;
mod plans;
mod polite;
mod prometheus;
mod proxies;
mod redis_url;
mod reload;
mod retries;
mod routes;
mod service_and_caller;
mod settings;
mod several_limits;
mod shadow;
mod stream_messages;
mod tokens;
mod usage;
mod user_or_address;
mod wait;
mod web_sockets;

use std::fs;
use std::path::Path;

/// Every block of the page is a part of the program that its recipe names, in other lines at most. A recipe is a section of the
/// third level. A line `// ..` marks omitted code.
#[test]
fn the_page_quotes_the_programs() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(folder.join(path)).unwrap();
    let joined = |text: &str| -> String {
        let mut text: String = text.split_whitespace().collect();
        for end in [")", "]", "}"] {
            text = text.replace(&format!(",{end}"), end);
        }
        text
    };
    let page = read("../../docs/recipes.md");
    let mut quoted = vec![];
    let (head, recipes) = page.split_once("\n### ").unwrap();
    assert!(!head.contains("```"), "a block needs a recipe");
    for recipe in recipes.split("\n### ") {
        let name = recipe
            .split('`')
            .find(|word| word.ends_with(".rs") && !word.contains('/'))
            .unwrap_or_else(|| panic!("no program is named in {recipe}"));
        let program = joined(&read(name));
        let mut rest = &*program;
        for block in recipe.split("```").skip(1).step_by(2) {
            let (language, block) = block.split_once('\n').unwrap();
            assert!(
                matches!(language, "rust,ignore" | "toml"),
                "a block of {name} is marked {language:?}"
            );
            for part in block.split("// ..\n").map(joined) {
                let at = rest
                    .find(&part)
                    .unwrap_or_else(|| panic!("{name} lacks, or has earlier: {part}"));
                rest = &rest[at + part.len()..];
            }
        }
        quoted.push(name.to_owned());
    }
    let mut programs: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".rs") && name != "lib.rs")
        .collect();
    programs.sort();
    quoted.sort();
    assert_eq!(quoted, programs, "every program needs exactly one recipe");
}
