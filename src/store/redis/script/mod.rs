//! The wire format of script calls: the scripts, their arguments and their replies. Sends nothing.
//!
//! `lua/call.lua`, `lua/takes.lua` and `lua/take.lua` define the contracts.

mod call;
mod wire;

use std::sync::OnceLock;

pub(super) use call::{Asked, Plan, ScriptCall, read_key};

/// Decides checks of any kind.
static CHECK: Script = Script::new(wire::CHECK);
/// Decides takes under meters, faster than [`CHECK`].
static TAKES: Script = Script::new(wire::TAKES);
/// Decides one take under a meter, faster than [`TAKES`].
static TAKE: Script = Script::new(wire::TAKE);
/// Announces an instance. Returns the number of live instances.
pub(super) static ANNOUNCE: Script = Script::new(include_str!("../../../../lua/announce.lua"));
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
        self.hash
            .get_or_init(|| redis::Script::new(self.text).get_hash().to_owned())
    }
}
