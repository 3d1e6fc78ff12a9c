//! A Redis Cluster of real servers: the guarantees of a single server also hold while nodes fail
//! and slots migrate.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "real servers fail in real time")]
#![allow(unreachable_pub, reason = "helpers of this binary")]

#[path = "../support/mod.rs"]
mod support;
#[macro_use]
#[path = "../support/table.rs"]
mod table;

mod in_flight;
#[path = "../support/in_flight.rs"]
mod in_flight_load;
#[path = "../faults/load.rs"]
#[allow(dead_code, reason = "the faults of a single server use more of it")]
mod load;
#[macro_use]
mod matrix;
mod faults;
mod healthy;
mod moves;
mod nodes;
#[path = "../faults/proxy.rs"]
#[allow(dead_code, reason = "the faults of a single server use more of it")]
mod proxy;
mod settle;
mod strangers;
