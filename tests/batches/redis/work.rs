//! The commands that a check runs in Redis: few, for any check of any log.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{Key, Policies, RedisStore, Strategy};

use crate::support::{RedisServer, STRATEGIES, policy};

/// Commands that change a key.
const WRITES: [&str; 8] = [
    "set",
    "setrange",
    "del",
    "rpush",
    "lset",
    "ltrim",
    "lrem",
    "pexpireat",
];

/// Maximum number of commands of a search in this number of charges, including the use of its
/// result.
fn search(charges: usize) -> usize {
    2 * charges.ilog2() as usize + 4
}

struct Server {
    redis: RedisServer,
    store: RedisStore,
}

impl Server {
    async fn start() -> Self {
        let redis = RedisServer::start();
        let many = NonZeroUsize::new(1_000).unwrap();
        let builder = RedisStore::builder(redis.url())
            .batch(many)
            .queue(many)
            .timeout(Duration::from_secs(20));
        // Send each denial to Redis.
        let store = builder.denials(0).connect().await.unwrap();
        Self { redis, store }
    }

    /// Returns the commands that one check runs, by name, and its granted units.
    async fn commands(&self, check: Check) -> (BTreeMap<String, usize>, u32) {
        let _: String = self.redis.command("CONFIG RESETSTAT").await;
        let granted = self.store.check(check).await.unwrap().granted();
        let stats: String = self.redis.command("INFO commandstats").await;
        let called = stats.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let ours = ["evalsha", "config", "client", "hello", "info"]
                .iter()
                .all(|other| !name.starts_with(other));
            ours.then(|| {
                (
                    name.to_owned(),
                    rest.split(',').next().unwrap().parse().unwrap(),
                )
            })
        });
        (called.collect(), granted)
    }

    /// Charges each of these, one after another.
    async fn charge(&self, key: Key, policies: &Policies, costs: &[u32]) {
        for costs in costs.chunks(1_000) {
            // Concurrent takes of one caller would be one charge.
            let charges = costs
                .iter()
                .map(|cost| self.store.check(Check::charge(key, policies, *cost)));
            for (decision, cost) in join_all(charges).await.into_iter().zip(costs) {
                assert_eq!(decision.unwrap().granted(), *cost);
            }
        }
    }

    /// Sends every kind of check for a caller with these charges, which sum up to the limit minus
    /// one. Each check may run `more` commands than a granted take.
    async fn ask(&self, policies: &Policies, charges: &[u32], more: usize) {
        let key = Key::new("ann");
        let limit = policies[0].quota().limit();
        self.charge(key, policies, charges).await;
        let (granted, one) = self.commands(Check::take(key, policies, 1)).await;
        assert_eq!(one, 1);
        let most = granted.values().sum::<usize>() + more;

        // Each cost is smaller than the one before, so no cached denial applies.
        let denied = (0..20)
            .map(|i| limit * 99 / 100 - i)
            .chain([limit, limit / 2, 100, 2, 1]);
        let takes = denied.clone().map(|cost| Check::take(key, policies, cost));
        let peeks = denied
            .step_by(5)
            .map(|cost| Check::peek(key, policies, cost));
        for check in takes
            .chain(peeks)
            .chain([Check::up_to(key, policies, limit)])
        {
            let context = format!("{:?} {} of {policies:?}", check.mode(), check.cost());
            let (commands, granted) = self.commands(check).await;
            assert_eq!(granted, 0, "{context}");
            let count: usize = commands.values().sum();
            assert!(
                count <= most,
                "{context}: {count} commands, {most} at most: {commands:?}"
            );
            assert!(
                WRITES.iter().all(|write| !commands.contains_key(*write)),
                "{context} writes: {commands:?}"
            );
        }
        for check in [
            Check::refund(key, policies, 1),
            Check::refund(key, policies, limit / 100),
            Check::refund(key, policies, limit / 2),
            Check::up_to(key, policies, limit),
            Check::charge(key, policies, limit),
            Check::refund(key, policies, limit / 2),
            Check::reset(key, policies),
        ] {
            let context = format!("{:?} {} of {policies:?}", check.mode(), check.cost());
            let (commands, granted) = self.commands(check).await;
            assert!(granted > 0, "{context}");
            let count: usize = commands.values().sum();
            assert!(
                count <= most,
                "{context}: {count} commands, {most} at most: {commands:?}"
            );
        }
    }
}

/// Many small charges, and checks of every cost and mode: no more commands than a binary search
/// needs.
#[tokio::test]
async fn every_check_costs_about_the_same() {
    let server = Server::start().await;
    for strategy in STRATEGIES
        .into_iter()
        .chain([Strategy::SlidingWindow { cells: 1000 }])
    {
        let more = if strategy == Strategy::SlidingLog {
            search(10_000)
        } else {
            0
        };
        server
            .ask(&policy(strategy, "10000/366d"), &[1; 9_999], more)
            .await;
    }
}

/// The longest possible log, of equal charges and of random ones.
#[tokio::test]
async fn longest_log_checks_cost_about_the_same() {
    let policies = policy(Strategy::SlidingLog, "100000/366d");
    let mut rng = Rng::with_seed(0);
    let mut uneven: Vec<u32> = (0..9_000)
        .map(|_| [1, 1, 1, rng.u32(1..=20)][rng.usize(..4)])
        .collect();
    uneven.push(99_999 - uneven.iter().sum::<u32>());
    for charges in [vec![1; 99_999], uneven] {
        let server = Server::start().await;
        server.ask(&policies, &charges, search(100_000)).await;
    }
}

/// Refunds from the middle of long logs would occupy Redis for a tenth of a second.
#[tokio::test]
async fn refunds_of_long_logs_share_few_calls() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    for (limit, refunds, takes) in [(100_000, 20..=40, 2..=20), (100, 1..=4, 1..=4)] {
        let policies = policy(Strategy::SlidingLog, &format!("{limit}/366d"));
        let mut calls = vec![];
        for check in [Check::refund, Check::take] {
            let before = server.calls("evalsha").await;
            let checks =
                (0..128).map(|i| store.check(check(Key::new(format!("caller-{i}")), &policies, 1)));
            assert!(join_all(checks).await.iter().all(Result::is_ok));
            calls.push(server.calls("evalsha").await - before);
        }
        assert!(
            refunds.contains(&calls[0]) && takes.contains(&calls[1]),
            "{limit}: {calls:?} calls"
        );
    }
}
