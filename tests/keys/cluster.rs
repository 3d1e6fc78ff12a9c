//! Several keys of one request in a cluster, in one partition and in several.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::{Check, JointCheck, Source};
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policies, Policy, RedisStore, Strategy,
};

use crate::nodes::{Cluster, slot_of};
use crate::support::until;

const PATIENT: Duration = Duration::from_secs(20);

fn lists(quotas: [&str; 3]) -> [Policies; 3] {
    let names = ["user", "org", "all"];
    std::array::from_fn(|i| {
        Policy::new(names[i], Strategy::SlidingLog, quotas[i])
            .unwrap()
            .into()
    })
}

async fn used(store: &impl Store, key: Key, list: &Policies) -> u32 {
    store.check(Check::peek(key, list, 0)).await.unwrap().used()
}

/// Returns a key on each of the three masters.
async fn key_of_each_master(cluster: &Cluster, store: &RedisStore) -> [Key; 3] {
    let list = &lists(["1/d", "1/d", "1/d"])[0];
    let mut found: HashMap<usize, Key> = HashMap::new();
    for i in 0.. {
        let name = format!("caller-{i}");
        let key = Key::new(&name);
        drop(store.check(Check::take(key, list, 1)).await.unwrap());
        for (node, server) in cluster.nodes.iter().enumerate() {
            let keys: Vec<String> = server.server.command(&format!("KEYS *{{{name}}}*")).await;
            if !keys.is_empty() {
                found.insert(node, key);
            }
        }
        drop(store.check(Check::reset(key, list)).await.unwrap());
        if found.len() == 3 {
            break;
        }
    }
    [0, 1, 2].map(|node| found[&node])
}

/// 600 concurrent requests, each of three keys on three masters: no limit is exceeded, and what denied requests have held
/// flows back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_over_three_masters_exceed_no_limit() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect_lazy().unwrap();
    let [_, org, all] = key_of_each_master(&cluster, &store).await;
    let lists = lists(["30/100d", "200/100d", "300/100d"]);
    let limiter = Limiter::new(store.clone(), lists[0].clone());
    let user = |i: usize| Key::new(format!("user{}", i % 15));
    let tasks = (0..600).map(|i| {
        let parts = [(user(i), &lists[0]), (org, &lists[1]), (all, &lists[2])];
        limiter.take_all(parts, 1)
    });
    let mut granted = 0;
    for decided in join_all(tasks).await {
        granted += decided.unwrap().granted();
    }
    println!("{granted} of 200 were granted");
    assert!((100..=200).contains(&granted), "{granted}");
    let sums = async || {
        let mut users = 0;
        for i in 0..15 {
            users += used(&store, user(i), &lists[0]).await;
        }
        [
            users,
            used(&store, org, &lists[1]).await,
            used(&store, all, &lists[2]).await,
        ]
    };
    assert!(store.flush().await);
    assert_eq!(sums().await, [granted; 3]);
    // One at a time, the rest passes.
    let mut passed = granted;
    for i in 0..300 {
        let parts = [(user(i), &lists[0]), (org, &lists[1]), (all, &lists[2])];
        passed += limiter.take_all(parts, 1).await.unwrap().granted();
        assert!(store.flush().await);
        if passed == 200 {
            break;
        }
    }
    assert_eq!(sums().await, [200; 3]);
}

