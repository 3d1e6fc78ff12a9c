//! Concurrent requests share a script call, and none affects another.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::{Check, Mode};
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{Key, Policies, RedisStore, Strategy, redis};

use crate::support::{RedisServer, STRATEGIES, check, policy, until};

#[tokio::test]
async fn one_script_call_serves_many_requests() {
    let server = RedisServer::start();
    let store = server.store();
    let before = server.calls("evalsha").await;
    for _ in 0..10 {
        let checks = (0..256).map(|i| store.check(check(&format!("caller-{i}"), "1000/h")));
        assert!(
            join_all(checks)
                .await
                .into_iter()
                .all(|decision| decision.unwrap().is_allowed())
        );
    }
    let calls = server.calls("evalsha").await - before;
    assert!(
        (20..=100).contains(&calls),
        "2560 checks took {calls} script calls"
    );
}

/// Lua passes at most 8,000 values at a time, but a call may have more keys.
#[tokio::test]
async fn one_call_of_ten_thousand_callers() {
    let server = RedisServer::start();
    let all = NonZeroUsize::new(10_000).unwrap();
    let store = RedisStore::builder(server.url())
        .batch(all)
        .queue(all)
        .timeout(Duration::from_secs(20))
        .connect();
    let store = store.await.unwrap();
    let policies = policy(Strategy::Gcra, "1000/d");
    let before = server.calls("evalsha").await;
    for left in [999, 998] {
        let take = |i| store.check(Check::take(Key::new(format!("caller-{i}")), &policies, 1));
        // All checks are queued before the first worker runs.
        for decision in join_all((0..10_000).map(take)).await {
            assert_eq!(decision.unwrap().remaining(), left);
        }
    }
    assert_eq!(server.calls("evalsha").await - before, 2);
}

/// Each caller has a separate list, as when the policies depend on the request.
#[tokio::test]
async fn a_thousand_policy_lists_share_a_call() {
    let server = RedisServer::start();
    let all = NonZeroUsize::new(1_000).unwrap();
    let store = RedisStore::builder(server.url())
        .batch(all)
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let lists: Vec<Policies> = (1..=1_000)
        .map(|limit| policy(STRATEGIES[limit % STRATEGIES.len()], &format!("{limit}/d")))
        .collect();
    let before = server.calls("evalsha").await;
    for round in 1..=2 {
        let take = |(i, list): (usize, &Policies)| {
            store.check(Check::take(Key::new(format!("caller-{i}")), list, 1))
        };
        let decisions = join_all(lists.iter().enumerate().map(take)).await;
        for (i, decision) in decisions.into_iter().enumerate() {
            let (decision, limit) = (decision.unwrap(), i as u32 + 1);
            assert_eq!(
                (decision.is_allowed(), decision.remaining()),
                (limit >= round, limit.saturating_sub(round))
            );
        }
    }
    assert_eq!(server.calls("evalsha").await - before, 2);
}

/// Redis loses the script repeatedly while 64 tasks send checks: no check fails, and each is
/// charged once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_notices_a_script_flush() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(10))
        .connect()
        .await
        .unwrap();
    let policies = policy(Strategy::Gcra, "1000000/d");
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let (store, policies) = (store.clone(), policies.clone());
            tokio::spawn(async move {
                for _ in 0..100 {
                    assert!(
                        store
                            .check(Check::take(Key::new("ann"), &policies, 1))
                            .await
                            .unwrap()
                            .is_allowed()
                    );
                }
            })
        })
        .collect();
    let mut connection = server.connection().await;
    let mut flushes = 0;
    while !tasks.iter().all(|task| task.is_finished()) {
        let _: String = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut connection)
            .await
            .unwrap();
        flushes += 1;
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(
        flushes > 1 && server.calls("eval").await > 1,
        "the script was never forgotten"
    );
    let left = store
        .check(Check::peek(Key::new("ann"), &policies, 1))
        .await
        .unwrap()
        .remaining();
    // A million per day refills one unit per 86.4 ms during the test.
    assert!(
        (1_000_000 - 6_400..1_000_000 - 6_000).contains(&left),
        "{left} left"
    );
}

