//! Several keys of one request over Redis: one script call, exact sums, and memory of denials.

use std::num::NonZeroUsize;
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tower_redis_ratelimit::check::{Check, Decision, JointCheck, Source};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policies, Policy, RedisStore, Strategy,
};

use crate::support::{RedisServer, STRATEGIES, until};

const PATIENT: Duration = Duration::from_secs(20);

fn lists(strategy: Strategy, quotas: [&str; 3]) -> [Policies; 3] {
    let names = ["user", "org", "all"];
    std::array::from_fn(|i| Policy::new(names[i], strategy, quotas[i]).unwrap().into())
}

fn parts<'a>(user: &str, lists: &'a [Policies; 3]) -> [(Key, &'a Policies); 3] {
    let keys = [Key::new(user), Key::new("acme"), Key::GLOBAL];
    std::array::from_fn(|i| (keys[i], &lists[i]))
}

fn store(server: &RedisServer) -> RedisStore {
    RedisStore::builder(server.url())
        .timeout(PATIENT)
        .connect_lazy()
        .unwrap()
}

async fn used(store: &impl Store, key: Key, list: &Policies) -> u32 {
    store.check(Check::peek(key, list, 0)).await.unwrap().used()
}

/// 600 concurrent requests of 15 users over three instances, under every strategy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_are_charged_exactly() {
    let server = RedisServer::start();
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        let lists = lists(strategy, ["30/100d", "200/100d", "300/100d"]);
        let instances = [store(&server), store(&server), store(&server)];
        let prefix = |name: &str| format!("{name}-{i}");
        let keys = |user: usize| {
            let names = [format!("user{user}"), "acme".to_owned(), "all".to_owned()];
            names.map(|name| Key::new(prefix(&name)))
        };
        let tasks = (0..600).map(|request| {
            let limiter = Limiter::new(instances[request % 3].clone(), lists[0].clone());
            let mut parts: Vec<_> = keys(request % 15).into_iter().zip(&lists).collect();
            Rng::with_seed(request as u64).shuffle(&mut parts);
            async move { limiter.take_all(parts, 1).await.unwrap() }
        });
        let decided = join_all(tasks).await;
        let granted = decided.iter().filter(|decision| decision.is_allowed());
        assert_eq!(granted.count(), 200, "{strategy}: all of the organization");
        let mut users = 0;
        for user in 0..15 {
            users += used(&instances[0], keys(user)[0], &lists[0]).await;
        }
        let [_, org, all] = keys(0);
        let org = used(&instances[0], org, &lists[1]).await;
        let all = used(&instances[0], all, &lists[2]).await;
        assert_eq!([users, org, all], [200; 3], "{strategy}");
    }
}

/// The same random checks in Redis, in shared calls, and in this process.
#[tokio::test]
async fn redis_decides_as_a_local_store() {
    let server = RedisServer::start();
    let mut denied = 0;
    for seed in 0..30 {
        let mut rng = Rng::with_seed(seed);
        // One connection keeps the order. A memory of denials would show the policies of the denying keys only.
        let redis = RedisStore::builder(server.url())
            .denials(0)
            .connections(NonZeroUsize::MIN)
            .timeout(PATIENT)
            .connect_lazy()
            .unwrap();
        let local = LocalStore::default();
        for _ in 0..15 {
            let mut expected = vec![];
            let mut sent = vec![];
            let mut refunded = vec![];
            for _ in 0..rng.usize(1..=6) {
                let cost = rng.u32(0..4);
                let each: Vec<(Key, Policies)> = (0..rng.usize(1..=4))
                    .map(|part| {
                        let key = Key::new(format!("{seed}-key{}", rng.u32(..3)));
                        let strategy = STRATEGIES[(seed as usize + part) % STRATEGIES.len()];
                        let quota = format!("{}/100d", 10 + 5 * part);
                        let policy = Policy::new(&format!("part{part}"), strategy, &*quota);
                        (key, policy.unwrap().into())
                    })
                    .collect();
                if rng.u8(..4) == 0 {
                    // A refund between two takes of the same keys.
                    let refund = Check::refund(each[0].0, &each[0].1, cost);
                    refunded.push(redis.check(refund.clone()));
                    drop(local.check(refund).await.unwrap());
                }
                let parts = each.iter().map(|(key, list)| (*key, list));
                let joint = JointCheck::take(parts, cost).unwrap();
                sent.push(redis.check_all(joint.clone()));
                expected.push(local.check_all(joint).await.unwrap());
            }
            for (there, here) in join_all(sent).await.into_iter().zip(expected) {
                let there = there.unwrap();
                assert_eq!(shown(there.decision()), shown(here.decision()), "{seed}");
                for (there, here) in there.parts().iter().zip(here.parts()) {
                    let [there, here] = [there, here].map(|part| shown(part.as_ref().unwrap()));
                    assert_eq!(there, here, "{seed}");
                }
                denied += u32::from(!here.decision().is_allowed());
            }
            drop(join_all(refunded).await);
        }
    }
    assert!(denied > 200, "{denied}");
}

