//! Redis fails and recovers: no check fails, and counting continues.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::join_all;
use tower_redis_ratelimit::check::{Check, Source};
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{
    AnyStore, ErrorKind, FallbackBuilder, Instances, ShareConfig, Store, StoreConfig, StoreError,
    StoreKind,
};
use tower_redis_ratelimit::{Fallback, Key, LocalStore, Policies, Policy, RedisStore, Strategy};

use crate::support::{RedisServer, STRATEGIES, check, policy, until, unused_port};

/// Records notifications.
#[derive(Clone, Default)]
struct Notes(Arc<NotesInner>);

#[derive(Default)]
struct NotesInner {
    degraded: Mutex<Vec<ErrorKind>>,
    recovered: AtomicUsize,
    failed: AtomicUsize,
    /// Checks of a late runtime, which show no failure.
    in_doubt: AtomicUsize,
    reconciled: Mutex<Vec<(u64, u64)>>,
}

impl Observer for Notes {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Degraded { error, .. } => {
                self.0.degraded.lock().unwrap().push(error.kind());
            }
            Event::Recovered { .. } => {
                self.0.recovered.fetch_add(1, SeqCst);
            }
            Event::Reconciled {
                charged, dropped, ..
            } => {
                self.0.reconciled.lock().unwrap().push((charged, dropped));
            }
            Event::Failed { .. } => {
                self.0.failed.fetch_add(1, SeqCst);
            }
            Event::RuntimeLate { gave_up, .. } => {
                self.0.in_doubt.fetch_add(gave_up.into(), SeqCst);
            }
            _ => {}
        }
    }
}

fn fallback(url: String, notes: &Notes) -> FallbackBuilder<RedisStore, LocalStore> {
    let redis = RedisStore::builder(url)
        .timeout(Duration::from_secs(5))
        .connect_lazy()
        .unwrap();
    Fallback::builder(redis, LocalStore::default()).observer(notes.clone())
}

#[tokio::test]
async fn it_degrades_and_recovers_with_redis() {
    let mut server = RedisServer::start();
    let notes = Notes::default();
    let store = fallback(server.url(), &notes)
        .deadline(Duration::from_secs(5))
        .unwrap()
        .build();
    assert_eq!(
        store.check(check("ann", "10/h")).await.unwrap().source(),
        Source::Redis
    );

    server.kill();
    for _ in 0..5 {
        assert_eq!(
            store.check(check("ann", "10/h")).await.unwrap().source(),
            Source::Local
        );
    }
    assert!(store.is_degraded());
    assert_eq!(
        notes.0.degraded.lock().unwrap().as_slice(),
        [ErrorKind::Unreachable]
    );
    assert_eq!(
        notes.0.failed.load(SeqCst),
        3,
        "only what opened the breaker was tried in Redis"
    );

    server.restart();
    until("it has recovered", async || !store.is_degraded()).await;
    assert_eq!(notes.0.recovered.load(SeqCst), 1);
    let decision = store.check(check("ann", "10/h")).await.unwrap();
    // The restarted Redis is empty. The first check may have been charged when Redis failed; the
    // others got no connection, so they are charged afterwards.
    assert_eq!(
        (decision.source(), decision.remaining()),
        (Source::Redis, 10 - 4 - 1),
        "four were reconciled"
    );
    assert_eq!(notes.0.reconciled.lock().unwrap().as_slice(), [(4, 0)]);
}

