use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::thread;

/// One copy of a value per processor; each thread uses one of them.
///
/// Cloning an `Arc` writes to its counter, so threads that clone the same `Arc` on several processors wait for each other.
/// A request clones the `Arc`s of its thread's copy instead. (To clone all of the `Copies` still writes to one counter,
/// which is shared.)
#[derive(Debug)]
pub(super) struct Copies<T>(Arc<[T]>);

/// The number of copies.
static COPIES: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

impl<T> Copies<T> {
    /// One of `copy` for each processor, which must have fresh `Arc`s where a request clones one.
    pub(super) fn new(copy: impl FnMut() -> T) -> Self {
        Self(std::iter::repeat_with(copy).take(*COPIES).collect())
    }

    /// The copy of the current thread.
    pub(super) fn current(&self) -> &T {
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
