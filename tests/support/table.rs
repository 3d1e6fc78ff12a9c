//! What the fault matrices of a single server and of a cluster have in common: their tests, their tables, and what a row
//! came to.

use std::time::Duration;

/// The shortest that a fault lasts: several deadlines, and long enough for probes to fail.
pub const FAULT: Duration = Duration::from_millis(700);
/// What a busy machine may add to a wait, beside a stall.
pub const SLACK: Duration = Duration::from_millis(900);

/// Makes a test of each row.
#[allow(unused_macros, reason = "the benchmark makes a table only")]
macro_rules! tests {
    ($($test:ident: $name:literal => $fault:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            println!("{}: {:?}", $name, matrix::run($fault).await);
        }
    )*};
}

/// Makes a table of all rows.
macro_rules! table {
    ($($test:ident: $name:literal => $fault:expr;)*) => {
        #[allow(dead_code, reason = "the tests have a function for each row")]
        pub const ROWS: &[(&str, Fault)] = &[$(($name, $fault)),*];
    };
}

/// What a row came to.
#[derive(Debug)]
#[allow(dead_code, reason = "the tests only show it")]
pub struct Outcome {
    pub requests: u64,
    pub errors: u64,
    pub worst: Duration,
    /// Over the spent and the tight callers, in a cluster those of all masters.
    pub granted: u64,
    pub allowed: u64,
    /// How much more the bound lets be granted. It does not hold where a replica takes over.
    pub bound: u64,
    /// Checks that Redis was asked and did not answer in time.
    pub unanswered: u64,
    pub reconciled: u64,
    /// From the moment that Redis, the master or its heir could answer until all instances were back to it.
    pub recovery: Option<Duration>,
    /// What the limiter took of a request before the fault, and once the breaker was open.
    pub healthy_p99: Option<Duration>,
    pub open_p99: Option<Duration>,
    /// What was granted to callers of other masters from the fault on: by Redis, and by the instances.
    pub others: Option<(u64, u64)>,
}