/// Dropped futures affect neither the batch nor the connection, and unsent checks are not charged.
#[tokio::test]
async fn dropped_requests_affect_no_other() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let policies = policy(Strategy::Gcra, "1000/h");
    let take = |caller: &str| store.check(Check::take(Key::new(caller), &policies, 1));

    // No task runs before the first await: all these futures are dropped before they are sent.
    for _ in 0..100 {
        drop(take("ann"));
    }
    assert_eq!(take("ann").await.unwrap().remaining(), 999);

    let connections = server.info("stats", "total_connections_received").await;
    // Dropped at any later moment, while others of the same batch are kept.
    for yields in 0..100 {
        let mut checks: Vec<_> = (0..40).map(|i| take(&format!("{yields}-{i}"))).collect();
        for _ in 0..yields % 20 {
            tokio::task::yield_now().await;
        }
        let dropped = checks.split_off(20);
        drop(dropped);
        for decision in join_all(checks).await {
            assert_eq!(decision.unwrap().remaining(), 999);
        }
    }
    // The test's own connection, and at most the store's second worker's.
    let made = server.info("stats", "total_connections_received").await - connections;
    assert!(made <= 2, "{made} connections were replaced");
}

/// The queue is bounded: a further check fails immediately, and the queued checks fail with the
/// call before them.
#[tokio::test]
async fn full_queues_and_frozen_servers_fail_promptly() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .queue(NonZeroUsize::new(10).unwrap())
        .timeout(Duration::from_secs(1))
        .connect()
        .await
        .unwrap();
    server.freeze();
    let answers = join_all((0..20).map(|i| store.check(check(&i.to_string(), "10/s")))).await;
    let kinds: Vec<_> = answers
        .into_iter()
        .map(|answer| answer.unwrap_err().kind())
        .collect();
    assert_eq!(kinds[..10], [ErrorKind::Timeout; 10]);
    assert_eq!(kinds[10..], [ErrorKind::QueueFull; 10]);
    server.thaw();
    until("it decides again", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    })
    .await;
}

/// Arbitrary values under the script's keys, checked in every mode, in the same batches as a caller
/// with a valid state. No check fails, or waits longer than the deepest debt lasts. Values that
/// cannot be states count as empty.
#[tokio::test]
async fn foreign_values_affect_no_other_caller() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let mut connection = server.connection().await;
    for strategy in STRATEGIES {
        let policies = policy(strategy, "10/100d");
        let longest = 2 * policies[0].quota().period();
        let ann = || store.check(Check::take(Key::new("ann"), &policies, 1));
        assert!(ann().await.unwrap().is_allowed());
        let keys: Vec<String> = server.command("KEYS rl:{ann}*").await;
        let length = server.command(&format!("STRLEN {}", keys[0])).await;
        let (seconds, micros): (i64, i64) = server.command("TIME").await;

        let mut pipe = redis::pipe();
        let mut checks = vec![];
        for (i, foreign) in foreign_values(seconds * 1_000_000 + micros, length)
            .into_iter()
            .enumerate()
        {
            for (j, mode) in MODES.into_iter().enumerate() {
                let caller = format!("{i}-{j}");
                pipe.cmd(foreign.command)
                    .arg(keys[0].replace("ann", &caller))
                    .arg(&foreign.arguments)
                    .ignore();
                checks.push((foreign.clone(), mode(Key::new(&caller), &policies, 3)));
            }
        }
        let () = pipe.query_async(&mut connection).await.unwrap();

        // The second time, on the values that the first round has left.
        for time in [1, 2] {
            let all = join_all(checks.iter().map(|(_, check)| store.check(check.clone())));
            let (decisions, ann) = tokio::join!(all, ann());
            assert_eq!(ann.unwrap().remaining(), 9 - time, "{strategy:?}");
            for ((foreign, check), decision) in checks.iter().zip(decisions) {
                let context = format!(
                    "{strategy:?}, {:?} for time {time}, {foreign:?}",
                    check.mode()
                );
                let decision = decision.unwrap_or_else(|error| panic!("{error:?}: {context}"));
                let wait = decision
                    .retry_after()
                    .unwrap_or_default()
                    .max(decision.reset_after());
                assert!(wait <= longest, "{decision:?}: {context}");
                if time == 1 && !foreign.alike && check.mode() == Mode::Take {
                    assert_eq!(
                        (decision.granted(), decision.remaining()),
                        (3, 7),
                        "{context}"
                    );
                }
            }
        }

        let reset = |check: &Check| store.check(Check::reset(*check.key(), &policies));
        assert!(
            join_all(checks.iter().map(|(_, check)| reset(check)))
                .await
                .iter()
                .all(Result::is_ok)
        );
        let take = |check: &Check| store.check(Check::take(*check.key(), &policies, 1));
        let fresh = join_all(checks.iter().map(|(_, check)| take(check))).await;
        for ((foreign, check), decision) in checks.iter().zip(fresh) {
            assert_eq!(
                decision.unwrap().remaining(),
                9,
                "{strategy:?}, {:?} and a reset, {foreign:?}",
                check.mode()
            );
        }
        let _: String = server.command("FLUSHALL").await;
    }
}

