//! What the threads of this module share by. `model` compiles the files that use it with a scheduler's in their place.

pub(super) use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Mutex, MutexGuard};

pub(super) use crate::util::lock;
