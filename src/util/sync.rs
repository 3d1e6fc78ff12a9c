//! What threads share by in the files of this room. `tests` compiles these with `loom`'s in their place.

pub(super) use std::sync::atomic::{AtomicI64, Ordering, fence};
pub(super) use std::sync::{Arc, Mutex};

pub(super) use super::lock;
