//! The shared types of `task`. `tests` replaces them by `loom`'s.

pub(super) use std::sync::Arc;
pub(super) use std::sync::atomic::{AtomicBool, Ordering};
