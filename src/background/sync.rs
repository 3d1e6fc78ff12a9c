//! What threads share by in `task`. `tests` compiles that file with `loom`'s in their place.

pub(super) use std::sync::Arc;
pub(super) use std::sync::atomic::{AtomicBool, Ordering};
