//! Blocks of all instances, by a real `redis-server`.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::store::{ErrorKind, Store, StoreError};
use tower_redis_ratelimit::{
    Fallback, Key, Limiter, LocalStore, Policy, Quota, RedisStore, Strategy, redis,
};

use crate::support::{RedisServer, assert_helpful, until};

const HOUR: Duration = Duration::from_secs(3_600);

fn ann() -> Key {
    Key::new("ann")
}

fn policy(quota: &str) -> Policy {
    Policy::new("api", Strategy::SlidingLog, quota).unwrap()
}

/// An instance: three strikes within an hour block for another hour.
async fn instance(server: &RedisServer) -> Limiter<RedisStore> {
    let store = RedisStore::builder(server.url()).timeout(Duration::from_secs(20));
    let store = store.connect().await.unwrap();
    Limiter::new(store, policy("1/d"))
        .block_after("3/h", HOUR)
        .unwrap()
}

async fn is_blocked<S: Store>(limiter: &Limiter<S>, key: Key) -> bool {
    limiter.peek(key, 0).await.unwrap().source() == Source::Blocked
}

async fn until_blocked<S: Store>(limiter: &Limiter<S>, key: Key) {
    until("the caller is blocked", || is_blocked(limiter, key)).await;
}

async fn until_unblocked<S: Store>(limiter: &Limiter<S>, key: Key) {
    until("the caller is not blocked", async || {
        !is_blocked(limiter, key).await
    })
    .await;
}

/// Returns the strikes of ann that Redis counts, and their key. `None` without any.
async fn strikes_in(store: &RedisStore, rule: &str) -> Option<(Key, u32)> {
    let counted = policy(rule).into();
    let mut scan = store.scan();
    while let Some(counts) = scan.next().await.unwrap() {
        for count in counts {
            if count.key.reveal() == "ann,~hit" {
                let peek = Check::peek(count.key, &counted, 0);
                return Some((count.key, store.check(peek).await.unwrap().used()));
            }
        }
    }
    None
}

/// Denials in memory included, each of 10,000 denials over three instances is one strike.
#[tokio::test]
async fn a_flood_is_counted_exactly() {
    let server = RedisServer::start();
    let strikes = "20000/h";
    let mut instances = vec![];
    for _ in 0..3 {
        let store = RedisStore::builder(server.url()).timeout(Duration::from_secs(20));
        let store = store.connect().await.unwrap();
        let limiter = Limiter::new(store.clone(), policy("1/d"));
        instances.push((store, limiter.block_after(strikes, HOUR).unwrap()));
    }
    let mut denied = 0;
    // 10,001 takes, of which the store grants one.
    for round in 0..3_333 + 1 {
        let takes = instances.iter().take(if round < 3_333 { 3 } else { 2 });
        let takes = join_all(takes.map(|(_, limiter)| limiter.take(ann(), 1)));
        for decision in takes.await {
            denied += u32::from(!decision.unwrap().is_allowed());
        }
    }
    assert_eq!(denied, 10_000);

    let count = async || match strikes_in(&instances[0].0, strikes).await {
        Some((_, strikes)) => strikes,
        None => 0,
    };
    until("all strikes are counted", async || count().await >= 10_000).await;
    for (store, _) in &instances {
        assert!(store.flush().await);
    }
    assert_eq!(count().await, 10_000, "none twice");
    // A caller without a block has no key for it.
    assert_eq!(server.command::<u64>("EXISTS rl:blocks").await, 0);
}

