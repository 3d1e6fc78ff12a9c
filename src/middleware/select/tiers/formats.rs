//! Feature `serde`: tiers as a table.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Unexpected, Visitor};
use serde::ser::{Serialize, Serializer};

use super::networks::{self, Networks};
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
    callers: Callers,
}

#[derive(Default)]
struct Callers {
    keys: Choices<Key>,
    networks: Networks,
}

/// The callers that one text names.
#[derive(PartialEq, Eq, Hash)]
enum Named {
    Key(Key),
    Networks(Vec<IpNet>),
}

fn tiers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Choices<String>, D::Error> {
    deserializer.deserialize_any(Once {
        what: "tier",
        shown: String::clone,
    })
}

fn callers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Callers, D::Error> {
    let named = deserializer.deserialize_any(Once {
        what: "caller",
        shown: Named::to_string,
    })?;
    let mut callers = Callers::default();
    for (named, policies) in named {
        match named {
            Named::Key(key) => drop(callers.keys.insert(key, policies)),
            Named::Networks(listed) => {
                for network in listed {
                    if !callers.networks.insert(network, policies.clone()) {
                        return Err(duplicate("caller", &shown(&network)));
                    }
                }
            }
        }
    }
    Ok(callers)
}

impl Setting for Named {
    const EXPECTED: &'static str = "a caller's key in clear, addresses or networks such as `ip:192.0.2.7, ip:2001:db8::/32`, `secret:` \
                                    followed by an API key, or `~` followed by 32 digits as in Redis";

    fn read(text: &str) -> Result<Self, ConfigError> {
        let unknown = |_| ConfigError::choice("caller", text, Self::EXPECTED);
        // A comma without a blank joins the parts of a tuple, such as two addresses.
        let listed: Option<Vec<&str>> = text
            .split(", ")
            .map(|caller| {
                caller
                    .strip_prefix("ip:")
                    .filter(|rest| !rest.contains(','))
            })
            .collect();
        match listed.as_deref() {
            None | Some(["unix"]) => Key::read(text).map(Self::Key).map_err(unknown),
            Some(listed) => {
                let networks = listed.iter().map(|network| match parsed(network) {
                    Some(network) => networks::valid(network),
                    None => Err(ConfigError::choice("caller", text, Self::EXPECTED)),
                });
                networks.collect::<Result<_, _>>().map(Self::Networks)
            }
        }
    }
}

/// Parses an address or a network, also in the form of a key with more than 64 bits.
fn parsed(text: &str) -> Option<IpNet> {
    let address = |text: &str| text.parse().ok().map(|address: IpAddr| address.into());
    let in_redis = || {
        let (digits, _) = text.split_once('/')?;
        let is_address = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
        if is_address {
            Key::of_redis(&format!("ip:{text}"))?.to_network()
        } else {
            None
        }
    };
    address(text)
        .or_else(|| text.parse().ok())
        .or_else(in_redis)
}

/// Returns the text of a network of callers.
fn shown(network: &IpNet) -> String {
    if network.prefix_len() == network.max_prefix_len() {
        format!("ip:{}", network.addr())
    } else {
        format!("ip:{network}")
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => f.write_str(key.reveal()),
            Self::Networks(networks) => {
                let networks: Vec<_> = networks.iter().map(shown).collect();
                f.write_str(&networks.join(", "))
            }
        }
    }
}

fn duplicate<E: Error>(what: &str, shown: &str) -> E {
    E::custom(format_args!("duplicate {what} {shown:?}: remove one"))
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
        let Callers { keys, networks } = callers;
        Ok(Self {
            networks: Arc::new(networks),
            ..Self::of(Plans { default, named }, keys)
        })
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
    callers: BTreeMap<Cow<'a, str>, Choice<'a>>,
}

impl Serialize for Tiers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Plans { default, named } = self.plans.current();
        let choice = |policies| Option::as_ref(policies).map_or(Choice::Exempt, Choice::Limited);
        let tiers = named
            .iter()
            .map(|(name, policies)| (&**name, choice(policies)))
            .collect();
        let networks = self
            .networks
            .iter()
            .map(|(network, policies)| Ok((shown(network).into(), choice(policies))));
        let keys = self
            .callers
            .iter()
            .map(|(key, policies)| Ok((key.written()?.into(), choice(policies))));
        // The last of two equal texts counts, and so does a key.
        let callers = networks
            .chain(keys)
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
    shown: fn(&N) -> String,
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
                    return Err(duplicate(self.what, &(self.shown)(entry.key())));
                }
            };
        }
        Ok(choices)
    }
}