const MODES: [fn(Key, &Policies, u32) -> Check; 6] = [
    Check::take,
    Check::up_to,
    Check::peek,
    Check::charge,
    Check::refund,
    |key, policies, _| Check::reset(key, policies),
];

/// A value that another program has stored under a key.
#[derive(Debug, Clone)]
struct Foreign {
    command: &'static str,
    /// The arguments after the key.
    arguments: Vec<Vec<u8>>,
    /// Whether some strategy may accept it as a state.
    alike: bool,
}

/// Values of every type, and strings and lists that resemble states more and more. A charge has
/// this length.
fn foreign_values(now: i64, length: usize) -> Vec<Foreign> {
    const DAY: i64 = 86_400_000_000;
    let mut all = vec![];
    let mut add = |command, arguments: &[&[u8]], alike| {
        let arguments = arguments.iter().map(|bytes| bytes.to_vec()).collect();
        all.push(Foreign {
            command,
            arguments,
            alike,
        });
    };

    add("HSET", &[b"f", b"v"], false);
    add("SADD", &[b"x"], false);
    add("ZADD", &[b"1", b"x"], false);
    add("XADD", &[b"*", b"f", b"v"], false);
    for text in ["", "garbage", "1", "-1", "1790000000000000000000"] {
        add("SET", &[text.as_bytes()], text.len() == length);
        add("RPUSH", &[text.as_bytes()], false);
    }

    // The length of a state, or almost; with one more cell, and with twenty.
    for length in [
        length,
        length - 1,
        length + 1,
        length * 3 / 2,
        length / 2 * 21,
    ] {
        for byte in [0, 1, 0x7f, 0x80, 0xff, b'0'] {
            add("SET", &[&vec![byte; length]], true);
        }
        let mut rng = fastrand::Rng::with_seed(length as u64);
        for _ in 0..4 {
            let bytes: Vec<u8> = (0..length).map(|_| rng.u8(..)).collect();
            add("SET", &[&bytes], true);
        }
    }

    // Cells in any order, after any sum and time of a last charge.
    let (live, old, ahead) = (now - DAY, now - 300 * DAY, now + 1_000 * DAY);
    let bytes = |number: i64, length: usize| number.to_le_bytes()[..length].to_vec();
    for base in [0_i64, 1, 9, 10, 20, 1 << 39, -1] {
        for ends in [
            &[live][..],
            &[live, old],
            &[live, ahead, live],
            &[live, -1, live],
            &[old, ahead],
            &[ahead, old, ahead],
        ] {
            for sums in [[0, 1, 2], [9, 10, 11], [20, 10, 0], [-1, -2, 1 << 39]] {
                let cells = ends
                    .iter()
                    .zip(sums)
                    .flat_map(|(ends, sum)| [bytes(*ends, 7), bytes(sum, 5)].concat());
                let last = [live, old, ahead, -1][(sums[0] & 3) as usize];
                let value: Vec<u8> = bytes(last, 7)
                    .into_iter()
                    .chain(bytes(base, 5))
                    .chain(cells)
                    .collect();
                // If the newest cell has left the period, none counts.
                add("SET", &[&value], ends.last() != Some(&old));
            }
        }
    }

    // Lists that begin with a head of one block or of three, followed by anything.
    let block = |cells: &[(i64, i64)]| -> Vec<u8> {
        cells
            .iter()
            .flat_map(|(time, sum)| [bytes(*time, 7), bytes(*sum, 5)].concat())
            .collect()
    };
    // The number of charges at the front, of blocks, and of cells to skip in the first block.
    let head = |counts: [i64; 3], cells: &[(i64, i64)]| -> Vec<u8> {
        counts
            .iter()
            .flat_map(|count| bytes(*count, 2))
            .chain(block(cells))
            .collect()
    };
    let rests: [Vec<Vec<u8>>; 14] = [
        vec![],
        vec![b"x".to_vec()],
        vec![vec![]],
        // Redis also reads it as a number.
        vec![b"123456789012345678901234".to_vec(); 3],
        vec![vec![0xff; 24]; 5],
        vec![block(&[(0, 0), (live, 1)])],
        vec![block(&[(0, 0), (live, 1)]); 3],
        vec![block(&[(0, 0), (live, 10)]), b"x".to_vec()],
        vec![
            block(&[(0, 0), (old, 1), (live, 5), (old, 20)]),
            block(&[(0, 5), (live, 9)]),
        ],
        vec![
            vec![],
            block(&[(live, 20), (live, 10), (ahead, 5), (live, 9)]),
            block(&[(0, -1), (live, 9)]),
        ],
        vec![
            block(&[(0, 0), (ahead, 1), (live, 3)]),
            vec![],
            block(&[(0, 9), (ahead, 10)]),
        ],
        vec![
            block(&[(0, 3), (live, 1)]),
            block(&[(0, 0), (ahead, 2), (live, 30)]),
            b"x".to_vec(),
        ],
        vec![
            block(&[(0, 0), (old, 1), (old, 2)]),
            block(&[(0, 0), (live, 0)]),
        ],
        [vec![b"x".to_vec(); 300], vec![block(&[(0, 0), (live, 20)])]].concat(),
    ];
    let mut heads = vec![
        b"123456789".to_vec(),
        vec![0; 18],
        vec![0xff; 30],
        vec![0xff; 54],
    ];
    for base in [0, 1, -1, 1 << 39] {
        for count in [0, 1, 2, 9, 0xffff] {
            heads.push(head([0, 1, count], &[(0, base), (live, base + 9)]));
            heads.push(head([0, count, 0], &[(live, base), (ahead, 9)]));
            for times in [
                [live; 3],
                [old, old, live],
                [old, live, live],
                [live, ahead, live],
                [live, live, ahead],
            ] {
                for sums in [[1, 2, 3], [5, 5, 10], [20, 10, 9], [-1, 3, 1 << 38]] {
                    let of = |i: usize| (times[i], sums[i]);
                    heads.push(head([0, 3, count], &[(0, base), of(0), of(1), of(2)]));
                    heads.push(head([0, 1, count], &[(live, base), of(0), of(1), of(2)]));
                    heads.push(head([count, 2, 1], &[(ahead, base), of(0), of(1), of(2)]));
                }
            }
        }
    }
    // A sample of all combinations.
    for head in heads.iter().step_by(17) {
        for rest in &rests {
            let elements: Vec<&[u8]> = std::iter::once(head)
                .chain(rest)
                .map(Vec::as_slice)
                .collect();
            add("RPUSH", &elements, true);
        }
    }
    all
}

