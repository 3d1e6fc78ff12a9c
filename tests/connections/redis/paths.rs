//! The path between the store and Redis: connections that are dropped or pooled, and names that
//! resolve differently.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::redis::IntoConnectionInfo;
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{Key, RedisStore, Strategy};

use crate::devices::{Path, pooling, shard};
use crate::support::{RedisServer, check, policy, until};

const ONE: NonZeroUsize = NonZeroUsize::MIN;

/// Advances the clock so that connections count as idle.
async fn rest() {
    idle_for(Duration::from_secs(30)).await;
}

async fn idle_for(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

/// A NAT drops idle connections silently. All are lost, but the next check is decided over a new
/// one, within the timeout.
#[tokio::test]
async fn forgotten_connections_are_replaced() {
    const TIMEOUT: Duration = Duration::from_secs(4);
    let server = RedisServer::start();
    let path = Path::to(&server).await;
    let connections = NonZeroUsize::new(4).unwrap();
    let builder = RedisStore::builder(path.url())
        .connections(connections)
        .batch(ONE)
        .timeout(TIMEOUT);
    let store = builder.connect_lazy().unwrap();
    let checks = (0..4).map(|i| store.check(check(&format!("caller-{i}"), "10/h")));
    assert!(
        join_all(checks)
            .await
            .into_iter()
            .all(|decision| decision.unwrap().is_allowed())
    );
    let before = path.connections.load(SeqCst);
    assert!(before >= 2, "{before} connections");
    path.forget();
    rest().await;
    let start = Instant::now();
    assert_eq!(
        store.check(check("ann", "10/h")).await.unwrap().remaining(),
        9
    );
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    assert_eq!(path.connections.load(SeqCst), before + 1);
}

/// An idle connection is pinged in the background. If it was lost, the next check opens another one, and waits for no
/// ping.
#[tokio::test]
async fn idle_connections_are_pinged_in_the_background() {
    const TIMEOUT: Duration = Duration::from_secs(20);
    let server = RedisServer::start();
    let path = Path::to(&server).await;
    let builder = RedisStore::builder(path.url()).connections(ONE);
    let store = builder.timeout(TIMEOUT).connect_lazy().unwrap();
    let left = async || {
        let decision = store.check(check("ann", "100/100d")).await;
        decision.unwrap().remaining()
    };
    assert_eq!(left().await, 99);
    let before = server.calls("ping").await;
    idle_for(Duration::from_secs(15)).await;
    until("it is pinged", async || server.calls("ping").await > before).await;
    assert_eq!(left().await, 98);

    path.forget();
    idle_for(Duration::from_secs(15)).await;
    until("a ping is lost", async || path.dropped.load(SeqCst) > 0).await;
    idle_for(TIMEOUT / 2).await;
    let start = Instant::now();
    assert_eq!(left().await, 97);
    assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
    assert_eq!(path.connections.load(SeqCst), 2);
}

/// A connection in recent use is not pinged: the check that detects the loss times out. The other
/// connections are then pinged, so the next check is decided.
#[tokio::test]
async fn silently_lost_connections_cost_one_check() {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let server = RedisServer::start();
    let path = Path::to(&server).await;
    let store = RedisStore::builder(path.url())
        .connections(NonZeroUsize::new(2).unwrap())
        .batch(ONE)
        .timeout(TIMEOUT)
        .connect_lazy()
        .unwrap();
    let error = loop {
        until("both are connected", async || {
            let checks = join_all(["ann", "bob"].map(|caller| store.check(check(caller, "100/h"))));
            checks.await.iter().all(Result::is_ok) && path.connections.load(SeqCst) >= 2
        })
        .await;
        path.forget();
        match store.check(check("ann", "100/h")).await {
            Err(error) if !error.is_not_sent() => break error,
            // On a machine that stalled, the check was not sent in time.
            _ => {}
        }
    };
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let decision = store.check(check("ann", "100/h")).await.unwrap();
    assert!(decision.is_allowed());
}

/// Redis closes connections that are idle for longer than its `timeout`, that an administrator
/// kills, and all when it is killed. The next check is decided over a new one.
#[tokio::test]
async fn closed_connections_are_replaced() {
    let mut server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .connections(ONE)
        .timeout(Duration::from_secs(20));
    let store = store.connect_lazy().unwrap();
    let left = async || {
        store
            .check(check("ann", "100/100d"))
            .await
            .unwrap()
            .remaining()
    };
    assert_eq!(left().await, 99);
    let _: String = server.command("CONFIG SET timeout 1").await;
    let clients = async || {
        server
            .command::<String>("CLIENT LIST TYPE normal")
            .await
            .lines()
            .count()
    };
    until("it is closed", async || clients().await == 1).await;
    assert_eq!(left().await, 98);
    let _: String = server.command("CONFIG SET timeout 0").await;
    for remaining in [97, 96, 95] {
        // In recent use: no ping would detect the loss.
        let killed: u64 = server.command("CLIENT KILL TYPE normal").await;
        assert_eq!((killed, left().await), (1, remaining));
    }
    server.kill();
    server.restart();
    let _: String = server.command("PING").await;
    assert_eq!(left().await, 99, "Redis has forgotten");
}

/// A task of redis-rs drives a connection over a Unix socket, and ends with it.
#[cfg(unix)]
#[tokio::test]
async fn closed_unix_connections_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock");
    let socket = socket.to_str().unwrap();
    let server = RedisServer::start_with(&["--unixsocket", socket]);
    let store = RedisStore::builder(format!("redis+unix://{socket}"))
        .connections(ONE)
        .timeout(Duration::from_secs(20))
        .connect_lazy()
        .unwrap();
    for remaining in [99, 98, 97] {
        let decision = store.check(check("ann", "100/100d")).await.unwrap();
        assert_eq!(decision.remaining(), remaining);
        let killed: u64 = server.command("CLIENT KILL TYPE normal").await;
        assert_eq!(killed, 1);
        idle_for(Duration::from_millis(500)).await;
    }
}

