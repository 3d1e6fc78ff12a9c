//! Two quotas under one name, as in a rolling deploy. Windows of two periods grant what each grants alone, so a caller of
//! both gets at most their sum. A bucket is one count, so a caller of both gets at most what the looser one grants.

use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::advance;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::strategy::{Align, Refill};
use tower_redis_ratelimit::{Key, LocalStore, Strategy};

use crate::support::policy;

const BUCKETS: [Strategy; 3] = [
    Strategy::Gcra,
    Strategy::LeakyBucket,
    Strategy::TokenBucket(Refill::Greedy),
];
const WINDOWS: [Strategy; 5] = [
    Strategy::FixedWindow(Align::Clock {
        offset: Duration::ZERO,
    }),
    Strategy::FixedWindow(Align::FirstHit),
    Strategy::SlidingLog,
    Strategy::SlidingWindow { cells: 10 },
    Strategy::SlidingCounter,
];
const FIRST_HIT: [Strategy; 1] = [Strategy::FixedWindow(Align::FirstHit)];

/// The grants under each of two quotas: to a caller of both, and to two callers of one quota each.
#[derive(Debug, Default)]
struct Granted {
    both: [u32; 2],
    alone: [u32; 2],
}

/// A caller of both quotas, and a caller of each, with checks at the same times.
struct Callers {
    store: LocalStore,
    granted: Granted,
    take: [Check; 4],
}

impl Callers {
    fn new(strategy: Strategy, quotas: [&str; 2]) -> Self {
        let [one, other] = quotas.map(|quota| policy(strategy, quota));
        let take = |caller: &str, policies| Check::take(Key::new(caller), policies, 1);
        Self {
            store: LocalStore::default(),
            granted: Granted::default(),
            take: [
                take("both", &one),
                take("both", &other),
                take("one", &one),
                take("other", &other),
            ],
        }
    }

    fn passes(&self, i: usize) -> bool {
        let answer = self.store.check(self.take[i].clone()).now_or_never();
        answer.unwrap().unwrap().is_allowed()
    }

    /// A request under one of the quotas. Returns whether the caller of both gets it.
    fn come(&mut self, quota: usize) -> bool {
        self.granted.alone[quota] += u32::from(self.passes(2 + quota));
        let passes = self.passes(quota);
        self.granted.both[quota] += u32::from(passes);
        passes
    }

    /// Sends checks under the first quota until nothing remains, then one under the second, and repeats this.
    async fn ask_greedily(mut self) -> Granted {
        for _ in 0..25_000 {
            if !self.come(0) {
                let _ = self.come(1);
            }
            advance(Duration::from_millis(1)).await;
        }
        self.granted
    }
}

#[tokio::test(start_paused = true)]
async fn a_greedy_client_gets_what_each_quota_grants_alone() {
    for strategy in WINDOWS {
        let quotas = ["100/m", "2/s"];
        let callers = Callers::new(strategy, quotas);
        let Granted { both, alone } = callers.ask_greedily().await;
        println!("{strategy:?}, {quotas:?}: {both:?}, alone {alone:?}");
        assert_eq!(both, alone, "{strategy:?}");
        assert!(alone[0] >= 100 && alone[1] > 20, "{strategy:?}: {alone:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn two_quotas_of_a_bucket_grant_as_the_looser() {
    for strategy in BUCKETS {
        for other in ["100/10s burst 10", "10/10s", "2/s"] {
            let quotas = ["100/10s", other];
            let callers = Callers::new(strategy, quotas);
            let Granted { both, alone } = callers.ask_greedily().await;
            println!("{strategy:?}, {quotas:?}: {both:?}, alone {alone:?}");
            let sum = both[0] + both[1];
            assert!(
                sum.abs_diff(alone[0]) <= 1,
                "{strategy:?}: {both:?}, alone {alone:?}"
            );
        }
    }
}

/// Each half of a fleet has a different quota, and gets 33 requests a second of the caller.
#[tokio::test(start_paused = true)]
async fn each_half_of_a_fleet_keeps_its_quota() {
    let rows: [(&[Strategy], [&str; 2], u32); 4] = [
        (&FIRST_HIT, ["100/m", "2/s"], 60),
        (&FIRST_HIT, ["1000/h", "20/m"], 150),
        (&WINDOWS, ["60/h", "1/s"], 150),
        (&WINDOWS, ["60/10s", "6/s"], 60),
    ];
    for (strategies, quotas, seconds) in rows {
        for &strategy in strategies {
            let mut callers = Callers::new(strategy, quotas);
            for _ in 0..33 * seconds {
                let _ = (callers.come(0), callers.come(1));
                advance(Duration::from_secs(1) / 33).await;
            }
            let Granted { both, alone } = callers.granted;
            println!("{strategy:?}, {quotas:?}: {both:?}, alone {alone:?}");
            assert_eq!(both, alone, "{strategy:?}");
            assert!(alone[0] < 33 * seconds, "{strategy:?}: {alone:?}");
        }
    }
}
