//! Feature `serde`: the settings of a store.

use serde::de::{DeserializeSeed, Deserializer};

use super::ShareConfig;
use crate::error::ConfigError;
use crate::limit::formats::{Field, Setting, deserialize};

pub(super) use crate::limit::formats::write_duration;

/// Defines a function per field, whose errors name the field.
macro_rules! fields {
    ($($name:ident),+) => {
        $(pub(super) fn $name<'de, T: Setting, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
            Field::new(stringify!($name)).deserialize(deserializer)
        })+
    };
}

fields!(
    kind,
    prefix,
    connections,
    timeout,
    queue,
    batch,
    partitions,
    denials,
    deadline,
    failures,
    share,
    local_keys
);

deserialize!(ShareConfig);

impl Setting for ShareConfig {
    const EXPECTED: &'static str = Self::CHOICES;
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }
}
