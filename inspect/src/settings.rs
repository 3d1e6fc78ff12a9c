//! The settings of a service.

use std::error::Error;
use std::fmt;
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
        let with_path = |error: &dyn fmt::Display| format!("{}: {error}", file.display());
        let text = fs::read_to_string(file).map_err(|error| with_path(&error))?;
        let extension = file.extension().and_then(|extension| extension.to_str());
        let value: Value = match extension {
            Some("yaml" | "yml") => {
                yaml_serde::from_str(&text).map_err(|error| with_path(&error))?
            }
            Some("json") => serde_json::from_str(&text).map_err(|error| with_path(&error))?,
            _ => toml::from_str(&text).map_err(|error| {
                let line = error
                    .span()
                    .and_then(|span| text.get(..span.start))
                    .map_or(0, |before| before.matches('\n').count());
                // Do not quote the line, since it may contain a password.
                with_path(&format!("line {}: {}", line + 1, error.message()))
            })?,
        };
        let settings = || -> Result<Self, String> {
            let mut policies = vec![];
            collect_policies(&value, &mut policies)?;
            Ok(Self {
                store: store(&value)?,
                policies,
            })
        };
        Ok(settings().map_err(|error| with_path(&error))?)
    }
}

/// Returns the store of the settings: the one at the top level, or else the only one.
fn store(settings: &Value) -> Result<Option<StoreConfig>, String> {
    let mut nested = vec![];
    find_stores(settings, "", &mut nested);
    let store = match (settings.get("store"), &nested[..]) {
        (Some(store), _) => store,
        (None, [(_, only)]) => *only,
        (None, []) => return Ok(None),
        (None, stores) => {
            let names: Vec<&str> = stores.iter().map(|(name, _)| name.as_str()).collect();
            return Err(format!(
                "the stores `{}`: use a file with one of them, or with the service's `store` at the top level",
                names.join("`, `")
            ));
        }
    };
    let store = StoreConfig::deserialize(store);
    store.map(Some).map_err(|error| format!("store: {error}"))
}

/// Collects each `store` with its path in the settings.
fn find_stores<'a>(value: &'a Value, path: &str, stores: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                if name == "store" {
                    stores.push((format!("{path}{name}"), field));
                } else {
                    find_stores(field, &format!("{path}{name}."), stores);
                }
            }
        }
        Value::Array(values) => {
            for value in values {
                find_stores(value, path, stores);
            }
        }
        _ => {}
    }
}

fn collect_policies(value: &Value, policies: &mut Vec<Policy>) -> Result<(), String> {
    match value {
        // Another program's settings may have quotas too, but not as text together with a name.
        Value::Object(fields) if fields.contains_key("name") && fields.contains_key("quota") => {
            let policy = Policy::deserialize(value).map_err(|error| error.to_string())?;
            if !policies.contains(&policy) {
                policies.push(policy);
            }
            Ok(())
        }
        Value::Object(fields) => fields
            .values()
            .try_for_each(|field| collect_policies(field, policies)),
        Value::Array(values) => values
            .iter()
            .try_for_each(|value| collect_policies(value, policies)),
        _ => Ok(()),
    }
}
