//! The shared types of `task`. `tests` compiles `task` with `loom`'s types instead.

pub(super) use std::sync::Arc;
pub(super) use std::sync::atomic::{AtomicBool, Ordering};
