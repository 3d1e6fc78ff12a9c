//! What other limiters decide about the same requests, as `docs/migrating.md` says; and how their counts are taken over.

#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

mod claims;
mod replay;
#[path = "../support/mod.rs"]
mod support;
mod theirs;
