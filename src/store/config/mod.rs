//! [`StoreConfig`]: the settings of a store as plain data.
//!
//! Each setting is declared once, in the list below. `any.rs` creates the stores; those in Redis
//! keep a copy of the settings that concern them, [`RedisSettings`].

mod addresses;
mod certificates;
#[cfg(feature = "serde")]
mod formats;
mod kind;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::env::{self, VarError};
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

pub(super) use addresses::set_address_map;
pub(super) use certificates::set_tls;
pub use kind::{ShareConfig, StoreKind};

use super::redis::wrong_url;
use super::{Fallback, LocalStore, Servers};
use crate::error::{ConfigError, redacted};
use crate::observe::log_settings;
use crate::util::FOREVER;

/// Declares the settings, each with its documentation, type and default: all as fields of
/// [`StoreConfig`], and those after `redis` also as fields of [`RedisSettings`].
macro_rules! settings {
    (
        $(#[$attribute:meta])*
        { $($before:tt)* }
        redis { $($redis:tt)* }
        { $($after:tt)* }
    ) => {
        // In three lists, since a macro cannot select some items of one: the first type has all, the second some.
        settings!(@all $(#[$attribute])* { $($before)* $($redis)* $($after)* });
        settings!(@redis { $($redis)* });
    };
    (@all
        $(#[$attribute:meta])*
        { $($(#[$field:meta])* $name:ident: $type:ty = $default:expr;)* }
    ) => {
        $(#[$attribute])*
        pub struct StoreConfig {
            $($(#[$field])* pub $name: $type,)*
        }

        impl Default for StoreConfig {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        /// A setter for each field.
        impl StoreConfig {
            $(
                #[doc = concat!("Sets [`", stringify!($name), "`](Self#structfield.", stringify!($name), ").")]
                #[must_use]
                pub fn $name(self, $name: impl Into<$type>) -> Self {
                    Self { $name: $name.into(), ..self }
                }
            )*
        }

        impl StoreConfig {
            /// Returns the names of the settings that differ from their defaults.
            fn changed(&self) -> Vec<&'static str> {
                let default = Self::default();
                let mut names = vec![];
                $(if self.$name != default.$name {
                    names.push(stringify!($name));
                })*
                names
            }
        }

        /// Omits the password, also in a setting that should not contain it.
        impl fmt::Debug for StoreConfig {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let url = self.url.as_ref().map(|url| format!("{:?}", Servers::from(url)));
                let shown = Self { url, ..self.clone() };
                f.debug_struct("StoreConfig")
                    $(.field(stringify!($name), &ShownField(&shown.$name)))*
                    .finish()
            }
        }

        #[cfg(feature = "serde")]
        impl StoreConfig {
            const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Reads the value of the setting with this name.
            fn read_value<'de, A: serde::de::MapAccess<'de>>(
                &mut self,
                name: &'static str,
                map: &mut A,
            ) -> Result<(), A::Error> {
                $(if name == stringify!($name) {
                    self.$name = map.next_value_seed(formats::Field::new(name))?;
                })*
                Ok(())
            }
        }
    };
    (@redis { $($(#[$field:meta])* $name:ident: $type:ty = $default:expr;)* }) => {
        /// The settings of a [`RedisStore`](crate::RedisStore) except servers and TLS, as
        /// documented in [`StoreConfig`].
        #[derive(Debug, Clone)]
        pub(super) struct RedisSettings {
            $(pub(super) $name: $type,)*
        }

        impl From<&StoreConfig> for RedisSettings {
            fn from(config: &StoreConfig) -> Self {
                Self { $($name: config.$name.clone(),)* }
            }
        }

        impl Default for RedisSettings {
            fn default() -> Self {
                Self::from(&StoreConfig::default())
            }
        }
    };
}

/// A setting in `Debug`, without a secret.
struct ShownField<'a>(&'a dyn fmt::Debug);

impl fmt::Debug for ShownField<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redacted(&format!("{:?}", self.0)))
    }
}

type Both = Fallback<LocalStore, LocalStore>;

const fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::MIN.saturating_add(number - 1)
}

settings! {
    /// The settings of an [`AnyStore`](super::AnyStore), as plain data: one public field for each
    /// name in a file. A later version may add some, so start with the default.
    ///
    /// They are the settings of [`RedisStoreBuilder`](super::RedisStoreBuilder), [`Fallback`] and
    /// [`LocalStore`], with the same defaults. Settings that the [`kind`](Self::kind) does not use
    /// are ignored. The log warns of a URL with [`StoreKind::Local`], of a deadline, failures, a share or local keys with
    /// [`StoreKind::Redis`], and of any setting but local keys with [`StoreKind::Auto`] and no URL.
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
    /// assert_eq!(settings.store.deadline, Some(Duration::from_millis(50)));
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
    /// let config = StoreConfig::default()
    ///     .url("redis://127.0.0.1/".to_owned())
    ///     .prefix("shop");
    /// let store = AnyStore::from_config(&config)?;
    /// # let _ = store;
    /// # Ok::<(), tower_redis_ratelimit::store::StoreError>(())
    /// ```
    #[derive(Clone, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize))]
    #[non_exhaustive]
    {
        /// The kind of store. Defaults to [`StoreKind::Auto`].
        kind: StoreKind = StoreKind::Auto;
        /// The URL of Redis, as for [`RedisStore::connect`](super::RedisStore::connect). Defaults to none.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        url: Option<String> = None;
        /// Path of a file with the password of the servers; see
        /// [`RedisStoreBuilder::password_file`](super::RedisStoreBuilder::password_file). Defaults to none.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        password_file: Option<PathBuf> = None;
        /// Path of a file with the password of the sentinels; see
        /// [`RedisStoreBuilder::sentinel_password_file`](super::RedisStoreBuilder::sentinel_password_file). Defaults to none.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        sentinel_password_file: Option<PathBuf> = None;
        /// Path of a PEM file with the CA certificates to trust exclusively. Defaults to none: the CAs
        /// that this machine trusts or, with the feature `tls-webpki-roots`, Mozilla's.
        ///
        /// This setting and the three below require the feature `tls` and a URL with TLS. Paths are
        /// relative to the working directory; files are read when the store is created.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        root_certificates: Option<PathBuf> = None;
        /// Path of a PEM file with the client certificate and its intermediate CA certificates.
        /// Defaults to none.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        client_certificate: Option<PathBuf> = None;
        /// Path of a PEM file with the private key of the client certificate. Defaults to none.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        client_key: Option<PathBuf> = None;
        /// The name in the servers' certificates, if it differs from the hosts in the URL. Defaults to
        /// each server's host.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        server_name: Option<String> = None;
        /// Where the nodes of a cluster, and the master that sentinels report, are reached, by the addresses that they
        /// announce: see [`RedisStoreBuilder::address_map`](super::RedisStoreBuilder::address_map). In a file, a table such as
        /// `{ "172.18.0.2:6379" = "127.0.0.1:7000" }`; as text, pairs such as `172.18.0.2:6379=127.0.0.1:7000`, with commas.
        /// Defaults to none.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "BTreeMap::is_empty"))]
        address_map: BTreeMap<String, String> = BTreeMap::new();
    }
    redis {
        /// See [`RedisStoreBuilder::prefix`](super::RedisStoreBuilder::prefix); a prefix in the URL
        /// takes precedence. Defaults to `rl`.
        prefix: String = "rl".to_owned();
        /// See [`RedisStoreBuilder::connections`](super::RedisStoreBuilder::connections). Defaults to 2.
        connections: NonZeroUsize = number(2);
        /// See [`RedisStoreBuilder::timeout`](super::RedisStoreBuilder::timeout). Defaults to 250 ms.
        #[cfg_attr(feature = "serde", serde(serialize_with = "formats::write_duration"))]
        timeout: Duration = Duration::from_millis(250);
        /// See [`RedisStoreBuilder::connect_timeout`](super::RedisStoreBuilder::connect_timeout). Defaults to none: 2 s,
        /// or the [`timeout`](Self::timeout) if that is longer.
        #[cfg_attr(
            feature = "serde",
            serde(skip_serializing_if = "Option::is_none", serialize_with = "formats::write_some_duration")
        )]
        connect_timeout: Option<Duration> = None;
        /// See [`RedisStoreBuilder::client_name`](super::RedisStoreBuilder::client_name). Defaults to none: the name and
        /// version of this crate.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        client_name: Option<String> = None;
        /// See [`RedisStoreBuilder::queue`](super::RedisStoreBuilder::queue). Defaults to 10,000.
        queue: NonZeroUsize = number(10_000);
        /// See [`RedisStoreBuilder::batch`](super::RedisStoreBuilder::batch). Defaults to 128.
        batch: NonZeroUsize = number(128);
        /// See [`RedisStoreBuilder::partitions`](super::RedisStoreBuilder::partitions). Defaults to 12.
        partitions: NonZeroUsize = number(12);
        /// See [`RedisStoreBuilder::denials`](super::RedisStoreBuilder::denials). Defaults to 10,000.
        denials: usize = 10_000;
    }
    {
        /// See [`FallbackBuilder::deadline`](crate::store::FallbackBuilder::deadline). At least a millisecond, and at most the
        /// [`timeout`](Self::timeout). Defaults to none: 100 ms, or the timeout if that is shorter.
        #[cfg_attr(
            feature = "serde",
            serde(skip_serializing_if = "Option::is_none", serialize_with = "formats::write_some_duration")
        )]
        deadline: Option<Duration> = None;
        /// See [`FallbackBuilder::failures`](crate::store::FallbackBuilder::failures). Defaults to 3.
        failures: NonZeroU32 = Both::DEFAULT_FAILURES;
        /// See [`FallbackBuilder::share`](crate::store::FallbackBuilder::share); a share in the URL takes precedence.
        /// Defaults to 1.
        share: ShareConfig = ShareConfig::Fixed(NonZeroU32::MIN);
        /// Number of keys that a [`LocalStore`] holds, alone or in a [`Fallback`]. Defaults to 100,000.
        local_keys: NonZeroUsize = LocalStore::DEFAULT_KEYS;
    }
}

/// The settings of a store that decides in this process too.
const OF_FALLBACK: [&str; 4] = ["deadline", "failures", "share", "local_keys"];

/// The value of an environment variable that selects a store in this process.
const LOCAL: &str = "local";

impl RedisSettings {
    /// The default budget of a connection: a dozen round trips of 150 ms.
    const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

    /// Maximum time to open a connection; never below the timeout, unless that is longer than a year.
    pub(super) fn time_to_connect(&self) -> Duration {
        self.connect_timeout
            .unwrap_or(Self::CONNECT_TIMEOUT)
            .max(self.timeout)
            .min(FOREVER)
    }
}

impl StoreConfig {
    /// Creates the default settings, with the URL in this environment variable. The value `local` selects a store in this
    /// process. So does a variable that is not set, with a warning in the log, since its name may be misspelled: use
    /// [`require_env`](Self::require_env) in production.
    ///
    /// # Errors
    ///
    /// If the variable is empty or not Unicode.
    pub fn from_env(variable: &str) -> Result<Self, ConfigError> {
        let value = env::var(variable);
        if value == Err(VarError::NotPresent) {
            log_settings(&format!(
                "the environment variable {variable} is not set, so limits are counted in this process only: set {variable}=local \
                 if that is intended, or use `require_env` instead of `from_env` to fail"
            ));
            return Ok(Self::default());
        }
        Self::of_variable(variable, value)
    }

    /// Like [`from_env`](Self::from_env), for a variable that must be set.
    ///
    /// # Errors
    ///
    /// If the variable is not set, empty or not Unicode.
    pub fn require_env(variable: &str) -> Result<Self, ConfigError> {
        Self::of_variable(variable, env::var(variable))
    }

    /// Logs the settings that show that another kind of store may be meant.
    pub(super) fn log_ignored(&self) {
        match self.kind {
            StoreKind::Local if self.url.is_some() => log_settings(
                "the kind of the store is `local`, so it ignores the `url` and counts in this process only: use the \
                 kind `auto` to count in Redis, or remove the `url`",
            ),
            StoreKind::Redis => {
                if let Some(ignored) = self.list_changed(|name| OF_FALLBACK.contains(&name)) {
                    log_settings(&format!(
                        "the kind of the store is `redis`, so it ignores {ignored}: use the kind `fallback` to decide in this process while \
                         Redis is down, or remove the setting"
                    ));
                }
            }
            StoreKind::Auto if self.url.is_none() => {
                if let Some(ignored) = self.list_changed(|name| name != "local_keys") {
                    log_settings(&format!(
                        "the store has no `url`, so it ignores {ignored} and counts in this process only: add the `url`, or use the kind \
                         `local` if that is intended"
                    ));
                }
            }
            StoreKind::Local | StoreKind::Auto | StoreKind::Fallback => {}
        }
    }

    /// Returns the settings among `these` that differ from their defaults, for a message. `None` if all are equal.
    fn list_changed(&self, these: impl Fn(&str) -> bool) -> Option<String> {
        let mut changed = self.changed();
        changed.retain(|name| these(name));
        if changed.is_empty() {
            return None;
        }
        Some(format!("`{}`", changed.join("`, `")))
    }

    fn of_variable(name: &str, value: Result<String, VarError>) -> Result<Self, ConfigError> {
        let problem = match value {
            // Probably a template without its value: counting locally instead would hide that.
            Ok(url) if url.trim().is_empty() => "empty",
            Ok(word) if word.trim() == LOCAL => {
                return Ok(Self {
                    kind: StoreKind::Local,
                    ..Self::default()
                });
            }
            Ok(url) => {
                return Ok(Self {
                    url: Some(url),
                    ..Self::default()
                });
            }
            Err(VarError::NotPresent) => "not set",
            Err(VarError::NotUnicode(_)) => "not Unicode",
        };
        Err(wrong_url(format_args!(
            "{name} is {problem} (set {name}={LOCAL} for no Redis)"
        )))
    }
}