/// Outside a runtime, the primary store replies immediately that it cannot decide, and the check is
/// not sent. This is unrelated to Redis; the check is charged there as soon as there is a
/// runtime.
#[test]
fn checks_outside_runtimes_do_not_degrade_others() {
    let server = RedisServer::start();
    let notes = Notes::default();
    let store = fallback(server.url(), &notes)
        .deadline(Duration::from_secs(5))
        .unwrap()
        .build();
    for count in 1..=5 {
        let decision = store
            .check(check("ann", "10/h"))
            .now_or_never()
            .expect("it does not wait")
            .unwrap();
        assert_eq!(
            (decision.source(), decision.remaining()),
            (Source::Local, 10 - count)
        );
        assert!(!store.is_degraded());
    }
    assert_eq!(notes.0.failed.load(SeqCst), 5);
    assert!(notes.0.degraded.lock().unwrap().is_empty());

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        // The first check on the runtime starts the reconciliation.
        assert_eq!(
            store.check(check("ann", "10/h")).await.unwrap().source(),
            Source::Redis
        );
        until("all are reconciled", async || {
            !notes.0.reconciled.lock().unwrap().is_empty()
        })
        .await;
        let decision = store.check(check("ann", "10/h")).await.unwrap();
        assert_eq!(
            (decision.source(), decision.remaining()),
            (Source::Redis, 10 - 6 - 1),
            "all five were reconciled"
        );
    });
    assert_eq!(notes.0.reconciled.lock().unwrap().as_slice(), [(5, 0)]);
}

#[tokio::test]
async fn it_starts_while_redis_is_down() {
    let notes = Notes::default();
    let store = fallback(format!("redis://127.0.0.1:{}/", unused_port()), &notes).build();
    let decisions = join_all((0..20).map(|_| store.check(check("ann", "10/h")))).await;
    let allowed = decisions
        .iter()
        .filter(|decision| decision.as_ref().unwrap().is_allowed())
        .count();
    assert_eq!(allowed, 10, "the local store limits too");
}

/// If Redis does not reply by the deadline, the fallback decides, and the check is not sent again.
#[tokio::test]
async fn a_frozen_redis_is_not_waited_for() {
    let server = RedisServer::start();
    let notes = Notes::default();
    // Long enough for a busy machine, unless Redis is frozen.
    let store = fallback(server.url(), &notes)
        .deadline(Duration::from_secs(1))
        .unwrap()
        .build();
    let policies = policy(Strategy::Gcra, "100/d");
    let take = || store.check(Check::take(Key::new("ann"), &policies, 1));
    assert_eq!(take().await.unwrap().source(), Source::Redis);

    server.freeze();
    // All checks in flight fail first, then two more, each a check or a probe.
    let mut taken = 0;
    while taken < 30 || !store.is_degraded() {
        for decision in join_all((0..10).map(|_| take())).await {
            assert_eq!(decision.unwrap().source(), Source::Local);
        }
        taken += 10;
    }
    let failed = notes.0.failed.load(SeqCst);
    let sent = failed + notes.0.in_doubt.load(SeqCst);
    assert!(
        failed <= 10 + 2 && sent >= 10,
        "{sent} checks sent, {failed} failed"
    );
    assert_eq!(
        notes.0.degraded.lock().unwrap().as_slice(),
        [ErrorKind::Timeout]
    );
    server.thaw();
    until("it has recovered", async || !store.is_degraded()).await;
    let left = take().await.unwrap();
    assert_eq!(left.source(), Source::Redis);
    assert!(
        (100 - 2 - taken..=100 - 2 - (taken - sent as u32)).contains(&left.remaining()),
        "a check was lost, or a check was charged twice: {left:?}"
    );
}

#[tokio::test]
async fn a_dropped_store_stops_its_probes() {
    let notes = Notes::default();
    let store = fallback(format!("redis://127.0.0.1:{}/", unused_port()), &notes).build();
    for _ in 0..3 {
        let _ = store.check(check("ann", "10/h")).await.unwrap();
    }
    assert!(store.is_degraded());
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    drop(store);
    until("every task has ended", async || tasks() == 0).await;
}

/// A limiter uses a store on one runtime and then on another; the first runtime's probe ends with
/// it.
#[test]
fn it_recovers_on_another_runtime() {
    let mut server = RedisServer::start();
    let notes = Notes::default();
    let store = fallback(server.url(), &notes).build();
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    server.kill();
    runtime().block_on(async {
        for _ in 0..3 {
            let _ = store.check(check("ann", "10/h")).await.unwrap();
        }
    });
    assert!(store.is_degraded());
    server.restart();
    runtime().block_on(until("it has recovered", async || {
        store.check(check("ann", "10/h")).await.unwrap().source() == Source::Redis
    }));
}

