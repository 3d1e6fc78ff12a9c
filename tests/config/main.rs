//! Settings as text, in files and in the environment, with the feature `serde`.

#![cfg(feature = "serde")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod client_ip;
mod errors;
mod read;
mod round_trips;
mod tiers;
