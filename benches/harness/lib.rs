//! Shared by the benches `allocations`, `growth` and `load`: see `CONTRIBUTING.md`.

#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the time")]

pub mod cases;
pub mod cluster;
pub mod meter;
#[path = "../../tests/support/cluster.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
pub mod nodes;
pub mod page;
pub mod picture;
pub mod redis_cell;
#[path = "../../tests/support/mod.rs"]
pub mod support;
#[path = "../../xtask/src/svg.rs"]
mod svg;
