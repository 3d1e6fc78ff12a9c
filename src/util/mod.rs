//! Small things that no room owns. They know nothing of ours.

mod clock;
mod jitter;
mod seed;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use clock::{Clock, instant, unix_time};
pub(crate) use jitter::{jittered, random};
pub(crate) use seed::RandomState;
#[cfg(test)]
pub(crate) use seed::Seed;

/// Panics, as std's futures do when they are polled after they have answered. To hang or to answer again would hide the
/// caller's mistake.
#[track_caller]
#[allow(
    clippy::panic,
    reason = "only code that breaks the contract of `Future` gets here"
)]
pub(crate) fn polled_after_completion(future: &str) -> ! {
    panic!("`{future}` polled after completion")
}

/// Runs code of a user, such as an observer's, that must not end what goes on around it: `None` if it panics, which the
/// panic hook has shown by then.
pub(crate) fn contain<T>(user: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(user)).ok()
}

/// Locks, whether or not the lock is poisoned: nothing panics under our locks, and if it did, what they hold would
/// still be consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
