//! Feature `serde`: tiers as a table.

use std::collections::BTreeMap;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::hash::Hash;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Unexpected, Visitor};
use serde::ser::{Serialize, Serializer};

use super::{Plans, Tiers};
use crate::error::ConfigError;
use crate::limit::formats::{Field, Redacted, Setting};
use crate::limit::{Key, Policies};

/// `None` means exempt.
type Choices<N> = HashMap<N, Option<Policies>>;

#[derive(serde::Deserialize)]
#[serde(rename = "Tiers", deny_unknown_fields)]
#[serde(expecting = "tiers such as `{ default = { name = \"free\", quota = \"60/min\" } }`")]
struct Table {
    default: Policies,
    #[serde(default, deserialize_with = "tiers")]
    tiers: Choices<String>,
    #[serde(default, deserialize_with = "callers")]
    callers: Choices<Key>,
}

fn tiers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Choices<String>, D::Error> {
    deserializer.deserialize_any(Once {
        what: "tier",
        shown: String::as_str,
    })
}

fn callers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Choices<Key>, D::Error> {
    deserializer.deserialize_any(Once {
        what: "caller",
        shown: Key::reveal,
    })
}

impl<'de> Deserialize<'de> for Tiers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Table {
            default,
            tiers,
            callers,
        } = Table::deserialize(Redacted(deserializer))?;
        let named = tiers
            .into_iter()
            .map(|(name, policies)| (name.into(), policies))
            .collect();
        Ok(Self::of(Plans { default, named }, callers))
    }
}

/// Serialized in a stable order.
#[derive(serde::Serialize)]
#[serde(rename = "Tiers")]
struct Written<'a> {
    default: &'a Policies,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tiers: BTreeMap<&'a str, Choice<'a>>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    callers: BTreeMap<&'a str, Choice<'a>>,
}

impl Serialize for Tiers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Plans { default, named } = self.plans.current();
        let choice = |policies| Option::as_ref(policies).map_or(Choice::Exempt, Choice::Limited);
        let tiers = named
            .iter()
            .map(|(name, policies)| (&**name, choice(policies)))
            .collect();
        let callers = self
            .callers
            .iter()
            .map(|(key, policies)| Ok((key.written()?, choice(policies))));
        let callers = callers
            .collect::<Result<_, ConfigError>>()
            .map_err(serde::ser::Error::custom)?;
        Written {
            default,
            tiers,
            callers,
        }
        .serialize(serializer)
    }
}

#[derive(serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum Choice<'a> {
    Exempt,
    #[serde(untagged)]
    Limited(&'a Policies),
}

impl Setting for Option<Policies> {
    const EXPECTED: &'static str =
        "`exempt`, a policy such as `{ name = \"pro\", quota = \"100/s\" }`, or a list of policies";
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            "exempt" => Ok(None),
            _ => Err(ConfigError::choice("policy", text, Self::EXPECTED)),
        }
    }

    fn read_table<'de, D: Deserializer<'de>>(policy: D, _: Field<Self>) -> Result<Self, D::Error> {
        Policies::deserialize(policy).map(Some)
    }

    fn read_list<'de, D: Deserializer<'de>>(policies: D, _: Field<Self>) -> Result<Self, D::Error> {
        Policies::deserialize(policies).map(Some)
    }
}

/// Visits a table in which each name occurs once.
struct Once<N> {
    what: &'static str,
    /// Formats a name without its secret.
    shown: fn(&N) -> &str,
}

impl<'de, N: Setting + Eq + Hash> Visitor<'de> for Once<N> {
    type Value = Choices<N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a table of {}s", self.what)
    }

    /// The text may be a caller's key.
    fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
        Err(E::invalid_type(Unexpected::Other("text"), &self))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut choices = HashMap::new();
        while let Some(name) = map.next_key_seed(Field::new(""))? {
            // Two different texts may be the same caller.
            match choices.entry(name) {
                Entry::Vacant(entry) => entry.insert(map.next_value_seed(Field::new(""))?),
                Entry::Occupied(entry) => {
                    let (what, shown) = (self.what, (self.shown)(entry.key()));
                    return Err(A::Error::custom(format_args!(
                        "duplicate {what} {shown:?}: remove one"
                    )));
                }
            };
        }
        Ok(choices)
    }
}
