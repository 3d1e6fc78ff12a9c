//! Servers that are far away: connecting takes many round trips, and a check one.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;
use tower_redis_ratelimit::check::Source;
use tower_redis_ratelimit::observe::{Observer, event};
use tower_redis_ratelimit::store::{RedisStoreBuilder, Store};
use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};

use crate::devices::far;
use crate::support::{check, until};
use crate::with_tls::{Authority, TlsServer};

/// Returns a store over TLS and one without, with this round trip.
async fn stores(
    ca: &Authority,
    server: &TlsServer,
    round_trip: Duration,
) -> [RedisStoreBuilder; 2] {
    let tls = far(server.port, round_trip / 2).await;
    let tls = tls.replace("redis://", "rediss://");
    let plain = far(server.server.port(), round_trip / 2).await;
    [
        RedisStore::builder(tls).root_certificates(ca.pem()),
        RedisStore::builder(plain),
    ]
}

/// A round trip of 80 % of the deadline is enough, also for a check after a pause: connecting takes longer than the
/// timeout, but continues, and an idle connection is not pinged first.
#[tokio::test]
async fn redis_decides_within_a_long_round_trip() {
    const DEADLINE: Duration = Duration::from_millis(500);
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    // The first call of a script takes two round trips.
    let near = RedisStore::connect(server.server.url()).await.unwrap();
    let _ = near.check(check("bob", "10000/s")).await.unwrap();
    let _: String = server.server.command("CONFIG RESETSTAT").await;
    let decides = async |builder: RedisStoreBuilder| {
        let redis = builder.timeout(DEADLINE * 3 / 2);
        let redis = redis.connect_timeout(20 * DEADLINE);
        let redis = redis.connect_lazy().unwrap();
        let store = Fallback::builder(redis, LocalStore::default())
            .deadline(DEADLINE)
            .build();
        let source = async || {
            let decision = store.check(check("ann", "10000/s")).await;
            decision.unwrap().source()
        };
        until("Redis decides", async || source().await == Source::Redis).await;
        for pause in [0, 600, 0] {
            sleep(Duration::from_millis(pause)).await;
            assert_eq!(source().await, Source::Redis, "after {pause} ms");
        }
    };
    let [tls, plain] = stores(&ca, &server, DEADLINE * 4 / 5).await;
    tokio::join!(decides(tls), decides(plain));
    let stats: String = server.server.command("INFO commandstats").await;
    assert!(!stats.contains("cmdstat_ping"), "{stats}");
}

/// Collects the texts of failures.
#[derive(Clone, Default)]
struct Texts(Arc<Mutex<Vec<String>>>);

impl Observer for Texts {
    fn failed(&self, event: &event::Failed<'_>) {
        self.0.lock().unwrap().push(event.error.to_string());
    }
}

/// With a deadline below the round trip, no other setting helps.
#[tokio::test]
async fn a_deadline_below_the_round_trip_is_named() {
    let ca = Authority::new();
    let server = TlsServer::start(&ca, "127.0.0.1");
    for builder in stores(&ca, &server, Duration::from_millis(120)).await {
        let texts = Texts::default();
        let store = Fallback::builder(builder.connect_lazy().unwrap(), LocalStore::default())
            .deadline(Duration::from_millis(60))
            .failures(NonZeroU32::MAX)
            .observer(texts.clone())
            .build();
        until("it is connected, and the deadline named", async || {
            let decision = store.check(check("ann", "10000/s")).await;
            assert_eq!(decision.unwrap().source(), Source::Local);
            let texts = texts.0.lock().unwrap();
            texts
                .iter()
                .any(|text| text.contains("did not reply within the `deadline`"))
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
