//! The owner of background tasks: by itself, and in every order in which threads may come to it.

#![allow(clippy::duplicate_mod, reason = "that is the point")]

use std::sync::LazyLock;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::thread;
use tokio::time::Instant;

use self::sync::{Arc, LOOKS, Mutex, lock};
use super::{Span, TaskOwner, instant};

/// The file of the library, compiled once more with what `loom` schedules.
#[allow(dead_code, reason = "not all of it is tried")]
#[path = "task.rs"]
mod task;

mod sync {
    use std::cell::Cell;
    pub(super) use std::sync::Arc;
    use std::sync::atomic;

    pub(super) use loom::sync::atomic::Ordering;
    pub(super) use loom::sync::{Mutex, MutexGuard};

    thread_local! {
        /// Whether anybody looks without the lock. `loom` follows no more than two threads through that.
        pub(super) static LOOKS: Cell<bool> = const { Cell::new(false) };
    }

    #[derive(Debug)]
    pub(super) enum AtomicI64 {
        Followed(loom::sync::atomic::AtomicI64),
        Plain(atomic::AtomicI64),
    }

    impl AtomicI64 {
        pub(super) fn new(value: i64) -> Self {
            match LOOKS.get() {
                true => Self::Followed(loom::sync::atomic::AtomicI64::new(value)),
                false => Self::Plain(atomic::AtomicI64::new(value)),
            }
        }

        pub(super) fn load(&self, order: Ordering) -> i64 {
            match self {
                Self::Followed(atomic) => atomic.load(order),
                Self::Plain(atomic) => atomic.load(order),
            }
        }

        pub(super) fn store(&self, value: i64, order: Ordering) {
            match self {
                Self::Followed(atomic) => atomic.store(value, order),
                Self::Plain(atomic) => atomic.store(value, order),
            }
        }
    }

    pub(super) fn fence(order: Ordering) {
        if LOOKS.get() {
            loom::sync::atomic::fence(order);
        }
    }

    pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
}

/// So many seconds after the start.
fn at(seconds: u64) -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(instant);
    *START + Duration::from_secs(seconds)
}

fn span(begins: u64, until: u64) -> Span {
    Span {
        begins: at(begins),
        until: at(until),
    }
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

struct Model {
    owner: task::TaskOwner<usize>,
    needed: AtomicBool,
    /// How many do the work at this moment.
    working: AtomicUsize,
    standing_still: Mutex<Vec<task::Task<usize>>>,
}

impl Model {
    fn new() -> Self {
        let (needed, working) = (AtomicBool::new(false), AtomicUsize::new(0));
        Self {
            owner: task::TaskOwner::new(at(0)),
            needed,
            working,
            standing_still: Mutex::new(vec![]),
        }
    }

    /// As whoever needs the work, and the task that it may begin, which runs at once here.
    fn need(&self, runtime: usize, mut fate: Fate) {
        self.needed.store(true, SeqCst);
        while self.needed.load(SeqCst) {
            if LOOKS.get() && self.owner.is_held(at(0)) {
                return;
            }
            let span = task::Span {
                begins: at(0),
                until: at(10),
            };
            let Some(task) = self.owner.begin(runtime, at(0), span) else {
                return;
            };
            match fate {
                Fate::Ends => self.work(&task),
                Fate::IsDropped => {}
                Fate::StandsStill => return lock(&self.standing_still).push(task),
            }
            fate = Fate::Ends;
        }
    }

    fn work(&self, task: &task::Task<usize>) {
        assert!(task.renew(at(0), at(10)), "nobody else may have it");
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
        explore(fates, false);
    }
}

#[test]
fn checks_without_the_lock_leave_no_work() {
    for fates in [
        [Fate::Ends; 2],
        [Fate::IsDropped, Fate::Ends],
        [Fate::StandsStill, Fate::Ends],
    ] {
        explore(fates, true);
    }
}

fn explore<const N: usize>(fates: [Fate; N], looks: bool) {
    LOOKS.set(looks);
    let mut scheduler = loom::model::Builder::new();
    scheduler.preemption_bound = Some(2);
    scheduler.check(move || {
        let model = Arc::new(Model::new());
        let spawn = |runtime| {
            let model = Arc::clone(&model);
            thread::spawn(move || model.need(runtime, fates[runtime]))
        };
        let threads: Vec<_> = (1..N).map(spawn).collect();
        model.need(0, fates[0]);
        for thread in threads {
            thread.join().unwrap();
        }
        let stuck = std::mem::take(&mut *lock(&model.standing_still));
        assert_eq!(
            model.owner.is_held(at(0)),
            !stuck.is_empty(),
            "a task is counted that runs no more"
        );
        assert!(
            !model.needed.load(SeqCst) || !stuck.is_empty(),
            "work is left behind"
        );

        // Another runtime takes over from one that stands still, which finds out when it runs again.
        let span = task::Span {
            begins: at(10),
            until: at(20),
        };
        let next = model.owner.begin(3, at(10), span).unwrap();
        assert!(model.owner.is_held(at(10)) && model.owner.begin(4, at(10), span).is_none());
        assert!(next.renew(at(10), at(20)));
        assert!(stuck.iter().all(|task| !task.renew(at(10), at(20))));
        drop(next);
        assert!(stuck.iter().all(|task| task.renew(at(10), at(20))));
    });
}

#[test]
fn a_task_that_begins_sooner_replaces_others() {
    let owner = TaskOwner::new(at(0));
    let later = owner.begin(1, at(0), span(60, 70)).unwrap();
    assert!(owner.begin(1, at(0), span(80, 90)).is_none());
    let sooner = owner.begin(2, at(0), span(5, 15)).unwrap();
    assert!(!later.renew(at(5), at(15)) && sooner.renew(at(5), at(15)));
    drop(later);
    assert!(sooner.renew(at(5), at(15)), "it was not that one");
}

#[test]
fn a_runtime_has_one_task() {
    let owner = TaskOwner::new(at(0));
    let alone = Span::on_each_runtime(at(0));
    let mut each = [1, 2].map(|runtime| owner.begin(runtime, at(0), alone));
    assert!(each.iter().all(Option::is_some));
    assert!(
        [1, 2]
            .iter()
            .all(|runtime| owner.begin(*runtime, at(0), alone).is_none())
    );
    each[0] = None;
    assert!(owner.begin(1, at(0), alone).is_some() && owner.begin(2, at(0), alone).is_none());
}
