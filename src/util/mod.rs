//! Small helpers, and the maps and copies that several rooms share. They import no module but `limit`, for keys and policies.

pub(crate) mod bounded_map;
mod clock;
mod copies;
mod jitter;
mod once;
mod patience;
mod seed;
mod shards;
mod yields;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use bounded_map::{BoundedMap, Hold, MapSlot, Ranked};
pub(crate) use clock::{Clock, FOREVER, instant, unix_time};
pub(crate) use copies::{Copies, OwnCount, own_list};
pub(crate) use jitter::{jittered, random};
pub(crate) use once::OnceFlag;
pub(crate) use patience::{NoOutput, Patient, patient};
pub(crate) use seed::RandomState;
#[cfg(test)]
pub(crate) use seed::Seed;
pub(crate) use shards::{Digest, Digester, Shards};
pub(crate) use yields::yield_to_others;

/// Panics like std's futures when they are polled after completion. Pending forever or completing
/// again would hide the caller's mistake.
#[track_caller]
#[allow(
    clippy::panic,
    reason = "only code that breaks the contract of `Future` gets here"
)]
pub(crate) fn polled_after_completion(future: &str) -> ! {
    panic!("`{future}` polled after completion")
}

/// Runs user code, such as an observer's, and catches its panic: `None` if it panicked (the panic
/// hook has already printed it).
pub(crate) fn contain<T>(user: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(user)).ok()
}

/// Locks, even if the lock is poisoned: no code of this crate panics while it holds a lock, and the
/// protected data would still be consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