/// An outage grants no second burst: each instance continues with its share of the rest, and
/// reconciles it.
#[tokio::test]
async fn instances_share_and_reconcile_the_rest() {
    let all = STRATEGIES.map(async |strategy| {
        let mut server =
            RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
        let notes = Notes::default();
        let instance = || {
            let store = fallback(server.url(), &notes)
                .deadline(Duration::from_secs(2))
                .unwrap()
                .share(4);
            store.failures(NonZeroU32::MIN).build()
        };
        let instances = [instance(), instance(), instance(), instance()];
        let policies = policy(strategy, "100/100d");
        let take = |i: usize| instances[i % 4].check(Check::take(Key::new("ann"), &policies, 1));
        // Every instance has a count of the caller, and 40 units are left.
        for i in 0..60 {
            assert_eq!(take(i).await.unwrap().source(), Source::Redis);
        }
        server.kill();
        // The check that opens the breaker may have been charged, so it is never reconciled.
        for instance in &instances {
            let _ = instance
                .check(Check::take(Key::new("somebody else"), &policies, 1))
                .await
                .unwrap();
        }
        let mut granted = 0;
        for i in 0..100 {
            let decision = take(i).await.unwrap();
            assert_eq!(decision.source(), Source::Local);
            granted += decision.granted();
        }
        assert!(
            (36..=40).contains(&granted),
            "{strategy:?}: {granted} of the 40 that were left"
        );

        server.restart();
        until("all have recovered", async || {
            instances.iter().all(|instance| !instance.is_degraded())
        })
        .await;
        until("all have reconciled", async || {
            notes.0.reconciled.lock().unwrap().len() == 4
        })
        .await;
        let left = instances[0]
            .check(Check::peek(Key::new("ann"), &policies, 1))
            .await
            .unwrap();
        assert_eq!(
            (left.source(), left.remaining()),
            (Source::Redis, 40 - granted),
            "{strategy:?}"
        );
    });
    join_all(all).await;
}

/// One check is sent, and the others are queued behind it until after their deadlines.
#[tokio::test]
async fn checks_unsent_by_the_deadline_are_reconciled() {
    let server = RedisServer::start();
    let notes = Notes::default();
    let one = NonZeroUsize::MIN;
    let redis = RedisStore::builder(server.url())
        .connections(one)
        .batch(one)
        .timeout(Duration::from_secs(20));
    let redis = redis.connect().await.unwrap();
    let store = Fallback::builder(redis.clone(), LocalStore::default())
        .observer(notes.clone())
        .deadline(Duration::from_millis(300))
        .unwrap()
        .build();
    let policies = policy(Strategy::Gcra, "100/100d");
    server.freeze();
    for decision in
        join_all((0..10).map(|_| store.check(Check::take(Key::new("ann"), &policies, 1)))).await
    {
        assert_eq!(decision.unwrap().source(), Source::Local);
    }
    server.thaw();
    let reconciled = || {
        notes
            .0
            .reconciled
            .lock()
            .unwrap()
            .iter()
            .fold((0, 0), |sum, event| (sum.0 + event.0, sum.1 + event.1))
    };
    until("nine are reconciled", async || reconciled() == (9, 0)).await;
    let left = redis
        .check(Check::peek(Key::new("ann"), &policies, 1))
        .await
        .unwrap();
    assert_eq!(
        (left.source(), left.remaining()),
        (Source::Redis, 100 - 10),
        "the sent check is charged too"
    );
}

