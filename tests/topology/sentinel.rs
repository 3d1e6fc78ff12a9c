//! Dead, slow, late or lying sentinels: the store still finds the master in time.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::store::{Servers, Store};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

use crate::devices::far;
use crate::nodes::{Fake, NAME, Sentinel, url};
use crate::support::{RedisServer, check, until, unused_port};

const PATIENT: Duration = Duration::from_secs(20);
/// Shorter than redis-rs's own timeout for a silent server.
const IMPATIENT: Duration = Duration::from_millis(400);

/// A server that accepts connections and never replies.
fn silent() -> (std::net::TcpListener, u16) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

async fn has_counted(server: &RedisServer) -> bool {
    server.calls("eval").await + server.calls("evalsha").await > 0
}

async fn take(store: &RedisStore) {
    assert!(
        store
            .check(check("ann", "1000000/100d"))
            .await
            .unwrap()
            .is_allowed()
    );
}

#[tokio::test]
async fn the_master_is_found() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "");
    let of_sentinel = format!("redis://127.0.0.1:{}", sentinel.port);
    take(&RedisStore::sentinel(NAME, [of_sentinel.as_str()]).unwrap()).await;
    assert!(has_counted(&server).await);
    take(&RedisStore::connect(url(&[sentinel.port])).await.unwrap()).await;
    let servers = Servers::sentinel(NAME, [of_sentinel]);
    take(
        &RedisStore::builder(servers)
            .prefix("shop")
            .connect()
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(
        server
            .command::<Vec<String>>("KEYS shop:*{ann}*")
            .await
            .len(),
        1
    );
    // RESP3 replies with maps.
    let resp3 = format!("{}/3?protocol=resp3", url(&[sentinel.port]));
    take(
        &RedisStore::builder(resp3)
            .prefix("third")
            .connect()
            .await
            .unwrap(),
    )
    .await;
    assert!(
        server
            .command::<String>("INFO keyspace")
            .await
            .contains("db3:keys=")
    );
}

/// Behind a NAT, sentinels report an address that this process does not reach.
#[tokio::test]
async fn a_map_reaches_the_master() {
    let server = RedisServer::start();
    let (announced, other) = (unused_port(), unused_port());
    let sentinels = [Fake::start(announced, 1), Fake::start(announced, 1)];
    let servers = || url(&[sentinels[0].port, sentinels[1].port]);
    let port = server.port();
    let map = move |host: &str, _: u16| Some((host.to_owned(), port));
    let builder = RedisStore::builder(servers()).timeout(Duration::from_secs(20));
    let store = builder.address_map(map).connect().await.unwrap();
    take(&store).await;
    assert!(has_counted(&server).await);

    let unmapped = RedisStore::builder(servers()).address_map(|_, _| None);
    let error = unmapped.connect().await.unwrap_err();
    let text = format!("the server 127.0.0.1:{announced} cannot be reached");
    assert!(error.to_string().starts_with(&text), "{error}");
    let nowhere =
        RedisStore::builder(servers()).address_map(|_, _| Some(("127.0.0.1".to_owned(), 1)));
    let error = nowhere.connect().await.unwrap_err();
    let text =
        format!("the server 127.0.0.1:{announced} (reached at 127.0.0.1:1) cannot be reached");
    assert!(error.to_string().starts_with(&text), "{error}");

    // The sentinels disagree, and both masters would be one server.
    sentinels[1].set_master(other, 1);
    let builder = RedisStore::builder(servers()).address_map(map);
    let error = builder.connect().await.unwrap_err().to_string();
    for part in [announced, other, port] {
        assert!(error.contains(&format!("127.0.0.1:{part}")), "{error}");
    }
}

/// The watch keeps its connection to a sentinel.
#[tokio::test]
async fn connections_to_sentinels_have_a_name() {
    let server = RedisServer::start();
    let sentinel = Sentinel::start(server.port(), 1, "");
    let store = RedisStore::builder(url(&[sentinel.port])).client_name("shop-api");
    let store = store.connect().await.unwrap();
    until("a connection has the name", async || {
        take(&store).await;
        let clients: String = sentinel.command("CLIENT LIST").await.unwrap();
        clients.contains(" name=shop-api ")
    })
    .await;
    let clients: String = server.command("CLIENT LIST TYPE normal").await;
    assert!(clients.contains(" name=shop-api "), "{clients}");
}

