//! `cargo xtask test`: everything that must hold before a change is merged, on any machine.

mod pictures;

use std::env;
use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;

const USAGE: &str = "\
usage: cargo xtask test                     checks formatting, lints, docs, MSRV and examples, and runs all tests
       cargo xtask simulate [SEEDS]         runs the simulation with so many seeds, or a million
       cargo xtask simulate --from SEED     the same from this seed on
       cargo xtask simulate --seed SEED     replays a seed with its log
       cargo xtask pictures                 draws the pictures of docs/choosing.md
       cargo xtask pictures --check         fails if they are not what it would draw";

type Result<T = ()> = std::result::Result<T, String>;

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => test(),
        ["simulate"] => simulate(&[("SEEDS", "1000000")]),
        ["simulate", "--seed", seed] => simulate(&[("SEED", seed)]),
        ["simulate", "--from", from] => simulate(&[("FROM", from), ("SEEDS", "1000000")]),
        ["simulate", seeds] => simulate(&[("SEEDS", seeds)]),
        ["pictures"] => pictures::pictures(false),
        ["pictures", "--check"] => pictures::pictures(true),
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

fn test() -> Result {
    redis_server()?;
    cargo(&["fmt", "--all", "--check"])?;
    rust_version()?;
    cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"])?;
    // Each feature only adds: the library must also build without any.
    cargo(&["clippy", "--lib", "--no-default-features", "--", "-D", "warnings"])?;
    run(Command::new("cargo").args(["doc", "--no-deps", "--all-features"]).env("RUSTDOCFLAGS", "-D warnings"))?;
    cargo(&["build", "--examples"])?;
    pictures::pictures(true)?;
    cargo(&["test", "--doc", "--all-features"])?;
    // What is said where a feature is missing.
    cargo(&["test", "--test", "redis", "without_the_feature"])?;
    // Last, since its last lines are the counts.
    if succeeds("cargo", &["nextest", "--version"]) {
        cargo(&["nextest", "run", "--workspace", "--all-features"])
    } else {
        cargo(&["test", "--workspace", "--all-features", "--lib", "--bins", "--tests"])
    }
}

/// Runs the simulation of the fallback store, optimized. It is a unit test, so that it sees all parts of the library.
fn simulate(settings: &[(&str, &str)]) -> Result {
    let mut command = Command::new("cargo");
    command.args(["test", "--release", "--lib", "--package", "tower-redis-ratelimit"]);
    command.args(["simulation::every_seed_keeps_the_rules", "--", "--nocapture"]);
    for (name, value) in settings {
        command.env(format!("SIMULATE_{name}"), value);
    }
    run(&mut command)
}

/// Finds `redis-server`, or installs it with the system's package manager.
fn redis_server() -> Result {
    if succeeds("redis-server", &["--version"]) {
        return Ok(());
    }
    let installers: [&[&str]; 5] = [
        &["apt-get", "install", "--yes", "--no-install-recommends", "redis-server"],
        &["dnf", "install", "--assumeyes", "redis"],
        &["apk", "add", "redis"],
        &["pacman", "--sync", "--noconfirm", "redis"],
        &["brew", "install", "redis"],
    ];
    for installer in installers {
        if !succeeds(installer[0], &["--version"]) {
            continue;
        }
        // Without its lists, apt finds no package.
        if installer[0] == "apt-get" {
            run(&mut privileged(&["apt-get", "update"]))?;
        }
        run(&mut privileged(installer))?;
        return match succeeds("redis-server", &["--version"]) {
            true => Ok(()),
            false => Err(format!("{} has run, and `redis-server` is still not on the PATH", installer[0])),
        };
    }
    Err("the tests need `redis-server` on the PATH, and no package manager known here could install it: \
         see https://redis.io/docs/latest/operate/oss_and_stack/install/"
        .to_owned())
}

/// The command, with `sudo` where there is one and the package manager wants it.
fn privileged(command: &[&str]) -> Command {
    let words = match command[0] != "brew" && succeeds("sudo", &["-n", "true"]) {
        true => [&["sudo"], command].concat(),
        false => command.to_vec(),
    };
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// The Rust version that we state must be enough for every dependency of the library.
fn rust_version() -> Result {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--all-features"])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let find = |id: &Value| packages.iter().find(|package| package["id"] == *id);

    let root = &metadata["resolve"]["root"];
    let ours = version(find(root).ok_or("cargo metadata lists no root package")?);
    let nodes = metadata["resolve"]["nodes"].as_array().ok_or("cargo metadata resolves nothing")?;
    let (mut seen, mut next) = (vec![], vec![root]);
    while let Some(id) = next.pop() {
        if seen.contains(&id) {
            continue;
        }
        seen.push(id);
        let dependencies = nodes.iter().find(|node| node["id"] == *id).and_then(|node| node["deps"].as_array());
        for dependency in dependencies.into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array();
            if kinds.into_iter().flatten().any(|kind| kind["kind"].is_null()) {
                next.push(&dependency["pkg"]);
            }
        }
    }
    for package in seen.into_iter().filter_map(find) {
        if version(package) > ours {
            return Err(format!(
                "{} needs Rust {}, more than the rust-version in Cargo.toml",
                package["name"], package["rust_version"]
            ));
        }
    }
    Ok(())
}

/// `rust-version` as numbers; empty, and so below all others, where there is none.
fn version(package: &Value) -> Vec<u32> {
    let text = package["rust_version"].as_str().unwrap_or_default();
    text.split('.').map_while(|part| part.parse().ok()).chain([0, 0]).take(3).collect()
}

fn cargo(args: &[&str]) -> Result {
    run(Command::new("cargo").args(args))
}

fn run(command: &mut Command) -> Result {
    eprintln!("+ {command:?}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?} failed: {status}")),
        Err(error) => Err(format!("{command:?} could not be started: {error}")),
    }
}

fn succeeds(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