/// A third of 10,000 denials over three instances falls into an outage. Each is one strike.
#[tokio::test]
async fn an_outage_loses_no_strike() {
    let strikes = "20000/h";
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let long = Duration::from_secs(20);
    let redis = || {
        let redis = RedisStore::builder(server.url()).timeout(2 * long);
        redis.connect_lazy().unwrap()
    };
    let reader = redis();
    let mut instances = vec![];
    for _ in 0..3 {
        let store = Fallback::builder(redis(), LocalStore::default());
        let store = store.deadline(long).unwrap().build();
        let limiter = Limiter::new(store.clone(), policy("1/d"));
        instances.push((store, limiter.block_after(strikes, HOUR).unwrap()));
    }
    let flood = async |rounds| {
        let mut denied = 0;
        for _ in 0..rounds {
            let takes = instances.iter().map(|(_, limiter)| limiter.take(ann(), 1));
            for decision in join_all(takes).await {
                denied += u32::from(!decision.unwrap().is_allowed());
            }
        }
        denied
    };
    let until_counted = async |expected| {
        until("the strikes are counted", async || {
            let counted = strikes_in(&reader, strikes).await;
            counted.is_some_and(|(_, counted)| counted >= expected)
        })
        .await;
    };
    // One of the first takes is granted.
    let before = flood(1_112).await;
    assert_eq!(before, 3 * 1_112 - 1);
    until_counted(before).await;
    let (hits, _) = strikes_in(&reader, strikes).await.unwrap();

    server.kill();
    let in_memory = async |store: &Fallback<_, _>| {
        let peek = Check::peek(hits, &policy(strikes).into(), 0);
        let counted = store.check(peek).await.unwrap();
        assert_eq!(counted.source(), Source::Local);
        counted.used()
    };
    let mut known = vec![];
    for (store, _) in &instances {
        until("the breaker is open", async || {
            let _ = in_memory(store).await;
            store.is_degraded()
        })
        .await;
        known.push(in_memory(store).await);
    }
    let during = flood(1_111).await;
    assert_eq!(during, 3 * 1_111);
    for ((store, _), known) in instances.iter().zip(known) {
        until("the strikes are counted in memory", async || {
            in_memory(store).await >= known + 1_111
        })
        .await;
    }

    server.restart();
    let after = flood(1_110).await;
    for (_, limiter) in &instances[..2] {
        assert!(!limiter.take(ann(), 1).await.unwrap().is_allowed());
    }
    let all = before + during + after + 2;
    assert_eq!(all, 10_000);
    until_counted(all).await;
    for (store, _) in &instances {
        assert!(store.flush().await);
    }
    let counted = strikes_in(&reader, strikes).await.unwrap().1;
    assert_eq!(counted, all, "none twice");
}

#[tokio::test]
async fn strikes_of_all_instances_block_in_all() {
    let server = RedisServer::start();
    let (one, two) = (instance(&server).await, instance(&server).await);
    assert!(one.take(ann(), 1).await.unwrap().is_allowed());
    for limiter in [&one, &two, &one] {
        assert!(!limiter.take(ann(), 1).await.unwrap().is_allowed());
    }
    until_blocked(&one, ann()).await;
    until_blocked(&two, ann()).await;
    let (first, second) = (
        one.take(ann(), 1).await.unwrap().retry_after().unwrap(),
        two.take(ann(), 1).await.unwrap().retry_after().unwrap(),
    );
    assert!(first <= HOUR && second <= HOUR && first.abs_diff(second) < Duration::from_secs(20));
    assert!(!is_blocked(&two, Key::new("bob")).await);

    // A new instance learns the block, and the end of it reaches all.
    let three = instance(&server).await;
    until_blocked(&three, ann()).await;
    two.unblock(ann()).await.unwrap();
    until_unblocked(&one, ann()).await;
    until_unblocked(&three, ann()).await;
    assert!(!is_blocked(&two, ann()).await);
}

#[tokio::test]
async fn an_operator_blocks_in_all_instances() {
    let server = RedisServer::start();
    let (one, two) = (instance(&server).await, instance(&server).await);
    one.block(ann(), 2 * HOUR).await.unwrap();
    one.block(ann(), HOUR).await.unwrap();
    two.block(ann(), HOUR).await.unwrap();
    until_blocked(&two, ann()).await;
    until("the later end has arrived", async || {
        two.peek(ann(), 0).await.unwrap().retry_after() > Some(HOUR)
    })
    .await;
    let ttl: i64 = server.command("PTTL rl:blocks").await;
    assert!(ttl > 3_600_000 && ttl <= 7_200_000, "{ttl}");
    one.reset(ann()).await.unwrap();
    assert!(is_blocked(&one, ann()).await);
}

