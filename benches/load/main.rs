//! `cargo bench --bench load`
//!
//! Decisions per second through the whole middleware, beside what others do with the same Redis, in one run: rounds of
//! all cases in turn, medians, ratios first. Client and server share the machine.
//!
//! `-- TEXT...` runs only the cases whose name has one of the texts: `-- cluster` those on a cluster, and what they are
//! compared with. `-- --save` also writes the tables into
//! `docs/performance.md` and draws `docs/throughput.svg`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the time")]
#![allow(unreachable_pub, dead_code, reason = "shared with another benchmark")]

mod cases;
mod cluster;
mod meter;
#[path = "../../tests/cluster/nodes.rs"]
mod nodes;
mod report;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::{env, fs};

use cases::{Case, Servers};
use cluster::Sites;
use meter::{Amount, Measure};
use report::Report;
use support::RedisServer;
use tokio::runtime;

const ROUNDS: usize = 5;

fn main() {
    let (options, texts): (Vec<String>, Vec<String>) = env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let save = options.iter().any(|option| option == "--save");
    assert!(!save || texts.is_empty(), "--save writes what all cases have measured: leave out {texts:?}");

    let cases = cases::named(&texts);
    let allocations = allocations(&cases, &texts);
    let servers = Arc::new(Servers { single: RedisServer::start(), sites: Sites::default() });
    let mut measures = vec![vec![]; cases.len()];
    for round in 1..=ROUNDS {
        eprintln!("round {round} of {ROUNDS}");
        for (case, measures) in cases.iter().zip(&mut measures) {
            measures.push(run(*case, &servers));
        }
    }
    let report = Report { cases, measures, allocations };
    let (ratios, table) = (report.ratios(), report.table());
    println!("{ratios}\n{table}");
    if save {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let page = fs::read_to_string(docs.join("performance.md")).unwrap();
        let page = replace(&replace(&page, "ratios", &ratios), "table", &table);
        fs::write(docs.join("performance.md"), page).unwrap();
        fs::write(docs.join("throughput.svg"), report.picture().unwrap()).unwrap();
    }
}

/// On a runtime of its own, so that no task of one is in the way of another.
fn run(case: Case, servers: &Arc<Servers>) -> Measure {
    let runtime = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let servers = Arc::clone(servers);
    runtime.block_on(async move { tokio::spawn(async move { case.run(&servers, Amount::Time).await }).await.unwrap() })
}

/// How many allocations a request takes: counted by a process of its own, since counting takes time.
fn allocations(cases: &[Case], texts: &[String]) -> Vec<Option<f64>> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    command.args(["bench", "--quiet", "--bench", "allocations", "--"]).args(texts).stderr(Stdio::inherit());
    let output = command.output().expect("cargo");
    assert!(output.status.success(), "{command:?} failed");
    let text = String::from_utf8(output.stdout).unwrap();
    let count = |case: &Case| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{}: ", case.full_name())));
        line.map(|count| count.parse().expect(count))
    };
    cases.iter().map(count).collect()
}

/// Puts a table in the place of the one between two marks.
fn replace(page: &str, mark: &str, table: &str) -> String {
    let (open, close) = (format!("<!-- {mark} -->\n"), format!("<!-- end of {mark} -->"));
    let start = page.find(&open).expect(&open) + open.len();
    let end = page.find(&close).expect(&close);
    format!("{}{table}{}", &page[..start], &page[end..])
}
