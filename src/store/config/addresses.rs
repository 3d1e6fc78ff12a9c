//! The map of addresses in settings.

use std::collections::HashMap;

use super::StoreConfig;
use crate::error::ConfigError;
use crate::store::RedisStoreBuilder;
use crate::store::redis::{host_and_port, two_to_one};

/// Sets the map of addresses of a store.
pub(in crate::store) fn set_address_map(
    builder: RedisStoreBuilder,
    config: &StoreConfig,
) -> Result<RedisStoreBuilder, ConfigError> {
    let mut map = HashMap::new();
    let mut reached = HashMap::new();
    for (announced, reachable) in &config.address_map {
        let (Some(from), Some(to)) = (parse(announced), parse(reachable)) else {
            return Err(ConfigError::new(format!(
                "`address_map` leads from {announced:?} to {reachable:?}: write both like `10.0.0.1:6379`"
            )));
        };
        if let Some(other) = reached.insert(to.clone(), announced) {
            return Err(two_to_one(other, announced, reachable));
        }
        map.insert(from, to);
    }
    if map.is_empty() {
        return Ok(builder);
    }
    Ok(builder.address_map(move |host, port| map.get(&(host.to_owned(), port)).cloned()))
}

/// Parses an address to which a connection is possible.
fn parse(address: &str) -> Option<(String, u16)> {
    match host_and_port(address.trim())? {
        ("", _) | (_, 0) => None,
        (host, port) => Some((host.to_owned(), port)),
    }
}
