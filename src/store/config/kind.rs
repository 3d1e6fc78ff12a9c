use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::error::ConfigError;
use crate::limit::words;

/// Selects the store that an [`AnyStore`](crate::store::AnyStore) is.
///
/// As text: `auto`, `fallback`, `redis`, `local`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum StoreKind {
    /// [`Fallback`](Self::Fallback) if there is a URL, otherwise [`Local`](Self::Local).
    #[default]
    Auto,
    /// A [`RedisStore`](crate::RedisStore) with a [`LocalStore`](crate::LocalStore) as its
    /// [`Fallback`](crate::Fallback). It needs a URL.
    Fallback,
    /// A [`RedisStore`](crate::RedisStore). It needs a URL. The log warns of settings that only a fallback has.
    Redis,
    /// A [`LocalStore`](crate::LocalStore), even if there is a URL. Then the log warns.
    Local,
}

words!(StoreKind, "kind of store":
    Auto = "auto", Fallback = "fallback", Redis = "redis", Local = "local");

/// The [share](crate::store::FallbackBuilder::share) of the fallback in an [`AnyStore`](crate::store::AnyStore).
///
/// As text: a number such as `4`, or `alive`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum ShareConfig {
    /// The count of [`RedisStore::announce`](crate::RedisStore::announce). Requires a Tokio runtime when the
    /// store is created.
    Alive,
    /// This number of instances.
    #[cfg_attr(feature = "serde", serde(untagged))]
    Fixed(NonZeroU32),
}

impl ShareConfig {
    pub(super) const CHOICES: &str = "a number of instances such as `4`, or `alive`";
}

impl fmt::Display for ShareConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(instances) => write!(f, "{instances}"),
            Self::Alive => f.write_str("alive"),
        }
    }
}

impl FromStr for ShareConfig {
    type Err = ConfigError;

    /// # Errors
    ///
    /// If the text is neither.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            "alive" => Ok(Self::Alive),
            number => match number.parse() {
                Ok(instances) => Ok(Self::Fixed(instances)),
                Err(_) => Err(ConfigError::choice("share", text, Self::CHOICES)),
            },
        }
    }
}