/// More blocks than one reply has.
#[tokio::test]
async fn a_new_instance_learns_all_blocks() {
    let server = RedisServer::start();
    let one = instance(&server).await;
    let key = |number: u32| Key::from(u64::from(number));
    for number in 0..2_100 {
        one.block(key(number), HOUR).await.unwrap();
    }
    let two = instance(&server).await;
    until_blocked(&two, key(2_099)).await;
    for number in 0..2_100 {
        assert!(is_blocked(&two, key(number)).await, "{number}");
    }
    // The end of one block makes both read all of them again.
    one.unblock(key(7)).await.unwrap();
    until_unblocked(&two, key(7)).await;
    until_unblocked(&one, key(7)).await;
    assert!(is_blocked(&two, key(2_099)).await && is_blocked(&one, key(0)).await);
}

/// The instance's own unsent blocks delay it little.
#[tokio::test]
async fn a_flood_of_blocks_delays_no_other() {
    const FLOOD: u32 = 10_000;
    let server = RedisServer::start();
    let two = instance(&server).await;
    two.block(ann(), HOUR).await.unwrap();
    let one = instance(&server).await;
    for number in 0..FLOOD {
        drop(one.block(Key::from(u64::from(number)), HOUR));
    }
    until_blocked(&one, ann()).await;
    let sent = async || server.command::<u32>("ZCARD rl:blocks").await - 1;
    assert!(sent().await < FLOOD);
    until("the flood is sent", async || sent().await == FLOOD).await;
}

/// Known blocks hold in an outage. New ones hold where they began, and elsewhere afterwards.
#[tokio::test]
async fn an_outage_frees_nobody() {
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let instance = || {
        let redis = RedisStore::builder(server.url()).timeout(Duration::from_secs(5));
        let redis = redis.connect_lazy().unwrap();
        let store = Fallback::builder(redis, LocalStore::default())
            .deadline(Duration::from_secs(5))
            .unwrap()
            .build();
        let quota = Quota::per_day(1);
        let policy = Policy::new("api", Strategy::SlidingLog, quota).unwrap();
        Limiter::new(store, policy)
            .block_after("3/h", HOUR)
            .unwrap()
    };
    let (one, two) = (instance(), instance());
    one.block(ann(), 2 * HOUR).await.unwrap();
    until_blocked(&two, ann()).await;

    server.kill();
    let bob = Key::new("bob");
    for _ in 0..4 {
        let _ = one.take(bob, 1).await.unwrap();
    }
    until_blocked(&one, bob).await;
    one.block(Key::new("eve"), HOUR).await.unwrap_err();
    for limiter in [&one, &two] {
        assert!(is_blocked(limiter, ann()).await);
    }
    assert!(is_blocked(&one, Key::new("eve")).await);
    assert!(!is_blocked(&two, bob).await);

    server.restart();
    until_blocked(&two, bob).await;
    until_blocked(&two, Key::new("eve")).await;
    assert!(is_blocked(&two, ann()).await && is_blocked(&one, ann()).await);
}

/// Redis has its maximum number of blocks. New ones, however many, end none that lasts longer.
#[tokio::test]
async fn a_full_server_keeps_the_longer_blocks() {
    let server = RedisServer::start();
    let one = instance(&server).await;
    fill(&server, HOUR).await;
    one.block(ann(), 2 * HOUR).await.unwrap();
    for number in 0..50_u64 {
        one.block(Key::from(number), HOUR / 2).await.unwrap();
    }
    assert_eq!(server.command::<u32>("ZCARD rl:blocks").await, 65_536);
    assert_eq!(server.command::<u32>("ZCARD rl:block-changes").await, 1);
    let two = instance(&server).await;
    until_blocked(&two, ann()).await;
    assert!(!is_blocked(&two, Key::from(0_u64)).await);
}

/// Adds the maximum number of blocks that Redis keeps. They end after this time.
async fn fill(server: &RedisServer, after: Duration) {
    let script = "local now = redis.call('TIME')[1] * 1000 \
                  for i = 1, 65536 do redis.call('ZADD', KEYS[1], now + ARGV[1] + i, i) end";
    let mut fill = redis::cmd("EVAL");
    fill.arg(script).arg(1).arg("rl:blocks");
    fill.arg(after.as_millis() as u64);
    let mut connection = server.connection().await;
    let () = fill.query_async(&mut connection).await.unwrap();
}

/// The commands of blocks, in the order of the guide.
const OF_BLOCKS: [&str; 8] = [
    "zadd",
    "zrem",
    "zcard",
    "zscore",
    "zpopmin",
    "zrangebyscore",
    "zrevrange",
    "pexpireat",
];

