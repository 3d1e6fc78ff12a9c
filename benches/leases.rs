//! `cargo bench -p benches --bench leases`
//!
//! Grants per second of four instances that share one limit, with a demand of one
//! and a half times the limit, in parts of 8, 4, 2 and 1: without leases, and with them. `-- --save` draws
//! `docs/leases-plot.svg`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a benchmark fails by panicking"
)]

use std::env;
use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::time::Duration;

use benches::page;
use benches::support::RedisServer;
use futures_util::future::join_all;
use tokio::runtime;
use tokio::time::{MissedTickBehavior, interval};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::{Share, Store};
use tower_redis_ratelimit::{
    Fallback, Key, Leased, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
};

const PARTS: [u32; 4] = [8, 4, 2, 1];
const LIMIT: u32 = 2_000;
const DEMAND: u32 = LIMIT * 3 / 2;
const LEASE: Duration = Duration::from_millis(100);
/// A stall of the machine must not count as an outage.
const PATIENCE: Duration = Duration::from_secs(20);
/// Interval at which each instance sends its due requests, number of intervals per point of the picture, and of points.
const TICK: Duration = Duration::from_millis(5);
const TICKS: usize = 100;
const POINTS: usize = 40;

/// The results without leases, or with them.
struct Run {
    name: &'static str,
    /// Per instance and point.
    granted: Vec<[u32; POINTS]>,
    /// Calls to Redis per second.
    calls: u64,
}

fn main() {
    let quota = Quota::per_second(LIMIT).burst(LIMIT / 2);
    let policy = Policy::new("all", Strategy::Gcra, quota).unwrap();
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let runs = [
        ("without leases", policy.clone()),
        ("with leases", policy.leased(LEASE).unwrap()),
    ]
    .map(|(name, policy)| runtime.block_on(measure(name, policy.into())));
    for Run {
        name,
        granted,
        calls,
    } in &runs
    {
        let sums: Vec<u32> = granted.iter().map(|points| points.iter().sum()).collect();
        println!("{name}: {sums:?} granted, {calls} calls a second");
    }
    if env::args().any(|arg| arg == "--save") {
        page::save_picture("docs/leases-plot.svg", &draw(&runs));
    }
}

async fn measure(name: &'static str, policies: Policies) -> Run {
    let server = RedisServer::start();
    let share = Share::Fixed(NonZeroU32::new(PARTS.len() as u32).unwrap());
    let stores = join_all(PARTS.map(async |_| {
        let redis = RedisStore::builder(server.url())
            .timeout(PATIENCE)
            .connect()
            .await
            .unwrap();
        Leased::new(Fallback::new(redis, LocalStore::default()).deadline(PATIENCE))
            .share(share.clone())
    }))
    .await;
    let before = server.calls("evalsha").await;
    let instances = stores
        .into_iter()
        .zip(PARTS)
        .map(|(store, part)| tokio::spawn(ask(store, part, policies.clone())));
    let granted = join_all(instances)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let seconds = (TICK * (TICKS * POINTS) as u32).as_secs();
    Run {
        name,
        granted,
        calls: (server.calls("evalsha").await - before) / seconds,
    }
}

/// Returns the grants of an instance, per point.
async fn ask(store: impl Store, part: u32, policies: Policies) -> [u32; POINTS] {
    let (mut granted, mut due) = ([0; POINTS], 0.0);
    let each = f64::from(DEMAND * part) / f64::from(PARTS.iter().sum::<u32>()) * TICK.as_secs_f64();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for granted in &mut granted {
        for _ in 0..TICKS {
            ticks.tick().await;
            due += each;
            let answers = join_all(
                (0..due as u32).map(|_| store.check(Check::take(Key::GLOBAL, &policies, 1))),
            )
            .await;
            due = due.fract();
            *granted += answers
                .into_iter()
                .map(|answer| answer.unwrap().granted())
                .sum::<u32>();
        }
    }
    granted
}

const COLORS: [&str; 4] = ["#0072b2", "#56b4e9", "#009e73", "#e69f00"];
const WIDTH: f64 = 300.0;

/// Draws both runs side by side: the grants of the instances, stacked, and the limit.
fn draw(runs: &[Run]) -> String {
    let seconds = TICK.as_secs_f64() * TICKS as f64;
    let y = |per_second: f64| 250.0 - 200.0 * per_second / f64::from(DEMAND);
    let mut marks = String::new();
    for (
        i,
        Run {
            name,
            granted,
            calls,
        },
    ) in runs.iter().enumerate()
    {
        let left = 60.0 + (WIDTH + 30.0) * i as f64;
        let x = |point: usize| left + WIDTH * point as f64 / POINTS as f64;
        let mut below = [0.0; POINTS];
        for (points, color) in granted.iter().zip(COLORS) {
            let above: Vec<f64> = below
                .iter()
                .zip(points)
                .map(|(below, point)| below + f64::from(*point) / seconds)
                .collect();
            // A step per point, and back along the steps below.
            let forth: String = (0..POINTS)
                .map(|p| format!("L{:.1} {:.1}H{:.1}", x(p), y(above[p]), x(p + 1)))
                .collect();
            let back: String = (0..POINTS)
                .rev()
                .map(|p| format!("L{:.1} {:.1}H{:.1}", x(p + 1), y(below[p]), x(p)))
                .collect();
            let _ = writeln!(
                marks,
                "<path d=\"M{left} {:.1}{forth}{back}z\" fill=\"{color}\"/>",
                y(below[0])
            );
            below.copy_from_slice(&above);
        }
        let (right, limit, middle) = (left + WIDTH, y(f64::from(LIMIT)), left + WIDTH / 2.0);
        let _ = writeln!(
            marks,
            "<path d=\"M{left} {limit:.1}H{right}\" stroke=\"#222\" stroke-dasharray=\"4 3\"/>\n\
             <text x=\"{middle}\" y=\"38\" text-anchor=\"middle\" font-size=\"12\" fill=\"#222\">{name}: {calls} calls a second</text>",
        );
        for second in (0..=(POINTS as f64 * seconds) as usize).step_by(5) {
            let x = x((second as f64 / seconds) as usize);
            let _ = writeln!(
                marks,
                "<text x=\"{x:.1}\" y=\"266\" text-anchor=\"middle\">{second} s</text>"
            );
        }
    }
    for value in [0, LIMIT / 2, LIMIT, DEMAND] {
        let _ = writeln!(
            marks,
            "<text x=\"54\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            y(f64::from(value)) + 4.0
        );
    }
    for ((part, color), at) in PARTS.iter().zip(COLORS).zip([0.0, 14.0, 28.0, 42.0]) {
        let share = DEMAND * part / PARTS.iter().sum::<u32>();
        let _ = writeln!(
            marks,
            "<text x=\"698\" y=\"{:.1}\" fill=\"{color}\">sends {share}</text>",
            240.0 - at
        );
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"760\" height=\"276\" viewBox=\"0 0 760 276\" role=\"img\"\n \
         font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"11\" fill=\"#555\">\n\
         <title>Grants per second of four instances under one limit, without leases and with them</title>\n\
         <rect width=\"760\" height=\"276\" rx=\"4\" fill=\"#fff\"/>\n\
         <text x=\"10\" y=\"18\" font-size=\"14\" font-weight=\"bold\" fill=\"#222\">Grants per second of four instances, of {LIMIT} in all</text>\n\
         {marks}</svg>\n",
    )
}
