//! `cargo run --release`, in `peers`
//!
//! This crate and other limiters, on Redis servers that it starts: decisions per second, the responses during an outage, and
//! the exactness of concurrent grants. `README.md` has the cases and the results.
//!
//! `speed`, `outage` or `exact` has only that, and `--peer TEXT` only this crate and the peers whose name has the text.
//! `--rounds N` takes the medians of N rounds; the default is 3. `--quick` is a short trial. `--save` also writes the tables
//! into `README.md`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a benchmark fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the time")]

mod exact;
mod outage;
mod peer;
mod peers;
mod report;
mod speed;

use std::env;
use std::time::Duration;

use benches::meter::{Amount, Measure};
use benches::page;
use futures_util::future::join_all;
use outage::{Fault, Outage};
use peer::Measured;
use peers::{LOCAL, SHARED};
use report::Speeds;
use speed::Load;
use tokio::runtime::{Builder, Runtime};

/// The cases of limiters that count in Redis, with their number of concurrent requests.
const SHARED_CASES: [(Load, u64); 10] = [
    (Load::Granted, 1),
    (Load::Granted, 64),
    (Load::Granted, 256),
    (Load::Denied, 64),
    (Load::Denied, 256),
    (Load::Living, 64),
    (Load::Living, 256),
    (Load::ShortLived, 64),
    (Load::ShortLived, 256),
    (Load::TenLimits, 64),
];
const LOCAL_CASES: [(Load, u64); 6] = [
    (Load::Granted, 1),
    (Load::Granted, 64),
    (Load::Denied, 64),
    (Load::Living, 64),
    (Load::ShortLived, 64),
    (Load::TenLimits, 64),
];

type Peers = Vec<&'static dyn Measured>;

const AMOUNT: Amount = Amount::Time(Duration::from_millis(600));
const QUICK: Amount = Amount::Time(Duration::from_millis(100));

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    let known = [
        "speed", "outage", "exact", "--peer", "--rounds", "--quick", "--save",
    ];
    let is_value = |i: usize| i > 0 && ["--peer", "--rounds"].contains(&args[i - 1].as_str());
    if let Some((_, other)) = args
        .iter()
        .enumerate()
        .find(|(i, arg)| !is_value(*i) && !known.contains(&arg.as_str()))
    {
        eprintln!(
            "{other}: use [speed] [outage] [exact] [--peer TEXT] [--rounds N] [--quick] [--save]"
        );
        std::process::exit(2);
    }
    let has = |option: &str| args.iter().any(|arg| arg == option);
    let value = |option: &str| {
        Some(
            args.get(args.iter().position(|arg| arg == option)? + 1)
                .expect(option)
                .as_str(),
        )
    };
    let rounds = value("--rounds").map_or(3, |rounds| rounds.parse().expect("--rounds N"));
    let (rounds, amount) = if has("--quick") {
        (1, QUICK)
    } else {
        (rounds, AMOUNT)
    };
    let named = |peers: &[&'static dyn Measured]| -> Peers {
        let (first, others) = peers.split_first().unwrap();
        let others = others
            .iter()
            .filter(|peer| value("--peer").is_none_or(|text| peer.name().contains(text)));
        [first].into_iter().chain(others).copied().collect()
    };
    let shared = named(&SHARED);
    assert!(
        !has("--save") || value("--peer").is_none(),
        "--save writes of all peers: leave out --peer"
    );
    let parts = ["speed", "outage", "exact"];
    let wants = |part: &str| has(part) || !parts.into_iter().any(has);

    let show = |mark: &str, table: &str| {
        println!("{mark}\n\n{table}");
        if has("--save") {
            page::save_table("peers/README.md", mark, table);
        }
    };
    if wants("speed") {
        let shared = speeds_of(&shared, &SHARED_CASES, rounds, amount);
        let local = speeds_of(&named(&LOCAL), &LOCAL_CASES, rounds, amount);
        show("faster", &report::faster(&[&shared, &local]));
        show("shared", &shared.tables());
        show("local", &local.tables());
    }
    if wants("outage") {
        show(
            "outage",
            &Fault::ALL
                .map(|fault| report::outage(fault, &outages(&shared, fault)))
                .concat(),
        );
    }
    if wants("exact") {
        show("exact", &report::exact(&exact(&shared, rounds)));
    }
}

/// In each round every case in turn, and in each case every peer.
fn speeds_of(
    peers: &Peers,
    cases: &'static [(Load, u64)],
    rounds: usize,
    amount: Amount,
) -> Speeds {
    let servers: Vec<_> = peers.iter().map(|peer| peer.server(&[])).collect();
    let mut measures: Vec<Vec<Vec<Measure>>> = vec![vec![vec![]; cases.len()]; peers.len()];
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for (case, &(load, tasks)) in cases.iter().enumerate() {
            for ((peer, server), measures) in peers.iter().zip(&servers).zip(&mut measures) {
                if peer.can(load) {
                    // On a separate runtime, so that no task affects another peer.
                    measures[case]
                        .push(runtime().block_on(peer.speed(server, load, tasks, amount)));
                }
            }
        }
    }
    Speeds {
        names: peers.iter().map(|peer| peer.name()).collect(),
        cases,
        shared: cases == SHARED_CASES,
        measures,
    }
}

/// All concurrently: they send so few requests that the machine is usually idle.
fn outages(peers: &Peers, fault: Fault) -> Vec<(&'static str, Outage)> {
    eprintln!("Redis {}", fault.name());
    let run = |peer: &'static dyn Measured| async move { (peer.name(), peer.outage(fault).await) };
    let run = |peer: &&'static dyn Measured| run(*peer);
    runtime().block_on(join_all(
        peers
            .iter()
            .map(|peer| async { tokio::spawn(run(peer)).await.unwrap() }),
    ))
}

/// The minimum and maximum of the grants by each number of instances.
fn exact(
    peers: &Peers,
    rounds: usize,
) -> Vec<(&'static str, [(u64, u64); exact::INSTANCES.len()])> {
    eprintln!("exactness");
    let granted = |peer: &dyn Measured, instances| {
        let granted = (0..rounds).map(|_| runtime().block_on(peer.exact(instances)));
        granted.fold((u64::MAX, 0), |(least, most), granted| {
            (least.min(granted), most.max(granted))
        })
    };
    peers
        .iter()
        .map(|peer| {
            (
                peer.name(),
                exact::INSTANCES.map(|instances| granted(*peer, instances)),
            )
        })
        .collect()
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}
