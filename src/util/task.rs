//! Work in the background that is not bound to one tokio runtime.
//!
//! A task is dropped with its runtime. And a runtime may be alive and run nothing, such as one that is only inside of
//! `block_on` now and then. So no task is begun once and for all: whoever needs the work asks the [`TaskOwner`], which
//! says whether to begin a task here, or whether there is one to rely on. A task that ends because there is nothing to
//! do drops its [`Task`] first and then looks once more, as what came up before has found it there.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Id;
use tokio::time::Instant;

/// Knows which tasks do some work: on each runtime one at most, and one that others rely on.
#[derive(Debug, Clone, Default)]
pub(crate) struct TaskOwner(Arc<Mutex<Tasks<Id>>>);

/// The right of a task to do the work, until it is dropped.
#[derive(Debug)]
pub(crate) struct Task {
    owner: TaskOwner,
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
        Self { begins: now, until: now }
    }
}

impl TaskOwner {
    /// The right to do the work on this runtime. `None` if a task that begins as soon has it there, or on another
    /// runtime that is still relied on. Tasks that would have begun later lose it.
    pub(crate) fn begin(&self, runtime: Id, now: Instant, span: Span) -> Option<Task> {
        let number = self.step(|tasks| tasks.begin(runtime, now, span))?;
        Some(Task { owner: self.clone(), number })
    }

    fn step<T>(&self, step: impl FnOnce(&mut Tasks<Id>) -> T) -> T {
        step(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Task {
    /// Has other runtimes rely on it until then. `false` if it has lost its right, or another one is relied on by now.
    pub(crate) fn renew(&self, now: Instant, until: Instant) -> bool {
        self.owner.step(|tasks| tasks.renew(self.number, now, until))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.owner.step(|tasks| tasks.end(self.number));
    }
}

/// Each method is one step under a lock. `R` names a runtime.
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
        if self.each.iter().any(|task| task.span.begins <= span.begins && is_relied_on(task)) {
            return None;
        }
        self.each.retain(|task| task.span.begins <= now);
        self.begun += 1;
        self.each.push(Claim { number: self.begun, runtime, span });
        Some(self.begun)
    }

    fn renew(&mut self, number: u64, now: Instant, until: Instant) -> bool {
        if self.each.iter().any(|task| task.number != number && now < task.span.until) {
            return false;
        }
        let task = self.each.iter_mut().find(|task| task.number == number);
        task.map(|task| task.span.until = until).is_some()
    }

    fn end(&mut self, number: u64) {
        self.each.retain(|task| task.number != number);
    }
}

impl<R> Default for Tasks<R> {
    fn default() -> Self {
        Self { each: vec![], begun: 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;
    use std::sync::atomic::Ordering::SeqCst;
    use std::time::Duration;

    use loom::sync::atomic::{AtomicBool, AtomicUsize};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;
    use crate::util::instant;

    /// So many seconds after the start.
    fn at(seconds: u64) -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(instant);
        *START + Duration::from_secs(seconds)
    }

    fn span(begins: u64, until: u64) -> Span {
        Span { begins: at(begins), until: at(until) }
    }

    /// What becomes of the first task of a runtime.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fate {
        Ends,
        /// Its runtime ends before it has run.
        IsDropped,
        /// Its runtime runs nothing any more.
        StandsStill,
    }

    #[derive(Default)]
    struct Model {
        tasks: Mutex<Tasks<usize>>,
        needed: AtomicBool,
        /// How many do the work at this moment.
        working: AtomicUsize,
        standing_still: Mutex<Vec<u64>>,
    }

    impl Model {
        /// As whoever needs the work, and the task that it may begin, which runs at once here.
        fn need(&self, runtime: usize, mut fate: Fate) {
            self.needed.store(true, SeqCst);
            while self.needed.load(SeqCst) {
                let Some(number) = self.tasks.lock().unwrap().begin(runtime, at(0), span(0, 10)) else { return };
                match fate {
                    Fate::Ends => self.work(number),
                    Fate::IsDropped => {}
                    Fate::StandsStill => return self.standing_still.lock().unwrap().push(number),
                }
                fate = Fate::Ends;
                self.tasks.lock().unwrap().end(number);
            }
        }

        fn work(&self, number: u64) {
            assert!(self.tasks.lock().unwrap().renew(number, at(0), at(10)), "nobody else may have it");
            assert_eq!(self.working.fetch_add(1, SeqCst), 0, "one works at a time");
            self.needed.store(false, SeqCst);
            self.working.fetch_sub(1, SeqCst);
        }
    }

    /// In every order in which three runtimes may come.
    #[test]
    fn one_task_works_at_a_time() {
        for fates in [
            [Fate::Ends; 3],
            [Fate::IsDropped, Fate::Ends, Fate::Ends],
            [Fate::IsDropped, Fate::IsDropped, Fate::Ends],
            [Fate::StandsStill, Fate::Ends, Fate::IsDropped],
        ] {
            let mut scheduler = loom::model::Builder::new();
            scheduler.preemption_bound = Some(2);
            scheduler.check(move || {
                let model = Arc::new(Model::default());
                let threads = [1, 2].map(|runtime| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || model.need(runtime, fates[runtime]))
                });
                model.need(0, fates[0]);
                for thread in threads {
                    thread.join().unwrap();
                }
                let stuck = std::mem::take(&mut *model.standing_still.lock().unwrap());
                let tasks = &mut *model.tasks.lock().unwrap();
                assert_eq!(tasks.each.len(), stuck.len(), "tasks that are counted and run no more");
                assert!(!model.needed.load(SeqCst) || !stuck.is_empty(), "work is left behind");

                // Another runtime takes over from one that stands still, which finds out when it runs again.
                let next = tasks.begin(3, at(10), span(10, 20)).unwrap();
                assert!(tasks.begin(4, at(10), span(10, 20)).is_none());
                assert!(tasks.renew(next, at(10), at(20)));
                assert!(stuck.iter().all(|task| !tasks.renew(*task, at(10), at(20))));
                tasks.end(next);
                assert!(stuck.iter().all(|task| tasks.renew(*task, at(10), at(20))));
            });
        }
    }

    #[test]
    fn a_task_that_begins_sooner_replaces_others() {
        let mut tasks = Tasks::default();
        let later = tasks.begin(1, at(0), span(60, 70)).unwrap();
        assert!(tasks.begin(1, at(0), span(80, 90)).is_none());
        let sooner = tasks.begin(2, at(0), span(5, 15)).unwrap();
        assert!(!tasks.renew(later, at(5), at(15)) && tasks.renew(sooner, at(5), at(15)));
        tasks.end(later);
        assert!(tasks.renew(sooner, at(5), at(15)), "it was not that one");
    }

    #[test]
    fn a_runtime_has_one_task() {
        let mut tasks = Tasks::default();
        let alone = Span::on_each_runtime(at(0));
        let each = [1, 2].map(|runtime| tasks.begin(runtime, at(0), alone).unwrap());
        assert!([1, 2].iter().all(|runtime| tasks.begin(*runtime, at(0), alone).is_none()));
        tasks.end(each[0]);
        assert!(tasks.begin(1, at(0), alone).is_some() && tasks.begin(2, at(0), alone).is_none());
    }
}
