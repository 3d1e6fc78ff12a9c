//! The Redis store on real servers: exactness, batches, faults and error texts.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

#[path = "../support/mod.rs"]
mod support;

mod backoff;
mod batches;
mod cluster;
mod connect;
mod denials;
mod eviction;
mod exact;
mod fallback;
mod forbidden;
#[cfg(feature = "axum")]
mod http;
mod ids;
mod in_flight;
#[path = "../support/in_flight.rs"]
mod in_flight_load;
mod keys;
mod leases;
mod memory;
mod paths;
mod pause;
mod proxy;
mod runtimes;
mod scan;
mod settle;
#[cfg(feature = "tracing")]
mod texts;
mod urls;
mod waiting;
mod work;