/// With announced instances, the shares follow the number of instances.
#[tokio::test]
async fn live_instances_are_counted() {
    let mut server = RedisServer::start();
    let stores: Vec<_> = (0..3)
        .map(|_| RedisStore::connect_lazy(server.url()).unwrap())
        .collect();
    let announced: Vec<_> = stores
        .iter()
        .map(|store| store.announce().unwrap())
        .collect();
    until("all instances are counted", async || {
        announced
            .iter()
            .all(|instances| instances.alive().get() == 3)
    })
    .await;

    let store = Fallback::builder(stores[0].clone(), LocalStore::default())
        .share(announced[0].clone())
        .build();
    server.kill();
    let policies = policy(
        Strategy::FixedWindow(tower_redis_ratelimit::strategy::Align::FirstHit),
        "10/100d",
    );
    let mut granted = 0;
    for _ in 0..20 {
        granted += store
            .check(Check::take(Key::new("ann"), &policies, 1))
            .await
            .unwrap()
            .granted();
    }
    assert_eq!(granted, 3, "a third of 10");

    // A stopped instance is soon not counted.
    server.restart();
    let [first, second, third] = <[_; 3]>::try_from(announced).unwrap();
    drop(third);
    until("it is no longer counted", async || {
        first.alive().get() == 2 && second.alive().get() == 2
    })
    .await;
}

/// `Leased` takes the number from the configured store, in which each instance announces itself once.
#[tokio::test]
async fn a_configured_store_returns_its_instances() {
    let server = RedisServer::start();
    let mut config = StoreConfig::default();
    config.url = Some(server.url());
    config.share = ShareConfig::Alive;
    let stores = [(); 2].map(|()| AnyStore::from_config(&config).unwrap());
    let instances = stores.each_ref().map(AnyStore::instances);
    until("both are counted", async || {
        instances
            .iter()
            .all(|instances| instances.alive().get() == 2)
    })
    .await;
    assert_eq!(server.command::<u32>("ZCARD rl:instances").await, 2);

    config.share = ShareConfig::Fixed(NonZeroU32::new(4).unwrap());
    let count = |config: &StoreConfig| {
        let store = AnyStore::from_config(config).unwrap();
        store.instances().alive().get()
    };
    assert_eq!(count(&config), 4);
    config.kind = StoreKind::Local;
    assert_eq!(count(&config), 1);
}

/// Such as one announcement for a `Fallback` and another one for a `Leased` store.
#[tokio::test]
async fn announcements_of_a_store_count_once() {
    let server = RedisServer::start();
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    let both = [&store, &store.clone()].map(|store| store.announce().unwrap());
    until("both are announced", async || {
        server.calls("zadd").await > 2
    })
    .await;
    assert_eq!(server.command::<u32>("ZCARD rl:instances").await, 1);
    assert_eq!(both.map(|instances| instances.alive().get()), [1, 1]);
}

#[tokio::test]
async fn an_outage_reports_whether_instances_are_counted() {
    #[derive(Clone, Default)]
    struct Shares(Arc<Mutex<Vec<(u32, bool)>>>);
    impl Observer for Shares {
        fn notify(&self, event: &Event<'_>) {
            if let Event::Degraded {
                share, is_counted, ..
            } = *event
            {
                let share = (share.get(), is_counted);
                self.0.lock().unwrap().push(share);
            }
        }
    }
    let url = format!("redis://127.0.0.1:{}/", unused_port());
    let redis = RedisStore::connect_lazy(url).unwrap();
    let instances = || redis.announce().unwrap();
    for (share, expected) in [
        (Instances::from(1), (1, false)),
        (instances(), (1, true)),
        (instances().at_least(2), (2, true)),
    ] {
        let shares = Shares::default();
        let store = Fallback::builder(redis.clone(), LocalStore::default())
            .share(share)
            .observer(shares.clone())
            .build();
        until("the outage is reported", async || {
            let peek = Check::peek(Key::GLOBAL, &policy(Strategy::Gcra, "1/s"), 1);
            let _ = store.check(peek).await.unwrap();
            !shares.0.lock().unwrap().is_empty()
        })
        .await;
        assert_eq!(*shares.0.lock().unwrap(), [expected]);
    }
}

