//! Values that are one piece of text, so that an environment variable can hold them.

use std::fmt;
use std::marker::PhantomData;
use std::num::{NonZeroU8, NonZeroU32, NonZeroUsize};
use std::time::Duration;

use serde::de::{DeserializeSeed, Deserializer, Error, Unexpected, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::limit::{ConfigError, Quota, Strategy, duration};

/// A value that is read from text.
pub(crate) trait Setting: Sized {
    /// What it looks like.
    const EXPECTED: &'static str;
    /// Whether a number will do too.
    const NUMBER: bool = false;

    fn read(text: &str) -> Result<Self, ConfigError>;
    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error>;
}

/// Reads a setting of this name, for errors to tell. The name is empty if the setting stands alone.
pub(crate) struct Field<T>(pub(crate) &'static str, PhantomData<T>);

impl<T> Field<T> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self(name, PhantomData)
    }
}

impl<T: Setting> Field<T> {
    fn read<E: Error>(&self, text: &str) -> Result<T, E> {
        T::read(text).map_err(|error| match self.0 {
            "" => E::custom(error),
            name => E::custom(format_args!("{name}: {error}")),
        })
    }

    fn read_number<E: Error>(&self, number: impl fmt::Display, unexpected: Unexpected<'_>) -> Result<T, E> {
        if T::NUMBER { self.read(&number.to_string()) } else { Err(E::invalid_type(unexpected, self)) }
    }
}

impl<'de, T: Setting> DeserializeSeed<'de> for Field<T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        if T::NUMBER { deserializer.deserialize_any(self) } else { deserializer.deserialize_str(self) }
    }
}

impl<T: Setting> Visitor<'_> for Field<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => f.write_str(T::EXPECTED),
            name => write!(f, "{} as `{name}`", T::EXPECTED),
        }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        self.read(text)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        self.read_number(number, Unexpected::Unsigned(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        self.read_number(number, Unexpected::Signed(number))
    }
}

/// A setting as it is written.
pub(crate) struct Written<'a, T>(pub(crate) &'a T);

impl<T: Setting> Serialize for Written<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.write(serializer)
    }
}

/// Makes a [`Setting`] that stands alone.
macro_rules! setting {
    ($($type:ty),+) => {
        $(
            impl serde::Serialize for $type {
                fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    $crate::limit::formats::Setting::write(self, serializer)
                }
            }

            impl<'de> serde::Deserialize<'de> for $type {
                fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    serde::de::DeserializeSeed::deserialize($crate::limit::formats::Field::new(""), deserializer)
                }
            }
        )+
    };
}

pub(crate) use setting;

setting!(Quota, Strategy);

impl Setting for Quota {
    const EXPECTED: &'static str = "a quota such as `100/s burst 200`";

    fn read(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Setting for Strategy {
    const EXPECTED: &'static str = "a strategy such as `gcra`";

    fn read(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Setting for Duration {
    const EXPECTED: &'static str = "a duration such as `250ms`";

    fn read(text: &str) -> Result<Self, ConfigError> {
        let wrong = |problem| ConfigError::DurationSyntax { text: text.chars().take(80).collect(), problem };
        duration::parse(text).map_err(wrong)
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&duration::Text(*self))
    }
}

/// Text is taken as it is: what is wrong with it is found where it is used.
impl Setting for String {
    const EXPECTED: &'static str = "text";

    fn read(text: &str) -> Result<Self, ConfigError> {
        Ok(text.to_owned())
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self)
    }
}

macro_rules! numbers {
    ($($type:ty, $expected:literal;)+) => {
        $(impl Setting for $type {
            const EXPECTED: &'static str = $expected;
            const NUMBER: bool = true;

            fn read(text: &str) -> Result<Self, ConfigError> {
                text.trim().parse().map_err(|_| ConfigError::choice("number that fits", text, $expected))
            }

            fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.serialize(serializer)
            }
        })+
    };
}

numbers! {
    usize, "a whole number from 0 on";
    NonZeroUsize, "a whole number from 1 on";
    NonZeroU8, "a whole number from 1 to 255";
    NonZeroU32, "a whole number from 1 to 4294967295";
}
