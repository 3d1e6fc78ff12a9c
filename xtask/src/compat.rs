//! `cargo xtask compat`: runs the tests that need a server, with every supported server version.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::root;
use crate::servers::{SERVERS, Server};
use crate::{Result, install};

const LIBRARY: &str = "tower-redis-ratelimit";

/// The tests: the target's name, its label in the table, and a prefix of test names. A target with
/// a prefix is one row of the table; a target without one has a row per module.
const TARGETS: [(&str, &str, &str); 4] = [
    (
        "tower_redis_ratelimit",
        "algorithms",
        "store::redis::tests::",
    ),
    ("tower_redis_ratelimit", "workers", "store::redis::worker::"),
    ("redis", "redis", ""),
    ("cluster", "cluster", ""),
];

/// The results of the tests of one module with one server.
#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// Runs the tests with all servers, or with the servers whose names contain `only`. Prints the
/// counts as a table.
pub(crate) fn compat(only: &str) -> Result {
    install::redis_server()?;
    let servers: Vec<&Server> = SERVERS
        .iter()
        .filter(|server| server.name.contains(only))
        .collect();
    if servers.is_empty() {
        let names: Vec<&str> = SERVERS.iter().map(|server| server.name).collect();
        return Err(format!(
            "no server is named {only:?}, but: {}",
            names.join(", ")
        ));
    }
    // Fetch all servers before the first test, so that a missing one is reported early.
    let servers: Vec<_> = servers
        .into_iter()
        .map(|server| Ok((server, server.find()?)))
        .collect::<Result<Vec<_>>>()?;
    let programs = build()?;

    let (mut table, mut notes, mut failures) =
        (Table::default(), BTreeMap::<_, Vec<_>>::new(), vec![]);
    for (server, (binary, version)) in &servers {
        for (program, label, filter) in &programs {
            let suite = Suite {
                program,
                filter,
                server,
                binary,
            };
            let row = |test: &str| match test.split_once("::") {
                Some((module, _)) if filter.is_empty() => format!("{label}::{module}"),
                _ => label.to_string(),
            };
            eprintln!("{} {version}: {label}", server.name);
            let all = suite.list()?;
            let mut results = 0;
            for test in &all {
                if let Some(lack) = server
                    .lacks
                    .iter()
                    .find(|lack| lack.tests.contains(&test.as_str()))
                {
                    table
                        .entry(row(test))
                        .or_default()
                        .entry(server.name)
                        .or_default()
                        .skipped += 1;
                    notes
                        .entry(format!("`{label}::{test}`: {}", lack.what))
                        .or_default()
                        .push(server.name);
                    results += 1;
                }
            }
            for (test, passed) in suite.run()? {
                results += 1;
                let counts = table
                    .entry(row(&test))
                    .or_default()
                    .entry(server.name)
                    .or_default();
                if passed {
                    counts.passed += 1;
                } else {
                    counts.failed += 1;
                    failures.push(format!("{}: {label} {test}", server.name));
                }
            }
            if results != all.len() {
                return Err(format!(
                    "{}: {label}: {} tests, but {results} results",
                    server.name,
                    all.len()
                ));
            }
        }
    }

    let header: Vec<String> = servers
        .iter()
        .map(|(server, (_, version))| full_version(server.name, version))
        .collect();
    print(
        &header,
        &table,
        &servers
            .iter()
            .map(|(server, _)| server.name)
            .collect::<Vec<_>>(),
    );
    println!();
    for (note, servers) in notes {
        println!("not with {}: {note}", servers.join(", "));
    }
    if failures.is_empty() {
        Ok(())
    } else {
        Err(format!("\nfailed:\n{}", failures.join("\n")))
    }
}

/// The counts per module and server.
type Table = BTreeMap<String, BTreeMap<&'static str, Counts>>;

/// Turns `Redis 6.2` into `Redis 6.2.14`.
fn full_version(name: &str, version: &str) -> String {
    format!("{} {version}", name.split(' ').next().unwrap_or_default())
}

