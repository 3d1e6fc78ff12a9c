//! Servers that are far away: connecting takes many round trips, and a check one. With `FAR=1` and `--nocapture`, the tests
//! of `redis_decides` measure more distances, and print the table of `docs/servers.md`.

use std::env;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::observe::{Event, Observer};
use tower_redis_ratelimit::store::{FallbackBuilder, RedisStoreBuilder, Store};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

use crate::devices::far;
use crate::support::{RedisServer, check, until};
use crate::topologies::{cluster_of_one, sentinel};
use crate::with_tls::{Authority, TlsServer};

const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);

/// A distance to a server, and a deadline for its checks.
#[derive(Clone, Copy)]
struct Distance {
    round_trip: Duration,
    deadline: Duration,
}

impl Distance {
    const fn new(round_trip: u64, deadline: u64) -> Self {
        Self {
            round_trip: Duration::from_millis(round_trip),
            deadline: Duration::from_millis(deadline),
        }
    }

    /// Returns the URL of a proxy at this distance, with this scheme.
    async fn to(self, port: u16, scheme: &str) -> String {
        let url = far(port, self.round_trip / 2).await;
        url.replace("redis:", scheme)
    }

    async fn builder(self, server: &TlsServer, tls: Option<&Authority>) -> RedisStoreBuilder {
        match tls {
            Some(ca) => {
                let url = self.to(server.port, "rediss:").await;
                RedisStore::builder(url).root_certificates(ca.pem())
            }
            None => RedisStore::builder(self.to(server.server.port(), "redis:").await),
        }
    }

    fn decides_one(self) -> bool {
        self.round_trip <= self.deadline * 4 / 5
    }

    /// A check may wait for the round trip before its own.
    fn decides_many(self) -> bool {
        self.round_trip * 2 < self.deadline
    }

    fn store(self, builder: RedisStoreBuilder, texts: &Texts) -> Fallback<RedisStore, LocalStore> {
        self.fallback(builder, texts).build()
    }

    fn fallback(
        self,
        builder: RedisStoreBuilder,
        texts: &Texts,
    ) -> FallbackBuilder<RedisStore, LocalStore> {
        let mut builder = builder;
        if self.deadline > DEFAULT_DEADLINE {
            builder = builder
                .timeout(self.deadline * 3 / 2)
                .connect_timeout(self.deadline * 20);
        }
        Fallback::builder(builder.connect_lazy().unwrap(), LocalStore::default())
            .deadline(self.deadline)
            .unwrap()
            .observer(texts.clone())
    }
}

/// Collects the texts of failures.
#[derive(Clone, Default)]
struct Texts(Arc<Mutex<Vec<String>>>);

impl Observer for Texts {
    fn notify(&self, event: &Event<'_>) {
        if let Event::Failed { error, .. }
        | Event::StillDegraded {
            error: Some(error), ..
        } = event
        {
            self.0.lock().unwrap().push(error.to_string());
        }
    }
}

impl Texts {
    fn name_the_deadline(&self) -> bool {
        let texts = self.0.lock().unwrap();
        texts
            .iter()
            .any(|text| text.contains("did not reply within the `deadline`"))
    }
}

/// Sends concurrent checks, and returns the number of those that Redis has decided.
async fn by_redis(store: &Fallback<RedisStore, LocalStore>, checks: usize) -> usize {
    let checks = (0..checks).map(|_| store.check(check("ann", "10000/s")));
    let mut decided = 0;
    for decision in join_all(checks).await {
        if decision.unwrap().source() == Source::Redis {
            decided += 1;
        }
    }
    decided
}

/// Waits until Redis decides, or the log says that it is too far away.
async fn connected(distance: Distance, store: &Fallback<RedisStore, LocalStore>, texts: &Texts) {
    until("Redis decides, or is too far away", async || {
        let mut decided = 0;
        for _ in 0..3 {
            decided += by_redis(store, 1).await;
        }
        if decided == 3 || distance.decides_one() {
            return decided == 3;
        }
        // Time to connect, and then for the report of an outage that continues.
        sleep(Duration::from_secs(3)).await;
        advance(60).await;
        texts.name_the_deadline()
    })
    .await;
}

/// Lets the connections be idle for 40 seconds of the store's clock. The store pings them meanwhile.
async fn idle(server: &RedisServer, distance: Distance) {
    let url = distance.to(server.port(), "").await;
    let address = url.trim_matches('/');
    let mut other = TcpStream::connect(address).await.unwrap();
    for _ in 0..2 {
        let before = server.calls("ping").await;
        advance(15).await;
        until("the connections are pinged", async || {
            server.calls("ping").await > before
        })
        .await;
        // A later reply over the same distance arrives after those to the pings.
        other.write_all(b"PING\r\n").await.unwrap();
        other.read_exact(&mut [0; 7]).await.unwrap();
    }
    advance(10).await;
}

async fn advance(seconds: u64) {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(seconds)).await;
    tokio::time::resume();
}