/// A restarted Redis without its data counts only the instances that have announced themselves since.
#[tokio::test]
async fn a_lost_announcement_keeps_the_count() {
    let server = RedisServer::start();
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    let instances = store.announce().unwrap();
    let soon = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
        + 5_500;
    let _: u32 = server
        .command(&format!("ZADD rl:instances {soon} other"))
        .await;
    until("the other is counted", async || {
        instances.alive().get() == 2
    })
    .await;

    let before = server.calls("zadd").await;
    let _: u32 = server.command("DEL rl:instances").await;
    until("three further counts", async || {
        let alive = instances.alive().get();
        let counts = server.calls("zadd").await - before;
        assert!(counts > 3 || alive == 2, "{alive} after {counts} counts");
        counts >= 3
    })
    .await;
    until("it is not counted", async || instances.alive().get() == 1).await;
}

/// An announcement made while the clock was ahead, or on another server, is counted no longer than
/// others.
#[tokio::test]
async fn instances_of_a_later_clock_are_forgotten() {
    let server = RedisServer::start();
    let later = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
        + 3_600_000;
    let _: u32 = server
        .command(&format!("ZADD rl:instances {later} gone"))
        .await;
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    let _instances = store.announce().unwrap();
    until("it is announced", async || server.calls("zadd").await > 1).await;
    assert_eq!(server.command::<u32>("ZCARD rl:instances").await, 1);
}

/// A flood on one key gets cached denials while Redis hangs.
#[tokio::test]
async fn cached_denials_do_not_hide_an_outage() {
    let server = RedisServer::start();
    let notes = Notes::default();
    let store = fallback(server.url(), &notes)
        .deadline(Duration::from_millis(200))
        .unwrap()
        .build();
    let policies = policy(Strategy::Gcra, "1/100d");
    let take = |caller: &str| store.check(Check::take(Key::new(caller), &policies, 1));
    let mut denied_at = Instant::now();
    loop {
        let asked_at = Instant::now();
        if take("flood").await.unwrap().source() == Source::Cached {
            break;
        }
        denied_at = asked_at;
        tokio::task::yield_now().await;
    }
    server.freeze();
    for i in 0..3 {
        let source = take("flood").await.unwrap().source();
        // A denial is cached for a second, which a busy machine may exceed. An open breaker precedes it.
        let is_cached = denied_at.elapsed() < Duration::from_secs(1) && !store.is_degraded();
        assert!(source == Source::Cached || !is_cached, "{source:?}");
        assert_eq!(
            take(&format!("caller-{i}")).await.unwrap().source(),
            Source::Local
        );
    }
    until("the breaker is open", async || {
        let _ = take("another").await.unwrap();
        store.is_degraded()
    })
    .await;
    server.thaw();
}

/// It neither opens the breaker for the others nor keeps it open.
#[tokio::test]
async fn a_refused_policy_does_not_degrade_others() {
    let mut server =
        RedisServer::start_with(&["--user", "logless", "on", ">word", "~*", "+@all", "-lrange"]);
    let notes = Notes::default();
    let url = format!("redis://logless:word@127.0.0.1:{}/", server.port());
    let store = fallback(url, &notes)
        .deadline(Duration::from_secs(5))
        .unwrap()
        .build();
    let (log, gcra) = (
        policy(Strategy::SlidingLog, "1000/100d"),
        policy(Strategy::Gcra, "1000/100d"),
    );
    let take = |policies| store.check(Check::take(Key::new("ann"), policies, 1));
    for _ in 0..10 {
        assert_eq!(take(&log).await.unwrap().source(), Source::Local);
        assert_eq!(take(&gcra).await.unwrap().source(), Source::Redis);
    }
    server.kill();
    for _ in 0..10 {
        let _ = take(&log).await.unwrap();
        let _ = take(&gcra).await.unwrap();
    }
    assert!(store.is_degraded());
    server.restart();
    until("it has recovered", async || !store.is_degraded()).await;
    assert_eq!(take(&gcra).await.unwrap().source(), Source::Redis);
}