/// Equal checks share an entry of a call, but not if another check of one of their keys is in between.
#[tokio::test]
async fn an_equal_check_does_not_overtake_a_refund() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url()).denials(0);
    let store = store.timeout(PATIENT).connect_lazy().unwrap();
    let lists = lists(Strategy::SlidingLog, ["2/d", "2/d", "2/d"]);
    let take = || store.check_all(JointCheck::take(parts("ann", &lists), 2).unwrap());
    let refund = |i: usize| store.check(Check::refund(parts("ann", &lists)[i].0, &lists[i], 2));
    // All in one batch.
    let first = take();
    let refunds: Vec<_> = (0..3).map(refund).collect();
    let second = take();
    assert!(first.await.unwrap().decision().is_allowed());
    drop(join_all(refunds).await);
    assert!(second.await.unwrap().decision().is_allowed());
}

/// What a decision grants, and what remains under each policy.
fn shown(decision: &Decision) -> (u32, Vec<(bool, u32)>) {
    let each = decision
        .each()
        .map(|each| (each.is_allowed(), each.remaining()));
    (decision.granted(), each.collect())
}

#[tokio::test]
async fn several_keys_are_one_call() {
    let server = RedisServer::start();
    let store = store(&server);
    let lists = lists(Strategy::Gcra, ["5/d", "50/d", "500/d"]);
    let limiter = Limiter::new(store.clone(), lists[0].clone());
    let decided = limiter.take_all(parts("ann", &lists), 1).await.unwrap();
    assert_eq!(
        (decided.source(), decided.policies().len()),
        (Source::Redis, 3)
    );
    let before = server.calls("evalsha").await + server.calls("eval").await;
    for _ in 0..3 {
        assert!(
            limiter
                .take_all(parts("ann", &lists), 1)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    let after = server.calls("evalsha").await + server.calls("eval").await;
    assert_eq!(after - before, 3);
}

/// A caller who hammers takes nothing from its organization, and does not reach Redis.
#[tokio::test]
async fn a_remembered_denial_denies_first() {
    let server = RedisServer::start();
    let store = store(&server);
    let lists = lists(Strategy::Gcra, ["1/d", "50/d", "500/d"]);
    let limiter = Limiter::new(store.clone(), lists[0].clone());
    let take = async |user: &str| limiter.take_all(parts(user, &lists), 1).await.unwrap();
    assert!(take("ann").await.is_allowed());
    assert_eq!(take("ann").await.source(), Source::Redis);
    let before = server.calls("evalsha").await;
    for _ in 0..50 {
        let denied = take("ann").await;
        assert_eq!(
            (denied.source(), denied.policy().name()),
            (Source::Cached, "user")
        );
        assert_eq!(denied.policies().len(), 1, "that of the denying key");
        assert!(denied.retry_after().is_some());
    }
    // Each key has a memory of its own.
    let alone = limiter.take(Key::new("ann"), 1).await.unwrap();
    assert_eq!(alone.source(), Source::Cached);
    assert_eq!(server.calls("evalsha").await, before);
    assert!(take("bob").await.is_allowed());
    assert_eq!(used(&store, Key::new("acme"), &lists[1]).await, 2);
}

/// What a key of a check gives back is free for the next check of several keys.
#[tokio::test]
async fn a_later_check_sees_a_refund_of_any_key() {
    let server = RedisServer::start();
    let store = store(&server);
    let lists = lists(Strategy::SlidingLog, ["100/d", "1/d", "100/d"]);
    let limiter = Limiter::new(store.clone(), lists[1].clone());
    for _ in 0..50 {
        let held = limiter.reserve(Key::new("acme"), 1).await.unwrap();
        drop(held);
        let next = limiter.reserve_all(parts("ann", &lists), 1).await;
        drop(next.unwrap());
    }
    assert!(store.flush().await);
    assert_eq!(used(&store, Key::new("ann"), &lists[0]).await, 0);
}

#[tokio::test]
async fn an_id_is_of_all_keys() {
    let server = RedisServer::start();
    let store = store(&server);
    let lists = lists(Strategy::SlidingLog, ["9/d", "9/d", "9/d"]);
    let take = async |user: &str, id: &str| {
        let joint = JointCheck::take(parts(user, &lists), 2)
            .unwrap()
            .with_id(id);
        store.check_all(joint).await.unwrap().into_decision()
    };
    for (user, id, total) in [
        ("ann", "1", 2),
        ("ann", "1", 2),
        ("ann", "2", 4),
        ("bob", "1", 6),
    ] {
        assert!(take(user, id).await.is_allowed());
        assert_eq!(
            used(&store, Key::GLOBAL, &lists[2]).await,
            total,
            "{user} {id}"
        );
    }
    // As a caller by the tuple, it has ids of its own.
    let tuple = Key::tuple(&[Key::new("ann"), Key::new("acme"), Key::GLOBAL]);
    let joined = Policies::new(lists.iter().flat_map(|list| list.clone())).unwrap();
    let alone = Check::take(tuple, &joined, 2).with_id("1");
    assert_eq!(store.check(alone).await.unwrap().remaining(), 7);
}

/// Waits until the fallback decides. A check on a connection that breaks is in doubt: Redis may have charged it.
async fn notice_outage<S: Store>(limiter: &Limiter<S>, lists: &[Policies; 3]) {
    until("the fallback decides", async || {
        let nothing = limiter.take_all(parts("nobody", lists), 0).await;
        nothing.unwrap().source() == Source::Local
    })
    .await;
}

/// 600 requests of 30 users while Redis is killed and restarted with its data: what was granted locally is charged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_exact_through_an_outage() {
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let redis = store(&server);
    let fallback = Fallback::builder(redis.clone(), LocalStore::default())
        .deadline(Duration::from_secs(5))
        .unwrap()
        .build();
    let lists = lists(Strategy::SlidingLog, ["100/100d", "5000/100d", "9000/100d"]);
    let limiter = Limiter::new(fallback.clone(), lists[0].clone());
    let users: Vec<String> = (0..30).map(|user| format!("user{user}")).collect();
    let wave = async || {
        let takes = (0..200).map(|i| limiter.take_all(parts(&users[i % 30], &lists), 1));
        let mut sources = vec![];
        for decided in join_all(takes).await {
            let decided = decided.unwrap();
            assert!(decided.is_allowed());
            sources.push(decided.source());
        }
        sources
    };
    assert!(wave().await.iter().all(|source| *source == Source::Redis));
    server.kill();
    notice_outage(&limiter, &lists).await;
    assert!(wave().await.iter().all(|source| *source == Source::Local));
    server.restart();
    until("Redis decides again", async || {
        !fallback.is_degraded() && fallback.flush().await
    })
    .await;
    assert!(wave().await.iter().all(|source| *source == Source::Redis));
    let mut of_users = 0;
    for user in &users {
        of_users += used(&redis, Key::new(user), &lists[0]).await;
    }
    let org = used(&redis, Key::new("acme"), &lists[1]).await;
    let all = used(&redis, Key::GLOBAL, &lists[2]).await;
    assert_eq!([of_users, org, all], [600; 3]);
}

/// In an outage, a denial of one key takes nothing from the others, and a reservation is settled where it was made.
#[tokio::test]
async fn an_outage_is_all_or_nothing_too() {
    let mut server = RedisServer::start();
    let fallback = Fallback::builder(store(&server), LocalStore::default())
        .deadline(Duration::from_secs(5))
        .unwrap()
        .build();
    let lists = lists(Strategy::Gcra, ["9/d", "4/d", "20/d"]);
    let limiter = Limiter::new(fallback.clone(), lists[0].clone());
    let before = limiter.reserve_all(parts("ann", &lists), 1).await.unwrap();
    server.kill();
    notice_outage(&limiter, &lists).await;
    let within = limiter.reserve_all(parts("ann", &lists), 3).await.unwrap();
    assert_eq!(within.decision().source(), Source::Local);
    for _ in 0..3 {
        let denied = limiter.take_all(parts("bob", &lists), 1).await.unwrap();
        assert_eq!(
            (denied.policy().name(), denied.policies().len()),
            ("org", 3)
        );
    }
    let left = async |user: &str| {
        let peek = limiter.take_all(parts(user, &lists), 0).await.unwrap();
        peek.each().map(|each| each.used()).collect::<Vec<_>>()
    };
    assert_eq!(left("bob").await, [0, 4, 4]);
    within.settle(1);
    assert_eq!(left("ann").await, [2, 2, 2]);
    before.keep();
}
