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
struct TiersTable {
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
        // A comma without a blank joins the parts of a tuple, such as two addresses.
        let is_tuple = text.replace(", ", "").contains(',');
        let is_list = text.split(", ").all(|caller| caller.starts_with("ip:"));
        // The key of peers on unix sockets begins with `ip:` too.
        if text == "ip:unix" || is_tuple || !is_list {
            return match Key::read(text) {
                Ok(key) => Ok(Self::Key(key)),
                Err(_) => Err(unknown(text)),
            };
        }
        let mut networks = vec![];
        for caller in text.split(", ") {
            let address = caller.strip_prefix("ip:").unwrap_or(caller);
            let Some(network) = parsed(address) else {
                return Err(unknown(text));
            };
            networks.push(networks::valid(network)?);
        }
        Ok(Self::Networks(networks))
    }
}

fn unknown(text: &str) -> ConfigError {
    ConfigError::choice("caller", text, Named::EXPECTED)
}

/// Parses an address or a network, also in the form of a key with more than 64 bits.
fn parsed(text: &str) -> Option<IpNet> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address.into());
    }
    if let Ok(network) = text.parse() {
        return Some(network);
    }
    let (digits, _) = text.split_once('/')?;
    let is_of_redis = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_of_redis {
        return None;
    }
    Key::of_redis(&format!("ip:{text}"))?.to_network()
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
        let TiersTable {
            default,
            tiers,
            callers,
        } = TiersTable::deserialize(Redacted(deserializer))?;
        let mut named = HashMap::new();
        for (name, policies) in tiers {
            named.insert(name.into(), policies);
        }
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
        let mut tiers = BTreeMap::new();
        for (name, policies) in named {
            tiers.insert(&**name, Choice::of(policies));
        }
        let mut callers = BTreeMap::new();
        for (network, policies) in self.networks.iter() {
            callers.insert(shown(network).into(), Choice::of(policies));
        }
        // The last of two equal texts counts: a key before a network.
        for (key, policies) in self.callers.iter() {
            let text = key.written().map_err(serde::ser::Error::custom)?;
            callers.insert(text.into(), Choice::of(policies));
        }
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

impl<'a> Choice<'a> {
    fn of(policies: &'a Option<Policies>) -> Self {
        match policies {
            Some(policies) => Self::Limited(policies),
            None => Self::Exempt,
        }
    }
}

impl Setting for Option<Policies> {
    const EXPECTED: &'static str = "`exempt`, `blocked`, a policy such as `{ name = \"pro\", quota = \"100/s\" }`, or a list of policies";
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            "exempt" => Ok(None),
            _ => match Policies::read(text) {
                Ok(blocked) => Ok(Some(blocked)),
                Err(_) => Err(ConfigError::choice("policy", text, Self::EXPECTED)),
            },
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
