use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::Tracker;
use crate::util::{Span, Task, TaskOwner, instant};

/// When the entries are checked, and by which task: one at a time, on the runtime of whoever came first.
#[derive(Debug)]
pub(super) struct Heartbeat {
    task: TaskOwner,
    start: Instant,
    /// When entries were last checked to renew them, in microseconds since the start.
    checked: AtomicI64,
    /// The shortest lease time, in microseconds.
    shortest: AtomicI64,
}

/// How often the task looks for what is in doubt.
const TICK: Duration = Duration::from_millis(250);
/// How long a task may not renew its right until another takes over.
const PATIENCE: Duration = Duration::from_secs(2);
/// No check was ever.
const NEVER: i64 = i64::MIN / 2;

impl Heartbeat {
    pub(super) fn new(start: Instant) -> Self {
        let (checked, shortest) = (AtomicI64::new(NEVER), AtomicI64::new(i64::MAX));
        Self { task: TaskOwner::new(start), start, checked, shortest }
    }

    fn micros(&self, now: Instant) -> i64 {
        i64::try_from(now.saturating_duration_since(self.start).as_micros()).unwrap_or(i64::MAX)
    }

    /// Among the entries is one of this lease time.
    pub(super) fn note(&self, lease: Duration) {
        let lease = i64::try_from(lease.as_micros()).unwrap_or(i64::MAX);
        // Each request notes it, and hardly one makes it shorter.
        if lease < self.shortest.load(Ordering::Relaxed) {
            self.shortest.fetch_min(lease, Ordering::Relaxed);
        }
    }

    /// From one check to the next: what is renewed after a quarter of the lease time is renewed within a third.
    fn gap(&self) -> Duration {
        Duration::from_micros(self.shortest.load(Ordering::Relaxed).unsigned_abs() / 12)
    }

    /// Whether it is time to check every entry.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let (now, gap) = (self.micros(now), self.gap().min(Duration::from_secs(1)).as_micros() as i64);
        let is_due = now.saturating_sub(self.checked.load(Ordering::Relaxed)) >= gap;
        if is_due {
            self.checked.store(now, Ordering::Relaxed);
        }
        is_due
    }
}

impl Tracker {
    /// Starts the task that renews, if there is none. Outside of a runtime there can be none: whoever comes does its
    /// work, before the store is asked.
    pub(super) fn attend(self: &Arc<Self>, now: Instant) {
        let owner = &self.heartbeat.task;
        if owner.is_held(now) {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return self.tick(now) };
        if let Some(task) = owner.begin(runtime.id(), now, Span { begins: now, until: now + PATIENCE }) {
            // A runtime that has ended drops it at once.
            runtime.spawn(Arc::clone(self).renew(task));
        }
    }

    async fn renew(self: Arc<Self>, task: Task) {
        loop {
            sleep(TICK.min(self.heartbeat.gap())).await;
            let now = instant();
            if !task.renew(now, now + PATIENCE) {
                return;
            }
            self.tick(now);
            if self.len.load(Ordering::Acquire) == 0 {
                drop(task);
                // Who came just before that has found a task.
                if self.len.load(Ordering::Acquire) > 0 {
                    self.attend(now);
                }
                return;
            }
        }
    }
}
