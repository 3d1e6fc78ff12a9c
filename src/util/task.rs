//! Work in the background that is not bound to one tokio runtime.
//!
//! A task is dropped with its runtime. And a runtime may be alive and run nothing, such as one that is only inside of
//! `block_on` now and then. So no task is begun once and for all: whoever needs the work asks the [`TaskOwner`], which
//! says whether to begin a task here, or whether there is one to rely on. A task that ends because there is nothing to
//! do drops its [`Task`] first and then looks once more, as what came up before has found it there.

use tokio::runtime::Id;
use tokio::time::Instant;

use super::sync::{Arc, AtomicI64, Mutex, Ordering, fence, lock};

/// Knows which tasks do some work: on each runtime one at most, and one that others rely on. `R` names a runtime.
#[derive(Debug)]
pub(crate) struct TaskOwner<R: PartialEq = Id>(Arc<Inner<R>>);

#[derive(Debug)]
struct Inner<R> {
    start: Instant,
    /// Until when a task is relied on, in microseconds since the start: what `tasks` come to.
    held_until: AtomicI64,
    tasks: Mutex<Tasks<R>>,
}

/// The right of a task to do the work, until it is dropped.
#[derive(Debug)]
pub(crate) struct Task<R: PartialEq = Id> {
    owner: Arc<Inner<R>>,
    number: u64,
}

/// When a task is to begin its work, and until when other runtimes rely on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) begins: Instant,
    pub(crate) until: Instant,
}

impl Span {
    /// Of a task that every runtime has of its own.
    pub(crate) fn on_each_runtime(now: Instant) -> Self {
        Self {
            begins: now,
            until: now,
        }
    }
}

impl<R: PartialEq> TaskOwner<R> {
    pub(crate) fn new(now: Instant) -> Self {
        let (held_until, tasks) = (
            AtomicI64::new(NEVER),
            Mutex::new(Tasks {
                each: vec![],
                begun: 0,
            }),
        );
        Self(Arc::new(Inner {
            start: now,
            held_until,
            tasks,
        }))
    }

    /// The right to do the work on this runtime. `None` if a task that begins as soon has it there, or on another
    /// runtime that is still relied on. Tasks that would have begun later lose it.
    pub(crate) fn begin(&self, runtime: R, now: Instant, span: Span) -> Option<Task<R>> {
        let number = self.0.step(|tasks| tasks.begin(runtime, now, span))?;
        Some(Task {
            owner: Arc::clone(&self.0),
            number,
        })
    }

    /// Whether a task is relied on for what came up before this call. It takes no lock.
    ///
    /// Of this fence and that of a task that ends one is first. If it is this one, the task sees what has come up when
    /// it looks once more. If it is the other one, this sees that the task has ended.
    pub(crate) fn is_held(&self, now: Instant) -> bool {
        fence(Ordering::SeqCst);
        self.0.micros(now) < self.0.held_until.load(Ordering::Relaxed)
    }
}

const NEVER: i64 = i64::MIN;

impl<R: PartialEq> Inner<R> {
    fn step<T>(&self, step: impl FnOnce(&mut Tasks<R>) -> T) -> T {
        let tasks = &mut *lock(&self.tasks);
        let result = step(tasks);
        let until = tasks.each.iter().map(|task| task.span.until).max();
        self.held_until.store(
            until.map_or(NEVER, |until| self.micros(until)),
            Ordering::Relaxed,
        );
        result
    }

    fn micros(&self, time: Instant) -> i64 {
        i64::try_from(time.saturating_duration_since(self.start).as_micros()).unwrap_or(i64::MAX)
    }
}

impl<R: PartialEq> Task<R> {
    /// Has other runtimes rely on it until then. `false` if it has lost its right, or another one is relied on by now.
    pub(crate) fn renew(&self, now: Instant, until: Instant) -> bool {
        self.owner
            .step(|tasks| tasks.renew(self.number, now, until))
    }
}

impl<R: PartialEq> Drop for Task<R> {
    fn drop(&mut self) {
        self.owner.step(|tasks| tasks.end(self.number));
        fence(Ordering::SeqCst);
    }
}

/// Each method is one step under a lock.
#[derive(Debug)]
struct Tasks<R> {
    each: Vec<Claim<R>>,
    /// How many there ever were: each has a number.
    begun: u64,
}

#[derive(Debug)]
struct Claim<R> {
    number: u64,
    runtime: R,
    span: Span,
}

impl<R: PartialEq> Tasks<R> {
    fn begin(&mut self, runtime: R, now: Instant, span: Span) -> Option<u64> {
        let is_relied_on = |task: &Claim<R>| task.runtime == runtime || now < task.span.until;
        if self
            .each
            .iter()
            .any(|task| task.span.begins <= span.begins && is_relied_on(task))
        {
            return None;
        }
        self.each.retain(|task| task.span.begins <= now);
        self.begun += 1;
        self.each.push(Claim {
            number: self.begun,
            runtime,
            span,
        });
        Some(self.begun)
    }

    fn renew(&mut self, number: u64, now: Instant, until: Instant) -> bool {
        if self
            .each
            .iter()
            .any(|task| task.number != number && now < task.span.until)
        {
            return false;
        }
        let task = self.each.iter_mut().find(|task| task.number == number);
        task.map(|task| task.span.until = until).is_some()
    }

    fn end(&mut self, number: u64) {
        self.each.retain(|task| task.number != number);
    }
}
