//! The contract of `Store`, for every store and strategy.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "tokio's clock is paused here")]

#[path = "../support/late.rs"]
mod late;
#[path = "../support/mod.rs"]
mod support;

mod any;
mod contract;
mod in_flight;
mod limiter;
mod local;
mod outside;
mod quotas;
mod remote;
mod turns;
mod wait_queues;
mod waiting;
