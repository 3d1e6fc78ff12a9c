use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::{Field, Setting, deserialize};
use crate::error::ConfigError;
use crate::limit::policy::check_name;
use crate::limit::{Kind, Policies, Policy, Quota};

/// How a policy is written.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "Policy", deny_unknown_fields)]
#[serde(expecting = "a policy such as `{ name = \"api\", quota = \"100/s\" }`")]
struct Table {
    name: String,
    #[serde(default)]
    strategy: Kind,
    quota: Quota,
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Table { name: self.name().to_owned(), strategy: self.kind(), quota: self.quota() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Table { name, strategy, quota } = Table::deserialize(deserializer)?;
        check_name(&name).map_err(D::Error::custom)?;
        // The place that a format reports may be that of the whole list.
        let located = |error| D::Error::custom(format_args!("policy {name:?}: {error}"));
        Self::of_kind(&name, strategy, quota).map_err(located)
    }
}

impl Serialize for Policies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

deserialize!(Policies);

impl Setting for Policies {
    const EXPECTED: &'static str = "a policy such as `{ name = \"api\", quota = \"100/s\" }`, or a list of policies";
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
