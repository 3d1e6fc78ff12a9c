use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::thread;

/// Copies of one thing, as many as there are processors, of which each thread uses one.
///
/// Whoever counts a reference writes to its counter. What a request counts references to is in its thread's copy, or it
/// would wait for the processor that wrote last. A clone still counts one reference that all threads share.
#[derive(Debug)]
pub(super) struct Copies<T>(Arc<[Arc<T>]>);

impl<T> Copies<T> {
    /// As many as threads can run at a time.
    pub(super) fn new(copy: impl FnMut() -> T) -> Self {
        static COPIES: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));
        Self(std::iter::repeat_with(copy).map(Arc::new).take(*COPIES).collect())
    }

    /// The one that this thread uses.
    pub(super) fn mine(&self) -> &Arc<T> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static THREAD: usize = NEXT.fetch_add(1, Relaxed);
        }
        // A thread that ends has none of its own any more.
        let thread = THREAD.try_with(|thread| *thread).unwrap_or(0);
        &self.0[thread % self.0.len()]
    }
}

impl<T> Clone for Copies<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_copies_of_their_own() {
        let copies = Copies::new(|| "settings");
        let mine = Arc::as_ptr(copies.mine()) as usize;
        assert_eq!(mine, Arc::as_ptr(copies.clone().mine()) as usize, "a thread keeps to one");
        let others = || {
            let copies = copies.clone();
            thread::spawn(move || Arc::as_ptr(copies.mine()) as usize).join().unwrap()
        };
        // Other tests may have threads that take turns with these.
        assert!(copies.0.len() == 1 || (0..1_000).any(|_| others() != mine), "others have the same");
    }
}