fn print(header: &[String], table: &Table, servers: &[&str]) {
    println!(
        "\n| | {} |\n|---|{}",
        header.join(" | "),
        "--:|".repeat(servers.len())
    );
    let row = |name: &str, cell: &dyn Fn(&str) -> String| {
        println!(
            "| {name} | {} |",
            servers
                .iter()
                .map(|server| cell(server))
                .collect::<Vec<_>>()
                .join(" | ")
        );
    };
    let text = |passed: usize, failed: usize, skipped: usize| match (failed, skipped) {
        (0, 0) => passed.to_string(),
        (0, _) => format!("{passed} of {}", passed + skipped),
        _ => format!("{passed}, **{failed} failed**"),
    };
    for (module, by_server) in table {
        row(
            &format!("`{module}`"),
            &|server| match by_server.get(server) {
                Some(counts) => text(counts.passed, counts.failed, counts.skipped),
                None => "-".to_owned(),
            },
        );
    }
    row("all", &|server| {
        let sum = |of: fn(&Counts) -> usize| {
            table
                .values()
                .filter_map(|row| row.get(server))
                .map(of)
                .sum()
        };
        text(
            sum(|counts| counts.passed),
            sum(|counts| counts.failed),
            sum(|counts| counts.skipped),
        )
    });
}

/// A test program, a prefix of the names of its tests, and a server.
struct Suite<'a> {
    program: &'a PathBuf,
    filter: &'a str,
    server: &'a Server,
    binary: &'a PathBuf,
}

impl Suite<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(self.program);
        command
            .current_dir(root())
            .env("REDIS_SERVER", self.binary)
            .stderr(Stdio::inherit());
        if !self.filter.is_empty() {
            command.arg(self.filter);
        }
        command
    }

    /// Returns the names of all tests.
    fn list(&self) -> Result<Vec<String>> {
        let text = output(self.command().args(["--list", "--format", "terse"]))?;
        let tests: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_suffix(": test"))
            .map(str::to_owned)
            .collect();
        if tests.is_empty() {
            Err(format!("{:?} has no tests", self.program))
        } else {
            Ok(tests)
        }
    }

    /// Runs the tests that this server supports. Returns the name of each, and whether it passed.
    fn run(&self) -> Result<Vec<(String, bool)>> {
        let mut command = self.command();
        for test in self.server.lacks.iter().flat_map(|lack| lack.tests) {
            command.args(["--skip", test]);
        }
        let text = output(&mut command)?;
        let results = text.lines().filter_map(|line| {
            let (test, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
            // The name may be followed by a note that the test should panic.
            Some((
                test.split(' ').next().unwrap_or(test).to_owned(),
                result == "ok",
            ))
        });
        let results: Vec<_> = results.collect();
        if results.iter().any(|(_, passed)| !passed) || !text.contains("test result: ") {
            eprintln!("{text}");
        }
        if !text.contains("test result: ") {
            return Err(format!(
                "{:?} did not finish with {}",
                self.program, self.server.name
            ));
        }
        Ok(results)
    }
}

fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Compiles the test programs. Returns their paths, in the order of [`TARGETS`].
fn build() -> Result<Vec<(PathBuf, &'static str, &'static str)>> {
    let mut command = Command::new("cargo");
    command.args([
        "test",
        "--no-run",
        "--message-format",
        "json",
        "--package",
        LIBRARY,
        "--all-features",
        "--lib",
    ]);
    command
        .args(["--test", "redis", "--test", "cluster"])
        .stderr(Stdio::inherit());
    let text = output(command.current_dir(root()))?;
    let built: Vec<Value> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    TARGETS
        .into_iter()
        .map(|(target, label, filter)| {
            let of_target = |message: &&Value| {
                message["target"]["name"] == target && message["profile"]["test"] == true
            };
            let program = built
                .iter()
                .filter(of_target)
                .find_map(|message| message["executable"].as_str());
            let program =
                program.ok_or_else(|| format!("cargo has not built the tests of {target}"))?;
            Ok((PathBuf::from(program), label, filter))
        })
        .collect()
}
