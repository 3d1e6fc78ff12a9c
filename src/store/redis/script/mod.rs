//! What Redis is asked and what it answers, in its own letters and numbers. Pure: nothing here is sent.
//!
//! `lua/call.lua` has the contract of both.

mod call;
mod wire;

use std::sync::OnceLock;

pub(super) use call::{Asked, Plan, ScriptCall, is_read_only, read_key};

/// It decides the checks of a [`ScriptCall`].
pub(super) static CHECK: Script = Script::new(wire::SCRIPT);
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
