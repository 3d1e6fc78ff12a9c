//! The settings of a service.

use std::error::Error;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tower_redis_ratelimit::Policy;
use tower_redis_ratelimit::store::StoreConfig;

/// The store and the policies in a settings file, at any depth.
#[derive(Default)]
pub(crate) struct Settings {
    pub(crate) store: Option<StoreConfig>,
    pub(crate) policies: Vec<Policy>,
}

impl Settings {
    /// Reads a file in YAML or JSON, if it has that extension, or in TOML.
    pub(crate) fn read(file: &Path) -> Result<Self, Box<dyn Error>> {
        let with_path = |error: &dyn Error| format!("{}: {error}", file.display());
        let text = fs::read_to_string(file).map_err(|error| with_path(&error))?;
        let extension = file.extension().and_then(|extension| extension.to_str());
        let value: Value = match extension {
            Some("yaml" | "yml") => {
                yaml_serde::from_str(&text).map_err(|error| with_path(&error))?
            }
            Some("json") => serde_json::from_str(&text).map_err(|error| with_path(&error))?,
            _ => toml::from_str(&text).map_err(|error| with_path(&error))?,
        };
        let mut settings = Self::default();
        settings
            .collect(&value)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(settings)
    }

    fn collect(&mut self, value: &Value) -> Result<(), String> {
        match value {
            // Another program's settings may have quotas too, but not as text together with a name.
            Value::Object(fields)
                if fields.contains_key("name") && fields.contains_key("quota") =>
            {
                let policy = Policy::deserialize(value).map_err(|error| error.to_string())?;
                if !self.policies.contains(&policy) {
                    self.policies.push(policy);
                }
            }
            Value::Object(fields) => {
                for (name, field) in fields {
                    if name == "store" && self.store.is_none() {
                        let store = StoreConfig::deserialize(field);
                        self.store = Some(store.map_err(|error| format!("store: {error}"))?);
                    } else {
                        self.collect(field)?;
                    }
                }
            }
            Value::Array(values) => values.iter().try_for_each(|value| self.collect(value))?,
            _ => {}
        }
        Ok(())
    }
}
