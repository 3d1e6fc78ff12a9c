//! How a store is made.

use std::num::NonZeroUsize;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::IntoConnectionInfo;

use super::link::Tls;
use super::servers::Servers;
use super::store::RedisStore;
use super::topology::Topology;
use super::topology::cluster::Cluster;
use super::worker::{Inner, Limits};

use crate::error::{ConfigError, StoreError};
use crate::limit::is_name;
use crate::observe::Observer;

impl RedisStore {
    /// Connects, and makes sure that Redis can run the script.
    ///
    /// `servers` is mostly a URL: `redis://user:password@host:6379/0`,
    /// `redis+cluster://host:6379,host:6380`, `redis+sentinel://host:26379,host:26380/mymaster`, each with
    /// `rediss` and the feature `tls`, `redis+unix:///path`; or a [`redis::ConnectionInfo`]. See [`Servers`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Configuration`](crate::store::ErrorKind::Configuration) for a wrong URL, and otherwise the reason
    /// why Redis cannot decide: it cannot be reached, refuses the password, lacks a permission, is not a Redis or is a
    /// node of a cluster.
    pub async fn connect(servers: impl Into<Servers>) -> Result<Self, StoreError> {
        Self::builder(servers).connect().await
    }

    /// Does not connect before the first check, so that a service starts while Redis is down.
    ///
    /// # Errors
    ///
    /// For a wrong URL, and for `rediss://` without the feature `tls`.
    pub fn connect_lazy(servers: impl Into<Servers>) -> Result<Self, ConfigError> {
        Self::builder(servers).connect_lazy()
    }

    /// A store in a Redis Cluster, by the URLs of some of its nodes, which report the others. It does not connect
    /// before the first check, as [`connect_lazy`](Self::connect_lazy).
    ///
    /// To connect at once, or to set more, give [`Servers::cluster`] to [`connect`](Self::connect) or
    /// [`builder`](Self::builder). See [above](Self#redis-cluster) for the specifics of a cluster.
    ///
    /// ```
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// let store = RedisStore::cluster(["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"])?;
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`connect_lazy`](Self::connect_lazy); also if there is no URL, or one has a database but 0.
    pub fn cluster<U: IntoConnectionInfo>(
        nodes: impl IntoIterator<Item = U>,
    ) -> Result<Self, ConfigError> {
        Self::connect_lazy(Servers::cluster(nodes))
    }

    /// A store on the master that Redis Sentinel has elected, by the master's name and the URLs of all sentinels. It
    /// does not connect before the first check, as [`connect_lazy`](Self::connect_lazy).
    ///
    /// User, password and TLS of a sentinel are those of its URL. For those of the master, and its database, write its
    /// name as a URL. To connect at once, or to set more, give [`Servers::sentinel`] to [`connect`](Self::connect) or
    /// [`builder`](Self::builder). See [above](Self#redis-sentinel) for the specifics of Sentinel.
    ///
    /// ```
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// let store = RedisStore::sentinel("mymaster", ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379"])?;
    ///
    /// let sentinels = ["redis://:secret@10.0.0.1:26379", "redis://:secret@10.0.0.2:26379"];
    /// let store = RedisStore::sentinel("redis://limiter:password@mymaster/0", sentinels)?;
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`connect_lazy`](Self::connect_lazy); also if there is no URL, or the name is not valid.
    pub fn sentinel<U: IntoConnectionInfo>(
        master: &str,
        sentinels: impl IntoIterator<Item = U>,
    ) -> Result<Self, ConfigError> {
        Self::connect_lazy(Servers::sentinel(master, sentinels))
    }

    /// Sets more than the URL.
    pub fn builder(servers: impl Into<Servers>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(servers.into())
    }
}

