//! Creation of a store.
//!
//! The constructors of [`RedisStore`] are here, beside the builder that they all use.

use std::error::Error;
use std::future::Future;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::credentials::{CredentialSource, Credentials};
use super::link::{Tls, check_client_name};
use super::servers::Servers;
use super::topology::cluster::Cluster;
use super::topology::{AddressMap, Logins, Topology};
use super::worker::{RedisStore, SharedStore};

use crate::error::{ConfigError, StoreError};
use crate::limit::is_name;
use crate::observe::{Observer, shared_observer};
use crate::store::config::RedisSettings;

impl RedisStore {
    /// Connects, and verifies that Redis can run the script.
    ///
    /// `servers` is usually a URL: `redis://user:password@host:6379/0`,
    /// `redis+cluster://host:6379,host:6380`, `redis+sentinel://host:26379,host:26380/mymaster`,
    /// each also with `rediss` and the feature `tls`, or `redis+unix:///path`. It may also be a
    /// [`redis::ConnectionInfo`]. See [`Servers`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Configuration`](crate::store::ErrorKind::Configuration) for an invalid URL,
    /// otherwise the reason why Redis cannot decide: the server is unreachable, rejects the
    /// password, lacks a permission, is not a Redis, or is a node of a cluster.
    pub async fn connect(servers: impl Into<Servers>) -> Result<Self, StoreError> {
        Self::builder(servers).connect().await
    }

    /// Connects at the first check, so that a service starts while Redis is down.
    ///
    /// # Errors
    ///
    /// If the URL is invalid, or is `rediss://` without the feature `tls`.
    pub fn connect_lazy(servers: impl Into<Servers>) -> Result<Self, ConfigError> {
        Self::builder(servers).connect_lazy()
    }

    /// Creates a store in a Redis Cluster, from the URLs of some of its nodes, which report the
    /// others. Connects at the first check, like [`connect_lazy`](Self::connect_lazy).
    ///
    /// To connect immediately, or for more settings, pass [`Servers::cluster`] to
    /// [`connect`](Self::connect) or [`builder`](Self::builder). See [above](Self#redis-cluster)
    /// for the specifics of a cluster.
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
    /// As [`connect_lazy`](Self::connect_lazy), and if there is no URL, or if a URL has a database
    /// other than 0.
    pub fn cluster(
        nodes: impl IntoIterator<Item = impl Into<Servers>>,
    ) -> Result<Self, ConfigError> {
        Self::connect_lazy(Servers::cluster(nodes))
    }

    /// Creates a store on the master that Redis Sentinel has elected, from the master's name and
    /// the URLs of all sentinels. Connects at the first check, like
    /// [`connect_lazy`](Self::connect_lazy).
    ///
    /// The URL of a sentinel has its user, password and TLS. For those of the master, and for its
    /// database, give the master's name as a URL. To connect immediately, or for more settings,
    /// pass [`Servers::sentinel`] to [`connect`](Self::connect) or [`builder`](Self::builder). See
    /// [above](Self#redis-sentinel) for the specifics of Sentinel.
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
    /// As [`connect_lazy`](Self::connect_lazy), and if there is no URL, or if the name is invalid.
    pub fn sentinel(
        master: &str,
        sentinels: impl IntoIterator<Item = impl Into<Servers>>,
    ) -> Result<Self, ConfigError> {
        Self::connect_lazy(Servers::sentinel(master, sentinels))
    }

    /// Creates a builder, for settings that a URL cannot have.
    pub fn builder(servers: impl Into<Servers>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(servers.into())
    }
}

/// Settings of a [`RedisStore`].
///
/// ```no_run
/// use std::num::NonZeroUsize;
/// use std::time::Duration;
/// use tower_redis_ratelimit::{Fallback, LocalStore, RedisStore};
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let redis = RedisStore::builder("redis://127.0.0.1/")
///     .prefix("shop")
///     .queue(NonZeroUsize::new(50_000).ok_or("zero")?)
///     .timeout(Duration::from_millis(500))
///     .connect()
///     .await?;
/// let instances = redis.announce()?;
/// let store = Fallback::builder(redis, LocalStore::default()).share(instances).build();
/// # let _ = store;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use]
pub struct RedisStoreBuilder {
    servers: Servers,
    tls: Tls,
    addresses: AddressMap,
    settings: RedisSettings,
    observer: OnceLock<Arc<dyn Observer>>,
    /// The time used by tests, in microseconds since the Unix epoch; 0 for Redis's own.
    pub(super) now: Arc<AtomicI64>,
}

