use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::limit::{ConfigError, Policies, Policy, Quota, Strategy};

/// How a policy is written.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "Policy", deny_unknown_fields)]
#[serde(expecting = "a policy such as `{ name = \"api\", quota = \"100/s\" }`")]
struct Table {
    name: String,
    #[serde(default)]
    strategy: Strategy,
    quota: Quota,
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Table { name: self.name().to_owned(), strategy: self.strategy(), quota: self.quota() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Table { name, strategy, quota } = Table::deserialize(deserializer)?;
        Self::new(&name, strategy, quota).map_err(|error| match error {
            ConfigError::PolicyName(_) => D::Error::custom(error),
            // The place that a format tells may be that of the whole list.
            _ => D::Error::custom(format_args!("policy {name:?}: {error}")),
        })
    }
}

impl Serialize for Policies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

impl<'de> Deserialize<'de> for Policies {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneOrSeveral)
    }
}

struct OneOrSeveral;

impl<'de> Visitor<'de> for OneOrSeveral {
    type Value = Policies;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a policy such as `{ name = \"api\", quota = \"100/s\" }`, or a list of policies")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Policies, A::Error> {
        Policy::deserialize(MapAccessDeserializer::new(map)).map(Policies::from)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Policies, A::Error> {
        let mut policies = vec![];
        while let Some(policy) = list.next_element::<Policy>()? {
            policies.push(policy);
        }
        Policies::new(policies).map_err(A::Error::custom)
    }
}
