//! `cargo xtask test`: everything that must hold before a change is merged, on any machine.

mod command;
mod compat;
mod metadata;
mod pages;
mod pictures;
mod redis;
mod servers;
mod test;

use std::env;
use std::process::{Command, ExitCode};

use command::run;

const USAGE: &str = "\
usage: cargo xtask test                     checks all that CI checks, and runs all tests
       cargo xtask compat                   runs the tests that talk to a server with every version of it
       cargo xtask compat SERVER            the same with some, such as \"Redis 8\"
       cargo xtask simulate [SEEDS]         runs the simulation with so many seeds, or a million
       cargo xtask simulate --from SEED     the same from this seed on
       cargo xtask simulate --seed SEED     replays a seed with its log
       cargo xtask pictures                 draws the pictures of docs/choosing.md
       cargo xtask pictures --check         fails if they are not what it would draw";

type Result<T = ()> = std::result::Result<T, String>;

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => test::test(),
        ["compat"] => compat::compat(""),
        ["compat", server] => compat::compat(server),
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