impl RedisStoreBuilder {
    pub(super) fn new(servers: Servers) -> Self {
        Self {
            servers,
            tls: Tls::default(),
            addresses: AddressMap::default(),
            settings: RedisSettings::default(),
            observer: OnceLock::new(),
            now: Arc::default(),
        }
    }

    /// Replaces all settings except the servers, TLS and the observer.
    pub(in crate::store) fn settings(self, settings: RedisSettings) -> Self {
        Self { settings, ..self }
    }

    /// Sets a closure that returns the user and password of the servers, for credentials that change: tokens of a cloud
    /// service (AWS IAM, Entra), or users of Vault. Defaults to the user and password in the URL. If this is set, the URL must
    /// have none.
    ///
    /// The store calls the closure before it connects, and again when a fifth of
    /// [`valid_for`](Credentials::valid_for) is left. Without `valid_for` it calls it for each new connection. It also calls it
    /// after a server has rejected the credentials. Open connections send new credentials in front of their next batch;
    /// idle ones send them immediately. See [the guide](crate::guide::servers#credentials-that-change).
    ///
    /// One call runs at a time, for all connections and runtimes of the store, and calls begin at least a second apart. If a
    /// call fails, panics, or takes longer than three quarters of the [`connect_timeout`](Self::connect_timeout), open
    /// connections are not affected, and new ones use the last credentials. The error is of
    /// [`ErrorKind::Authentication`](crate::store::ErrorKind::Authentication): the [observer](Self::observer) gets it or, before
    /// the first success, the checks do.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_redis_ratelimit::RedisStore;
    /// use tower_redis_ratelimit::store::Credentials;
    ///
    /// # async fn new_token() -> Result<String, std::io::Error> { Ok(String::new()) }
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::builder("redis://10.0.0.1/")
    ///     .credentials(|| async {
    ///         let token = new_token().await?;
    ///         Ok(Credentials::new("limiter", token).valid_for(Duration::from_secs(900)))
    ///     })
    ///     .connect()
    ///     .await?;
    /// # let _ = store;
    /// # Ok(())
    /// # }
    /// ```
    pub fn credentials<F, Fut>(mut self, credentials: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        let source = CredentialSource::closure(credentials);
        self.servers.set_credentials(|all| &mut all.servers, source);
        self
    }

    /// Like [`credentials`](Self::credentials), for the sentinels. Only new connections to sentinels use new credentials.
    /// Defaults to the credentials in the sentinels' URLs.
    pub fn sentinel_credentials<F, Fut>(mut self, credentials: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        let source = CredentialSource::closure(credentials);
        self.servers
            .set_credentials(|all| &mut all.sentinels, source);
        self
    }

    /// Sets the path of a file with the password of the servers, such as a mounted secret. The URL has the user, and no
    /// password. Defaults to the password in the URL. A URL may name the file too, as in
    /// `redis://limiter@10.0.0.1/?password_file=/run/secrets/redis`.
    ///
    /// The file is read for each new connection and every 5 seconds. A changed password is used like changed
    /// [`credentials`](Self::credentials). One newline at its end is not a part of the password. If it is missing, empty,
    /// longer than 64 KiB or not UTF-8, the last password is used; before the first success, [`connect`](Self::connect) and the
    /// checks fail with [`ErrorKind::Authentication`](crate::store::ErrorKind::Authentication).
    pub fn password_file(mut self, path: impl Into<PathBuf>) -> Self {
        let source = CredentialSource::file(path);
        self.servers.set_credentials(|all| &mut all.servers, source);
        self
    }

    /// Like [`password_file`](Self::password_file), for the sentinels: `?sentinel_user=asker&sentinel_password_file=PATH` in a
    /// URL. It is read when the store connects to a sentinel.
    pub fn sentinel_password_file(mut self, path: impl Into<PathBuf>) -> Self {
        let source = CredentialSource::file(path);
        self.servers
            .set_credentials(|all| &mut all.sentinels, source);
        self
    }

