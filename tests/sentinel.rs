//! Tests on Redis Sentinel with real servers: the store finds the master, and follows failovers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "real servers fail in real time")]
#![allow(unreachable_pub, reason = "helpers of this binary")]

#[path = "support/devices.rs"]
#[allow(dead_code, reason = "the tests of a single server use more of it")]
mod devices;
#[path = "support/load.rs"]
#[allow(dead_code, reason = "the faults of a single server use more of it")]
mod load;
#[path = "support/sentinel.rs"]
mod nodes;
#[path = "support/rotation.rs"]
mod rotation;
mod support;

mod connections {
    mod sentinel;
}
mod errors {
    mod sentinel;
}
mod faults {
    mod sentinel;
}
mod topology {
    mod sentinel;
}
