//! Tests of [`TaskOwner`]: every interleaving of threads that need its work, and runtimes that shut down.

#![allow(clippy::duplicate_mod, reason = "that is the point")]

use std::future::pending;

use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::thread;
use tokio::runtime::{Builder, Runtime};

use self::sync::Arc;
use self::sync::Ordering::{Relaxed, SeqCst};
use super::{Task, TaskOwner};

/// The library's file, compiled with `loom`'s types.
#[allow(dead_code, reason = "not all of it is tried")]
#[path = "task.rs"]
mod task;

mod sync {
    pub(super) use loom::sync::Arc;
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering};
}

/// How the task that a thread starts ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Ends,
    /// Its runtime shuts down before it has run.
    IsDropped,
}

struct Model {
    owner: task::TaskOwner,
    has_work: AtomicBool,
    /// Number of running tasks.
    running: AtomicUsize,
}

impl Model {
    /// Publishes work, and runs the task unless one is running.
    fn request(&self, fate: Fate) {
        // Relaxed, so that only `TaskOwner` can make the work visible to the task.
        self.has_work.store(true, Relaxed);
        while let Some(task) = self.owner.try_begin() {
            assert_eq!(self.running.fetch_add(1, SeqCst), 0, "one runs at a time");
            if fate == Fate::Ends {
                self.has_work.store(false, SeqCst);
            }
            self.running.fetch_sub(1, SeqCst);
            drop(task);
            if fate == Fate::IsDropped || !self.has_work.load(Relaxed) {
                break;
            }
        }
    }
}

fn explore<const N: usize>(fates: [Fate; N]) {
    let mut scheduler = loom::model::Builder::new();
    scheduler.preemption_bound = Some(3);
    scheduler.check(move || {
        let model = Arc::new(Model {
            owner: task::TaskOwner::new(),
            has_work: AtomicBool::new(false),
            running: AtomicUsize::new(0),
        });
        let threads: Vec<_> = fates[1..]
            .iter()
            .map(|fate| {
                let (model, fate) = (Arc::clone(&model), *fate);
                thread::spawn(move || model.request(fate))
            })
            .collect();
        model.request(fates[0]);
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(
            !model.has_work.load(SeqCst) || fates.contains(&Fate::IsDropped),
            "work is left behind"
        );
        // A task that was dropped with its runtime must not block the next one.
        model.request(Fate::Ends);
        assert!(!model.has_work.load(SeqCst), "the next task does the work");
    });
}

#[test]
fn no_work_is_left_behind() {
    explore([Fate::Ends; 2]);
    explore([Fate::Ends; 3]);
}

#[test]
fn dropped_tasks_block_no_other() {
    explore([Fate::IsDropped, Fate::Ends]);
    explore([Fate::IsDropped, Fate::Ends, Fate::Ends]);
    explore([Fate::IsDropped, Fate::IsDropped, Fate::Ends]);
}

/// A task that only its runtime ends.
async fn forever(_task: Task) {
    pending().await
}

#[test]
fn a_task_moves_when_its_runtime_shuts_down() {
    let runtime = || Builder::new_current_thread().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let owner = TaskOwner::new();
    for runtime in [&first, &second] {
        owner.spawn(Some(runtime.handle()), forever);
    }
    let tasks = |runtime: &Runtime| runtime.metrics().num_alive_tasks();
    assert_eq!([tasks(&first), tasks(&second)], [1, 0]);
    let shut_down = first.handle().clone();
    drop(first);
    owner.spawn(Some(&shut_down), forever);
    owner.spawn(None, forever);
    assert!(!owner.is_running(), "there is no runtime");
    second.block_on(async { owner.spawn(None, forever) });
    assert_eq!(tasks(&second), 1);
}
