//! The wire format of script calls: the scripts, their arguments and their replies. Sends nothing.
//!
//! `lua/call.lua`, `lua/takes.lua` and `lua/take.lua` define the contracts.

mod call;
mod count;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::OnceLock;
use std::time::Duration;

use redis::{Cmd, ToRedisArgs};

use crate::error::{ErrorKind, StoreError};

pub(super) use call::{ScriptCall, read_bucket, read_key};

/// Decides checks of any kind.
static CHECK: Script = Script::new(wire::CHECK);
/// Decides takes under meters, faster than [`CHECK`].
static TAKES: Script = Script::new(wire::TAKES);
/// Decides one take under a meter, faster than [`TAKES`].
static TAKE: Script = Script::new(wire::TAKE);
/// Announces an instance. Returns the number of live instances.
pub(super) static ANNOUNCE: Script = Script::new(include_str!("../../../../lua/announce.lua"));
/// Blocks a caller, or ends a block. Returns whether that changes something.
pub(super) static BLOCK: Script = Script::new(include_str!("../../../../lua/block.lua"));
/// Returns the changed blocks.
pub(super) static BLOCKS: Script = Script::new(include_str!("../../../../lua/blocks.lua"));
/// Sets the number of partitions unless one is set. Returns the number in effect.
pub(super) static MARKER: Script = Script::new(include_str!("../../../../lua/marker.lua"));

/// A Lua script with its hash.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) text: &'static str,
    hash: OnceLock<String>,
}

impl Script {
    const fn new(text: &'static str) -> Self {
        Self {
            text,
            hash: OnceLock::new(),
        }
    }

    /// The SHA-1 hash that `EVALSHA` takes.
    pub(super) fn hash(&self) -> &str {
        // Once, since each call sends it, and the texts have tens of kilobytes.
        self.hash
            .get_or_init(|| redis::Script::new(self.text).get_hash().to_owned())
    }
}

/// The error of a script that calls `command`, which the server's configuration has renamed or disabled.
pub(super) fn no_command(command: &str) -> StoreError {
    StoreError::new(ErrorKind::Permission).with_message(format!(
        "the server has no command {command}, which the script calls: do not rename or disable it"
    ))
}

/// A call of a script.
pub(super) trait Call {
    /// The script that it calls.
    fn script(&self) -> &'static Script;

    /// Whether `ASKING` precedes it, because the node imports the slot.
    fn needs_asking(&self) -> bool;

    /// Returns the command `name`, which is `EVALSHA` with the hash of the script or `EVAL` with its text.
    fn command(&self, name: &str, script: &str) -> Cmd;
}

impl<C: Call> Call for &C {
    fn script(&self) -> &'static Script {
        (**self).script()
    }

    fn needs_asking(&self) -> bool {
        (**self).needs_asking()
    }

    fn command(&self, name: &str, script: &str) -> Cmd {
        (**self).command(name, script)
    }
}

/// A call of a script whose keys, all in one slot, belong to no caller.
pub(super) struct KeyCall<A> {
    pub(super) script: &'static Script,
    pub(super) keys: Vec<String>,
    pub(super) args: A,
    /// The last argument: a time to live.
    pub(super) ttl: Duration,
}

impl<A: ToRedisArgs> Call for KeyCall<A> {
    fn script(&self) -> &'static Script {
        self.script
    }

    fn needs_asking(&self) -> bool {
        false
    }

    fn command(&self, name: &str, script: &str) -> Cmd {
        let mut cmd = redis::cmd(name);
        cmd.arg(script).arg(self.keys.len());
        cmd.arg(&self.keys).arg(&self.args);
        cmd.arg(self.ttl.as_millis() as u64);
        cmd
    }
}
