//! Feature `serde`: the settings of a store.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::{ShareConfig, StoreConfig};
use crate::error::ConfigError;
use crate::limit::formats::{Redacted, Setting, deserialize};

pub(super) use crate::limit::formats::{Field, write_duration};

/// Serializes a duration that is set.
pub(super) fn write_some_duration<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => write_duration(duration, serializer),
        None => serializer.serialize_none(),
    }
}

impl<'de> Deserialize<'de> for StoreConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Redacted(deserializer).deserialize_struct("StoreConfig", Self::NAMES, StoreTable)
    }
}

struct StoreTable;

impl<'de> Visitor<'de> for StoreTable {
    type Value = StoreConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the settings of a store, such as `{ url = \"redis://127.0.0.1/\" }`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StoreConfig, A::Error> {
        let mut config = StoreConfig::default();
        let mut names = vec![];
        while let Some(SettingName(name)) = map.next_key()? {
            // As in derived code: some formats pass a repeated name on.
            if names.contains(&name) {
                return Err(A::Error::duplicate_field(name));
            }
            names.push(name);
            config.read_value(name, &mut map)?;
        }
        Ok(config)
    }
}

/// The name of a setting. It rejects an unknown one itself, so that the error has the name's line.
struct SettingName(&'static str);

impl<'de> Deserialize<'de> for SettingName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_identifier(NameVisitor)
    }
}

struct NameVisitor;

impl Visitor<'_> for NameVisitor {
    type Value = SettingName;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a setting")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<SettingName, E> {
        match StoreConfig::NAMES.iter().find(|name| **name == text) {
            Some(name) => Ok(SettingName(name)),
            None => Err(E::unknown_field(text, StoreConfig::NAMES)),
        }
    }
}

deserialize!(ShareConfig);

impl Setting for ShareConfig {
    const EXPECTED: &'static str = Self::CHOICES;
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }
}

/// Pairs of addresses.
impl Setting for BTreeMap<String, String> {
    const EXPECTED: &'static str = "a table such as `{ \"10.0.0.1:6379\" = \"127.0.0.1:7000\" }`";
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        let mut map = Self::new();
        // A comma at the end is no pair.
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let fix = "use the form `10.0.0.1:6379=127.0.0.1:7000`, and each address once";
            let wrong = || ConfigError::invalid("pair of addresses", pair, fix);
            let (from, to) = pair.split_once('=').ok_or_else(wrong)?;
            // A second entry for an address would replace the first.
            let former = map.insert(from.trim().to_owned(), to.trim().to_owned());
            if former.is_some() {
                return Err(wrong());
            }
        }
        Ok(map)
    }

    fn read_table<'de, D: Deserializer<'de>>(table: D, _: Field<Self>) -> Result<Self, D::Error> {
        Self::deserialize(table)
    }
}
