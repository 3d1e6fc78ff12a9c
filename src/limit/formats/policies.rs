//! Policies as tables.
//!
//! The `impl`s of [`Policy`] and [`Policies`] here need the feature `serde`.

use std::time::Duration;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::{Field, Redacted, Setting, deserialize, write_duration};
use crate::error::ConfigError;
use crate::limit::policy::check_name;
use crate::limit::{Policies, Policy, PolicyKind, Quota, Strategy};

/// The serialized form of a policy.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "Policy", deny_unknown_fields)]
#[serde(expecting = "a policy such as `{ name = \"api\", quota = \"100/s\" }`")]
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
    PolicyKind::deserialize(deserializer).map(Some)
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
        let (name, leased) = (self.name().to_owned(), self.lease().map(Span));
        PolicyTable {
            name,
            strategy: Some(self.kind()),
            quota: self.stated(),
            leased,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let PolicyTable {
            name,
            strategy,
            quota,
            leased,
        } = PolicyTable::deserialize(Redacted(deserializer))?;
        check_name(&name).map_err(D::Error::custom)?;
        let kind = strategy.unwrap_or_else(|| Strategy::default_for(quota).into());
        // The location that a format reports may be that of the whole list.
        let located = |error| D::Error::custom(format_args!("policy {name:?}: {error}"));
        let policy = Self::of_kind(&name, kind, quota).map_err(located)?;
        match leased {
            Some(Span(time)) => policy.leased(time).map_err(located),
            None => Ok(policy),
        }
    }
}

impl Serialize for Policies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

deserialize!(Policies);

impl Setting for Policies {
    const EXPECTED: &'static str =
        "a policy such as `{ name = \"api\", quota = \"100/s\" }`, or a list of policies";
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        Err(ConfigError::choice("policy", text, Self::EXPECTED))
    }

    fn read_table<'de, D: Deserializer<'de>>(policy: D, _: Field<Self>) -> Result<Self, D::Error> {
        Policy::deserialize(policy).map(Self::from)
    }

    fn read_list<'de, D: Deserializer<'de>>(list: D, _: Field<Self>) -> Result<Self, D::Error> {
        Self::new(Vec::<Policy>::deserialize(list)?).map_err(D::Error::custom)
    }
}