/// Number of checks by Redis: without a pause, after 0.6 and 40 seconds each, and in groups of 16.
async fn measure(
    server: &RedisServer,
    distance: Distance,
    store: &Fallback<RedisStore, LocalStore>,
    times: usize,
) -> [usize; 4] {
    let mut decided = [0; 4];
    for _ in 0..times {
        decided[0] += by_redis(store, 1).await;
    }
    for _ in 0..times {
        sleep(Duration::from_millis(600)).await;
        decided[1] += by_redis(store, 1).await;
    }
    for _ in 0..times {
        idle(server, distance).await;
        decided[2] += by_redis(store, 1).await;
    }
    for _ in 0..times {
        decided[3] += by_redis(store, 16).await;
    }
    decided
}

/// Redis decides all checks, after any pause, within the limits of [`Distance`].
async fn redis_decides(tls: bool) {
    let mut distances = vec![Distance::new(400, 500), Distance::new(200, 500)];
    let mut times = 2;
    let only_measures = env::var_os("FAR").is_some();
    if only_measures {
        distances = [0, 30, 60, 80, 120, 200]
            .map(|time| Distance::new(time, 100))
            .into();
        distances.extend([120, 200].map(|time| Distance::new(time, 500)));
        times = 20;
        println!(
            "| TLS | round trip, deadline | connected after | no pause | 0.6 s | 40 s | 16 at once |"
        );
    }
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    // The first call of a script takes two round trips.
    let near = RedisStore::connect(server.server.url()).await.unwrap();
    let _ = near.check(check("bob", "10000/s")).await.unwrap();
    for distance in distances {
        let builder = distance.builder(&server, tls.then_some(&ca)).await;
        let texts = Texts::default();
        let store = distance.store(builder, &texts);
        // A stall of this machine may cost a connection: again, once there is another one.
        until("Redis decides as expected", async || {
            let start = Instant::now();
            connected(distance, &store, &texts).await;
            let connecting = start.elapsed();
            let decided = measure(&server.server, distance, &store, times).await;
            println!(
                "| {tls} | {:?}, {:?} | {connecting:.1?} | {:?} |",
                distance.round_trip, distance.deadline, decided
            );
            let decides_one = decided[..3] == [times; 3];
            let decides_many = decided[3] == 16 * times || !distance.decides_many();
            only_measures || decides_one && decides_many
        })
        .await;
    }
}

#[tokio::test]
async fn redis_decides_far_away() {
    redis_decides(false).await;
}

#[tokio::test]
async fn redis_decides_far_away_over_tls() {
    redis_decides(true).await;
}

/// Redis decides within a long round trip to sentinels and their master.
#[tokio::test]
async fn redis_decides_behind_far_sentinels() {
    let distance = Distance::new(400, 500);
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    let (_sentinel, port) = sentinel(server.port, "127.0.0.1", &ca);
    until("the sentinel is up", async || {
        TcpStream::connect(("127.0.0.1", port)).await.is_ok()
    })
    .await;
    let url = distance.to(port, "rediss+sentinel:").await + "mymaster";
    let own = ca.sign("service.example");
    let builder = RedisStore::builder(url).client_certificate(own.pem, own.key);
    mapped_server_decides(distance, server.port, builder, &ca).await;
}

/// Redis decides within a long round trip to the nodes of a cluster.
#[tokio::test]
async fn redis_decides_in_a_far_cluster() {
    let distance = Distance::new(400, 500);
    let ca = Authority::new();
    let options = ["--tls-auth-clients", "no"];
    let node = cluster_of_one(&ca, &ca.sign("127.0.0.1"), &options).await;
    let url = distance.to(node.port, "rediss+cluster:").await;
    mapped_server_decides(distance, node.port, RedisStore::builder(url), &ca).await;
}

/// The server on this port is at a distance too.
async fn mapped_server_decides(
    distance: Distance,
    port: u16,
    builder: RedisStoreBuilder,
    ca: &Authority,
) {
    let url = distance.to(port, "").await;
    let (_, far_port) = url.trim_end_matches('/').rsplit_once(':').unwrap();
    let far_port = far_port.parse().unwrap();
    let builder = builder
        .root_certificates(ca.pem())
        .address_map(move |host, mapped| (mapped == port).then(|| (host.to_owned(), far_port)));
    let texts = Texts::default();
    let store = distance.store(builder, &texts);
    until("Redis decides after each pause", async || {
        connected(distance, &store, &texts).await;
        let mut decided = 0;
        for pause in [0, 600, 0] {
            sleep(Duration::from_millis(pause)).await;
            decided += by_redis(&store, 1).await;
        }
        decided == 3
    })
    .await;
}

/// With a deadline below the round trip, no other setting helps.
#[tokio::test]
async fn a_deadline_below_the_round_trip_is_named() {
    // Above two deadlines, which a check of a late runtime may wait.
    let distance = Distance::new(200, 60);
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    for tls in [None, Some(&ca)] {
        let texts = Texts::default();
        let builder = distance.builder(&server, tls).await;
        let store = distance
            .fallback(builder, &texts)
            .failures(NonZeroU32::MAX)
            .build();
        until("it is connected, and the deadline named", async || {
            assert_eq!(by_redis(&store, 1).await, 0);
            texts.name_the_deadline()
        })
        .await;
        let texts = texts.0.lock().unwrap();
        assert!(texts[0].contains("still connecting"), "{texts:?}");
        for text in texts.iter() {
            let is_connected = !text.contains("still connecting");
            assert!(text.contains("raise the `deadline`"), "{texts:?}");
            assert!(!(is_connected && text.contains("`timeout`")), "{texts:?}");
        }
    }
}
