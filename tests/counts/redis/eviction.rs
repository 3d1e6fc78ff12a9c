//! `maxmemory` is reached, under every eviction policy: which counts are evicted, and how the store
//! reacts.

use std::time::Duration;

use futures_util::future::join_all;
use tower_redis_ratelimit::check::Check;
use tower_redis_ratelimit::store::{ErrorKind, Store};
use tower_redis_ratelimit::{Key, Policies, RedisStore, Strategy};

use crate::support::{RedisServer, policy};

const EVICTING: [&str; 7] = [
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
];

/// Bytes for counts: enough for some thousand callers.
const ROOM: u64 = 512 * 1024;

struct Full {
    server: RedisServer,
    store: RedisStore,
    /// No charge expires during a test.
    policies: Policies,
    callers: u32,
}

impl Full {
    /// Starts with room for some thousand callers.
    async fn start(maxmemory_policy: &str) -> Self {
        let server = RedisServer::start_with(&["--maxmemory-policy", maxmemory_policy]);
        // Send each check to Redis.
        let builder = RedisStore::builder(server.url())
            .timeout(Duration::from_secs(20))
            .denials(0);
        let store = builder.connect().await.unwrap();
        // Remove the keys of the connection check.
        let _: String = server.command("FLUSHALL").await;
        let full = Self {
            server,
            store,
            policies: policy(Strategy::Gcra, "10/100d"),
            callers: 0,
        };
        full.leave(ROOM).await;
        full
    }

    /// Sets `maxmemory` to `bytes` above the current usage.
    async fn leave(&self, bytes: u64) {
        let used = self.server.info("memory", "used_memory").await;
        let _: String = self
            .server
            .command(&format!("CONFIG SET maxmemory {}", used + bytes))
            .await;
    }

    fn take(&self, caller: &str, cost: u32) -> Check {
        Check::take(Key::new(caller), &self.policies, cost)
    }

    async fn remaining(&self, caller: &str) -> u32 {
        self.store
            .check(Check::peek(Key::new(caller), &self.policies, 1))
            .await
            .unwrap()
            .remaining()
    }

    async fn evicted(&self) -> u64 {
        self.server.info("stats", "evicted_keys").await
    }

    /// New callers take 1 of 10 each, until this number of keys has been evicted. None of them
    /// fails.
    async fn flood(&mut self, evicted: u64) {
        while self.evicted().await < evicted {
            let callers = self.callers..self.callers + 200;
            self.callers = callers.end;
            assert!(self.callers < 100_000, "nothing is evicted");
            let takes = callers.map(|i| self.store.check(self.take(&format!("caller-{i}"), 1)));
            for decision in join_all(takes).await {
                assert_eq!(decision.unwrap().remaining(), 9);
            }
        }
    }
}

/// Every check is decided, and only evicted callers start with an empty count.
#[tokio::test]
async fn evicted_callers_start_afresh() {
    for maxmemory_policy in EVICTING {
        let mut full = Full::start(maxmemory_policy).await;
        full.flood(500).await;
        let before = full.evicted().await;
        let mut afresh = 0;
        for first in (0..full.callers).step_by(200) {
            let callers: Vec<String> = (first..first + 200)
                .map(|i| format!("caller-{i}"))
                .collect();
            for remaining in join_all(callers.iter().map(|caller| full.remaining(caller))).await {
                assert!(
                    (9..=10).contains(&remaining),
                    "{maxmemory_policy}: {remaining}"
                );
                afresh += u64::from(remaining == 10);
            }
        }
        // A larger buffer may evict some more in the meantime.
        let after = full.evicted().await;
        assert!(
            (before..=after).contains(&afresh),
            "{maxmemory_policy}: {afresh} new counts, {before} to {after} evicted"
        );
        assert!(
            full.store
                .check(full.take("caller-0", 5))
                .await
                .unwrap()
                .is_allowed()
        );
    }
}

/// A key lives until its state is fresh. With strategies that refill, callers with little usage are
/// evicted first.
#[tokio::test]
async fn volatile_ttl_keeps_the_most_exhausted_callers() {
    for strategy in [
        Strategy::Gcra,
        Strategy::LeakyBucket,
        Strategy::TokenBucket(Default::default()),
    ] {
        let mut full = Full::start("volatile-ttl").await;
        full.policies = policy(strategy, "10/100d");
        let heavy: Vec<String> = (0..20).map(|i| format!("heavy-{i}")).collect();
        for caller in &heavy {
            assert!(
                full.store
                    .check(full.take(caller, 10))
                    .await
                    .unwrap()
                    .is_allowed()
            );
        }
        full.flood(1_000).await;
        for caller in &heavy {
            assert!(
                !full
                    .store
                    .check(full.take(caller, 1))
                    .await
                    .unwrap()
                    .is_allowed(),
                "{strategy:?}: {caller}"
            );
        }
    }
}

