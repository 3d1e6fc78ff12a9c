//! The number of partitions, kept in the cluster: instances that put a caller into other partitions would each count by
//! themselves.

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;

use super::Cluster;
use crate::limit::ConfigError;
use crate::store::StoreError;
use crate::store::redis::errors::error_of;
use crate::store::redis::inner::Inner;
use crate::store::redis::lua::Lua;
use crate::store::redis::transport::Node;

static SCRIPT: Lua = Lua::new(include_str!("../../../../lua/marker.lua"));

/// How long it stays after the last instance has looked at it, which each does every hour.
const KEPT: Duration = Duration::from_secs(3 * 86_400);

impl Inner {
    /// Sets the marker, or makes sure that it has the same number.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Partitions`] if it has another one, and whatever keeps its node from telling.
    pub(super) async fn mark(self: &Arc<Self>, cluster: &Cluster, node: Node) -> Result<(), StoreError> {
        let ours = cluster.partitions.len();
        let key = Cluster::shared_key(&self.prefix, "partitions");
        let command = |command: &str, script: &str| {
            let mut cmd = Cmd::new();
            cmd.arg(command).arg(script).arg(1).arg(&key).arg(ours).arg(KEPT.as_millis() as u64);
            cmd
        };
        let reply = self.run_at(node, &SCRIPT, command).await?;
        let theirs: usize = redis::from_redis_value(reply).map_err(|error| error_of(&error.into()))?;
        match theirs == ours {
            true => Ok(()),
            false => Err(ConfigError::Partitions { ours, theirs, prefix: self.prefix.to_string() }.into()),
        }
    }
}
