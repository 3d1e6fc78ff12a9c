use std::future::Future;

use tokio::runtime::Handle;

use super::sync::{Arc, AtomicBool, Ordering};

/// Runs at most one background task at a time, on the runtime that first needed it.
///
/// Publish the work, then call [`spawn`](Self::spawn). A task that finds no work drops its [`Task`] and then checks for
/// work again: if a `spawn` found the task still running, this check finds its work.
///
/// A runtime that shuts down drops its tasks, and the next call of `spawn` starts the task on its own runtime. A
/// runtime that is alive but stalls delays the work.
#[derive(Debug)]
pub(crate) struct TaskOwner(Arc<AtomicBool>);

/// The permission to run, held by the task. After its drop another task may start.
#[derive(Debug)]
pub(crate) struct Task(Arc<AtomicBool>);

impl TaskOwner {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Starts the task on this runtime; outside of a runtime, on `other`. Does nothing if the task is running or there
    /// is no runtime.
    pub(crate) fn spawn<F>(&self, other: Option<&Handle>, run: impl FnOnce(Task) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(task) = self.try_begin() else { return };
        let current = Handle::try_current().ok();
        if let Some(runtime) = current.as_ref().or(other) {
            // A runtime that has shut down drops the task and its permission immediately.
            drop(runtime.spawn(run(task)));
        }
    }

    /// Returns `true` if a task is running. It may be about to end: publish work under a lock that the task also ends
    /// under, or call [`spawn`](Self::spawn).
    pub(crate) fn is_running(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the permission to run, or `None` if a task is running.
    pub(super) fn try_begin(&self) -> Option<Task> {
        // Swap even while a task is running: the swap in `Task::drop` reads this value, so the ending task sees the
        // work that was published before this call.
        let is_running = self.0.swap(true, Ordering::AcqRel);
        if is_running {
            return None;
        }
        Some(Task(Arc::clone(&self.0)))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}
