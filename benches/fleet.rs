//! `cargo bench -p benches --bench fleet`
//!
//! Decisions of a fleet: many instances with few requests at a time each, so that most calls of a script have one check.
//! Each instance uses one connection, all share one Redis, and 100,000 callers come in random order. In each round, every
//! fleet is measured with this crate, with a plain script of one decision, with redis-cell's module, and with three calls
//! that decide nothing. Client and server share the machine.
//!
//! `-- TEXT...` runs only the fleets whose name contains a text: `-- 8x1`. `-- --quick` is a short trial. `-- --save`
//! also writes the ratios into `docs/performance.md`, and all cases into `benches/RESULTS.md`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a benchmark fails by panicking"
)]

use std::env;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use benches::cases::{MANY, address, one_by_one};
use benches::meter::{Amount, Measure, load};
use benches::page::{self, median};
use benches::redis_cell;
use benches::support::RedisServer;
use futures_util::future::join_all;
use redis::{Cmd, Value, cmd};
use tokio::runtime;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, Policy, Quota, RedisStore, Strategy, redis};

/// The number of rounds, and the time of each case in a round.
const ROUNDS: (usize, Duration) = (5, Duration::from_secs(1));
const QUICK: (usize, Duration) = (1, Duration::from_millis(100));

/// Number of instances, and of concurrent requests of each.
#[derive(Clone, Copy)]
struct Fleet(usize, usize);

const FLEETS: [Fleet; 6] = [
    Fleet(1, 1),
    Fleet(8, 1),
    Fleet(32, 1),
    Fleet(128, 1),
    Fleet(16, 4),
    Fleet(16, 16),
];

impl Fleet {
    fn name(self) -> String {
        format!("{}x{}", self.0, self.1)
    }

    fn tasks(self) -> u64 {
        (self.0 * self.1) as u64
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Case {
    /// `RedisStore`, one for each instance.
    Ours,
    /// A GCRA script for one key.
    Plain,
    /// `CL.THROTTLE` of redis-cell.
    Module,
    /// A script that reads the time and a key, and writes the key in place.
    Undecided,
    /// A script that returns a number.
    Empty,
    Get,
}

const CASES: [Case; 6] = [
    Case::Ours,
    Case::Plain,
    Case::Module,
    Case::Undecided,
    Case::Empty,
    Case::Get,
];

const UNDECIDED: &str = "
redis.call('TIME')
redis.call('GET', KEYS[1])
redis.call('SETRANGE', KEYS[1], '0', ARGV[1])
return ARGV[1]";

fn quota() -> Quota {
    Quota::per_hour(3_600)
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "this crate",
            Self::Plain => "a plain GCRA script",
            Self::Module => "redis-cell, `CL.THROTTLE`",
            Self::Undecided => "a script of TIME, GET, SETRANGE",
            Self::Empty => "a script of `return 1`",
            Self::Get => "GET",
        }
    }

    async fn run(self, fleet: Fleet, servers: &[RedisServer; 2], time: Duration) -> Measure {
        let server = &servers[usize::from(self == Self::Module)];
        let _: String = server.command("FLUSHALL").await;
        match self {
            Self::Ours => ours(fleet, server, time).await,
            _ => self.others(fleet, server, time).await,
        }
    }

    /// One multiplexed connection of redis-rs for each instance.
    async fn others(self, fleet: Fleet, server: &RedisServer, time: Duration) -> Measure {
        let connections = join_all((0..fleet.0).map(|_| server.connection())).await;
        let mut load_script = cmd("SCRIPT");
        load_script.arg("LOAD").arg(match self {
            Self::Empty => "return 1",
            _ => UNDECIDED,
        });
        let mut connection = server.connection().await;
        let hash: String = load_script.query_async(&mut connection).await.unwrap();
        load(&[server], fleet.tasks(), Amount::Time(time), |mut meter| {
            let mut connection = connections[meter.task % fleet.0].clone();
            let hash = hash.clone();
            async move {
                while meter.should_continue() {
                    let caller = meter.rng.u32(..MANY);
                    if self == Self::Plain {
                        one_by_one(&mut connection, quota(), caller).await;
                    } else {
                        let call = self.call(&hash, caller);
                        let _: Value = call.query_async(&mut connection).await.unwrap();
                    }
                    meter.record();
                }
                meter
            }
        })
        .await
    }

    fn call(self, hash: &str, caller: u32) -> Cmd {
        let key = key(caller);
        let mut call = Cmd::new();
        match self {
            Self::Get => call.arg("GET").arg(key),
            Self::Module => {
                let (limit, period) = (quota().limit(), quota().period().as_secs());
                // It grants one more than its burst.
                call.arg("CL.THROTTLE").arg(key).arg(limit - 1);
                call.arg(limit).arg(period).arg(1)
            }
            _ => call.arg("EVALSHA").arg(hash).arg(1).arg(key).arg(STATE),
        };
        call
    }
}

/// With the length of a state of the store.
const STATE: &str = "a state of 19 bytes";

/// A key as long as the store's.
fn key(caller: u32) -> String {
    format!("rl:{{{}}}:api:g", address(caller))
}