/// A replica decides checks that write nothing, such as a peek. Another check of the batch shows
/// that it is a replica.
#[tokio::test]
async fn a_replica_is_left_after_any_refusal() {
    let (former, server) = (
        RedisServer::start(),
        RedisServer::start_with(&["--repl-diskless-sync-delay", "0"]),
    );
    let path = Path::to(&former).await;
    let builder = RedisStore::builder(path.url())
        .connections(ONE)
        .timeout(Duration::from_secs(20));
    let store = builder.connect_lazy().unwrap();
    assert!(
        store
            .check(check("ann", "10/h"))
            .await
            .unwrap()
            .is_allowed()
    );
    let _: String = former
        .command(&format!("REPLICAOF 127.0.0.1 {}", server.port()))
        .await;
    until("it follows", async || {
        former
            .command::<String>("INFO replication")
            .await
            .contains("master_link_status:up")
    })
    .await;
    path.lead_to(&server);
    let peek = Check::peek(Key::new("bob"), &policy(Strategy::Gcra, "10/h"), 1);
    let (peeked, taken) = tokio::join!(store.check(peek), store.check(check("ann", "10/h")));
    assert!(peeked.unwrap().is_allowed());
    assert_eq!(taken.unwrap_err().kind(), ErrorKind::ReadOnly);
    assert_eq!(
        store.check(check("ann", "10/h")).await.unwrap().remaining(),
        9
    );
}

/// The system probes idle connections, so no device in between drops them: it lists the timer of
/// each.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn connections_are_kept_alive() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let to_server = format!(":{:04X}", server.port());
    until("its connections have a timer", async || {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        // The remote address, the state, and the kind and due time of the next timer.
        let sockets = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let ours: Vec<_> = sockets
            .filter(|socket| socket[2].ends_with(&to_server) && socket[3] == "01")
            .collect();
        let is_probe = |timer: &str| {
            let (kind, due) = timer.split_once(':').unwrap();
            // In hundredths of a second.
            kind == "02" && i64::from_str_radix(due, 16).unwrap() <= 60 * 100
        };
        !ours.is_empty() && ours.iter().all(|socket| is_probe(socket[5]))
    })
    .await;
    drop(store);
}

