//! `cargo bench -p benches --bench instructions`
//!
//! Instructions per request through the whole middleware without Redis, with `tower_governor` beside it, counted by Valgrind's
//! `callgrind`, which must be installed. They include those that make the request and drop the response. `-- TEXT...` counts only in the cases whose name contains one of the texts.
//!
//! `FILES=1 cargo bench --profile dev -p benches --bench instructions` lists the files of `src` with lines that each request runs,
//! by way: locally, to Redis, through a healthy fallback, and through a queue. A file of which a request runs only getters, conversions and calls of other files is
//! not counted ([`PASSING`]). The profile `dev` inlines nothing, and has the lines.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a benchmark fails by panicking"
)]

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;
use std::{env, fs, mem};

use benches::cases::{self, Case, Servers};
use benches::meter::Amount;
use tokio::runtime;

/// Requests of the smaller run.
const FEW: u64 = 1_000;
const MORE: u64 = 11_000;
/// Set in the process that Valgrind runs: the number of requests.
const REQUESTS: &str = "INSTRUCTIONS_REQUESTS";

/// The files that only pass a plain request on.
const PASSING: &[&str] = &[
    "gate/settings.rs",
    "lib.rs",
    "limit/policies.rs",
    "limit/policy.rs",
    "limit/quota.rs",
    "limit/strategy/frees.rs",
    "limit/strategy/mod.rs",
    "limit/strategy/writer.rs",
    "middleware/mod.rs",
    "middleware/rate_limit/service.rs",
    "observe/misses.rs",
    "store/backend.rs",
    "store/fallback/mod.rs",
    "store/mod.rs",
    "store/redis/link/errors.rs",
    "store/redis/script/mod.rs",
    "store/redis/topology/mod.rs",
    "store/redis/topology/node.rs",
    "store/redis/worker/clock.rs",
    "util/clock.rs",
    "util/copies.rs",
    "util/mod.rs",
    "util/once.rs",
];

/// Instructions by the file of their line, if it is known.
type Files = BTreeMap<String, u64>;

fn main() {
    let texts: Vec<String> = env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let lists_files = env::var_os("FILES").is_some();
    let mut cases = if lists_files {
        cases::ways(&texts)
    } else {
        cases::named(&texts)
    };
    cases.retain(|Case(subject, _)| lists_files || subject.is_local());
    if let Ok(requests) = env::var(REQUESTS) {
        assert_eq!(cases.len(), 1, "{texts:?}");
        return run(cases[0], requests.parse().unwrap());
    }
    for case in cases {
        let name = case.full_name();
        let mut rest = instructions(&name, MORE);
        let few = instructions(&name, FEW);
        for (file, count) in &mut rest {
            *count = count.saturating_sub(few.get(file).copied().unwrap_or(0));
        }
        if lists_files {
            print_files(&name, &rest);
        } else {
            println!("{name}: {}", rest.values().sum::<u64>() / (MORE - FEW));
        }
    }
}

fn run(case: Case, requests: u64) {
    let servers = Servers::start();
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(case.run(&servers, Amount::Count(requests)));
}

/// Returns the instructions of a process that sends this number of requests.
fn instructions(case: &str, requests: u64) -> Files {
    let out = tempfile::NamedTempFile::new().unwrap();
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", out.path().display()))
        .arg(env::current_exe().unwrap())
        .arg(case)
        .env(REQUESTS, requests.to_string())
        .output()
        .expect("valgrind is installed");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    by_file(&fs::read_to_string(out.path()).unwrap())
}

/// Reads a file of callgrind: lines of costs, below the file whose lines they are of.
fn by_file(profile: &str) -> Files {
    let mut names = HashMap::new();
    let mut files = Files::new();
    let mut file = String::new();
    let mut is_call = false;
    for line in profile.lines() {
        match line.split_once('=') {
            Some((key @ ("fl" | "fi" | "fe" | "cfi" | "cfl"), name)) => {
                // `(7) src/lib.rs` names a file, which `(7)` repeats.
                let (id, name) = name.split_once(' ').unwrap_or((name, ""));
                if !name.is_empty() {
                    names.insert(id, name);
                }
                if key.starts_with('f') {
                    file = names[id].to_owned();
                }
            }
            Some(("calls", _)) => is_call = true,
            None if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) => {
                // The line after that of a call has the costs of the called function, which are in its own lines too.
                let is_of_callee = mem::take(&mut is_call);
                if !is_of_callee {
                    let cost = line.rsplit(' ').next().expect(line);
                    *files.entry(file.clone()).or_default() += cost.parse::<u64>().expect(line);
                }
            }
            _ => {}
        }
    }
    files
}

/// Prints the files of which each of the further requests has run an instruction.
fn print_files(case: &str, rest: &Files) {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("src");
    let mut counted = vec![];
    let mut passing = vec![];
    for (file, count) in rest {
        let count = count / (MORE - FEW);
        if let Ok(file) = Path::new(file).strip_prefix(&src)
            && count > 0
        {
            let file = file.to_str().unwrap();
            let is_passing = PASSING.contains(&file);
            let list = if is_passing {
                &mut passing
            } else {
                &mut counted
            };
            list.push(format!("{file} ({count})"));
        }
    }
    println!("{case}: {} files: {}", counted.len(), counted.join(", "));
    println!(
        "  and {} that pass it on: {}",
        passing.len(),
        passing.join(", ")
    );
}