async fn ours(fleet: Fleet, server: &RedisServer, time: Duration) -> Measure {
    let stores = (0..fleet.0).map(|_| {
        let builder = RedisStore::builder(server.url()).connections(NonZeroUsize::MIN);
        builder.timeout(Duration::from_secs(20)).connect()
    });
    let stores: Vec<RedisStore> = join_all(stores)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let policies: Policies = Policy::new("api", Strategy::Gcra, quota()).unwrap().into();
    load(&[server], fleet.tasks(), Amount::Time(time), |mut meter| {
        let (store, policies) = (stores[meter.task % fleet.0].clone(), policies.clone());
        async move {
            while meter.should_continue() {
                let caller = Key::new(address(meter.rng.u32(..MANY)).to_string());
                let check = Check::take(caller, &policies, 1);
                let _ = store.check(check).await.unwrap();
                meter.record();
            }
            meter
        }
    })
    .await
}

/// The measurements of a fleet: for each case one per round.
type Measures = [Vec<Measure>; CASES.len()];

fn main() {
    let (options, texts): (Vec<String>, Vec<String>) =
        env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let has = |option: &str| options.iter().any(|given| given == option);
    let (save, (rounds, time)) = (has("--save"), if has("--quick") { QUICK } else { ROUNDS });
    assert!(
        !save || texts.is_empty(),
        "--save writes what all fleets have measured: leave out {texts:?}"
    );
    let is_wanted = |fleet: &Fleet| texts.is_empty() || texts.contains(&fleet.name());
    let fleets: Vec<Fleet> = FLEETS.into_iter().filter(is_wanted).collect();
    let servers = Arc::new([RedisServer::start(), redis_cell::start(&[])]);
    let mut measures: Vec<Measures> = fleets.iter().map(|_| Measures::default()).collect();
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for (fleet, measures) in fleets.iter().zip(&mut measures) {
            for (case, measures) in CASES.iter().zip(measures) {
                measures.push(run(*case, *fleet, &servers, time));
            }
        }
    }
    let (ratios, table) = (ratios(&fleets, &measures), table(&fleets, &measures));
    println!("{ratios}\n{table}");
    if save {
        page::save_table("docs/performance.md", "fleet ratios", &ratios);
        page::save_table("benches/RESULTS.md", "fleet table", &table);
    }
}

/// On a separate runtime, so that no task affects another case.
fn run(case: Case, fleet: Fleet, servers: &Arc<[RedisServer; 2]>, time: Duration) -> Measure {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let servers = Arc::clone(servers);
    runtime.block_on(async move {
        tokio::spawn(async move { case.run(fleet, &servers, time).await })
            .await
            .unwrap()
    })
}

/// The median of a case.
fn of(measures: &Measures, case: Case, value: fn(&Measure) -> f64) -> f64 {
    median(measures[case as usize].iter().map(value).collect())
}

/// The median of the ratio of this crate to another case, round by round.
fn ratio(measures: &Measures, base: Case, value: fn(&Measure) -> f64) -> f64 {
    let ours = measures[Case::Ours as usize].iter();
    let pairs = ours.zip(&measures[base as usize]);
    median(
        pairs
            .map(|(ours, base)| value(ours) / value(base))
            .collect(),
    )
}

fn ratios(fleets: &[Fleet], measures: &[Measures]) -> String {
    let mut text = String::from(
        "| instances x requests at a time | decisions/s | of a plain script | of the module | p50, of a plain script | \
         Redis us a decision, of a plain script | the same, of a script that decides nothing |\n\
         |---|--:|--:|--:|--:|--:|--:|\n",
    );
    for (fleet, measures) in fleets.iter().zip(measures) {
        let _ = writeln!(
            text,
            "| {} | {:.0} | {:.2} x | {:.2} x | {:.2} x | {:.2} x | {:.2} x |",
            fleet.name(),
            of(measures, Case::Ours, |m| m.per_second),
            ratio(measures, Case::Plain, |m| m.per_second),
            ratio(measures, Case::Module, |m| m.per_second),
            ratio(measures, Case::Plain, |m| m.p50),
            ratio(measures, Case::Plain, |m| m.server),
            ratio(measures, Case::Undecided, |m| m.server),
        );
    }
    text
}

fn table(fleets: &[Fleet], measures: &[Measures]) -> String {
    let mut text = String::from(
        "| instances x requests at a time | case | decisions/s | p50 us | p99 us | Redis us | client us |\n\
         |---|---|--:|--:|--:|--:|--:|\n",
    );
    for (fleet, measures) in fleets.iter().zip(measures) {
        for case in CASES {
            let value = |value| of(measures, case, value);
            let _ = writeln!(
                text,
                "| {} | {} | {:.0} | {:.1} | {:.1} | {:.2} | {:.2} |",
                fleet.name(),
                case.name(),
                value(|m| m.per_second),
                value(|m| m.p50),
                value(|m| m.p99),
                value(|m| m.server),
                value(|m| m.client),
            );
        }
    }
    text
}
