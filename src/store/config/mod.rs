mod certificates;
#[cfg(feature = "serde")]
mod formats;
mod kind;
#[cfg(test)]
mod tests;

use std::env::{self, VarError};
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

pub use kind::{ShareConfig, StoreKind};

use super::redis::{RedisStoreBuilder, Settings, wrong_url};
use super::{AnyStore, Fallback, LocalStore, RedisStore, Servers, StoreError};
use crate::error::ConfigError;
use crate::observe::log_unset;

/// The settings of an [`AnyStore`], as plain data: one public field for each name in a file. A later
/// version may add some, so start with the default.
///
/// They are the settings of [`RedisStoreBuilder`], [`Fallback`] and [`LocalStore`], with the same
/// defaults. Settings that the [`kind`](Self::kind) does not use are ignored.
///
/// With the feature `serde` it is read from TOML, YAML, JSON or the environment. Every setting may
/// be given as text. A missing setting has its default, and an unknown name is an error. A duration
/// is an integer and a unit (`us`, `ms`, `s`, `m`, `h` or `d`):
///
/// ```
/// # #[cfg(feature = "serde")] {
/// use std::time::Duration;
/// use tower_redis_ratelimit::store::{AnyStore, StoreConfig};
/// use tower_redis_ratelimit::Policies;
///
/// #[derive(serde::Deserialize)]
/// struct Settings {
///     store: StoreConfig,
///     policies: Policies,
/// }
///
/// let settings: Settings = toml::from_str(
///     r#"
///     [store]
///     url = "redis://127.0.0.1/"
///     prefix = "shop"
///     deadline = "50ms"
///     share = 4
///
///     [[policies]]
///     name = "burst"
///     quota = "10/s burst 20"
///
///     [[policies]]
///     name = "daily"
///     strategy = "fixed-window(clock+22h)"
///     quota = "10000 per day"
///     "#,
/// )?;
/// assert_eq!(settings.store.deadline, Duration::from_millis(50));
/// let store = AnyStore::from_config(&settings.store)?;
/// # let _ = (store, settings.policies);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `Debug` shows the server's address, but no password. The serialized form contains the whole URL.
/// If the URL has a password, beware of the format's errors: an error of `toml` shows the invalid
/// line, and its `Debug` the whole file, even if `main` returns it. A URL from the environment
/// appears in neither: see [`from_env`](Self::from_env).
///
/// In code, change the defaults:
///
/// ```
/// use tower_redis_ratelimit::store::{AnyStore, StoreConfig};
///
/// let mut config = StoreConfig::default();
/// config.url = Some("redis://127.0.0.1/".to_owned());
/// config.prefix = "shop".to_owned();
/// let store = AnyStore::from_config(&config)?;
/// # let _ = store;
/// # Ok::<(), tower_redis_ratelimit::store::StoreError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
#[cfg_attr(
    feature = "serde",
    serde(expecting = "the settings of a store, such as `{ url = \"redis://127.0.0.1/\" }`")
)]
#[non_exhaustive]
pub struct StoreConfig {
    /// The kind of store. Defaults to [`StoreKind::Auto`].
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::kind"))]
    pub kind: StoreKind,
    /// The URL of Redis, as for [`RedisStore::connect`]. Defaults to none.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub url: Option<String>,
    /// Path of a PEM file with the CA certificates to trust exclusively. Defaults to none: the CAs
    /// that this machine trusts or, with the feature `tls-webpki-roots`, Mozilla's.
    ///
    /// This setting and the three below require the feature `tls` and a URL with TLS. Paths are
    /// relative to the working directory; files are read when the store is created.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub root_certificates: Option<PathBuf>,
    /// Path of a PEM file with the client certificate and its intermediate CA certificates.
    /// Defaults to none.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub client_certificate: Option<PathBuf>,
    /// Path of a PEM file with the private key of the client certificate. Defaults to none.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub client_key: Option<PathBuf>,
    /// The name in the servers' certificates, if it differs from the hosts in the URL. Defaults to
    /// each server's host.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub server_name: Option<String>,
    /// See [`RedisStoreBuilder::prefix`]; a prefix in the URL takes precedence. Defaults to `rl`.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::prefix"))]
    pub prefix: String,
    /// See [`RedisStoreBuilder::connections`]. Defaults to 2.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::connections"))]
    pub connections: NonZeroUsize,
    /// See [`RedisStoreBuilder::timeout`]. Defaults to 250 ms.
    #[cfg_attr(
        feature = "serde",
        serde(
            deserialize_with = "formats::timeout",
            serialize_with = "formats::write_duration"
        )
    )]
    pub timeout: Duration,
    /// See [`RedisStoreBuilder::queue`]. Defaults to 10,000.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::queue"))]
    pub queue: NonZeroUsize,
    /// See [`RedisStoreBuilder::batch`]. Defaults to 128.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::batch"))]
    pub batch: NonZeroUsize,
    /// See [`RedisStoreBuilder::partitions`]. Defaults to 12.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::partitions"))]
    pub partitions: NonZeroUsize,
    /// See [`RedisStoreBuilder::denials`]. Defaults to 10,000.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::denials"))]
    pub denials: usize,
    /// See [`Fallback::deadline`]. At least a millisecond; defaults to 100 ms.
    #[cfg_attr(
        feature = "serde",
        serde(
            deserialize_with = "formats::deadline",
            serialize_with = "formats::write_duration"
        )
    )]
    pub deadline: Duration,
    /// See [`Fallback::failures`]. Defaults to 3.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::failures"))]
    pub failures: NonZeroU32,
    /// See [`Fallback::share`]. Defaults to 1.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::share"))]
    pub share: ShareConfig,
    /// Number of keys that a [`LocalStore`] holds, alone or in a [`Fallback`]. Defaults to 100,000.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "formats::local_keys"))]
    pub local_keys: NonZeroUsize,
}