/// An exhausted caller stays denied, and a rejected check was not charged.
#[tokio::test]
async fn noeviction_refuses_charges_and_forgets_nothing() {
    let full = Full::start("noeviction").await;
    assert!(
        full.store
            .check(full.take("ann", 10))
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(
        full.store
            .check(full.take("bob", 4))
            .await
            .unwrap()
            .is_allowed()
    );
    full.leave(0).await;
    let _: String = full.server.command("CONFIG SET maxmemory 1").await;
    for caller in ["bob", "cid"] {
        let error = full.store.check(full.take(caller, 1)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.is_not_sent()),
            (ErrorKind::OutOfMemory, true),
            "{caller}: {error:?}"
        );
    }
    // Denials and peeks write nothing.
    assert!(
        !full
            .store
            .check(full.take("ann", 1))
            .await
            .unwrap()
            .is_allowed()
    );
    assert_eq!(
        (
            full.remaining("ann").await,
            full.remaining("bob").await,
            full.remaining("cid").await
        ),
        (0, 6, 10)
    );
    assert_eq!(full.evicted().await, 0);
    full.leave(ROOM).await;
    assert_eq!(
        full.store
            .check(full.take("bob", 1))
            .await
            .unwrap()
            .remaining(),
        5
    );
}

/// With `volatile-*`, data without an expiry displaces all counts; then charges are rejected as
/// with `noeviction`.
#[tokio::test]
async fn counts_are_evicted_before_persistent_data() {
    for maxmemory_policy in EVICTING
        .into_iter()
        .filter(|policy| policy.starts_with("volatile"))
    {
        let full = Full::start(maxmemory_policy).await;
        assert!(
            full.store
                .check(full.take("ann", 10))
                .await
                .unwrap()
                .is_allowed()
        );
        let mut connection = full.server.connection().await;
        let mut stored = 0;
        // The small values leave no room for a count.
        for size in [1_000, 1] {
            let value = "x".repeat(size);
            let refused = loop {
                let mut set = tower_redis_ratelimit::redis::cmd("SET");
                match set
                    .arg(format!("data-{stored}"))
                    .arg(&value)
                    .exec_async(&mut connection)
                    .await
                {
                    Ok(()) => stored += 1,
                    Err(error) => break error,
                }
            };
            assert_eq!(refused.code(), Some("OOM"), "{maxmemory_policy}: {refused}");
        }
        assert_eq!(
            full.server.command::<i64>("DBSIZE").await,
            stored,
            "{maxmemory_policy}: only data is left"
        );
        assert_eq!(full.remaining("ann").await, 10, "{maxmemory_policy}");
        let error = full.store.check(full.take("ann", 1)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.is_not_sent()),
            (ErrorKind::OutOfMemory, true),
            "{maxmemory_policy}"
        );
    }
}

/// `maxmemory-clients` evicts the largest client first. The store's clients are small, so they need
/// no `CLIENT NO-EVICT`, which would require administrator permissions.
#[tokio::test]
async fn client_eviction_spares_the_store() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let server = RedisServer::start_with(&["--maxmemory-clients", "4mb"]);
    let store = RedisStore::builder(server.url())
        .timeout(Duration::from_secs(20))
        .connect()
        .await
        .unwrap();
    let policies = policy(Strategy::Gcra, "100/100d");
    let take = || store.check(Check::take(Key::new("ann"), &policies, 1));
    assert!(take().await.unwrap().is_allowed());
    let ours: String = server.command("CLIENT LIST TYPE normal").await;
    let ours = ours
        .lines()
        .find(|line| line.contains("cmd=evalsha") || line.contains("cmd=eval "))
        .expect("ours");
    let id = ours.split(' ').next().unwrap().to_owned();

    let mut greedy = tokio::net::TcpStream::connect(("127.0.0.1", server.port()))
        .await
        .unwrap();
    // A command that never ends.
    let _ = greedy
        .write_all(b"*2\r\n$4\r\nECHO\r\n$100000000\r\n")
        .await;
    let megabyte = vec![b'x'; 1 << 20];
    let evicted = async {
        while greedy.write_all(&megabyte).await.is_ok() {}
        let _ = greedy.read(&mut [0]).await;
    };
    tokio::time::timeout(Duration::from_secs(60), evicted)
        .await
        .expect("it is evicted");
    assert_eq!(server.info("stats", "evicted_clients").await, 1);
    assert!(take().await.unwrap().is_allowed());
    let clients: String = server.command("CLIENT LIST TYPE normal").await;
    assert!(
        clients
            .lines()
            .any(|line| line.starts_with(&format!("{id} "))),
        "{id} was evicted: {clients}"
    );
}
