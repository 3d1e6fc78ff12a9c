//! `cargo xtask test`.

use std::process::Command;
use std::thread;

use crate::command::{cargo, run, succeeds};
use crate::metadata::Metadata;
use crate::release::package;
use crate::{Result, api, install, pages, simulate, unused};

const LIBRARY: &str = "tower-redis-ratelimit";
const NO_FEATURES: &str = "--no-default-features";

pub(crate) fn test() -> Result {
    install::redis_server()?;
    cargo(&["fmt", "--all", "--check"])?;
    let metadata = Metadata::read()?;
    metadata.check_dependencies()?;
    unused::check(&metadata)?;
    let version = metadata.rust_version().to_owned();
    // Run this concurrently: it shares nothing with the other steps, and most of them use one processor.
    let lowest_rust = thread::spawn(move || lowest_rust(&version));
    cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--all-features",
        "--",
        "-D",
        "warnings",
    ])?;
    pages()?;
    api::check()?;
    // Features only add, so what holds with all of them must hold with each alone, and with none.
    for feature in metadata.features() {
        check_features(&format!("--features={feature}"))?;
    }
    check_features(NO_FEATURES)?;
    document(&["--package", LIBRARY, NO_FEATURES])?;
    cargo(&["test", "--quiet", "--package", "plain-tests", "--lib"])?;
    package(&metadata, &["--allow-dirty"])?;
    lowest_rust
        .join()
        .map_err(|_| "the check with the lowest Rust panicked")??;
    // The remaining steps use the whole workspace, which is built once, including the examples.
    cargo(&["test", "--workspace", "--all-features", "--doc"])?;
    for (name, seeds) in [
        ("fallback", "8000"),
        ("requests", "2000"),
        ("leases", "800"),
    ] {
        simulate(&[name, seeds], &["--workspace", "--all-features"])?;
    }
    // Run the tests last: their output ends with the counts.
    if succeeds("cargo", &["nextest", "--version"]) {
        // More threads than processors: many tests wait for a server.
        let threads = thread::available_parallelism()
            .map_or(2, |count| count.get() * 3 / 2)
            .to_string();
        cargo(&[
            "nextest",
            "run",
            "--workspace",
            "--all-features",
            "--test-threads",
            &threads,
        ])
    } else {
        cargo(&[
            "test",
            "--workspace",
            "--all-features",
            "--lib",
            "--bins",
            "--examples",
            "--tests",
        ])
    }
}

/// Builds the documentation, and checks the pages.
pub(crate) fn pages() -> Result {
    // Use the whole workspace, as clippy does, so that the dependencies are not checked again.
    document(&["--workspace", "--all-features"])?;
    pages::check()
}

/// Checks the library with these features only.
fn check_features(features: &str) -> Result {
    cargo(&[
        "clippy",
        "--package",
        LIBRARY,
        "--lib",
        features,
        "--",
        "-D",
        "warnings",
    ])
}

/// Builds the documentation of the library with these features.
pub(crate) fn document(features: &[&str]) -> Result {
    let mut command = Command::new("cargo");
    command
        .args(["doc", "--quiet", "--no-deps", "--lib"])
        .args(features);
    run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Compiles the library with its `rust-version`, if rustup can install that. If not, clippy still
/// detects newer parts of std, and [`Metadata::check_dependencies`] checks the dependencies.
fn lowest_rust(version: &str) -> Result {
    if !succeeds("rustup", &["run", version, "cargo", "--version"]) {
        eprintln!("Rust {version} is not installed: installing it with rustup");
        let how = ["--profile", "minimal", "--no-self-update"];
        let install = [&["toolchain", "install", version][..], &how].concat();
        if !succeeds("rustup", &install) {
            eprintln!(
                "not compiled with Rust {version}: `rustup toolchain install {version}` fails"
            );
            return Ok(());
        }
    }
    let mut command = Command::new("rustup");
    command.args([
        "run",
        version,
        "cargo",
        "check",
        "--quiet",
        "--package",
        LIBRARY,
        "--lib",
        "--all-features",
    ]);
    run(command.args(["--target-dir", "target/lowest-rust"]))
}
