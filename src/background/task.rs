use std::future::Future;

use tokio::runtime::Handle;

use super::sync::{Arc, AtomicBool, Ordering};

/// Runs one background task at a time, on the runtime that needed it first.
///
/// Publish the work, and then call [`spawn`](Self::spawn). A task that ends because there is no work drops its [`Task`]
/// and then checks for work again: if `spawn` found the task still running, that check finds the work.
///
/// A runtime that shuts down drops its tasks. The next call of `spawn` then starts the task on its own runtime. A
/// runtime that is alive and runs nothing delays the work.
#[derive(Debug)]
pub(crate) struct TaskOwner(Arc<AtomicBool>);

/// The right of a task to run, until it is dropped.
#[derive(Debug)]
pub(crate) struct Task(Arc<AtomicBool>);

impl TaskOwner {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Spawns the task on this runtime, or outside of one on `home`. Does nothing if it is running already, or if there
    /// is no runtime.
    pub(crate) fn spawn<F>(&self, home: Option<&Handle>, task: impl FnOnce(Task) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(right) = self.begin() else { return };
        let here = Handle::try_current().ok();
        if let Some(runtime) = here.as_ref().or(home) {
            // A runtime that has shut down drops the task immediately, and with it the right.
            drop(runtime.spawn(task(right)));
        }
    }

    /// Whether a task is running. It may be about to end: publish work under a lock that the task also ends under, or call
    /// [`spawn`](Self::spawn).
    pub(crate) fn is_running(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The right to run. `None` if a task is running.
    pub(super) fn begin(&self) -> Option<Task> {
        // Each swap reads the one before, so that a task which ends sees all work that was published before a failed call.
        let is_running = self.0.swap(true, Ordering::AcqRel);
        (!is_running).then(|| Task(Arc::clone(&self.0)))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}
