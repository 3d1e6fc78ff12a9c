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
use std::time::Duration;

use benches::page;
use benches::support::RedisServer;
use futures_util::future::join_all;
use svg::{WIDTH, legend, strong, svg, text};
use tokio::runtime;
use tokio::time::{MissedTickBehavior, interval};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, Key, Leased, LocalStore, Policies, Policy, Quota, RedisStore, Strategy,
};

#[path = "../xtask/src/svg.rs"]
mod svg;

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
    let stores = join_all(PARTS.map(async |_| {
        let redis = RedisStore::builder(server.url())
            .timeout(PATIENCE)
            .connect()
            .await
            .unwrap();
        Leased::builder(
            Fallback::builder(redis, LocalStore::default())
                .deadline(PATIENCE)
                .unwrap()
                .build(),
        )
        .share(PARTS.len() as u32)
        .build()
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

const COLORS: [&str; 4] = ["blue", "sky", "green", "amber"];
const PANEL: f64 = 298.0;

/// Draws both runs side by side: the grants of the instances, stacked, and the limit.
fn draw(runs: &[Run]) -> String {
    let title = format!(
        "Grants per second of four instances, of {} in all",
        thousands(LIMIT)
    );
    let mut entries = vec![];
    let mut names = vec![];
    for part in PARTS {
        let share = DEMAND * part / PARTS.iter().sum::<u32>();
        names.push(format!("sends {}", thousands(share)));
    }
    for (name, color) in names.iter().zip(COLORS) {
        entries.push(("area", color, &**name));
    }
    entries.push(("dashed", "text", "limit"));
    let columns = [12.0, 162.0, 292.0, 422.0, 552.0];

    let mut shapes = strong(10.0, 25.0, "start", &title) + &legend(54.0, &columns, &entries);
    for value in [0, LIMIT / 2, LIMIT, DEMAND] {
        shapes += &text(64.0, y(f64::from(value)) + 6.0, "end", thousands(value));
    }
    for (i, run) in runs.iter().enumerate() {
        shapes += &run.draw(72.0 + (PANEL + 34.0) * i as f64);
    }
    shapes += &text(WIDTH / 2.0, 364.0, "middle", "seconds");
    svg(376, &title, &shapes)
}

fn y(per_second: f64) -> f64 {
    314.0 - 210.0 * per_second / f64::from(DEMAND)
}

fn thousands(value: u32) -> String {
    match value {
        0..1_000 => value.to_string(),
        _ => format!("{},{:03}", value / 1_000, value % 1_000),
    }
}

impl Run {
    fn draw(&self, left: f64) -> String {
        let seconds = TICK.as_secs_f64() * TICKS as f64;
        let x = |point: usize| left + PANEL * point as f64 / POINTS as f64;
        let mut shapes = String::new();
        let mut below = [0.0; POINTS];
        for (points, color) in self.granted.iter().zip(COLORS) {
            let mut above = below;
            for (above, point) in above.iter_mut().zip(points) {
                *above += f64::from(*point) / seconds;
            }
            // A step per point, and back along the steps below.
            let mut path = format!("M{left:.1} {:.1}", y(below[0]));
            for (p, above) in above.iter().enumerate() {
                let _ = write!(path, "V{:.1}H{:.1}", y(*above), x(p + 1));
            }
            for (p, below) in below.iter().enumerate().rev() {
                let _ = write!(path, "V{:.1}H{:.1}", y(*below), x(p));
            }
            let _ = writeln!(shapes, "<path class=\"area {color}\" d=\"{path}z\"/>");
            below = above;
        }
        let (right, limit) = (left + PANEL, y(f64::from(LIMIT)));
        let _ = writeln!(
            shapes,
            "<path class=\"dashed text\" d=\"M{left:.1} {limit:.1}H{right:.1}\"/>"
        );
        let heading = format!("{}: {} calls a second", self.name, self.calls);
        shapes += &text((left + right) / 2.0, 90.0, "middle", heading);
        for second in (0..=(POINTS as f64 * seconds) as usize).step_by(5) {
            let x = x((second as f64 / seconds) as usize);
            shapes += &text(x, 338.0, "middle", second);
        }
        shapes
    }
}