/// Each connection takes several round trips to a sentinel, and then to the master.
#[tokio::test]
async fn a_far_master_is_found() {
    const ROUND_TRIP: Duration = Duration::from_millis(240);
    let server = RedisServer::start();
    let master = far_port(server.port(), ROUND_TRIP).await;
    let sentinel = Fake::start(master, 1);
    let sentinel = far_port(sentinel.port, ROUND_TRIP).await;
    // Above the two round trips of a script's first call: after a timeout, each connection is pinged.
    let redis = RedisStore::builder(url(&[sentinel])).timeout(ROUND_TRIP * 3);
    let redis = redis.connect_timeout(PATIENT).connect_lazy().unwrap();
    let store = Fallback::builder(redis, LocalStore::default())
        .deadline(ROUND_TRIP * 5 / 4)
        .unwrap()
        .build();
    let source = async || {
        let decision = store.check(check("ann", "10000/s")).await;
        decision.unwrap().source()
    };
    until("Redis decides", async || source().await == Source::Redis).await;
    for _ in 0..3 {
        assert_eq!(source().await, Source::Redis);
    }
}

/// Returns the port of a proxy at this distance to a server.
async fn far_port(port: u16, round_trip: Duration) -> u16 {
    let url = far(port, round_trip / 2).await;
    let port = url.trim_end_matches('/').rsplit(':').next();
    port.unwrap().parse().unwrap()
}

/// The watch waits for a distant sentinel for as long as a connection does.
#[tokio::test]
async fn a_far_sentinel_reports_a_failover() {
    const ROUND_TRIP: Duration = Duration::from_millis(400);
    let (former, server) = (RedisServer::start(), RedisServer::start());
    let sentinel = Fake::start(former.port(), 1);
    let port = far_port(sentinel.port, ROUND_TRIP).await;
    let builder = RedisStore::builder(url(&[port])).timeout(PATIENT);
    let store = builder.connect_timeout(PATIENT).connect().await.unwrap();
    take(&store).await;
    sentinel.set_master(server.port(), 2);
    until("the store goes to the new one", async || {
        take(&store).await;
        has_counted(&server).await
    })
    .await;
}

#[tokio::test]
async fn dead_and_silent_sentinels_cause_no_delay() {
    let server = RedisServer::start();
    let ((_listener, silent), fake) = (silent(), Fake::start(server.port(), 1));
    // The silent sentinel might report another master, but is not waited for longer than a
    // connection may take.
    let sentinels = url(&[silent, unused_port(), fake.port]);
    let store = RedisStore::builder(sentinels)
        .timeout(IMPATIENT)
        .connect_lazy()
        .unwrap();
    until("it decides", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    })
    .await;

    // A majority agrees, so the third one is not waited for.
    let other = Fake::start(server.port(), 1);
    let since = Instant::now();
    let sentinels = url(&[silent, other.port, fake.port]);
    take(
        &RedisStore::builder(sentinels)
            .timeout(PATIENT)
            .connect()
            .await
            .unwrap(),
    )
    .await;
    assert!(since.elapsed() < PATIENT / 8, "{:?}", since.elapsed());
}

#[tokio::test]
async fn a_frozen_sentinel_causes_no_delay() {
    let server = RedisServer::start();
    let sentinels: Vec<Sentinel> = (0..3)
        .map(|_| Sentinel::start(server.port(), 2, ""))
        .collect();
    sentinels[0].freeze();
    let ports: Vec<u16> = sentinels.iter().map(|sentinel| sentinel.port).collect();
    let since = Instant::now();
    take(
        &RedisStore::builder(url(&ports))
            .timeout(PATIENT)
            .connect()
            .await
            .unwrap(),
    )
    .await;
    assert!(since.elapsed() < PATIENT / 8, "{:?}", since.elapsed());
}

