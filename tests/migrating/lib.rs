//! What other limiters decide about the same requests, as `docs/migrating.md` says; and how one switches.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

mod claims;
mod dry_run;
mod replay;
#[path = "../support/mod.rs"]
mod support;
mod theirs;
