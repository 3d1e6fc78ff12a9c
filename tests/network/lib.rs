//! Real servers and clients of other crates: gRPC by tonic, over memory with a clock that the tests control or over sockets;
//! and clients of hyper, reqwest and tonic under a limit.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot continue has failed"
)]
#![allow(clippy::disallowed_methods, reason = "a test of time reads it")]

mod client;
mod clients;
mod frames;
mod peers;
mod protocols;
mod server;
mod settle;
mod streams;
mod support;
