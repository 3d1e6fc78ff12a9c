//! Copies of shared values for each processor, against contention.
//!
//! Cloning an `Arc` writes to its counter, so threads that clone the same `Arc` on several processors wait for each other. A
//! request clones the `Arc`s of its thread's copy instead. The `Clone` of the settings of a layer makes such a copy: a
//! [list of policies](own_list) and a [pointer](OwnCount) with separate counters.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::thread;

use crate::limit::Policies;

/// One copy of a value per processor; each thread uses one of them. To clone all of the `Copies` writes to one counter.
#[derive(Debug)]
pub(crate) struct Copies<T>(Arc<[T]>);

/// A shared value, behind a counter that clones share and a [copy](Self::copy) does not.
#[allow(
    clippy::redundant_allocation,
    reason = "the outer `Arc` has the counter that requests write, the inner one the value"
)]
pub(crate) struct OwnCount<T>(Arc<Arc<T>>);

/// Returns a list of the same policies with a separate counter.
pub(crate) fn own_list(policies: &Policies) -> Policies {
    // It cannot fail: the list is valid.
    Policies::new(policies.iter().cloned()).unwrap_or_else(|_| policies.clone())
}

/// The number of copies.
static COPIES: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

impl<T> Copies<T> {
    /// One of `copy` for each processor, which must have fresh `Arc`s where a request clones one.
    pub(crate) fn new(copy: impl FnMut() -> T) -> Self {
        Self(std::iter::repeat_with(copy).take(*COPIES).collect())
    }

    /// The copy of the current thread.
    pub(crate) fn current(&self) -> &T {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static COPY: usize = NEXT.fetch_add(1, Relaxed) % *COPIES;
        }
        // The thread-local is already destroyed: the thread is exiting.
        let copy = COPY.try_with(|copy| *copy).unwrap_or(0);
        &self.0[copy]
    }
}

impl<T> Clone for Copies<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> OwnCount<T> {
    #[allow(clippy::redundant_allocation, reason = "see `OwnCount`")]
    pub(crate) fn new(value: Arc<T>) -> Self {
        Self(Arc::new(value))
    }

    /// Returns a pointer to the same value with a separate counter.
    pub(crate) fn copy(&self) -> Self {
        Self::new(Arc::clone(&self.0))
    }
}

impl<T> Deref for OwnCount<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.0
    }
}

impl<T> Clone for OwnCount<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for OwnCount<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnCount").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn threads_have_copies_of_their_own() {
        let copies = Copies::new(|| "settings");
        let current = ptr::from_ref(copies.current()) as usize;
        assert_eq!(
            current,
            ptr::from_ref(copies.clone().current()) as usize,
            "a thread keeps its copy"
        );
        let others = || {
            let copies = copies.clone();
            thread::spawn(move || ptr::from_ref(copies.current()) as usize)
                .join()
                .unwrap()
        };
        // Another test's thread may get a number between these two, so the two may share a copy.
        assert!(
            copies.0.len() == 1 || (0..1_000).any(|_| others() != current),
            "all threads have the same copy"
        );
    }
}
