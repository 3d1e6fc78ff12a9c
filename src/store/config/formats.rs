//! Feature `serde`: the settings of a store.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::StoreConfig;
use crate::limit::formats::{Field, Written};

/// The name of a setting. It is checked where it is read, so that a format can tell the line.
struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<&'static str, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Name {
    type Value = &'static str;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a setting")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<&'static str, E> {
        NAMES.iter().find(|known| **known == name).copied().ok_or_else(|| E::unknown_field(name, NAMES))
    }
}

struct Settings;

/// Reads and writes these fields, which are all that there are.
macro_rules! fields {
    ($($name:ident),+; optional: $($optional:ident),+) => {
        const NAMES: &[&str] = &[$(stringify!($name),)+ $(stringify!($optional)),+];

        impl<'de> Visitor<'de> for Settings {
            type Value = StoreConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the settings of a store, such as `{ url = \"redis://127.0.0.1/\" }`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StoreConfig, A::Error> {
                $(let mut $name = None;)+
                $(let mut $optional = None;)+
                while let Some(name) = map.next_key_seed(Name)? {
                    $(if name == stringify!($name) {
                        if $name.replace(map.next_value_seed(Field::new(stringify!($name)))?).is_some() {
                            return Err(A::Error::duplicate_field(stringify!($name)));
                        }
                    })+
                    $(if name == stringify!($optional) {
                        if $optional.replace(map.next_value()?).is_some() {
                            return Err(A::Error::duplicate_field(stringify!($optional)));
                        }
                    })+
                }
                let default = StoreConfig::default();
                Ok(StoreConfig {
                    $($name: $name.unwrap_or(default.$name),)+
                    $($optional: $optional.unwrap_or(default.$optional),)+
                })
            }
        }

        impl Serialize for StoreConfig {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let Self { $($name,)+ $($optional),+ } = self;
                let mut fields = serializer.serialize_struct("StoreConfig", NAMES.len())?;
                $(fields.serialize_field(stringify!($name), &Written($name))?;)+
                $(match $optional {
                    Some(value) => fields.serialize_field(stringify!($optional), value)?,
                    None => fields.skip_field(stringify!($optional))?,
                })+
                fields.end()
            }
        }
    };
}

fields!(
    kind, prefix, connections, timeout, queue, batch, partitions, denials, deadline, failures, share, local_keys;
    optional: url, root_certificates, client_certificate, client_key, server_name
);

impl<'de> Deserialize<'de> for StoreConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_struct("StoreConfig", NAMES, Settings)
    }
}
