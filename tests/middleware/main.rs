//! The middleware: the tower contract over mocks, and the responses over HTTP. Without network or
//! real waiting.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a panic fails the test"
)]

mod api;
mod call;
mod client_ip;
mod compose;
mod cost;
mod fields;
#[cfg(feature = "axum")]
mod handlers;
#[cfg(feature = "tracing")]
#[path = "../support/lines.rs"]
mod lines;
mod messages;
mod observe;
#[cfg(feature = "axum")]
mod paths;
mod pause;
mod policies;
mod reject;
#[cfg(feature = "axum")]
mod routes;
mod select;
mod service;
mod settle;
mod shadow;
mod support;
mod throttle;
mod wait;
