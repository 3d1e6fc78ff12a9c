//! The shared types of this module. `model` compiles the files that use them with a scheduler's types instead.

pub(super) use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Mutex, MutexGuard};

pub(super) use crate::util::lock;