/// The slot of one of the keys moves between two masters meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_exact_while_slots_move() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect_lazy().unwrap();
    let keys = key_of_each_master(&cluster, &store).await;
    let lists = lists(["9000/100d", "9000/100d", "9000/100d"]);
    let limiter = Limiter::new(store.clone(), lists[0].clone());
    drop(
        limiter
            .take_all(keys.into_iter().zip(&lists), 0)
            .await
            .unwrap(),
    );
    let take = async || {
        loop {
            match limiter.take_all(keys.into_iter().zip(&lists), 1).await {
                Ok(taken) => return taken.granted(),
                // The slot is between two nodes.
                Err(error) => assert!(error.is_not_sent(), "{error:?}"),
            }
        }
    };
    assert_eq!(take().await, 1);
    let found: Vec<String> = cluster.nodes[1].server.command("KEYS *:org:*").await;
    let slot = slot_of(&cluster, &found[0]).await;
    let granted = AtomicU32::new(1);
    for turn in 0..6 {
        let [from, to] = if turn % 2 == 0 { [1, 2] } else { [2, 1] };
        let wave = join_all((0..20).map(async |_| {
            for _ in 0..5 {
                granted.fetch_add(take().await, SeqCst);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }));
        tokio::join!(wave, cluster.move_slot(slot, from, to));
    }
    assert!(store.flush().await);
    assert_eq!(granted.load(SeqCst), 601);
    for (key, list) in keys.into_iter().zip(&lists) {
        assert_eq!(used(&store, key, list).await, 601);
    }
}

/// An id is stored in each partition: a repetition passes only if all know it.
#[tokio::test]
async fn an_id_is_known_in_all_partitions() {
    let cluster = Cluster::start(false).await;
    let store = cluster.builder().timeout(PATIENT).connect_lazy().unwrap();
    let keys = key_of_each_master(&cluster, &store).await;
    let lists = lists(["9/100d", "3/100d", "9/100d"]);
    let take = async |user: Key, id: &str| {
        let parts = [
            (user, &lists[0]),
            (keys[1], &lists[1]),
            (keys[2], &lists[2]),
        ];
        let joint = JointCheck::take(parts, 1).unwrap().with_id(id);
        let decided = store.check_all(joint).await.unwrap();
        assert!(store.flush().await);
        decided.into_decision().is_allowed()
    };
    let eve = Key::new("eve");
    for (user, id, used_by_org) in [
        (keys[0], "1", 1),
        (keys[0], "1", 1),
        (eve, "1", 2),
        (keys[0], "2", 3),
    ] {
        assert!(take(user, id).await);
        assert_eq!(used(&store, keys[1], &lists[1]).await, used_by_org);
    }
    // The organization knows the id, and has nothing left for another user.
    assert!(!take(Key::new("bob"), "1").await);
    assert_eq!(used(&store, Key::new("bob"), &lists[0]).await, 0);
    assert!(take(keys[0], "1").await);
    assert_eq!(used(&store, keys[2], &lists[2]).await, 3);
}

/// One of three masters is dead: its key is decided locally, the others by Redis. A denial of one side takes nothing from
/// the other, and what was granted locally is charged afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_exact_while_a_master_is_dead() {
    let mut cluster = Cluster::start(false).await;
    let redis = cluster.builder().timeout(PATIENT).connect_lazy().unwrap();
    let keys = key_of_each_master(&cluster, &redis).await;
    let fallback = Fallback::builder(redis.clone(), LocalStore::default())
        .deadline(Duration::from_secs(5))
        .unwrap()
        .build();
    let lists = lists(["9000/100d", "400/100d", "9000/100d"]);
    let limiter = Limiter::new(fallback.clone(), lists[0].clone());
    let wave = async |count: usize| {
        let takes = (0..count).map(|_| limiter.take_all(keys.into_iter().zip(&lists), 1));
        let mut granted = 0;
        let mut sources = vec![];
        for decided in join_all(takes).await {
            let decided = decided.unwrap();
            granted += decided.granted();
            sources.push(decided.source());
        }
        (granted, sources)
    };
    let (granted, sources) = wave(200).await;
    assert_eq!(granted, 200);
    assert!(sources.iter().all(|source| *source == Source::Redis));
    cluster.nodes[1].server.kill();
    // The local key denies after its 400.
    let (granted, sources) = wave(300).await;
    assert_eq!(granted, 200);
    assert!(sources.iter().all(|source| *source == Source::Local));
    let both = async || {
        [
            used(&redis, keys[0], &lists[0]).await,
            used(&redis, keys[2], &lists[2]).await,
        ]
    };
    until("the other keys have it back", async || {
        both().await == [400; 2]
    })
    .await;
    cluster.nodes[1].server.restart();
}