    /// Sets the prefix of the store's keys: 1 to 64 ASCII letters, digits, `-`, `_`, `.`, `/` or
    /// `:`. Stores with the same prefix share their counts. A prefix in the URL, such as
    /// `redis://127.0.0.1/?prefix=shop`, takes precedence, so that an operator can change it.
    /// Defaults to `rl`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.settings.prefix = prefix.into();
        self
    }

    /// Sets the CA certificates to trust, in PEM; no others are trusted. Defaults to the CAs that
    /// this machine trusts or, with the feature `tls-webpki-roots`, to Mozilla's.
    ///
    /// This setting and the two below apply to every TLS connection: to a single server, to the
    /// nodes of a cluster, to sentinels and to their master.
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

    /// Sets the client certificate, with any intermediate CA certificates, and its key, in PEM. A
    /// Redis with `tls-auth-clients yes`, its default, requires one. Defaults to none.
    #[cfg(feature = "tls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        self.tls.client_certificate = Some((certificate.into(), key.into()));
        self
    }

    /// Sets the name in the servers' certificates, if it differs from the hosts in the URL: for
    /// servers with IP addresses as hosts, such as the nodes of most clusters. Defaults to each
    /// server's host.
    #[cfg(feature = "tls")]
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.tls.server_name = Some(name.into());
        self
    }

    /// Sets the connections per runtime (in a cluster, per master). Each carries one script call at
    /// a time. Defaults to 2: while Redis decides one batch, the next one is prepared. In a Redis
    /// Cluster, only the first connection of a master is used until more checks wait than a
    /// [batch](Self::batch) holds, so that checks of one partition share a call.
    pub fn connections(mut self, connections: NonZeroUsize) -> Self {
        self.settings.connections = connections;
        self
    }

    /// Sets the maximum time of one call, and that a check waits to be sent without a [`Fallback`](crate::Fallback), which
    /// withdraws its checks itself. Defaults to 250 ms; zero is an error. A [`Fallback`](crate::Fallback) has its own
    /// deadline: keep this above two of them.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// Sets the maximum time to open a connection: for the name lookup, TCP, TLS and the greeting together. Defaults to 2 s,
    /// or to the [`timeout`](Self::timeout) if that is longer; less than the timeout is an error.
    ///
    /// The store connects in the background, and the checks of that time do not begin it again. Each waits for at most the
    /// timeout, or for the deadline of its [`Fallback`](crate::Fallback). A TCP connection that takes longer than a quarter
    /// of this time is begun again.
    pub fn connect_timeout(mut self, time: Duration) -> Self {
        self.settings.connect_timeout = Some(time);
        self
    }

    /// Sets where the nodes of a cluster, and the master that sentinels report, are reached, if not at the addresses that
    /// they announce: behind a NAT, in Docker, or by forwarded ports. The closure takes an announced host and port; `None`
    /// keeps them. It must not lead from two addresses to one. Addresses in the URL are not mapped.
    ///
    /// With TLS, a server's certificate must still have the announced name, or the `server_name`.
    ///
    /// ```
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// let store = RedisStore::builder("redis+cluster://127.0.0.1:7000")
    ///     .address_map(|host, port| match host {
    ///         "172.18.0.2" => Some(("127.0.0.1".to_owned(), port + 621)),
    ///         _ => None,
    ///     })
    ///     .connect_lazy()?;
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub fn address_map(
        mut self,
        reachable: impl Fn(&str, u16) -> Option<(String, u16)> + Send + Sync + 'static,
    ) -> Self {
        self.addresses = AddressMap::new(reachable);
        self
    }

    /// Sets the name of the store's connections in `CLIENT LIST`: ASCII letters, digits and punctuation, without blanks.
    /// Defaults to the name and version of this crate, which Redis 7.2 and later also show as `lib-name` and `lib-ver`.
    ///
    /// It is sent with the login, and costs no round trip. A user who lacks the right to it (`+client|setname`) has
    /// connections without a name.
    ///
    /// ```
    /// use tower_redis_ratelimit::RedisStore;
    ///
    /// let store = RedisStore::builder("redis://127.0.0.1/").client_name("shop-api").connect_lazy()?;
    /// # Ok::<(), tower_redis_ratelimit::ConfigError>(())
    /// ```
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.settings.client_name = Some(name.into());
        self
    }

    /// Sets how many checks of a runtime may wait to be sent; one more fails immediately. Defaults
    /// to 10,000.
    pub fn queue(mut self, checks: NonZeroUsize) -> Self {
        self.settings.queue = checks;
        self
    }

    /// Sets the maximum number of checks in one script call. More is faster, but occupies Redis for
    /// longer at a time: about 3 us per check. Defaults to 128. A check under
    /// [`SlidingLog`](crate::Strategy::SlidingLog) with a limit of 16,384 or more, or a refund with
    /// a limit of 256 or more, counts as several: a call of such checks takes a few milliseconds at
    /// most.
    pub fn batch(mut self, checks: NonZeroUsize) -> Self {
        self.settings.batch = checks;
        self
    }

    /// Sets the number of partitions of callers in a Redis Cluster, where only checks of one
    /// partition share a script call: 1 to 1,024. Defaults to 12, which 2, 3, 4 or 6 masters share
    /// evenly. A single server ignores it.
    ///
    /// Each partition is in one slot, so on one master. Use a multiple of the number of masters,
    /// and for more than 6 masters at least 4 partitions per master; otherwise some masters have
    /// far more load than others. With fewer partitions, more checks share a call. With 256 checks
    /// in flight on three masters, 6 partitions put about 21 checks into a call, 12 about 13, 16
    /// about 9, 32 about 5.
    ///
    /// All stores of one prefix must use the same number; otherwise they would count the same
    /// callers twice. The number is therefore kept in the cluster, and a different one is rejected.
    /// To change the number, change the prefix too; all counts then start empty.
    pub fn partitions(mut self, partitions: NonZeroUsize) -> Self {
        self.settings.partitions = partitions;
        self
    }

    /// Sets the maximum number of callers whose denials are remembered, so that a flood of denied checks does not reach
    /// Redis; see [`Source::Cached`](crate::check::Source::Cached). Defaults to 10,000; 0 sends every check to Redis.
    ///
    /// A denial is remembered until its `retry_after`, for at most a second, so a reset or a
    /// refund by another instance takes effect within a second. Each caller has denials of up to 16 lists of
    /// policies, with up to four costs each, at about 200 bytes for a denial. A denial applies to all checks of
    /// its cost, except checks with an id. Under fixed windows and buckets that refill gradually, the wait of a
    /// larger cost follows from it. Under other strategies, Redis decides a larger cost too, but at most four
    /// costs a second: the reported wait of further costs ends when nothing is charged, which may be too long. A cost
    /// below all denied ones is always decided by Redis, since it may pass. The least active callers are
    /// dropped first, so a flood of denied callers replaces itself.
    pub fn denials(mut self, denials: usize) -> Self {
        self.settings.denials = denials;
        self
    }

    /// Sets the observer of the calls that are sent. Defaults to the [observer](crate::RateLimitLayer::observer) of the
    /// first layer over the store that has one, otherwise to [a log of what needs
    /// attention](Observer).
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observer = OnceLock::from(shared_observer(observer));
        self
    }

    /// Connects, and verifies that Redis can run the script. Waits for a connection for at most the
    /// [`connect_timeout`](Self::connect_timeout).
    ///
    /// # Errors
    ///
    /// As [`RedisStore::connect`].
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let store = self.connect_lazy()?;
        store.inner.ping().await?;
        Ok(store)
    }

    /// Creates the store, which connects at the first check.
    ///
    /// # Errors
    ///
    /// For an invalid URL, prefix, client name, certificate or server name; for more than 1,024 partitions, a
    /// timeout of zero or above the time to connect; for `rediss://` without the feature `tls`; and for TLS settings without
    /// `rediss://`.
    pub fn connect_lazy(self) -> Result<RedisStore, ConfigError> {
        let Self {
            mut servers,
            tls,
            addresses,
            mut settings,
            observer,
            now,
        } = self;
        if let Some(prefix) = servers.take_prefix() {
            settings.prefix = prefix;
        }
        // A brace would become the hash tag of all keys, and `*` a wildcard of a scan.
        if !is_name(&settings.prefix, b"-_./:") {
            let fix = "use 1 to 64 ASCII letters, digits, `-`, `_`, `.`, `/` or `:`";
            return Err(ConfigError::invalid("key prefix", &settings.prefix, fix));
        }
        if settings.timeout.is_zero() {
            return Err(ConfigError::new(
                "a timeout of 0 for Redis: use a longer one, such as 250 ms",
            ));
        }
        if let Some(time) = settings.connect_timeout
            && time < settings.timeout
        {
            return Err(ConfigError::new(format!(
                "a connect_timeout of {time:?} below the timeout of {:?}: use a longer one, or a shorter timeout",
                settings.timeout
            )));
        }
        if settings.partitions.get() > Cluster::MAX_PARTITIONS {
            return Err(ConfigError::new(format!(
                "{} partitions: use at most 1024",
                settings.partitions
            )));
        }
        if let Some(name) = &settings.client_name {
            check_client_name(name)?;
        }
        let credentials = servers.credentials.clone();
        let servers = servers.into_kind()?;
        let logins = Logins::new(credentials, &servers, settings.time_to_connect());
        let login = logins.servers.clone();
        let topology = Topology::new(servers, &settings, &tls, logins, addresses)?;
        Ok(RedisStore {
            inner: Arc::new(SharedStore::new(topology, login, settings, observer, now)),
        })
    }
}
