use std::sync::OnceLock;

/// A script in Lua.
#[derive(Debug)]
pub(super) struct Lua {
    pub(super) text: &'static str,
    hash: OnceLock<String>,
}

impl Lua {
    pub(super) const fn new(text: &'static str) -> Self {
        Self { text, hash: OnceLock::new() }
    }

    /// The SHA-1 by which EVALSHA names it.
    pub(super) fn hash(&self) -> &str {
        self.hash.get_or_init(|| redis::Script::new(self.text).get_hash().to_owned())
    }
}