/// One sentinel reports a former master that still considers itself master: both are cut off from
/// the others.
#[tokio::test]
async fn one_sentinel_is_cut_off() {
    let (server, former) = (RedisServer::start(), RedisServer::start());
    for (epoch, dead) in [(1, false), (1, true), (9, false)] {
        let liar = Fake::start(former.port(), epoch);
        let others = [Fake::start(server.port(), 2), Fake::start(server.port(), 2)];
        let second = if dead { unused_port() } else { others[1].port };
        let store = RedisStore::builder(url(&[liar.port, others[0].port, second]))
            .timeout(PATIENT)
            .connect_lazy()
            .unwrap();
        take(&store).await;
        // The background watch does not believe it either.
        let queries = liar.queries.load(SeqCst);
        until("it was queried twice more", async || {
            liar.queries.load(SeqCst) > queries + 1
        })
        .await;
        take(&store).await;
        assert!(
            !has_counted(&former).await && has_counted(&server).await,
            "{epoch} {dead}"
        );
    }
}

/// The majority reports a replica, or a server that does not reply: the store tries the next
/// candidate.
#[tokio::test]
async fn the_sentinels_are_late() {
    let server = RedisServer::start();
    let replica =
        RedisServer::start_with(&["--replicaof", "127.0.0.1", &server.port().to_string()]);
    let (_listener, silent) = silent();
    for former in [replica.port(), silent, unused_port()] {
        let sentinels = [
            Fake::start(former, 1),
            Fake::start(former, 1),
            Fake::start(server.port(), 2),
        ];
        let ports = [sentinels[0].port, sentinels[1].port, sentinels[2].port];
        let store = RedisStore::builder(url(&ports))
            .timeout(IMPATIENT)
            .connect_lazy()
            .unwrap();
        until("it decides", async || {
            store.check(check("ann", "10/s")).await.is_ok()
        })
        .await;
    }
}

/// A former master that still accepts writes would lose them.
#[tokio::test]
async fn a_master_that_still_answers_is_left() {
    let (former, server) = (RedisServer::start(), RedisServer::start());
    let sentinels = [
        Fake::start(former.port(), 1),
        Fake::start(former.port(), 1),
        Fake::start(former.port(), 1),
    ];
    let ports = [sentinels[0].port, sentinels[1].port, sentinels[2].port];
    let store = RedisStore::builder(url(&ports))
        .timeout(PATIENT)
        .connect()
        .await
        .unwrap();
    take(&store).await;
    sentinels
        .iter()
        .for_each(|sentinel| sentinel.set_master(server.port(), 2));
    let since = Instant::now();
    until("the store goes to the new one", async || {
        take(&store).await;
        has_counted(&server).await
    })
    .await;
    println!("left after {:?}", since.elapsed());
    let counted = former.calls("evalsha").await;
    for _ in 0..10 {
        take(&store).await;
    }
    assert_eq!(
        former.calls("evalsha").await,
        counted,
        "the former master gets another check"
    );
}

/// A master that becomes a replica replies `READONLY`, without closing its connections.
#[tokio::test]
async fn a_demoted_master_is_left_immediately() {
    let former = RedisServer::start();
    let server = RedisServer::start_with(&["--repl-diskless-sync-delay", "0"]);
    let sentinel = Fake::start(former.port(), 1);
    let store = RedisStore::builder(url(&[sentinel.port]))
        .timeout(PATIENT)
        .connect()
        .await
        .unwrap();
    take(&store).await;
    // No sentinel reports this in time.
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
    assert!(store.check(check("ann", "10/s")).await.is_err());
    sentinel.set_master(server.port(), 2);
    take(&store).await;
    assert!(has_counted(&server).await);
}

