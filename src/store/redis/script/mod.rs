//! What Redis is asked and what it answers, in its own letters and numbers. Pure: nothing here is sent.
//!
//! `lua/call.lua` and `lua/takes.lua` have the contracts.

mod call;
mod wire;

use std::sync::OnceLock;

pub(super) use call::{Asked, Plan, ScriptCall, read_key};

/// Decides any checks.
static CHECK: Script = Script::new(wire::CHECK);
/// Decides takes under meters, in less time.
static TAKES: Script = Script::new(wire::TAKES);
/// Announces an instance. Returns how many are alive.
pub(super) static ANNOUNCE: Script = Script::new(include_str!("../../../../lua/announce.lua"));
/// Sets the number of partitions, if there is none. Returns the number that is there.
pub(super) static MARKER: Script = Script::new(include_str!("../../../../lua/marker.lua"));

/// A script in Lua.
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

    /// The SHA-1 by which EVALSHA names it.
    pub(super) fn hash(&self) -> &str {
        self.hash
            .get_or_init(|| redis::Script::new(self.text).get_hash().to_owned())
    }
}
