//! The contract of `Store`, once per store and strategy.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_redis_ratelimit::check::{Check, Decision, Outcome, Source};
use tower_redis_ratelimit::store::{AnyStore, Store, StoreConfig, StoreKind};
use tower_redis_ratelimit::strategy::Refill;
use tower_redis_ratelimit::{
    Fallback, Key, Leased, LocalStore, Policies, Policy, RedisStore, Strategy,
};

use super::outside::{InMemory, MEMORY};
use crate::remote::{Remote, Table};
use crate::support::{RedisServer, STRATEGIES, leased as leased_policy, policy};

#[tokio::test]
async fn local() {
    keeps_the_contract(LocalStore::default(), Source::Local).await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    keeps_the_contract(server.store(), Source::Redis).await;
}

/// A fallback that a busy machine does not cause to decide.
fn patient(server: &RedisServer) -> Fallback<RedisStore, LocalStore> {
    let redis = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(60))
        .connect_lazy()
        .unwrap();
    Fallback::builder(redis, LocalStore::default())
        .deadline(Duration::from_secs(60))
        .unwrap()
        .build()
}

#[tokio::test]
async fn fallback() {
    let server = RedisServer::start();
    keeps_the_contract(patient(&server), Source::Redis).await;
}

#[tokio::test]
async fn leased() {
    let server = RedisServer::start();
    let store = Leased::new(patient(&server));
    // With a small limit, busy callers lease single units only.
    keeps_the_contract_under(store, Source::Redis, |strategy| {
        leased_policy(strategy, 10, Duration::from_secs(60))
    })
    .await;
}

#[tokio::test]
async fn any_local() {
    keeps_the_contract(AnyStore::local(), Source::Local).await;
}

#[tokio::test]
async fn any_redis() {
    let server = RedisServer::start();
    let mut config = StoreConfig::default();
    (config.kind, config.url) = (StoreKind::Redis, Some(server.url()));
    keeps_the_contract(AnyStore::from_config(&config).unwrap(), Source::Redis).await;
}

#[tokio::test]
async fn any_fallback() {
    let server = RedisServer::start();
    let mut config = StoreConfig::default();
    config.url = Some(server.url());
    (config.deadline, config.timeout) = (Some(Duration::from_secs(60)), Duration::from_secs(150));
    keeps_the_contract(AnyStore::from_config(&config).unwrap(), Source::Redis).await;
}

#[tokio::test(start_paused = true)]
async fn outside() {
    keeps_the_contract(InMemory::new(), MEMORY).await;
}

#[tokio::test]
async fn remote() {
    keeps_the_contract(Remote::new(Table::default()), Source::Other("remote")).await;
}

#[tokio::test]
async fn fallback_over_remote() {
    let remote = Remote::new(Table::default());
    let store = Fallback::builder(remote, LocalStore::default())
        .deadline(Duration::from_secs(60))
        .unwrap()
        .build();
    keeps_the_contract(store, Source::Other("remote")).await;
}

async fn keeps_the_contract(store: impl Store, source: Source) {
    keeps_the_contract_under(store, source, |strategy| policy(strategy, "10/100d")).await;
}

async fn keeps_the_contract_under(
    store: impl Store,
    source: Source,
    policies: fn(Strategy) -> Policies,
) {
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        // Nothing refills during the test: 10 per 100 days.
        let caller = Caller {
            store: &store,
            policies: policies(strategy),
            strategy,
            i,
        };
        caller.takes_all_or_nothing(source).await;
        caller.grants_a_part().await;
        caller.peeks_without_charging().await;
        caller.charges_a_bounded_debt().await;
        caller.takes_ahead().await;
        caller.refunds().await;
        caller.resets_one_caller().await;
        caller.refunds_to_each_policy().await;
        caller.shares_its_counts_with_clones().await;
        caller.is_atomic().await;
        caller.charges_an_id_once().await;
        caller.cuts_a_charge_for_each_policy().await;
    }
}

struct Caller<'a, S> {
    store: &'a S,
    policies: Policies,
    strategy: Strategy,
    /// Distinguishes the keys of strategies with the same letter.
    i: usize,
}

