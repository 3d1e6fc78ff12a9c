//! The Redis store on real servers: exactness, batches, faults, and what its errors say.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;

mod batches;
mod connect;
mod exact;
mod fallback;
mod http;
mod keys;
mod memory;