/// Settings of a [`RedisStore`].
///
/// ```no_run
/// use std::num::NonZeroUsize;
/// use std::time::Duration;
/// use tower_redis_ratelimit::store::Share;
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let redis = RedisStore::builder("redis://127.0.0.1/")
///     .prefix("shop")
///     .queue(NonZeroUsize::new(50_000).ok_or("zero")?)
///     .timeout(Duration::from_millis(500))
///     .connect()
///     .await?;
/// let share = Share::Alive(redis.announce()?);
/// let store = Fallback::new(redis, LocalStore::default()).share(share);
/// # let _ = store;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use]
pub struct RedisStoreBuilder {
    servers: Servers,
    tls: Tls,
    prefix: String,
    connections: usize,
    timeout: Duration,
    queue: usize,
    batch: usize,
    partitions: usize,
    denials: usize,
    observer: OnceLock<Arc<dyn Observer>>,
    /// A test's own time, in microseconds since the Unix epoch; 0 for Redis's.
    pub(super) now: Arc<AtomicI64>,
}

impl RedisStoreBuilder {
    pub(super) fn new(servers: Servers) -> Self {
        Self {
            servers,
            tls: Tls::default(),
            prefix: "rl".to_owned(),
            connections: 2,
            timeout: Duration::from_millis(250),
            queue: 10_000,
            batch: 128,
            partitions: 12,
            denials: 10_000,
            observer: OnceLock::new(),
            now: Arc::default(),
        }
    }

