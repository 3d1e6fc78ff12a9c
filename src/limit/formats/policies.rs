//! Policies as tables.
//!
//! The `impl`s of [`Policy`] and [`Policies`] here need the feature `serde`.

use std::fmt;
use std::time::Duration;

use serde::de::value::MapAccessDeserializer;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, Unexpected, Visitor,
};
use serde::ser::{Serialize, Serializer};

use super::{Field, Redacted, Setting, deserialize, write_duration};
use crate::error::ConfigError;
use crate::limit::policy::check_name;
use crate::limit::{Policies, Policy, PolicyKind, Quota, Strategy};

/// The text of [`Policies::blocked`].
const BLOCKED: &str = "blocked";
/// The names in a [`PolicyTable`].
const NAMES: [&str; 4] = ["name", "strategy", "quota", "leased"];

/// The serialized form of a policy that is not blocked.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "Policy", deny_unknown_fields)]
struct PolicyTable {
    name: String,
    #[serde(default, deserialize_with = "strategy")]
    strategy: Option<PolicyKind>,
    quota: Quota,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    leased: Option<Span>,
}

/// Reads a strategy that is present: some formats cannot tell an option from its value.
fn strategy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PolicyKind>, D::Error> {
    Ok(Some(PolicyKind::deserialize(deserializer)?))
}

/// A duration as text.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
struct Span(#[serde(serialize_with = "write_duration", deserialize_with = "leased")] Duration);

fn leased<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    Field::new("leased").deserialize(deserializer)
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_blocked() {
            return serializer.serialize_str(BLOCKED);
        }
        let table = PolicyTable {
            name: self.name().to_owned(),
            strategy: Some(self.kind()),
            quota: self.stated(),
            leased: self.lease().map(Span),
        };
        table.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Redacted(deserializer).deserialize_struct("Policy", &NAMES, PolicyVisitor)
    }
}

/// Reads a table, or the text `blocked`.
struct PolicyVisitor;

impl<'de> Visitor<'de> for PolicyVisitor {
    type Value = Policy;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a policy such as `{ name = \"api\", quota = \"100/s\" }`, or `blocked`")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Policy, E> {
        match text.trim() {
            BLOCKED => Ok(Policies::blocked()[0].clone()),
            _ => Err(E::invalid_type(Unexpected::Str(text), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Policy, A::Error> {
        let table = PolicyTable::deserialize(MapAccessDeserializer::new(map))?;
        if let Err(error) = check_name(&table.name) {
            return Err(A::Error::custom(error));
        }
        match table.policy() {
            Ok(policy) => Ok(policy),
            // The location that a format reports may be that of the whole list.
            Err(error) => Err(A::Error::custom(format_args!(
                "policy {:?}: {error}",
                table.name
            ))),
        }
    }
}

impl PolicyTable {
    fn policy(&self) -> Result<Policy, ConfigError> {
        let kind = match self.strategy {
            Some(kind) => kind,
            None => Strategy::default_for(self.quota).into(),
        };
        let policy = Policy::of_kind(&self.name, kind, self.quota)?;
        match self.leased {
            Some(Span(time)) => policy.leased(time),
            None => Ok(policy),
        }
    }
}

impl Serialize for Policies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.are_blocked() {
            return serializer.serialize_str(BLOCKED);
        }
        serializer.collect_seq(self)
    }
}

deserialize!(Policies);

impl Setting for Policies {
    const EXPECTED: &'static str = "a policy such as `{ name = \"api\", quota = \"100/s\" }`, a list of policies, or `blocked`";
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            BLOCKED => Ok(Self::blocked()),
            _ => Err(ConfigError::choice("policy", text, Self::EXPECTED)),
        }
    }

    fn read_table<'de, D: Deserializer<'de>>(policy: D, _: Field<Self>) -> Result<Self, D::Error> {
        Ok(Policy::deserialize(policy)?.into())
    }

    fn read_list<'de, D: Deserializer<'de>>(list: D, _: Field<Self>) -> Result<Self, D::Error> {
        Self::new(Vec::<Policy>::deserialize(list)?).map_err(D::Error::custom)
    }
}
