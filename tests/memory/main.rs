//! Memory use in this process: a few bytes per caller, and per check that waits for Redis. Key
//! extraction allocates nothing, and a log lists a bounded number of callers.
//!
//! Measures the allocations of a test's own thread, so that tests do not affect each other.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../support/mod.rs"]
mod support;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::time::Duration;

use allocation_counter::measure;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::Request;
use tokio::runtime;
use tokio::task::yield_now;
use tokio::time::timeout;
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::extract::{ClientIp, KeyExtractor};
use tower_redis_ratelimit::store::{Answer, ErrorKind, Store};
use tower_redis_ratelimit::{Key, Leased, LocalStore, RedisStore, Strategy};

use crate::support::{RedisServer, STRATEGIES, leased, policy};

/// In every form of header, and with the client far from the last entry.
#[test]
fn finding_the_client_allocates_nothing() {
    let list = "6.6.6.6, [2001:db8::7]:4711, 10.0.0.3, fd00::2%eth0, ::ffff:10.0.0.1";
    let elements = r#"for=6.6.6.6, for="[2001:db8::\7]:4711";host="a, b", for=10.0.0.3;proto=https, FOR="[fd00::2]""#;
    for (header, line) in [
        ("x-forwarded-for", list),
        ("forwarded", elements),
        ("x-real-ip", "[2001:db8::7]:4711"),
    ] {
        let client = ClientIp::header(header)
            .trust(["203.0.113.0/24", "2001:db8:1::/48", "private"])
            .unwrap();
        let peer = SocketAddr::from(([10, 0, 0, 1], 4711));
        let request = Request::builder()
            .extension(peer)
            .header(header, line)
            .body(())
            .unwrap()
            .into_parts()
            .0;
        let mut key = None;
        assert_eq!(
            measure(|| key = client.extract(&request).ok()).count_total,
            0,
            "{header}"
        );
        assert_eq!(
            key,
            Some(Key::ip("2001:db8::7".parse().unwrap())),
            "{header}"
        );
    }
}

/// With more callers than the maximum, and with the longest keys.
#[cfg(feature = "tracing")]
#[test]
fn a_logged_caller_takes_400_bytes() {
    use tower_redis_ratelimit::check::Decision;
    use tower_redis_ratelimit::observe::{Event, Observer, TracingObserver};

    let policies = policy(Strategy::Gcra, "1/h");
    let store = LocalStore::default();
    let take = || {
        store
            .check(Check::take(Key::GLOBAL, &policies, 1))
            .now_or_never()
            .unwrap()
            .unwrap()
    };
    let [_, denied]: [Decision; 2] = [take(), take()];
    for max in [100, 900, 1_800] {
        let observer = TracingObserver::new()
            .reveal_keys()
            .callers(NonZeroUsize::new(max).unwrap());
        let log = measure(|| {
            for caller in 0..50_000 {
                let key = Key::new(format!("{caller:039}"));
                observer.notify(&Event::decided(&key, &denied, Duration::ZERO, false));
            }
        });
        let each = log.bytes_current as f64 / max as f64;
        assert!(
            (100.0..=400.0).contains(&each),
            "{each:.0} bytes for each of {max}"
        );
    }
}

/// The size of a stored key: its hash of 128 bits.
const KEY: i64 = size_of::<u128>() as i64;

/// For every strategy, from 2,000 callers on: with fewer, the room for more of them counts. The limit does not include the
/// charges that some strategies store.
#[test]
fn a_caller_takes_at_most_100_bytes() {
    const CAPACITY: NonZeroUsize = NonZeroUsize::new(200_000).unwrap();
    const STEP: i64 = 2_000;
    for strategy in STRATEGIES {
        let charges = match strategy {
            // A queue of two entries of 12 bytes each, from the first charge.
            Strategy::SlidingLog | Strategy::SlidingWindow { .. } => {
                size_of::<(VecDeque<()>, [u8; 24])>()
            }
            _ => 0,
        };
        // A period in which no caller expires.
        let policies = policy(strategy, "1000/366d");
        let mut store = None;
        let mut bytes = measure(|| store = Some(LocalStore::with_capacity(CAPACITY))).bytes_current;
        let store = store.unwrap();
        // Each shard grows in steps, independently of the others.
        for first in (0..100_000).step_by(STEP as usize) {
            let takes = measure(|| {
                for i in first..first + STEP {
                    let check = Check::take(Key::new(format!("user-{i:05}")), &policies, 1);
                    assert!(
                        store
                            .check(check)
                            .now_or_never()
                            .unwrap()
                            .unwrap()
                            .is_allowed()
                    );
                }
            });
            bytes += takes.bytes_current;
            let callers = first + STEP;
            assert_eq!(store.len() as i64, callers, "each is held");
            let without_keys = bytes - callers * (KEY + charges as i64);
            assert!(
                without_keys > 0,
                "{strategy:?}: less than {callers} keys were counted"
            );
            assert!(
                without_keys <= 100 * callers,
                "{strategy:?}: {:.1} bytes for each of {callers} callers, without their keys",
                without_keys as f64 / callers as f64
            );
        }
    }
}

