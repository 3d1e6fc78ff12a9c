//! Feature `serde`: settings from a file or from environment variables.

mod decision;
mod key;
mod policies;
mod redacted;

use std::fmt;
use std::marker::PhantomData;
use std::num::{NonZeroU8, NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{
    Deserialize, DeserializeOwned, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess,
    Unexpected, Visitor,
};
use serde::ser::Serializer;

pub(crate) use self::redacted::Redacted;
use crate::error::ConfigError;
use crate::limit::{PolicyKind, Quota, Strategy, duration};

/// A value that is read from text, so that an environment variable can contain it.
///
/// serde's own choice between text and tables, `untagged`, would lose the line and the cause of an
/// error.
pub(crate) trait Setting: Sized {
    /// Describes a valid value.
    const EXPECTED: &'static str;
    /// Describes a list of valid values.
    const LIST: &'static str = "a list";
    /// Whether a format may contain other types than text: a number, which is parsed as text, a
    /// table or a list.
    const ANY: bool = false;

    /// Returns the value of an absent setting, such as JSON's `null`. `None` if it is an error.
    fn absent() -> Option<Self> {
        None
    }

    fn read(text: &str) -> Result<Self, ConfigError>;

    fn read_table<'de, D: Deserializer<'de>>(_: D, field: Field<Self>) -> Result<Self, D::Error> {
        Err(D::Error::invalid_type(Unexpected::Map, &field))
    }

    fn read_list<'de, D: Deserializer<'de>>(_: D, field: Field<Self>) -> Result<Self, D::Error> {
        Err(D::Error::invalid_type(Unexpected::Seq, &field))
    }
}

/// Reads a setting. The name is for errors; it is empty for a setting outside of a struct.
pub(crate) struct Field<T>(&'static str, PhantomData<T>);

impl<T> Field<T> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self(name, PhantomData)
    }
}

impl<'de, T: Setting> DeserializeSeed<'de> for Field<T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        if T::absent().is_some() {
            deserializer.deserialize_option(self)
        } else if T::ANY {
            deserializer.deserialize_any(self)
        } else {
            deserializer.deserialize_str(self)
        }
    }
}

impl<'de, T: Setting> Visitor<'de> for Field<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => f.write_str(T::EXPECTED),
            name => write!(f, "{} as `{name}`", T::EXPECTED),
        }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        T::read(text).map_err(|error| match self.0 {
            "" => E::custom(error),
            name => E::custom(format_args!("{name}: {error}")),
        })
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_none<E: Error>(self) -> Result<T, E> {
        self.visit_unit()
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        T::absent().ok_or_else(|| E::invalid_type(Unexpected::Unit, &self))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_str(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<T, A::Error> {
        T::read_table(MapAccessDeserializer::new(table), self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<T, A::Error> {
        T::read_list(SeqAccessDeserializer::new(list), self)
    }
}

/// Implements `Deserialize` through [`Setting`].
macro_rules! deserialize {
    ($type:ty) => {
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                serde::de::DeserializeSeed::deserialize(
                    $crate::limit::formats::Field::new(""),
                    deserializer,
                )
            }
        }
    };
}

/// Implements `Setting`, `Serialize` and `Deserialize` through `FromStr` and `Display`.
macro_rules! text {
    ($type:ty, $expected:expr) => {
        impl $crate::limit::formats::Setting for $type {
            const EXPECTED: &'static str = $expected;
            const LIST: &'static str = concat!("a list, each ", $expected);

            fn read(text: &str) -> Result<Self, $crate::error::ConfigError> {
                text.parse()
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        $crate::limit::formats::deserialize!($type);
    };
}

pub(crate) use {deserialize, text};

text!(Quota, "a quota such as `100/s burst 200`");
text!(Strategy, "a strategy such as `gcra`");
text!(PolicyKind, "a strategy such as `gcra`");

impl Setting for Option<Duration> {
    const EXPECTED: &'static str = Duration::EXPECTED;

    fn absent() -> Option<Self> {
        Some(None)
    }

    fn read(text: &str) -> Result<Self, ConfigError> {
        Ok(Some(Duration::read(text)?))
    }
}

impl Setting for Duration {
    const EXPECTED: &'static str = "a duration such as `250ms`";

    fn read(text: &str) -> Result<Self, ConfigError> {
        match duration::parse(text) {
            Ok(duration) => Ok(duration),
            Err(problem) => {
                let problem = format!("{problem}; use the form `250ms`, `2s` or `15m`");
                Err(ConfigError::invalid("duration", text, problem))
            }
        }
    }
}

pub(crate) fn write_duration<S: Serializer>(
    duration: &Duration,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&duration::Text(*duration))
}

/// Accepts any text, which is checked by the code that uses it.
impl Setting for String {
    const EXPECTED: &'static str = "text";

    fn read(text: &str) -> Result<Self, ConfigError> {
        Ok(text.to_owned())
    }
}

macro_rules! optional {
    ($($type:ty, $expected:literal;)+) => {
        $(impl Setting for Option<$type> {
            const EXPECTED: &'static str = $expected;

            fn absent() -> Option<Self> {
                Some(None)
            }

            fn read(text: &str) -> Result<Self, ConfigError> {
                Ok(Some(text.into()))
            }
        })+
    };
}

optional! {
    String, "text";
    PathBuf, "a path";
}

macro_rules! numbers {
    ($($type:ty, $expected:literal;)+) => {
        $(impl Setting for $type {
            const EXPECTED: &'static str = $expected;
            const ANY: bool = true;

            fn read(text: &str) -> Result<Self, ConfigError> {
                text.trim().parse().map_err(|_| ConfigError::choice("number", text, $expected))
            }
        })+
    };
}

numbers! {
    usize, "an integer >= 0";
    NonZeroUsize, "an integer >= 1";
    NonZeroU8, "an integer from 1 to 255";
    NonZeroU32, "an integer from 1 to 4294967295";
}

/// Several settings: a list, or one text with commas.
#[derive(serde::Serialize)]
#[serde(transparent)]
pub(crate) struct SettingList<T>(pub(crate) Vec<T>);

impl<T: Setting + DeserializeOwned> Setting for SettingList<T> {
    const EXPECTED: &'static str = T::LIST;
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        // `split` would return one empty text for an empty list.
        if text.trim().is_empty() {
            return Ok(Self(vec![]));
        }
        let mut settings = vec![];
        for setting in text.split(',') {
            settings.push(T::read(setting.trim())?);
        }
        Ok(Self(settings))
    }

    fn read_list<'de, D: Deserializer<'de>>(list: D, _: Field<Self>) -> Result<Self, D::Error> {
        Ok(Self(Vec::deserialize(list)?))
    }
}
