use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::inner::Inner;
use super::shard::Asked;
use crate::store::Store;
use crate::util::{Span, Task, TaskOwner, instant, lock};

/// When to look at which block, for all callers.
pub(super) struct Timer {
    /// By time and the number of the ask.
    looks: Mutex<BTreeMap<(Instant, u64), Asked>>,
    /// The first look has changed.
    changed: Arc<Notify>,
    owner: TaskOwner,
}

/// The task that looks. If its runtime ends, all blocks are refunded: nobody else may be left to do so.
struct Looker<S: Store> {
    inner: Weak<Inner<S>>,
    changed: Arc<Notify>,
    task: Task,
}

/// For how long other runtimes rely on a task that does not run.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of looks before other tasks run.
const LOOKS: usize = 1_024;

impl Timer {
    pub(super) fn new() -> Self {
        Self { looks: Mutex::default(), changed: Arc::default(), owner: TaskOwner::new(instant()) }
    }

    pub(super) fn add(&self, at: Instant, asked: Asked) {
        let mut looks = lock(&self.looks);
        looks.insert((at, asked.number), asked);
        let is_first = looks.first_key_value().is_some_and(|(first, _)| *first == (at, asked.number));
        drop(looks);
        if is_first {
            self.changed.notify_one();
        }
    }

    /// Starts the task if none is relied on. Returns `false` if there is no runtime to start it on.
    pub(super) fn attend<S: Store>(&self, inner: &Arc<Inner<S>>) -> bool {
        let now = instant();
        if self.owner.is_held(now) {
            return true;
        }
        let Ok(runtime) = Handle::try_current() else { return false };
        if let Some(task) = self.owner.begin(runtime.id(), now, Span { begins: now, until: now + PATIENCE }) {
            let looker = Looker { inner: Arc::downgrade(inner), changed: Arc::clone(&self.changed), task };
            drop(runtime.spawn(looker.run()));
        }
        true
    }

    /// Ends the task.
    pub(super) fn end(&self) {
        self.changed.notify_one();
    }

    pub(super) fn is_idle(&self) -> bool {
        lock(&self.looks).is_empty()
    }

    /// Does what is due. Returns when the next look is, if there is any.
    fn run<S: Store>(&self, inner: &Inner<S>) -> Option<Instant> {
        for _ in 0..LOOKS {
            let asked = {
                let mut looks = lock(&self.looks);
                let first = looks.first_entry()?;
                let at = first.key().0;
                if at > instant() {
                    return Some(at);
                }
                first.remove()
            };
            if let Some(next) = inner.look(&asked) {
                lock(&self.looks).insert((next, asked.number), asked);
            }
        }
        Some(instant())
    }
}

impl<S: Store> Looker<S> {
    async fn run(mut self) {
        while let Some(inner) = self.inner.upgrade() {
            let now = instant();
            let next = if self.task.renew(now, now + PATIENCE) { inner.timer.run(&inner) } else { None };
            let Some(next) = next else {
                // What was added meanwhile relied on this task.
                self.inner = Weak::new();
                drop(self);
                if !inner.timer.is_idle() {
                    inner.timer.attend(&inner);
                }
                return;
            };
            drop(inner);
            let pause = next.saturating_duration_since(instant()).min(PATIENCE / 2);
            let _ = timeout(pause, self.changed.notified()).await;
        }
    }
}

impl<S: Store> Drop for Looker<S> {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            inner.refund_all();
        }
    }
}