/// In addition to the store. One task refunds the rests of all blocks.
#[test]
fn a_leased_caller_takes_800_bytes() {
    const MOST: NonZeroUsize = NonZeroUsize::new(8_192).unwrap();
    const CALLERS: u64 = MOST.get() as u64;
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let policies = leased(Strategy::Gcra, 10_000, Duration::from_secs(600));
    let local = LocalStore::default();
    let take = |caller: u64| Check::take(Key::from(caller), &policies, 1);
    for caller in 0..CALLERS {
        let _ = local.check(take(caller)).now_or_never().unwrap().unwrap();
    }
    let (store, mut from_memory) = (Leased::builder(local).max_callers(MOST).build(), 0);
    let blocks = measure(|| {
        runtime.block_on(async {
            for caller in 0..CALLERS {
                for _ in 0..24 {
                    let decision = store.check(take(caller)).await.unwrap();
                    from_memory += u64::from(decision.source() == Source::Leased);
                }
            }
            yield_now().await;
        });
    });
    assert!(from_memory > 5 * CALLERS, "{from_memory}");
    let (each, tasks) = (
        blocks.bytes_current / CALLERS as i64,
        runtime.metrics().num_alive_tasks(),
    );
    println!("{each} bytes each, {tasks} tasks");
    assert!((100..=800).contains(&each), "{each}");
    assert_eq!(tasks, 1);
}

/// Redis hangs until the queue is full: all waiting checks with their futures take at most 8 MB.
/// The store runs on this thread only.
#[test]
fn a_full_queue_takes_8_megabytes() {
    const QUEUE: NonZeroUsize = NonZeroUsize::new(10_000).unwrap();
    const LANES: NonZeroUsize = NonZeroUsize::new(2).unwrap();
    const BATCH: NonZeroUsize = NonZeroUsize::new(128).unwrap();
    const MOST: usize = QUEUE.get() + LANES.get() * BATCH.get();
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let server = RedisServer::start();
    let policies = policy(Strategy::Gcra, "1000/366d");
    let take = |i: usize| Check::take(Key::new(format!("user-{i:05}")), &policies, 1);
    let store = RedisStore::builder(server.url())
        .queue(QUEUE)
        .connections(LANES)
        .batch(BATCH);
    let store = runtime.block_on(async {
        let store = store
            .timeout(Duration::from_secs(60))
            .connect()
            .await
            .unwrap();
        assert!(store.check(take(MOST)).await.unwrap().is_allowed());
        store
    });

    server.freeze();
    let mut waiting: Vec<<RedisStore as Store>::Future> = vec![];
    let mut fill = || loop {
        match store.check(take(waiting.len())) {
            Answer::Pending { future } => waiting.push(future),
            Answer::Ready { answer: Err(error) } if error.kind() == ErrorKind::QueueFull => {
                break waiting.len();
            }
            Answer::Ready { answer } => panic!("an answer although Redis hangs: {answer:?}"),
        }
    };
    let queued = measure(|| {
        runtime.block_on(async {
            assert_eq!(fill(), QUEUE.get());
            let workers_take = async {
                while fill() < MOST {
                    yield_now().await;
                }
            };
            timeout(Duration::from_secs(20), workers_take)
                .await
                .expect("each worker takes a batch");
            assert_eq!(fill(), MOST, "the queue refills by the batches taken");
        });
    });
    let least = QUEUE.get() * (size_of::<<RedisStore as Store>::Future>() + size_of::<Check>());
    assert!(
        queued.bytes_current >= least as i64,
        "less memory than the checks need: {queued:?}"
    );
    assert!(queued.bytes_max <= 8 << 20, "{queued:?}");

    server.thaw();
    let answered = measure(|| {
        for decision in runtime.block_on(join_all(waiting)) {
            let decision = decision.unwrap();
            assert_eq!(
                (decision.source(), decision.granted(), decision.remaining()),
                (Source::Redis, 1, 999)
            );
        }
    });
    // The queue keeps its buffer for later use.
    let kept = queued.bytes_current + answered.bytes_current;
    assert!(kept <= 9 << 18, "{kept} bytes are kept");
}
