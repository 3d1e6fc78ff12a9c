//! Requests in flight in Redis, also of processes that are killed or stopped, and while Redis is.

use std::convert::Infallible;
use std::env;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::settle::Reservation;
use tower_redis_ratelimit::store::Store;
use tower_redis_ratelimit::wait::Wait;
use tower_redis_ratelimit::{CallLimitLayer, Key, Limiter, Policy, RedisStore};

use crate::devices::far;
use crate::in_flight_load::{
    LIMIT, TTL, an_outage, ann, is_worker, limiter, patient, processes_are_killed, work,
};
use crate::support::{RedisServer, until};

/// `SECONDS=20` runs longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_processes_never_exceed_the_limit() {
    if is_worker() {
        return work().await;
    }
    let server = RedisServer::start();
    let test = "in_flight::redis::killed_processes_never_exceed_the_limit";
    processes_are_killed(test, &server.url()).await;
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Outage {
    /// It returns empty.
    Killed,
    /// It returns unchanged.
    Frozen,
}

async fn outage(test: &str, outage: Outage) {
    let mut server = RedisServer::start();
    let url = server.url();
    an_outage(test, &url, async |has_begun| match (outage, has_begun) {
        (Outage::Killed, false) => server.kill(),
        (Outage::Killed, true) => server.restart(),
        (Outage::Frozen, false) => server.freeze(),
        (Outage::Frozen, true) => server.thaw(),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_killed() {
    if is_worker() {
        return work().await;
    }
    outage("in_flight::redis::redis_is_killed", Outage::Killed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_frozen() {
    if is_worker() {
        return work().await;
    }
    outage("in_flight::redis::redis_is_frozen", Outage::Frozen).await;
}

async fn hold(limiter: &Limiter<RedisStore>, count: u32) -> Vec<Reservation> {
    join_all((0..count).map(|_| limiter.reserve(ann(), 1)))
        .await
        .into_iter()
        .flatten()
        .collect()
}

async fn left(limiter: &Limiter<RedisStore>) -> u32 {
    limiter.peek(ann(), 1).await.unwrap().remaining()
}

/// Its slots expire. After the stall they are taken again, and no other request is admitted until
/// there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_instance_is_counted_again() {
    let server = RedisServer::start();
    let (other, url) = (limiter(server.store()), server.url());
    // A runtime that runs nothing acts like a stalled instance.
    let stopped = limiter(patient(&url));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let stops = stopped.clone();
    let held = runtime
        .spawn(async move { hold(&stops, 6).await })
        .await
        .unwrap();
    assert_eq!((held.len(), left(&other).await), (6, 4));
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    runtime.spawn(async move { wait.recv() });
    until("what it holds is free", async || {
        left(&other).await == LIMIT
    })
    .await;
    let others = hold(&other, LIMIT).await;
    assert_eq!(others.len(), LIMIT as usize);
    go_on.send(()).unwrap();
    // 16 requests are in flight: four beyond the limit, which must end first, and one more to make
    // room.
    sleep(TTL).await;
    let mut others = others;
    for _ in 0..6 {
        others.pop();
        sleep(Duration::from_millis(20)).await;
        assert!(hold(&other, 1).await.is_empty());
    }
    others.pop();
    until("there is room again", async || left(&other).await == 1).await;
    drop((others, held));
    until("all is free", async || left(&other).await == LIMIT).await;
    runtime.shutdown_background();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_requests_are_counted_again() {
    let server = RedisServer::start();
    let limiters = [limiter(server.store()), limiter(server.store())];
    let held = [hold(&limiters[0], 4).await, hold(&limiters[1], 3).await];
    for _ in 0..3 {
        let () = server.command("FLUSHALL").await;
        let forgot_at = Instant::now();
        // Other requests start and end in the meantime.
        until("it is counted again", async || {
            drop(hold(&limiters[0], 1).await);
            // It may still count the request that has just ended.
            left(&limiters[1]).await <= LIMIT - 7
        })
        .await;
        assert!(forgot_at.elapsed() < TTL, "after {:?}", forgot_at.elapsed());
    }
    drop(held);
    until("all is free", async || left(&limiters[0]).await == LIMIT).await;
    assert_eq!(server.command::<u64>("DBSIZE").await, 0);
}

/// Requests of many callers end in one call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_ending_together_are_released_together() {
    use tower_redis_ratelimit::Key;
    const CALLERS: usize = 2_000;

    let server = RedisServer::start();
    let limiter = limiter(server.store());
    let keys = (0..CALLERS).map(|i| Key::new(i.to_string()));
    let held: Vec<_> = join_all(keys.map(|key| limiter.reserve(key, 1)))
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let calls = server.calls("evalsha").await;
    drop(held);
    until("nothing is left", async || {
        server.command::<u64>("DBSIZE").await == 0
    })
    .await;
    let calls = server.calls("evalsha").await - calls;
    assert!(calls < CALLERS as u64 / 20, "{calls} calls");
}

/// A flood of denied requests costs next to nothing, and the end of a request in this process
/// admits the next one immediately. A cost above the limit is treated like any other.
#[tokio::test]
async fn denials_are_cached_until_requests_end() {
    use tower_redis_ratelimit::Policy;
    use tower_redis_ratelimit::check::{Check, Outcome, Source};
    use tower_redis_ratelimit::store::Store;

    let server = RedisServer::start();
    let store = server.store();
    let policies = Policy::in_flight("streams", 2).unwrap().into();
    let take = async |cost| {
        store
            .check(Check::take(ann(), &policies, cost))
            .await
            .unwrap()
    };
    let first = Check::take(ann(), &policies, 1);
    let slot = first.slot().unwrap();
    assert!(store.check(first).await.unwrap().is_allowed() && take(100).await.is_allowed());
    let denied = take(100).await;
    assert_eq!(
        denied.outcome(),
        Outcome::Denied {
            retry_after: Duration::from_millis(100)
        }
    );
    let (before, mut cached) = (server.calls("evalsha").await, 0);
    for _ in 0..1_000 {
        let denied = take(100).await;
        assert!(!denied.is_allowed() && denied.retry_after() <= Some(Duration::from_millis(100)));
        cached += u32::from(denied.source() == Source::Cached);
    }
    let calls = server.calls("evalsha").await - before;
    assert!(
        cached > 900 && calls < 100,
        "{cached} of 1000 were remembered, {calls} calls"
    );
    let _ = store
        .check(Check::release(ann(), &policies, slot))
        .await
        .unwrap();
    assert!(take(100).await.is_allowed());
    // A release elsewhere is visible at the next check in Redis.
    assert!(!take(100).await.is_allowed());
    let other = server.store();
    let _ = other.check(Check::reset(ann(), &policies)).await.unwrap();
    sleep(Duration::from_millis(110)).await;
    assert!(take(100).await.is_allowed());
}

/// An instance knows the grants of Redis when Redis fails: it then grants only the rest of its
/// share.
#[tokio::test]
async fn an_outage_grants_no_extra_quota() {
    use tower_redis_ratelimit::check::Source;
    use tower_redis_ratelimit::{Fallback, LocalStore};

    let mut server = RedisServer::start();
    let share = 2;
    let limiter = limiter(
        Fallback::builder(server.store(), LocalStore::default())
            .share(share)
            .build(),
    );
    let mut held = vec![];
    for _ in 0..7 {
        held.push(limiter.reserve(ann(), 1).await.unwrap());
    }
    server.kill();
    until("the outage is noticed", async || {
        limiter.peek(ann(), 1).await.unwrap().source() == Source::Local
    })
    .await;
    assert!(
        limiter.reserve(ann(), 1).await.is_err(),
        "it holds more than its share of 5"
    );
    held.truncate(4);
    until("there is room", async || {
        limiter.peek(ann(), 1).await.unwrap().remaining() == 1
    })
    .await;
    held.push(limiter.reserve(ann(), 1).await.unwrap());
    assert!(limiter.reserve(ann(), 1).await.is_err());
    server.restart();
    // The next renewal takes the slots in Redis too.
    until("Redis counts the slots", async || {
        let peek = limiter.peek(ann(), 1).await.unwrap();
        peek.source() == Source::Redis && peek.remaining() == LIMIT - 5
    })
    .await;
    drop(held);
    until("all is free", async || {
        limiter.peek(ann(), 1).await.unwrap().remaining() == LIMIT
    })
    .await;
}

/// Even if requests arrive faster than one per call to Redis.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_distant_wait_queue_drains() {
    let server = RedisServer::start();
    let url = far(server.port(), Duration::from_millis(20)).await;
    let layer = CallLimitLayer::new(
        patient(&url),
        |_: &()| Some(ann()),
        Policy::in_flight("streams", 50).unwrap(),
    );
    let wait = Wait::up_to(Duration::from_secs(60)).per_caller(NonZeroUsize::MAX);
    let service = layer.wait(wait).layer(service_fn(async |()| {
        sleep(Duration::from_millis(10)).await;
        Ok::<_, Infallible>(())
    }));
    let mut calls: Vec<_> = (0..150)
        .map(|_| tokio::spawn(service.clone().oneshot(())))
        .collect();
    for _ in 0..200 {
        sleep(Duration::from_millis(5)).await;
        calls.push(tokio::spawn(service.clone().oneshot(())));
    }
    let start = Instant::now();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let took = start.elapsed();
    assert!(
        took < Duration::from_secs(3),
        "the last one waited for {took:?}"
    );
    let here = Limiter::new(server.store(), Policy::in_flight("streams", 50).unwrap());
    until("all is free", async || left(&here).await == 50).await;
}

/// Requests start and end continuously, and some clients disconnect. `SECONDS=5` runs longer, and
/// prints the number of requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_distant_flood_releases_all_capacity() {
    const PLACES: u32 = 20;
    const HASTY: u8 = 0;
    const PATIENT: u8 = 1;
    const OVER: u8 = 2;

    let seconds = env::var("SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or(1.0);
    let server = RedisServer::start();
    let policy = Policy::in_flight("streams", PLACES).unwrap();
    let limiter = |url: &str| Limiter::new(patient(url), policy.clone());
    let (here, far) = (
        limiter(&server.url()),
        limiter(&far(server.port(), Duration::from_millis(20)).await),
    );
    let (mood, begun) = (
        Arc::new(AtomicU8::new(PATIENT)),
        Arc::new(AtomicUsize::new(0)),
    );
    let mut tasks = vec![];
    for seed in 0..5 * u64::from(PLACES) {
        let (far, mood, begun, mut rng) = (
            far.clone(),
            Arc::clone(&mood),
            Arc::clone(&begun),
            Rng::with_seed(seed),
        );
        tasks.push(tokio::spawn(async move {
            loop {
                let goes_away = mood.load(SeqCst) == HASTY && rng.f64() < 0.1;
                let patience =
                    Duration::from_millis(if goes_away { rng.u64(..40) } else { 60_000 });
                let held = timeout(patience, far.reserve(ann(), 1))
                    .await
                    .ok()
                    .and_then(Result::ok);
                if held.is_some() {
                    begun.fetch_add(1, SeqCst);
                }
                sleep(Duration::from_millis(rng.u64(1..20))).await;
                if mood.load(SeqCst) == OVER {
                    return held;
                }
            }
        }));
    }
    let pass = async |what: &str, seconds: f64| {
        let before = begun.load(SeqCst);
        sleep(Duration::from_secs_f64(seconds)).await;
        println!(
            "{what}: {} began in {seconds} s",
            begun.load(SeqCst) - before
        );
    };
    pass("before", seconds).await;
    mood.store(HASTY, SeqCst);
    pass("while some disconnect", seconds).await;
    mood.store(PATIENT, SeqCst);
    pass("just after that", 1.0).await;
    pass("then", seconds).await;
    mood.store(OVER, SeqCst);
    let mut held = vec![];
    for task in tasks {
        held.extend(task.await.unwrap());
    }
    assert_eq!(
        left(&here).await,
        PLACES - held.len() as u32,
        "{} are held",
        held.len()
    );
}

/// A third of all calls are dropped before, with or after the reply, while connections are killed
/// and Redis pauses: the limit holds, and all slots are released within a second of the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_calls_on_broken_connections_keep_the_limit() {
    let server = RedisServer::start();
    let limiters = [limiter(server.store()), limiter(server.store())];
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (open, begun) = (Arc::new(AtomicU8::new(1)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = vec![];
    for seed in 0..64 {
        let limiter = limiters[seed as usize % 2].clone();
        let (running, most, open, begun) =
            (running.clone(), most.clone(), open.clone(), begun.clone());
        tasks.push(tokio::spawn(async move {
            let mut rng = Rng::with_seed(seed);
            while open.load(SeqCst) == 1 {
                let patience = match rng.u8(..9) {
                    0 => Duration::ZERO,
                    1 | 2 => Duration::from_micros(rng.u64(..2_000)),
                    _ => Duration::from_secs(60),
                };
                if let Ok(Ok(held)) = timeout(patience, limiter.reserve(ann(), 1)).await {
                    begun.fetch_add(1, SeqCst);
                    most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                    sleep(Duration::from_millis(rng.u64(..10))).await;
                    running.fetch_sub(1, SeqCst);
                    drop(held);
                }
                sleep(Duration::from_millis(rng.u64(..10))).await;
            }
        }));
    }
    let mut connection = server.connection().await;
    for round in 0..20 {
        sleep(Duration::from_millis(100)).await;
        let mut kill = redis::cmd("CLIENT");
        let () = kill
            .arg("KILL")
            .arg("TYPE")
            .arg("normal")
            .query_async(&mut connection)
            .await
            .unwrap();
        if round % 5 == 4 {
            let mut pause = redis::cmd("CLIENT");
            let () = pause
                .arg("PAUSE")
                .arg(50)
                .query_async(&mut connection)
                .await
                .unwrap();
        }
    }
    open.store(0, SeqCst);
    for task in tasks {
        task.await.unwrap();
    }
    let ended_at = Instant::now();
    until("nothing is left", async || {
        server.command::<u64>("DBSIZE").await == 0
    })
    .await;
    let (took, begun, most) = (ended_at.elapsed(), begun.load(SeqCst), most.load(SeqCst));
    println!("{begun} began, at most {most} ran, all released after {took:?}");
    assert!(begun > 100, "only {begun} began");
    assert_eq!(most, LIMIT as usize);
    assert!(took < TTL * 3 / 4, "released after {took:?}");
}

/// A string, or another type, under the key of slots counts as empty, and the other checks of the
/// batch are decided.
#[tokio::test]
async fn foreign_values_count_as_no_slots() {
    use tower_redis_ratelimit::check::Check;
    use tower_redis_ratelimit::store::Store;
    use tower_redis_ratelimit::{Key, Policies, Quota, Strategy};

    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .denials(0)
        .connect()
        .await
        .unwrap();
    let streams = Policy::in_flight("streams", 2).unwrap();
    let alone = Policies::from(streams.clone());
    let api = Policy::new("api", Strategy::Gcra, Quota::per_second(10)).unwrap();
    let both = Policies::new([api, streams]).unwrap();
    let (bob, callers) = (Key::new("bob"), ["a", "b", "c", "d"].map(Key::new));
    for (policies, mode) in [
        (&alone, 0),
        (&alone, 1),
        (&alone, 2),
        (&alone, 3),
        (&both, 0),
        (&both, 1),
        (&both, 3),
    ] {
        let () = server.command("FLUSHALL").await;
        let () = server.command("SET rl:{a}:streams:s text").await;
        let () = server.command("RPUSH rl:{b}:streams:s one two").await;
        let () = server.command("HSET rl:{c}:streams:s field value").await;
        let () = server.command("SADD rl:{d}:streams:s member").await;
        let make = |key: Key| {
            let take = Check::take(key, policies, 1);
            let slot = take.slot().unwrap();
            match mode {
                0 => take,
                1 => Check::renew(key, policies, slot),
                2 => Check::release(key, policies, slot),
                _ => Check::peek(key, policies, 1),
            }
        };
        let asked = callers
            .iter()
            .copied()
            .chain([bob])
            .map(|key| store.check(make(key)));
        for answer in join_all(asked).await {
            let decision = answer.unwrap();
            let left = decision.each().last().unwrap().remaining();
            assert!(decision.is_allowed());
            assert_eq!(left, if mode < 2 { 1 } else { 2 }, "mode {mode}");
        }
        if mode < 2 {
            for key in ["a", "b", "c", "d"] {
                assert_eq!(
                    server
                        .command::<u64>(&format!("ZCARD rl:{{{key}}}:streams:s"))
                        .await,
                    1
                );
            }
        }
    }
}

/// The key of a caller and policy in Redis is deleted with its last slot.
#[tokio::test]
async fn instances_count_together() {
    let server = RedisServer::start();
    let store = || {
        RedisStore::builder(server.url())
            .denials(0)
            .connect_lazy()
            .unwrap()
    };
    let stores = [store(), store()];
    let policies = Policy::in_flight("streams", 4).unwrap().into();
    let ann = Key::new("ann");
    let mut slots = vec![];
    for store in stores.iter().cycle().take(4) {
        let take = Check::take(ann, &policies, 1);
        slots.push(take.slot().unwrap());
        assert!(store.check(take).await.unwrap().is_allowed());
    }
    assert!(
        !stores[0]
            .check(Check::take(ann, &policies, 1))
            .await
            .unwrap()
            .is_allowed()
    );
    let count: usize = server.command("ZCARD rl:{ann}:streams:s").await;
    assert_eq!(count, 4);
    let expires: i64 = server.command("PTTL rl:{ann}:streams:s").await;
    assert!((29_000..=30_001).contains(&expires), "{expires} ms");
    for (left, slot) in slots.into_iter().enumerate() {
        let released = stores[1]
            .check(Check::release(ann, &policies, slot))
            .await
            .unwrap();
        assert_eq!(released.remaining(), left as u32 + 1);
    }
    assert_eq!(server.command::<usize>("DBSIZE").await, 0);
}