/// Losing all sentinels is no outage of Redis.
#[tokio::test]
async fn without_sentinels_the_known_master_stays() {
    let server = RedisServer::start();
    let mut sentinel = Sentinel::start(server.port(), 1, "");
    let store = RedisStore::builder(url(&[sentinel.port]))
        .timeout(PATIENT)
        .connect()
        .await
        .unwrap();
    sentinel.kill();
    let _: i64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
    until("it decides", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    })
    .await;
}

/// The watch is a background task of the store.
#[tokio::test]
async fn a_dropped_store_stops_its_watch() {
    let server = RedisServer::start();
    let sentinel = Fake::start(server.port(), 1);
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    let before = tasks();
    let store = RedisStore::builder(url(&[sentinel.port]))
        .connect()
        .await
        .unwrap();
    let queries = sentinel.queries.load(SeqCst);
    until("the watch sends a query", async || {
        sentinel.queries.load(SeqCst) > queries + 1
    })
    .await;
    drop(store);
    until("all tasks have ended", async || tasks() <= before).await;
}

/// The other runtime has connections already, which need the watch.
#[test]
fn the_watch_moves_to_another_runtime() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let server = RedisServer::start();
    let sentinel = Fake::start(server.port(), 1);
    let store = RedisStore::builder(url(&[sentinel.port]))
        .timeout(PATIENT)
        .connect_lazy()
        .unwrap();
    first.block_on(take(&store));
    second.block_on(take(&store));
    drop(first);
    second.block_on(async {
        take(&store).await;
        let queries = sentinel.queries.load(SeqCst);
        until("the watch sends a query", async || {
            sentinel.queries.load(SeqCst) > queries + 1
        })
        .await;
    });
}

/// The stale sentinel was cut off from the others, which do not reply.
#[tokio::test]
async fn one_stale_sentinel_replaces_no_master() {
    let (server, stray) = (RedisServer::start(), RedisServer::start());
    let good: Vec<Sentinel> = (0..2)
        .map(|_| Sentinel::start(server.port(), 2, ""))
        .collect();
    // A sentinel that has seen no failover.
    let stale = Fake::start(server.port(), 0);
    let ports = [stale.port, good[0].port, good[1].port];
    let store = RedisStore::builder(url(&ports))
        .timeout(PATIENT)
        .connect()
        .await
        .unwrap();
    take(&store).await;
    good.iter().for_each(Sentinel::freeze);
    stale.set_master(stray.port(), 0);
    let queries = stale.queries.load(SeqCst);
    until("the watch has queried it twice", async || {
        stale.queries.load(SeqCst) > queries + 1
    })
    .await;
    let _: i64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
    until("it decides", async || {
        store.check(check("ann", "10/s")).await.is_ok()
    })
    .await;
    assert!(!has_counted(&stray).await, "a stray server has counts");
}

/// Its report loses the vote once, and then does not cause another vote.
#[tokio::test]
async fn an_outvoted_sentinel_costs_nothing() {
    let (server, stray) = (RedisServer::start(), RedisServer::start());
    let sentinels = [
        Fake::start(stray.port(), 1),
        Fake::start(server.port(), 2),
        Fake::start(server.port(), 2),
    ];
    let ports = [sentinels[0].port, sentinels[1].port, sentinels[2].port];
    let store = RedisStore::builder(url(&ports))
        .timeout(PATIENT)
        .connect()
        .await
        .unwrap();
    take(&store).await;
    let queries = |sentinel: usize| sentinels[sentinel].queries.load(SeqCst);
    let before = queries(0);
    until("the watch has queried it", async || queries(0) > before + 1).await;
    let (before, connections) = (
        [queries(0), queries(1), queries(2)],
        server.info("stats", "total_connections_received").await,
    );
    until("the watch has queried it four times more", async || {
        queries(0) > before[0] + 3
    })
    .await;
    // The watch queries one sentinel at a time, in turn.
    for good in [1, 2] {
        assert!(
            queries(good) - before[good] <= queries(0) - before[0] + 1,
            "sentinel {good} was queried too often"
        );
    }
    let connections = server.info("stats", "total_connections_received").await - connections;
    assert_eq!(
        connections, 1,
        "connections to the master: this test makes one"
    );
}