/// How to make Redis reject writes, its reply then, and how to make it accept them again.
const REFUSALS: [(&str, ErrorKind, &str); 3] = [
    (
        "CONFIG SET maxmemory 1",
        ErrorKind::OutOfMemory,
        "CONFIG SET maxmemory 0",
    ),
    (
        "CONFIG SET min-replicas-to-write 1",
        ErrorKind::Refused,
        "CONFIG SET min-replicas-to-write 0",
    ),
    (
        "REPLICAOF 127.0.0.1 1",
        ErrorKind::ReadOnly,
        "REPLICAOF NO ONE",
    ),
];

/// Also under several policies, with an id, and for a log that needs several commands.
#[tokio::test]
async fn checks_redis_cannot_write_are_uncharged() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(5))
        .connect()
        .await
        .unwrap();
    let named = |name, strategy| Policy::new(name, strategy, "100/100d").unwrap();
    let lists = STRATEGIES.map(|strategy| {
        Policies::new([
            named("one", strategy),
            named("log", Strategy::SlidingLog),
            named("two", Strategy::Gcra),
        ])
    });
    let lists: Vec<_> = lists
        .into_iter()
        .map(Result::unwrap)
        .chain([policy(Strategy::Gcra, "100/100d")])
        .collect();
    let used = async |list: &Policies| {
        let peek = store
            .check(Check::peek(Key::new("ann"), list, 1))
            .await
            .unwrap();
        peek.each()
            .map(|each| each.capacity() - each.remaining())
            .collect::<Vec<_>>()
    };
    for list in &lists {
        for cost in [2, 3] {
            assert!(
                store
                    .check(Check::take(Key::new("ann"), list, cost))
                    .await
                    .unwrap()
                    .is_allowed()
            );
        }
    }
    for (refuse, kind, mend) in REFUSALS {
        let _: String = server.command(refuse).await;
        for list in &lists {
            let key = Key::new("ann");
            let charges = [
                Check::take(key, list, 1),
                Check::take(key, list, 1).with_id("payment-7"),
                Check::charge(key, list, 1),
            ];
            let refused = |error: StoreError| {
                assert_eq!(
                    (error.kind(), error.is_not_sent()),
                    (kind, true),
                    "{refuse}: {list:?}: {error:?}"
                );
            };
            let before = used(list).await;
            for answer in join_all(charges.map(|check| store.check(check))).await {
                refused(answer.unwrap_err());
            }
            assert_eq!(used(list).await, before, "{refuse}: {list:?}");
            for cost in [1, 3] {
                let before = used(list).await;
                match store.check(Check::refund(key, list, cost)).await {
                    // Without memory Redis can still shorten a list. A script that has begun to
                    // write may continue.
                    Ok(_) if kind == ErrorKind::OutOfMemory => {}
                    Ok(decision) => panic!("{refuse}: {decision:?}"),
                    Err(error) => {
                        refused(error);
                        assert_eq!(used(list).await, before, "{refuse}: {list:?}");
                    }
                }
            }
        }
        let _: String = server.command(mend).await;
    }
}

#[tokio::test]
async fn grants_redis_cannot_write_are_reconciled() {
    for (refuse, kind, mend) in REFUSALS {
        let server = RedisServer::start();
        let notes = Notes::default();
        let store = fallback(server.url(), &notes)
            .deadline(Duration::from_secs(5))
            .unwrap()
            .build();
        let policies = policy(Strategy::Gcra, "100/100d");
        let take = || store.check(Check::take(Key::new("ann"), &policies, 1));
        assert_eq!(take().await.unwrap().source(), Source::Redis);
        let _: String = server.command(refuse).await;
        for _ in 0..5 {
            assert_eq!(take().await.unwrap().source(), Source::Local);
        }
        assert_eq!(notes.0.degraded.lock().unwrap().as_slice(), [kind]);
        let _: String = server.command(mend).await;
        until("it has recovered", async || !store.is_degraded()).await;
        let left = take().await.unwrap();
        assert_eq!(
            (left.source(), left.remaining()),
            (Source::Redis, 100 - 1 - 5 - 1),
            "{refuse}"
        );
    }
}
