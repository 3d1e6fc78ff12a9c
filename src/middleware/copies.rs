use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::thread;

/// Copies of one thing, of which each thread uses its own.
///
/// Whoever counts a reference writes to its counter: with one for all, every request of every thread would wait for the
/// processor that wrote last.
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
