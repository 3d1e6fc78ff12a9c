//! What every store promises, with every strategy; and that Redis and this process decide alike.

#[path = "../support/mod.rs"]
mod support;

mod contract;
