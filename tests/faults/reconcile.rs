//! Two instances that shared limits during an outage; one of them has many other callers to charge.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Fallback, Key, LocalStore, Policies, RedisStore, Strategy};

use crate::proxy::{Mode, Proxy};
use crate::support::{RedisServer, policy};

type Instance = Fallback<RedisStore, LocalStore>;

const SPENT: usize = 50;
const LIMIT: u32 = 100;

/// The results.
#[derive(Debug)]
pub struct Row {
    /// Time per instance from the recovery of Redis until Redis decided again.
    pub back: [Duration; 2],
    /// Units granted beyond limits that were used up.
    pub beyond: u32,
    /// The longest time for which the runtime ran nothing else.
    pub stall: Duration,
}

/// Runs both instances at a distance of `away` from Redis; one of them has grants to `others` other
/// callers.
pub async fn run(away: Duration, others: usize) -> Row {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port(), Mode::Refuse);
    let instance = || {
        let redis = RedisStore::connect_lazy(proxy.url()).unwrap();
        Fallback::builder(redis, LocalStore::default())
            .share(2)
            .build()
    };
    let instances: [Instance; 2] = [instance(), instance()];
    let limit = policy(Strategy::Gcra, &format!("{LIMIT}/100d"));
    let mut granted = 0;
    for instance in &instances {
        while !instance.is_degraded() {
            granted += ask(instance, &limit).await;
        }
        for _ in 0..LIMIT {
            granted += ask(instance, &limit).await;
        }
    }
    assert_eq!(granted, SPENT as u32 * LIMIT, "the limits are used up");
    for i in 0..others {
        let check = Check::take(Key::new(format!("other-{i}")), &limit, 1);
        assert!(instances[1].check(check).await.unwrap().is_allowed());
    }

    let (stop, longest) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let watching = tokio::spawn({
        let (stop, longest) = (Arc::clone(&stop), Arc::clone(&longest));
        async move {
            while !stop.load(SeqCst) {
                let since = Instant::now();
                sleep(Duration::from_millis(1)).await;
                longest.fetch_max(since.elapsed().as_micros() as u64, SeqCst);
            }
        }
    });
    proxy.set(Mode::Delay(away));
    let start = Instant::now();
    let (mut back, mut beyond) = ([None; 2], 0);
    while back.contains(&None) {
        for (instance, back) in instances.iter().zip(&mut back) {
            if !instance.is_degraded() {
                back.get_or_insert(start.elapsed());
            }
            beyond += ask(instance, &limit).await;
        }
        sleep(Duration::from_millis(5)).await;
    }
    stop.store(true, SeqCst);
    watching.await.unwrap();
    Row {
        back: back.map(Option::unwrap),
        beyond,
        stall: Duration::from_micros(longest.load(SeqCst)),
    }
}

/// Sends one check for each caller with a used-up limit. Returns the granted units.
async fn ask(instance: &Instance, limit: &Policies) -> u32 {
    let checks =
        (0..SPENT).map(|i| instance.check(Check::take(Key::new(format!("spent-{i}")), limit, 1)));
    let answers = futures_util::future::join_all(checks).await;
    answers
        .into_iter()
        .map(|answer| answer.unwrap().granted())
        .sum()
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            back: [first, second],
            beyond,
            stall,
        } = self;
        write!(
            f,
            "back after {first:.2?} and {second:.2?}, {beyond} granted beyond, longest stall {stall:.1?}"
        )
    }
}