impl Default for StoreConfig {
    fn default() -> Self {
        type Both = Fallback<RedisStore, LocalStore>;
        let Settings {
            prefix,
            connections,
            timeout,
            queue,
            batch,
            partitions,
            denials,
        } = Settings::default();
        Self {
            kind: StoreKind::Auto,
            url: None,
            root_certificates: None,
            client_certificate: None,
            client_key: None,
            server_name: None,
            prefix,
            connections,
            timeout,
            queue,
            batch,
            partitions,
            denials,
            deadline: Both::DEFAULT_DEADLINE,
            failures: Both::DEFAULT_FAILURES,
            share: ShareConfig::Fixed(NonZeroU32::MIN),
            local_keys: LocalStore::DEFAULT_KEYS,
        }
    }
}

impl StoreConfig {
    /// Creates the default settings, with the URL in this environment variable if it is set. Otherwise the feature `tracing`
    /// logs that the variable is not set.
    ///
    /// # Errors
    ///
    /// If the variable is empty or not Unicode. Unset it to use no Redis.
    pub fn from_env(variable: &str) -> Result<Self, ConfigError> {
        let value = env::var(variable);
        if value == Err(VarError::NotPresent) {
            log_unset(variable);
        }
        Self::of_variable(variable, value)
    }

    fn of_variable(name: &str, value: Result<String, VarError>) -> Result<Self, ConfigError> {
        let wrong = |what: &str| {
            Err(wrong_url(format_args!(
                "{name} is {what} (unset it for no Redis)"
            )))
        };
        match value {
            Ok(url) if url.trim().is_empty() => wrong("empty"),
            Ok(url) => Ok(Self {
                url: Some(url),
                ..Self::default()
            }),
            Err(VarError::NotPresent) => Ok(Self::default()),
            Err(VarError::NotUnicode(_)) => wrong("not Unicode"),
        }
    }

    pub(super) fn store(&self) -> Result<AnyStore, StoreError> {
        Ok(match (self.kind, &self.url) {
            (StoreKind::Local, _) | (StoreKind::Auto, None) => AnyStore::Local(self.local()),
            (StoreKind::Redis, Some(url)) => AnyStore::Redis(self.connect_lazy(url)?),
            (StoreKind::Auto | StoreKind::Fallback, Some(url)) => {
                AnyStore::Fallback(self.fallback(self.connect_lazy(url)?)?)
            }
            (kind @ (StoreKind::Redis | StoreKind::Fallback), None) => {
                return Err(wrong_url(format_args!(
                    "it is missing, and a store of the kind `{kind}` needs it"
                ))
                .into());
            }
        })
    }

    fn redis(&self, url: &str) -> RedisStoreBuilder {
        RedisStore::builder(url).settings(Settings {
            prefix: self.prefix.clone(),
            connections: self.connections,
            timeout: self.timeout,
            queue: self.queue,
            batch: self.batch,
            partitions: self.partitions,
            denials: self.denials,
        })
    }

    fn fallback(&self, redis: RedisStore) -> Result<Fallback<RedisStore, LocalStore>, StoreError> {
        // With less, every reply of Redis would be too late: each instance would count separately
        // although Redis works.
        if self.deadline < Duration::from_millis(1) {
            let text = format!(
                "a deadline of {:?} for Redis: use at least 1 ms, such as 100 ms",
                self.deadline
            );
            return Err(ConfigError::new(text).into());
        }
        let share = self.share.of(&redis)?;
        Ok(Fallback::new(redis, self.local())
            .deadline(self.deadline)
            .failures(self.failures)
            .share(share))
    }

    fn local(&self) -> LocalStore {
        LocalStore::with_capacity(self.local_keys)
    }
}

/// Omits the password.
#[warn(clippy::missing_fields_in_debug)]
impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = |url: &String| format!("{:?}", Servers::from(url));
        f.debug_struct("StoreConfig")
            .field("kind", &self.kind)
            .field("url", &self.url.as_ref().map(address))
            .field("root_certificates", &self.root_certificates)
            .field("client_certificate", &self.client_certificate)
            .field("client_key", &self.client_key)
            .field("server_name", &self.server_name)
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("timeout", &self.timeout)
            .field("queue", &self.queue)
            .field("batch", &self.batch)
            .field("partitions", &self.partitions)
            .field("denials", &self.denials)
            .field("deadline", &self.deadline)
            .field("failures", &self.failures)
            .field("share", &self.share)
            .field("local_keys", &self.local_keys)
            .finish()
    }
}
