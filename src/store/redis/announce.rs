//! Announcing an instance, and counting those that are alive.

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;

use super::errors::error_of;
use super::inner::Inner;
use super::lua::Lua;
use crate::store::StoreError;

static SCRIPT: Lua = Lua::new(include_str!("../../../lua/announce.lua"));

impl Inner {
    /// Says that the instance of this name is alive for so long. Returns how many are.
    pub(super) async fn announce(self: &Arc<Self>, name: &str, alive: Duration) -> Result<u32, StoreError> {
        let (node, key) = self.shared("instances").await?;
        let command = |command: &str, script: &str| {
            let mut cmd = Cmd::new();
            cmd.arg(command).arg(script).arg(1).arg(&key).arg(name).arg(alive.as_millis() as u64);
            cmd
        };
        let reply = self.run_at(node, &SCRIPT, command).await?;
        redis::from_redis_value(reply).map_err(|error| error_of(&error.into()))
    }
}