/// A service's name resolves to another server after a failover. The old master's error replies,
/// which charge nothing, make the store replace the connections.
#[tokio::test]
async fn the_name_leads_to_a_new_master() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let path = Path::to(&old).await;
    let store = RedisStore::builder(path.url())
        .batch(ONE)
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let take = || store.check(check("ann", "100/100d"));
    for decision in join_all((0..10).map(|_| take())).await {
        assert!(decision.unwrap().is_allowed());
    }
    let made = path.connections.load(SeqCst);
    path.lead_to(&new);
    let _: String = old
        .command(&format!("REPLICAOF 127.0.0.1 {}", new.port()))
        .await;
    let (mut refused, mut decided) = (0, 0);
    for _ in 0..20 {
        match take().await {
            Ok(decision) => {
                decided += 1;
                assert_eq!(decision.remaining(), 100 - decided, "the new master counts");
            }
            Err(error) => {
                // While it synchronizes, a replica rejects even scripts.
                let kinds = [ErrorKind::ReadOnly, ErrorKind::NotReady];
                assert!(
                    kinds.contains(&error.kind()) && error.is_not_sent(),
                    "{error:?}"
                );
                refused += 1;
            }
        }
    }
    assert!(refused <= made, "{refused} refused, of {made} connections");
}

/// A call, and its repetition with the script text after NOSCRIPT, may use different connections.
#[tokio::test]
async fn a_proxy_pools_connections() {
    let server = RedisServer::start();
    let store =
        RedisStore::builder(pooling(&[&server], false).await).timeout(Duration::from_secs(20));
    let store = store
        .batch(NonZeroUsize::new(5).unwrap())
        .connect()
        .await
        .unwrap();
    let policies = policy(Strategy::Gcra, "100/100d");
    let mut granted = 0;
    for _ in 0..6 {
        let takes = (0..20).map(|_| store.check(Check::take(Key::new("ann"), &policies, 1)));
        granted += join_all(takes)
            .await
            .into_iter()
            .filter(|decision| decision.as_ref().unwrap().is_allowed())
            .count();
        let _: String = server.command("SCRIPT FLUSH").await;
    }
    assert_eq!(granted, 100);
}

/// Twemproxy and others close connections on unknown commands; redis-rs's own commands are not
/// required.
#[tokio::test]
async fn a_proxy_that_knows_scripts_only() {
    let server = RedisServer::start();
    let url = pooling(&[&server], true).await;
    assert_eq!(
        RedisStore::connect(url.clone()).await.unwrap_err().kind(),
        ErrorKind::Unreachable
    );

    let info = url.into_connection_info().unwrap();
    let settings = info.redis_settings().clone().set_skip_set_lib_name();
    let store =
        RedisStore::builder(info.set_redis_settings(settings)).timeout(Duration::from_secs(20));
    let store = store.connect().await.unwrap();
    for count in 1..=3 {
        assert_eq!(
            store
                .check(check("ann", "10/100d"))
                .await
                .unwrap()
                .remaining(),
            10 - count
        );
        // The ping makes the proxy close the connection, and the next connection works.
        rest().await;
    }
}

/// A proxy that spreads keys over servers routes a call by its first key. So a call may have only
/// one caller; with more, a caller would be counted on the server that its batch happens to reach.
#[tokio::test]
async fn a_proxy_spreads_keys() {
    let servers = [RedisServer::start(), RedisServer::start()];
    let url = pooling(&[&servers[0], &servers[1]], false).await;
    assert_ne!(shard(b"rl:{ann}:test:g", 2), shard(b"rl:{bea}:test:g", 2));
    let policies = policy(Strategy::Gcra, "5/100d");
    for (batch, granted) in [(1, 5), (128, 10)] {
        let store = RedisStore::builder(url.clone())
            .batch(NonZeroUsize::new(batch).unwrap())
            .connections(ONE)
            .denials(0);
        let store = store
            .timeout(Duration::from_secs(20))
            .connect_lazy()
            .unwrap();
        let take = |caller: &str| store.check(Check::take(Key::new(caller), &policies, 5));
        let mut of_ann = 0;
        for callers in [["ann", "bea"], ["bea", "ann"]] {
            let decisions = join_all(callers.map(take))
                .await
                .into_iter()
                .map(Result::unwrap);
            let of = callers
                .into_iter()
                .zip(decisions)
                .find(|(caller, _)| *caller == "ann");
            of_ann += of.unwrap().1.granted();
        }
        assert_eq!(of_ann, granted, "in batches of {batch}");
        for server in &servers {
            let _: String = server.command("FLUSHALL").await;
        }
    }
}