impl<S: Store> Caller<'_, S> {
    fn key(&self, name: &str) -> Key {
        Key::new(format!("{}-{name}", self.i))
    }

    async fn check(
        &self,
        name: &str,
        check: fn(Key, &Policies, u32) -> Check,
        cost: u32,
    ) -> Decision {
        self.store
            .check(check(self.key(name), &self.policies, cost))
            .await
            .unwrap()
    }

    /// Returns the granted and remaining amounts.
    async fn numbers(
        &self,
        name: &str,
        check: fn(Key, &Policies, u32) -> Check,
        cost: u32,
    ) -> (u32, u32) {
        let decision = self.check(name, check, cost).await;
        (decision.granted(), decision.remaining())
    }

    async fn takes_all_or_nothing(&self, source: Source) {
        let first = self.check("take", Check::take, 4).await;
        assert_eq!(
            (first.granted(), first.remaining(), first.capacity()),
            (4, 6, 10),
            "{:?}",
            self.strategy
        );
        assert_eq!((first.source(), first.policy().name()), (source, "test"));
        assert!(first.reset_after() > Duration::ZERO);

        let denied = self.check("take", Check::take, 7).await;
        assert_eq!(
            (denied.granted(), denied.remaining()),
            (0, 6),
            "{:?}",
            self.strategy
        );
        assert!(
            denied.retry_after().unwrap() > Duration::ZERO
                && denied.retry_after().unwrap() <= denied.reset_after()
        );

        assert!(
            self.check("take", Check::take, 0).await.is_allowed(),
            "a cost of 0 takes nothing"
        );
        assert_eq!(self.numbers("take", Check::take, 6).await, (6, 0));
        assert!(!self.check("take", Check::take, 1).await.is_allowed());

        let never = self.check("take", Check::take, 11).await;
        assert_eq!(
            (never.outcome(), never.retry_after()),
            (Outcome::ExceedsCapacity, None)
        );
        assert_eq!(
            self.check("large", Check::take, u32::MAX).await.outcome(),
            Outcome::ExceedsCapacity
        );
        assert_eq!(
            self.numbers("other", Check::take, 10).await,
            (10, 0),
            "callers are counted apart"
        );
    }

    async fn grants_a_part(&self) {
        assert_eq!(self.numbers("part", Check::up_to, 7).await, (7, 3));
        assert_eq!(self.numbers("part", Check::up_to, 100).await, (3, 0));
        let denied = self.check("part", Check::up_to, 5).await;
        assert!(
            denied.granted() == 0 && denied.retry_after().is_some(),
            "{denied:?}"
        );
    }

    async fn peeks_without_charging(&self) {
        for _ in 0..3 {
            let peek = self.check("peek", Check::peek, 10).await;
            assert!(
                peek.is_allowed()
                    && peek.granted() == 0
                    && peek.remaining() == 10
                    && peek.reset_after().is_zero()
            );
        }
        let _ = self.check("peek", Check::take, 1).await;
        let peek = self.check("peek", Check::peek, 10).await;
        assert!(
            !peek.is_allowed() && peek.remaining() == 9 && peek.retry_after().is_some(),
            "{peek:?}"
        );
        assert_eq!(
            self.check("peek", Check::peek, 11).await.outcome(),
            Outcome::ExceedsCapacity
        );
    }

    async fn charges_a_bounded_debt(&self) {
        assert_eq!(self.numbers("debt", Check::charge, 8).await, (8, 2));
        assert_eq!(self.numbers("debt", Check::charge, 8).await, (8, 0));
        assert_eq!(
            self.numbers("debt", Check::charge, 8).await,
            (4, 0),
            "at most twice the capacity"
        );
        let denied = self.check("debt", Check::charge, 1).await;
        assert!(
            denied.granted() == 0 && denied.retry_after().is_some(),
            "{denied:?}"
        );
        assert!(
            !self.check("debt", Check::take, 0).await.is_allowed(),
            "in debt, even a cost of 0 is denied"
        );
    }

    async fn takes_ahead(&self) {
        let days = |days: u64| Duration::from_secs(days * 86_400);
        let take_ahead = async |cost, within| {
            let check = Check::take_ahead(self.key("ahead"), &self.policies, cost, within);
            self.store.check(check).await.unwrap()
        };
        let first = take_ahead(8, Duration::ZERO).await;
        assert_eq!(
            (first.outcome(), first.granted(), first.remaining()),
            (Outcome::Allowed, 8, 2)
        );
        let late = take_ahead(5, days(1)).await;
        assert!(
            late.granted() == 0 && late.retry_after().is_some(),
            "{late:?}"
        );
        let ahead = take_ahead(5, days(1_000)).await;
        if self.supports_debts() {
            // 3 units are missing: 1 refills in 10 days, or 10 in 100.
            let due = if self.strategy == Strategy::TokenBucket(Refill::Interval) {
                100
            } else {
                30
            };
            let Outcome::Later { due_in } = ahead.outcome() else {
                panic!("{ahead:?}")
            };
            assert!(due_in > days(due - 1) && due_in <= days(due), "{ahead:?}");
            assert_eq!(
                (ahead.granted(), ahead.remaining(), ahead.is_allowed()),
                (5, 0, false)
            );
            assert!(
                !self.check("ahead", Check::take, 1).await.is_allowed(),
                "the debt uses the capacity"
            );
            let much = take_ahead(8, days(1_000)).await;
            assert_eq!(
                (much.granted(), much.retry_after().is_some()),
                (0, true),
                "the debt is at most one capacity"
            );
            assert_eq!(self.numbers("ahead", Check::refund, 5).await, (5, 2));
        } else {
            assert!(
                ahead.granted() == 0 && ahead.retry_after().is_some(),
                "{ahead:?}"
            );
        }
        assert_eq!(self.numbers("ahead", Check::take, 2).await, (2, 0));
        assert_eq!(
            take_ahead(11, days(1_000)).await.outcome(),
            Outcome::ExceedsCapacity
        );
    }

    /// Returns `true` if the strategy supports charges that are due later.
    fn supports_debts(&self) -> bool {
        matches!(
            self.strategy,
            Strategy::Gcra | Strategy::LeakyBucket | Strategy::TokenBucket(_)
        )
    }

    async fn refunds(&self) {
        let _ = self.check("refund", Check::take, 5).await;
        assert_eq!(self.numbers("refund", Check::refund, 2).await, (2, 7));
        assert_eq!(
            self.numbers("refund", Check::refund, 100).await,
            (3, 10),
            "no more than was taken"
        );
        assert_eq!(self.numbers("refund", Check::refund, 1).await, (0, 10));
        assert_eq!(self.numbers("refund", Check::take, 10).await, (10, 0));
    }

    async fn resets_one_caller(&self) {
        let _ = self.check("reset", Check::take, 5).await;
        let _ = self.check("bystander", Check::take, 5).await;
        let reset = self
            .store
            .check(Check::reset(self.key("reset"), &self.policies))
            .await
            .unwrap();
        assert_eq!(
            (reset.granted(), reset.remaining(), reset.reset_after()),
            (5, 10, Duration::ZERO)
        );
        assert_eq!(self.check("reset", Check::peek, 1).await.remaining(), 10);
        assert_eq!(self.check("bystander", Check::peek, 1).await.remaining(), 5);
    }

    /// Each policy refunds and resets its own count, independent of the others.
    async fn refunds_to_each_policy(&self) {
        let other = Policy::new("other", Strategy::Gcra, "20/100d").unwrap();
        let both = Policies::new([self.policies[0].clone(), other.clone()]).unwrap();
        let left = async |check: Check| -> Vec<u32> {
            self.store
                .check(check)
                .await
                .unwrap()
                .each()
                .map(|each| each.remaining())
                .collect()
        };
        let key = self.key("each");
        let _ = self
            .store
            .check(Check::take(key, &other.into(), 8))
            .await
            .unwrap();
        assert_eq!(left(Check::take(key, &both, 2)).await, [8, 10]);
        assert_eq!(
            left(Check::refund(key, &both, 5)).await,
            [10, 15],
            "{:?}",
            self.strategy
        );
        assert_eq!(
            left(Check::reset(key, &both)).await,
            [10, 20],
            "{:?}",
            self.strategy
        );
        assert_eq!(
            left(Check::peek(key, &both, 1)).await,
            [10, 20],
            "{:?}",
            self.strategy
        );
    }

    /// A charge is cut by each policy separately, and its refund never exceeds what a policy has charged.
    async fn cuts_a_charge_for_each_policy(&self) {
        let other: Policies = Policy::new("other", Strategy::Gcra, "20/100d")
            .unwrap()
            .into();
        let both = Policies::new([self.policies[0].clone(), other[0].clone()]).unwrap();
        let (key, since) = (self.key("cut"), Instant::now());
        let check = async |check: Check| self.store.check(check).await.unwrap();
        let _ = check(Check::charge(key, &self.policies, 18)).await;
        let charged = check(Check::charge(key, &both, 30)).await;
        assert_eq!(charged.granted(), 2, "{:?}", self.strategy);
        if let Some(refund) = charged.refund(key, 30, since.elapsed()) {
            assert_eq!(refund.cost(), 2);
            let _ = check(refund).await;
        }
        // A meter drains between the charge and its refund, and then until the next charge.
        let charged = check(Check::charge(key, &both, 5)).await.granted();
        assert!((1..=2).contains(&charged), "{:?}: {charged}", self.strategy);
        let mut denied = check(Check::charge(key, &both, 1)).await;
        if charged == 1 && denied.granted() == 1 {
            denied = check(Check::charge(key, &both, 1)).await;
        }
        let outcome = denied.outcome();
        assert!(matches!(outcome, Outcome::Denied { .. }), "{outcome:?}");
        for (policies, counted) in [(&self.policies, 19..=20), (&other, 34..=35)] {
            let reset = check(Check::reset(key, policies)).await;
            assert!(counted.contains(&reset.granted()), "{reset:?}");
        }
    }

    async fn shares_its_counts_with_clones(&self) {
        let _ = self.check("clone", Check::take, 5).await;
        let clone = self.store.clone();
        let decision = clone
            .check(Check::take(self.key("clone"), &self.policies, 5))
            .await
            .unwrap();
        assert_eq!(decision.remaining(), 0);
    }

    async fn is_atomic(&self) {
        let checks = (0..200).map(|_| {
            let (store, check) = (
                self.store.clone(),
                Check::take(self.key("atomic"), &self.policies, 3),
            );
            tokio::spawn(async move { store.check(check).await.unwrap().granted() })
        });
        let granted: u32 = join_all(checks).await.into_iter().map(Result::unwrap).sum();
        assert_eq!(granted, 9, "{:?}", self.strategy);
    }

    async fn charges_an_id_once(&self) {
        let take = |name: &str, cost, id: &str| {
            self.store
                .check(Check::take(self.key(name), &self.policies, cost).with_id(id))
        };
        let first = take("id", 3, "request-1").await.unwrap();
        assert_eq!((first.granted(), first.remaining()), (3, 7));
        for _ in 0..3 {
            assert_eq!(
                take("id", 3, "request-1").await.unwrap(),
                first,
                "{:?}",
                self.strategy
            );
        }
        assert_eq!(take("id", 3, "request-2").await.unwrap().remaining(), 4);
        assert_eq!(
            take("another", 3, "request-1").await.unwrap().remaining(),
            7,
            "ids belong to their caller"
        );
        assert_eq!(
            self.check("id", Check::take, 1).await.remaining(),
            3,
            "a check without an id is charged separately"
        );

        // So is the id of a charge of 0, as of a request that was charged before.
        let zero = Check::charge(self.key("id"), &self.policies, 0).with_id("request-0");
        let _ = self.store.check(zero).await.unwrap();
        let known = take("id", 1, "request-0").await.unwrap();
        assert!(known.is_allowed() && known.granted() == 0, "{known:?}");
        let charge = |cost| Check::charge(self.key("full"), &self.policies, cost);
        let _ = self.store.check(charge(20)).await.unwrap();
        let denied = self.store.check(charge(1).with_id("request-1")).await;
        assert!(!denied.unwrap().is_allowed());
        let known = take("full", 1, "request-1").await.unwrap();
        assert!(known.is_allowed() && known.granted() == 0, "{known:?}");

        let peek = Check::peek(self.key("id"), &self.policies, 1);
        for (id, granted) in [("request-1", 3), ("request-0", 0), ("request-9", 0)] {
            let known = self.store.check(peek.clone().with_id(id)).await.unwrap();
            assert_eq!(known.granted(), granted, "{:?}", self.strategy);
        }
        assert_eq!(self.check("id", Check::peek, 1).await.remaining(), 3);

        assert!(!take("id", 4, "request-3").await.unwrap().is_allowed());
        let _ = self.check("id", Check::refund, 1).await;
        assert!(
            take("id", 4, "request-3").await.unwrap().is_allowed(),
            "a denial is not stored"
        );

        let concurrent = join_all((0..50).map(|_| take("concurrent", 2, "request-1"))).await;
        assert!(
            concurrent
                .into_iter()
                .all(|decision| decision.unwrap().remaining() == 8)
        );
        assert_eq!(
            self.check("concurrent", Check::peek, 1).await.remaining(),
            8
        );
    }
}
