//! Which task looks after the primary store.
//!
//! One at a time holds the lease, and renews it while its runtime runs it. A runtime may be alive and run nothing, such as
//! one that is only inside of `block_on` now and then. Then the lease runs out, and the next check on another runtime
//! starts a task there.
//!
//! Times are in microseconds.

use smallvec::SmallVec;

use super::sync::{AtomicI64, Mutex, Ordering, fence, lock};

/// `R` names a runtime.
#[derive(Debug)]
pub(super) struct Lease<R> {
    /// When it runs out. A check reads it without the lock.
    until: AtomicI64,
    tasks: Mutex<Tasks<R>>,
}

#[derive(Debug)]
struct Tasks<R> {
    /// The runtime of the task that holds the lease.
    holder: Option<R>,
    /// Those that have a task. No runtime has two, so those that run nothing do not collect them.
    runtimes: SmallVec<[R; 1]>,
}

impl<R: Copy + Eq> Lease<R> {
    pub(super) fn new() -> Self {
        let tasks = Tasks { holder: None, runtimes: SmallVec::new() };
        Self { until: AtomicI64::new(i64::MIN), tasks: Mutex::new(tasks) }
    }

    /// Whether a task looks after what has come up before this call.
    ///
    /// A task that ends looks once more, after [`end`](Self::end), whether anything has come up. For example, a grant is
    /// noted while it ends. Of the two fences one is first. If it is the one in here, the task sees the grant. If it is
    /// the one in `end`, this sees that the lease has ended. So the grant is not left alone.
    pub(super) fn is_held(&self, now: i64) -> bool {
        fence(Ordering::SeqCst);
        now < self.until.load(Ordering::Relaxed)
    }

    /// Takes the lease for a new task on a runtime. `false` if a task holds it, or the runtime has a task already, which
    /// takes it as soon as it runs.
    pub(super) fn take(&self, runtime: R, now: i64, length: i64) -> bool {
        let mut tasks = lock(&self.tasks);
        if now < self.until.load(Ordering::Relaxed) || tasks.runtimes.contains(&runtime) {
            return false;
        }
        tasks.runtimes.push(runtime);
        self.hold(&mut tasks, runtime, now, length);
        true
    }

    /// Renews the lease of a task, or takes it if it has run out. `false` if another task holds it.
    pub(super) fn renew(&self, runtime: R, now: i64, length: i64) -> bool {
        let mut tasks = lock(&self.tasks);
        if tasks.holder != Some(runtime) && now < self.until.load(Ordering::Relaxed) {
            return false;
        }
        self.hold(&mut tasks, runtime, now, length);
        true
    }

    fn hold(&self, tasks: &mut Tasks<R>, runtime: R, now: i64, length: i64) {
        tasks.holder = Some(runtime);
        self.until.store(now.saturating_add(length), Ordering::Relaxed);
    }

    /// A runtime's task has ended.
    pub(super) fn end(&self, runtime: R) {
        let mut tasks = lock(&self.tasks);
        tasks.runtimes.retain(|other| *other != runtime);
        if tasks.holder == Some(runtime) {
            tasks.holder = None;
            self.until.store(i64::MIN, Ordering::Relaxed);
        }
        drop(tasks);
        fence(Ordering::SeqCst);
    }
}