    /// What the store's keys begin with: 1 to 64 ASCII letters, digits, `-`, `_`, `.`, `/` or `:`. Stores with one
    /// prefix share their counts. A URL that names one, as `redis://127.0.0.1/?prefix=shop`, takes precedence: whoever
    /// runs the program has written that. Defaults to `rl`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Trusts the certificate authorities of these certificates, in PEM, and no others. Defaults to those that this
    /// machine trusts, or with the feature `tls-webpki-roots` to Mozilla's.
    ///
    /// This and the two below are for every connection that speaks TLS: to a single server, to the nodes of a cluster,
    /// to sentinels and their master.
    ///
    /// ```no_run
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// # fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::builder("rediss://10.0.0.1:6380/")
    ///     .root_certificates(std::fs::read("ca.pem")?)
    ///     .client_certificate(std::fs::read("client.pem")?, std::fs::read("client.key")?)
    ///     .server_name("redis.internal")
    ///     .connect_lazy()?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls")]
    pub fn root_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.tls.root_certificates = Some(pem.into());
        self
    }

    /// The client certificate, with those between it and its authority, and its key, in PEM: required by a Redis with
    /// `tls-auth-clients yes`, its default. Defaults to none.
    #[cfg(feature = "tls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        self.tls.client_certificate = Some((certificate.into(), key.into()));
        self
    }

    /// The name that the servers' certificates must have, if not the hosts in the URL: for servers that are reached by
    /// address, as the nodes of a cluster mostly are. Defaults to each server's host.
    #[cfg(feature = "tls")]
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.tls.server_name = Some(name.into());
        self
    }

    /// How many connections a runtime has, each with one script call under way. Defaults to 2: while Redis decides one
    /// batch, the next is made ready. In a Redis Cluster, so many to each master; but the first is used alone until
    /// more checks wait than a [batch](Self::batch) has, so that checks of one partition share a call.
    pub fn connections(mut self, connections: NonZeroUsize) -> Self {
        self.connections = connections.get();
        self
    }

    /// How long one call may take, with connecting if it must; and how long a check may wait to be sent. Defaults to
    /// 250 ms; zero is an error. A [`Fallback`](crate::Fallback) answers by its own, shorter deadline.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How many checks of a runtime may wait to be sent; one more fails at once. Defaults to 10,000.
    pub fn queue(mut self, checks: NonZeroUsize) -> Self {
        self.queue = checks.get();
        self
    }

    /// Sets the maximum number of checks in one script call. More is faster, and keeps Redis busy for longer at a time, at
    /// about 3 us a check. Defaults to 128. Checks under
    /// [`SlidingLog`](crate::Strategy::SlidingLog) with a limit of 16,384 or more, and refunds with one of 256 or more,
    /// count as several: a call of such checks takes a few milliseconds at most.
    pub fn batch(mut self, checks: NonZeroUsize) -> Self {
        self.batch = checks.get();
        self
    }

    /// Into how many partitions callers are put in a Redis Cluster, where only the checks of one partition share a
    /// script call. Defaults to 12, which 2, 3, 4 or 6 masters share evenly; from 1 to 1,024. A single server ignores
    /// it.
    ///
    /// Each partition is in one slot, and so on one master: take a multiple of the number of masters, and for more than
    /// 6 of them at least 4 for each, or some have far more to do than others. Fewer partitions share more. With 256
    /// checks in flight on three masters, 6 partitions put about 21 checks into a call, 12 about 13, 16 about 9, 32
    /// about 5.
    ///
    /// All stores of one prefix must have the same number, or they would count the same callers twice. So the number is
    /// kept in the cluster, and another one is refused. To change it, choose a
    /// prefix for the new number, as all counts begin anew.
    pub fn partitions(mut self, partitions: NonZeroUsize) -> Self {
        self.partitions = partitions.get();
        self
    }

    /// Sets the maximum number of callers whose denials are remembered, so that a flood of denied checks does not reach
    /// Redis; see [`Source::Cached`](crate::check::Source::Cached). Defaults to 10,000; 0 sends every check to Redis.
    ///
    /// A denial is remembered until its `retry_after`, for a second at most: a reset or a refund by another instance
    /// takes effect within a second. For each caller it holds one denial for each list of policies, up to 16, at about 200 bytes.
    /// It answers all checks of its cost and above, but none with an id. The least active callers are dropped first, so
    /// that a flood of denied callers replaces itself.
    pub fn denials(mut self, denials: usize) -> Self {
        self.denials = denials;
        self
    }

    /// Sets the observer of the calls that are sent. Defaults to the [observer](crate::RateLimitLayer::observer) of the
    /// first layer over the store, and otherwise to [a log of what needs attention](Observer).
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observer = OnceLock::from(Arc::new(observer) as Arc<dyn Observer>);
        self
    }

    /// Connects, and makes sure that Redis can run the script.
    ///
    /// # Errors
    ///
    /// As [`RedisStore::connect`].
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let store = self.connect_lazy()?;
        store.inner.ping().await?;
        Ok(store)
    }

    /// Does not connect before the first check.
    ///
    /// # Errors
    ///
    /// For a wrong URL, prefix, certificate or server name, more than 1,024 partitions, and a timeout of zero; for `rediss://`
    /// without the feature `tls`, and for TLS settings without `rediss://`.
    pub fn connect_lazy(mut self) -> Result<RedisStore, ConfigError> {
        if let Some(prefix) = self.servers.take_prefix() {
            self.prefix = prefix;
        }
        if !is_name(&self.prefix, b"-_./:") {
            let fix = "use 1 to 64 ASCII letters, digits, `-`, `_`, `.`, `/` or `:`";
            return Err(ConfigError::invalid("key prefix", &self.prefix, fix));
        }
        if self.timeout.is_zero() {
            return Err(ConfigError::new(
                "a timeout of 0 for Redis: write a longer one, such as 250 ms",
            ));
        }
        if self.partitions > Cluster::MAX_PARTITIONS {
            return Err(ConfigError::new(format!(
                "{} partitions: write at most 1024",
                self.partitions
            )));
        }
        let servers = self.servers.into_kind()?;
        let topology = Topology::new(
            servers,
            &self.prefix,
            self.partitions,
            self.timeout,
            &self.tls,
        )?;
        let limits = Limits {
            workers: self.connections,
            queue: self.queue,
            batch: self.batch,
            timeout: self.timeout,
        };
        let inner = Inner::new(
            topology,
            self.prefix,
            limits,
            self.denials,
            self.observer,
            self.now,
        );
        Ok(RedisStore {
            inner: Arc::new(inner),
        })
    }
}
