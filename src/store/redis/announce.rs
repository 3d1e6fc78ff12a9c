//! Announcing an instance, and counting those that are alive.

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::errors::error_of;
use super::lanes::Lanes;
use super::lua::Lua;
use super::runtimes::no_runtime;
use crate::store::{Error, ErrorKind};

static SCRIPT: Lua = Lua::new(include_str!("../../../lua/announce.lua"));

impl Lanes {
    /// Says that the instance of this name is alive for so long. Returns how many are.
    pub(super) async fn announce(self: &Arc<Self>, name: &str, alive: Duration) -> Result<u32, Error> {
        let runtime = Handle::try_current().map_err(|_| no_runtime())?;
        let key = format!("{}:instances", self.prefix);
        let node = self.transport.node(key.as_bytes());
        let pool = self.with_queue(&runtime, node, |queue, _| Arc::clone(&queue.pool));
        let command = |command: &str, script: &str| {
            let mut cmd = Cmd::new();
            cmd.arg(command).arg(script).arg(1).arg(&key).arg(name).arg(alive.as_millis() as u64);
            cmd
        };
        let mut failures = pool.failures();
        let call = async {
            let mut connection = pool.checkout(&mut failures).await?;
            let reply = connection.run(&SCRIPT, command).await;
            let count = reply.and_then(|reply| Ok(redis::from_redis_value(reply)?));
            count.map_err(|error| error_of(&error))
        };
        timeout(self.limits.timeout, call).await.map_err(|_| Error::new(ErrorKind::Timeout))?
    }
}