/// Blocks and unblocks, on a server with as many blocks as it keeps.
async fn ask_of_blocks(server: &RedisServer, store: RedisStore) -> Vec<StoreError> {
    fill(server, 2 * HOUR).await;
    let limiter = Limiter::new(store, policy("1/d")).with_blocks();
    let mut failed = vec![];
    failed.extend(limiter.block(ann(), HOUR).await.err());
    failed.extend(limiter.unblock(ann()).await.err());
    let _: u32 = server.command("DEL rl:blocks").await;
    failed
}

#[tokio::test]
async fn missing_rights_are_listed() {
    for missing in OF_BLOCKS {
        let server = RedisServer::start();
        let mut rights = "+evalsha +eval +time".to_owned();
        for right in OF_BLOCKS {
            if right != missing {
                rights += &format!(" +{right}");
            }
        }
        let url = server.url_with_rights(&rights).await;
        let store = || {
            let store = RedisStore::builder(url.as_str()).timeout(Duration::from_secs(20));
            store.connect_lazy().unwrap()
        };
        let failed = ask_of_blocks(&server, store()).await;
        assert!(!failed.is_empty(), "{missing}");
        for error in failed {
            let rights = format!("for blocks, `+{}`", OF_BLOCKS.join(" +"));
            assert_helpful(&error, ErrorKind::Permission, &rights);
        }
        let grant = format!("ACL SETUSER limiter +{missing}");
        let _: String = server.command(&grant).await;
        let failed = ask_of_blocks(&server, store()).await;
        assert!(failed.is_empty(), "with +{missing}: {failed:?}");
    }
    let page = include_str!("../../docs/servers.md");
    assert!(page.contains(&format!("`+{}`; for strikes", OF_BLOCKS.join(" +"))));
}

#[tokio::test]
async fn renamed_commands_of_blocks_are_named() {
    for command in OF_BLOCKS {
        let command = command.to_uppercase();
        let server = RedisServer::start_with(&["--rename-command", &command, "HIDDEN"]);
        let store = RedisStore::connect_lazy(server.url()).unwrap();
        let limiter = Limiter::new(store, policy("1/d")).with_blocks();
        let failed = [
            limiter.block(ann(), HOUR).await.err(),
            limiter.unblock(ann()).await.err(),
        ];
        // Only a full set is popped.
        assert_eq!(failed.iter().any(Option::is_some), command != "ZPOPMIN");
        for error in failed.into_iter().flatten() {
            assert_helpful(&error, ErrorKind::Permission, &format!("`{command}`"));
        }
    }
}

/// Redis loses its data. Running instances keep the blocks that they know, also when another block ends.
#[tokio::test]
async fn lost_data_frees_nobody() {
    let server = RedisServer::start();
    let (one, two) = (instance(&server).await, instance(&server).await);
    let (bob, eve) = (Key::new("bob"), Key::new("eve"));
    for key in [ann(), bob] {
        one.block(key, 2 * HOUR).await.unwrap();
        until_blocked(&two, key).await;
    }
    let _: String = server.command("FLUSHALL").await;
    one.block(eve, HOUR).await.unwrap();
    until_blocked(&two, eve).await;
    two.unblock(eve).await.unwrap();
    until_unblocked(&one, eve).await;
    assert!(is_blocked(&one, ann()).await && is_blocked(&two, ann()).await);
    // The end of a lost block reaches the others too.
    two.unblock(bob).await.unwrap();
    until_unblocked(&one, bob).await;
    // And a new block after that.
    one.block(bob, HOUR).await.unwrap();
    until_blocked(&two, bob).await;
}

/// After a failover to a server whose clock is behind, and that lacks the last changes.
#[tokio::test]
async fn a_clock_that_is_behind_hides_no_block() {
    let server = RedisServer::start();
    let (one, two) = (instance(&server).await, instance(&server).await);
    // A change of the year 2096.
    let _: u32 = server
        .command("ZADD rl:block-changes 4000000000000000 api:nobody")
        .await;
    one.block(Key::new("bob"), HOUR).await.unwrap();
    until_blocked(&two, Key::new("bob")).await;
    let _: String = server.command("FLUSHALL").await;
    one.block(ann(), HOUR).await.unwrap();
    until_blocked(&two, ann()).await;
}
