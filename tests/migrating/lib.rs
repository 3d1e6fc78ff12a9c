//! Decisions of other limiters on equal requests, as `docs/migrating.md` states them; and how to switch.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot continue has failed"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

mod claims;
mod dry_run;
mod replay;
#[path = "../support/mod.rs"]
mod support;
mod theirs;
