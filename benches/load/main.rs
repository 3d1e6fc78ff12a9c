//! `cargo bench -p benches --bench load`
//!
//! Decisions per second through the whole middleware, compared with other designs on the same
//! Redis, in one run: rounds of all cases in turn, medians, ratios first. Client and server share
//! the machine.
//!
//! `-- TEXT...` runs only the cases whose name contains one of the texts: `-- cluster` those on a
//! cluster, and the cases that they are compared with. `-- --quick` is a short trial. `-- --save`
//! also writes some ratios into `docs/performance.md`, the other tables into `benches/RESULTS.md`, and draws
//! `docs/throughput.svg`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a benchmark fails by panicking"
)]

mod report;

use std::env;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use benches::cases::{self, Case, Servers};
use benches::meter::{Amount, Measure};
use benches::page;
use report::Report;
use tokio::runtime;

/// Number of rounds, and the amount per case in each.
const ROUNDS: (usize, Amount) = (5, Amount::Time(Duration::from_secs(1)));
const QUICK: (usize, Amount) = (1, Amount::Time(Duration::from_millis(100)));

fn main() {
    let (options, texts): (Vec<String>, Vec<String>) =
        env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let has = |option: &str| options.iter().any(|given| given == option);
    let (save, (rounds, amount)) = (has("--save"), if has("--quick") { QUICK } else { ROUNDS });
    assert!(
        !save || texts.is_empty(),
        "--save writes what all cases have measured: leave out {texts:?}"
    );

    let cases = cases::named(&texts);
    let allocations = allocations(&cases, &texts);
    let servers = Arc::new(Servers::start());
    let mut measures = vec![vec![]; cases.len()];
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for (case, measures) in cases.iter().zip(&mut measures) {
            measures.push(run(*case, &servers, amount));
        }
    }
    let report = Report {
        cases,
        measures,
        allocations,
    };
    let (ratios, table) = (report.ratios(), report.table());
    println!("{ratios}\n{table}");
    if save {
        page::save_table(
            "docs/performance.md",
            "ratios",
            &report::of_the_page(&ratios),
        );
        page::save_table("benches/RESULTS.md", "ratios", &ratios);
        page::save_table("benches/RESULTS.md", "table", &table);
        page::save_picture("docs/throughput.svg", &report.picture().unwrap());
    }
}

/// Runs a case on a separate runtime, so that no task affects another case.
fn run(case: Case, servers: &Arc<Servers>, amount: Amount) -> Measure {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let servers = Arc::clone(servers);
    runtime.block_on(async move {
        tokio::spawn(async move { case.run(&servers, amount).await })
            .await
            .unwrap()
    })
}

/// Returns the allocations per request, counted in a separate process, since counting takes time.
fn allocations(cases: &[Case], texts: &[String]) -> Vec<Option<f64>> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    command
        .args(["bench", "--quiet", "--bench", "allocations", "--"])
        .args(texts)
        .stderr(Stdio::inherit());
    let output = command.output().expect("cargo");
    assert!(output.status.success(), "{command:?} failed");
    let text = String::from_utf8(output.stdout).unwrap();
    let count = |case: &Case| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{}: ", case.full_name())));
        line.map(|count| count.parse().expect(count))
    };
    cases.iter().map(count).collect()
}