/// The checks queued behind it use the other connection, or a new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_connection_fails_one_batch() {
    const BATCH: u64 = 8;
    const KILLS: u64 = 20;
    let server = RedisServer::start();
    for tasks in [64, 500, 4_000] {
        let batch = NonZeroUsize::new(BATCH as usize).unwrap();
        let store = RedisStore::builder(server.url())
            .batch(batch)
            .timeout(Duration::from_secs(20));
        let store = store.connect().await.unwrap();
        let (failed, done) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let asks = (0..tasks).map(|task| {
            let (store, failed, done) = (store.clone(), Arc::clone(&failed), Arc::clone(&done));
            tokio::spawn(async move {
                while !done.load(SeqCst) {
                    if let Err(error) = store
                        .check(check(&format!("caller-{task}"), "1000000/s"))
                        .await
                    {
                        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
                        failed.fetch_add(1, SeqCst);
                    }
                }
            })
        });
        let asks: Vec<_> = asks.collect();
        let mut killed = 0;
        while killed < KILLS {
            let clients: String = server.command("CLIENT LIST").await;
            let ours = clients.lines().find(|line| line.contains("cmd=evalsha"));
            if let Some(id) = ours.and_then(|line| line.split(' ').next()?.strip_prefix("id=")) {
                killed += server.command::<u64>(&format!("CLIENT KILL ID {id}")).await;
            }
        }
        done.store(true, SeqCst);
        for ask in asks {
            ask.await.unwrap();
        }
        let failed = failed.load(SeqCst);
        println!("{tasks} tasks: {failed} failed, {} at most", BATCH * KILLS);
        assert!(
            failed <= BATCH * KILLS,
            "{tasks} tasks: {failed} checks failed by {killed} broken connections"
        );
    }
}
