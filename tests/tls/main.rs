//! TLS with an organization's own certificates, for every kind of deployment. Each misconfiguration
//! has its own advice.

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

#[path = "../support/busy.rs"]
mod busy;
#[path = "../support/devices.rs"]
#[allow(dead_code, reason = "the tests without TLS use more of it")]
mod devices;
mod far;
mod files;
mod settings;
mod stalls;
mod topologies;
mod trust;
#[path = "../support/tls.rs"]
mod with_tls;
