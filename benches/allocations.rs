//! `cargo bench -p benches --bench allocations`
//!
//! Allocations per request, in every case of `cargo bench -p benches --bench load`, including those
//! of the Redis client. `-- TEXT...` measures only the cases whose name contains one of the texts.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a benchmark fails by panicking"
)]

use std::env;

use benches::cases::{self, Case, Servers, Subject};
use benches::meter::Amount;
use tokio::runtime;

/// Requests of the smaller run: a multiple of every number of tasks.
const FEW: u64 = 20 * 1024;
const MORE: u64 = 40 * 1024;

fn main() {
    let texts: Vec<String> = env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let servers = Servers::start();
    for case in cases::named(&texts) {
        // Other cases do not run in this process, or allocate in addition to their requests.
        if !matches!(case.0, Subject::Get | Subject::Bare | Subject::Http(_)) {
            let count =
                (count(case, &servers, MORE) - count(case, &servers, FEW)) / (MORE - FEW) as f64;
            println!("{}: {count:.2}", case.full_name());
        }
    }
}

/// Returns the allocations of a run with this number of requests.
fn count(case: Case, servers: &Servers, requests: u64) -> f64 {
    // Allocations are counted per thread.
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let info = allocation_counter::measure(|| {
        runtime.block_on(case.run(servers, Amount::Count(requests)));
    });
    info.count_total as f64
}
