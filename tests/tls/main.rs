//! TLS: it works with what an organization has of its own, wherever Redis is, and each thing that is wrong has its own
//! advice.

#![cfg(feature = "tls")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "real servers take real time")]
#![allow(unreachable_pub, reason = "helpers of this binary")]

#[path = "../support/mod.rs"]
mod support;

mod files;
mod settings;
mod topologies;
mod trust;
mod with_tls;
