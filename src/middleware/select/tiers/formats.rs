//! Feature `serde`: tiers as a table.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::Hash;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

use super::{Plans, Tiers};
use crate::limit::formats::{Field, Setting};
use crate::limit::{ConfigError, Key, Policies};

const EXEMPT: &str = "exempt";

#[derive(serde::Deserialize)]
#[serde(rename = "Tiers", deny_unknown_fields)]
#[serde(expecting = "tiers such as `{ default = { name = \"free\", quota = \"60/min\" } }`")]
struct Table {
    default: Policies,
    #[serde(default)]
    tiers: Named<String>,
    #[serde(default)]
    callers: Named<Key>,
}

impl<'de> Deserialize<'de> for Tiers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Table { default, tiers: Named(named), callers: Named(callers) } = Table::deserialize(deserializer)?;
        let named = named.into_iter().map(|(name, policies)| (name.into(), policies)).collect();
        Ok(Self::of(Plans { default, named }, callers))
    }
}

/// In an order that is the same each time.
#[derive(serde::Serialize)]
#[serde(rename = "Tiers")]
struct Written<'a> {
    default: &'a Policies,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tiers: BTreeMap<&'a str, Choice<&'a Policies>>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    callers: BTreeMap<&'a str, Choice<&'a Policies>>,
}

impl Serialize for Tiers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Plans { default, named } = &**self.plans.current();
        let tiers = named.iter().map(|(name, policies)| (&**name, Choice(policies.as_ref()))).collect();
        let callers = self.callers.iter().map(|(key, policies)| Ok((key.written()?, Choice(policies.as_ref()))));
        let callers = callers.collect::<Result<_, ConfigError>>();
        Written { default, tiers, callers: callers.map_err(serde::ser::Error::custom)? }.serialize(serializer)
    }
}

/// Policies, or none for who is exempt.
struct Choice<P>(Option<P>);

impl Serialize for Choice<&Policies> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(policies) => policies.serialize(serializer),
            None => serializer.serialize_str(EXEMPT),
        }
    }
}

impl<'de> Deserialize<'de> for Choice<Policies> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ChoiceVisitor)
    }
}

struct ChoiceVisitor;

impl ChoiceVisitor {
    const CHOICES: &str = "`exempt`, a policy such as `{ name = \"pro\", quota = \"100/s\" }`, or a list of policies";
}

impl<'de> Visitor<'de> for ChoiceVisitor {
    type Value = Choice<Policies>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::CHOICES)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        match text.trim() {
            EXEMPT => Ok(Choice(None)),
            _ => Err(E::custom(ConfigError::choice("policy", text, Self::CHOICES))),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        Policies::deserialize(MapAccessDeserializer::new(map)).map(|policies| Choice(Some(policies)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        Policies::deserialize(SeqAccessDeserializer::new(list)).map(|policies| Choice(Some(policies)))
    }
}

/// Choices by name, each once.
struct Named<N>(HashMap<N, Option<Policies>>);

impl<N> Default for Named<N> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<'de, N: Name> Deserialize<'de> for Named<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(NamedVisitor(PhantomData))
    }
}

struct NamedVisitor<N>(PhantomData<N>);

impl<'de, N: Name> Visitor<'de> for NamedVisitor<N> {
    type Value = Named<N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a table of {}s", N::WHAT)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Named<N>, A::Error> {
        let mut named = HashMap::new();
        while let Some(name) = map.next_key_seed(Field::<N>::new(""))? {
            let Choice(policies) = map.next_value()?;
            // Two texts may be one caller.
            if named.contains_key(&name) {
                let (what, shown) = (N::WHAT, name.shown());
                return Err(A::Error::custom(format_args!("the {what} {shown:?} is there twice: write it once")));
            }
            named.insert(name, policies);
        }
        Ok(Named(named))
    }
}

/// What policies are looked up by.
trait Name: Setting + Eq + Hash {
    const WHAT: &'static str;

    /// Without a secret.
    fn shown(&self) -> &str;
}

impl Name for String {
    const WHAT: &'static str = "tier";

    fn shown(&self) -> &str {
        self
    }
}

impl Name for Key {
    const WHAT: &'static str = "caller";

    fn shown(&self) -> &str {
        self.reveal()
    }
}
