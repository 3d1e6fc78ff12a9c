//! Shared by the fault matrices of a single server and of a cluster: their tests, their tables, and
//! the outcome of a row.

use std::time::Duration;

/// Minimum duration of a fault: several deadlines, and long enough for probes to fail.
pub const FAULT: Duration = Duration::from_millis(700);
/// Time that a busy machine may add to a wait, in addition to a stall.
pub const SLACK: Duration = Duration::from_millis(900);

/// Makes a test of each row, which `matrix::run` runs, or the function that is named first.
#[allow(unused_macros, reason = "the benchmark makes a table only")]
macro_rules! tests {
    (by $run:path; $($test:ident: $name:literal => $fault:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            println!("{}: {:?}", $name, $run($fault).await);
        }
    )*};
    ($($rows:tt)*) => {
        tests! { by matrix::run; $($rows)* }
    };
}

/// Makes a table of all rows.
macro_rules! table {
    ($($test:ident: $name:literal => $fault:expr;)*) => {
        #[allow(dead_code, reason = "the tests have a function for each row")]
        pub const ROWS: &[(&str, Fault)] = &[$(($name, $fault)),*];
    };
}

/// The outcome of a row.
#[derive(Debug)]
#[allow(dead_code, reason = "the tests only show it")]
pub struct Outcome {
    pub requests: u64,
    pub errors: u64,
    pub worst: Duration,
    /// Units granted to the spent and the tight callers; in a cluster, to those of all masters.
    pub granted: u64,
    pub allowed: u64,
    /// Units that may be granted beyond `allowed`. Not checked if a replica takes over.
    pub bound: u64,
    /// Checks without a timely reply from Redis.
    pub unanswered: u64,
    pub reconciled: u64,
    /// Time from the recovery of the failed server, or of its successor, until all instances used it
    /// again.
    pub recovery: Option<Duration>,
    /// Time that the limiter added to a request before the fault, and after the breaker had opened.
    pub healthy_p99: Option<Duration>,
    pub open_p99: Option<Duration>,
    /// Units granted to callers of other masters since the fault: by Redis, and by the instances.
    pub others: Option<(u64, u64)>,
}
