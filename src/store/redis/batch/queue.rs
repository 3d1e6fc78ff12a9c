//! What waits to be sent, and how many workers work on it.

use std::collections::VecDeque;
use std::mem;

/// A bounded queue that counts its workers.
///
/// Each method is one step under the lock of whoever holds the queue. So a worker that finds nothing ends in the same step:
/// whoever pushes after that is told to start another, and no job waits for a worker that has ended.
#[derive(Debug)]
pub(crate) struct Queue<J> {
    jobs: VecDeque<J>,
    max_jobs: usize,
    /// How many jobs have left it. As they are numbered in their order, it is the number of the oldest that waits.
    left: u64,
    /// How many run, or are about to.
    workers: usize,
    max_workers: usize,
    /// How many jobs must wait for another worker to be started beside one that runs.
    backlog: usize,
}

/// A queue holds as many jobs as it may.
#[derive(Debug)]
pub(crate) struct Full;

impl<J> Queue<J> {
    pub(crate) fn new(max_jobs: usize, max_workers: usize, backlog: usize) -> Self {
        Self {
            jobs: VecDeque::new(),
            max_jobs,
            left: 0,
            workers: 0,
            max_workers,
            backlog,
        }
    }

    /// Adds a job. Returns whether the caller must start a worker, which is counted already.
    ///
    /// # Errors
    ///
    /// [`Full`].
    pub(crate) fn push(&mut self, job: J) -> Result<bool, Full> {
        if self.jobs.len() >= self.max_jobs {
            return Err(Full);
        }
        Ok(self.put(job))
    }

    /// As [`push`](Self::push), of a job that was let into another queue already.
    pub(crate) fn put(&mut self, job: J) -> bool {
        self.jobs.push_back(job);
        let start = self.workers < self.max_workers
            && (self.workers == 0 || self.jobs.len() > self.backlog);
        self.workers += usize::from(start);
        start
    }

    /// What waits.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &J> {
        self.jobs.iter()
    }

    /// Whether nothing waits, and no worker runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.workers == 0
    }

    /// The number of the job that is pushed next.
    pub(crate) fn next_number(&self) -> u64 {
        self.left + self.jobs.len() as u64
    }

    /// Whether the job of this number still waits: no worker has it.
    pub(crate) fn has(&self, number: u64) -> bool {
        (self.left..self.next_number()).contains(&number)
    }

    /// Moves the oldest jobs to a worker: at least one, and more until they weigh `max`. Returns how many still wait.
    ///
    /// `None` if there was no job: the worker is counted no longer, and must end.
    pub(crate) fn take(
        &mut self,
        max: usize,
        weight: impl Fn(&J) -> usize,
        to: &mut Vec<J>,
    ) -> Option<usize> {
        if self.jobs.is_empty() {
            self.workers -= 1;
            return None;
        }
        let mut left = max;
        let fits = |job: &&J| {
            let rest = left.checked_sub(weight(job));
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        let count = self.jobs.iter().take_while(fits).count().max(1);
        to.extend(self.jobs.drain(..count));
        self.left += count as u64;
        Some(self.jobs.len())
    }

    /// Moves all jobs to a worker, to fail with those that it has sent.
    pub(crate) fn take_all(&mut self, to: &mut Vec<J>) {
        self.left = self.next_number();
        to.extend(self.jobs.drain(..));
    }

    /// Counts a worker no longer that was dropped. Returns the jobs that no worker is left for: perhaps nobody pushes again
    /// and starts one.
    #[must_use]
    pub(crate) fn leave(&mut self) -> VecDeque<J> {
        self.workers -= 1;
        if self.workers > 0 {
            return VecDeque::new();
        }
        self.left = self.next_number();
        mem::take(&mut self.jobs)
    }

    /// What waits in a queue that has no workers any more.
    pub(crate) fn into_jobs(self) -> VecDeque<J> {
        self.jobs
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    const JOBS: usize = 3;

    /// What becomes of a worker.
    #[derive(Debug, Clone, Copy)]
    enum Fate {
        Ends,
        /// It is dropped with a job taken, or before its first.
        IsDropped {
            taken: bool,
        },
        /// Its calls fail, and what waits fails with them.
        Fails,
    }

    struct Model {
        queue: Mutex<Queue<usize>>,
        /// How often each job was answered.
        answers: [AtomicUsize; JOBS],
    }

    impl Model {
        fn new(max_jobs: usize, max_workers: usize, backlog: usize) -> Arc<Self> {
            Arc::new(Self {
                queue: Mutex::new(Queue::new(max_jobs, max_workers, backlog)),
                answers: Default::default(),
            })
        }

        /// As a check and the worker that it may start, which runs at once here.
        fn push(&self, job: usize, fate: Fate) {
            let pushed = self.queue.lock().unwrap().push(job);
            match pushed {
                Ok(true) => self.worker(fate),
                Ok(false) => {}
                Err(Full) => self.answer([job]),
            }
        }

        /// As the loop of a worker, with its steps under the lock.
        fn worker(&self, fate: Fate) {
            let mut jobs = vec![];
            if let Fate::IsDropped { taken } = fate {
                if taken
                    && self
                        .queue
                        .lock()
                        .unwrap()
                        .take(1, |_| 1, &mut jobs)
                        .is_none()
                {
                    return;
                }
                jobs.extend(self.queue.lock().unwrap().leave());
                return self.answer(jobs);
            }
            while self
                .queue
                .lock()
                .unwrap()
                .take(1, |_| 1, &mut jobs)
                .is_some()
            {
                if matches!(fate, Fate::Fails) {
                    self.queue.lock().unwrap().take_all(&mut jobs);
                }
                self.answer(jobs.drain(..));
            }
        }

        fn answer(&self, jobs: impl IntoIterator<Item = usize>) {
            for job in jobs {
                self.answers[job].fetch_add(1, Relaxed);
            }
        }
    }

    /// Three threads push and run workers, in every order in which at most two of them are interrupted.
    fn every_job_is_answered_once(max_jobs: usize, max_workers: usize, fates: [Fate; JOBS]) {
        for backlog in 0..=1 {
            every_job_is_answered_once_with(backlog, max_jobs, max_workers, fates);
        }
    }

    fn every_job_is_answered_once_with(
        backlog: usize,
        max_jobs: usize,
        max_workers: usize,
        fates: [Fate; JOBS],
    ) {
        let mut scheduler = loom::model::Builder::new();
        scheduler.preemption_bound = Some(2);
        scheduler.check(move || {
            let model = Model::new(max_jobs, max_workers, backlog);
            let threads = [1, 2].map(|job| {
                let model = Arc::clone(&model);
                thread::spawn(move || model.push(job, fates[job]))
            });
            model.push(0, fates[0]);
            for thread in threads {
                thread.join().unwrap();
            }
            let answers = model
                .answers
                .each_ref()
                .map(|answers| answers.load(Relaxed));
            assert_eq!(answers, [1; JOBS], "answers to each job");
            let queue = model.queue.lock().unwrap();
            assert!(queue.jobs.is_empty(), "no job is left behind");
            assert_eq!(queue.workers, 0, "workers that are counted and run no more");
        });
    }

    #[test]
    fn a_batch_is_bounded_by_weight() {
        let mut queue = Queue::new(10, 1, 0);
        [3, 1, 1, 5, 9, 2]
            .into_iter()
            .for_each(|weight| drop(queue.push(weight)));
        let mut take = || {
            let mut taken = vec![];
            queue.take(5, |weight| *weight, &mut taken).map(|_| taken)
        };
        assert_eq!(
            [take(), take(), take(), take(), take()].map(Option::unwrap_or_default),
            [vec![3, 1, 1], vec![5], vec![9], vec![2], vec![]]
        );
    }

    #[test]
    fn another_worker_starts_only_for_a_backlog() {
        let mut queue = Queue::new(10, 2, 2);
        let starts: Vec<bool> = (0..5).map(|job| queue.push(job).unwrap()).collect();
        assert_eq!(starts, [true, false, true, false, false]);
        let mut queue = Queue::new(10, 2, 0);
        let starts: Vec<bool> = (0..3).map(|job| queue.push(job).unwrap()).collect();
        assert_eq!(starts, [true, true, false]);
    }

    /// Either its caller takes a job back, or a worker has it.
    #[test]
    fn a_withdrawn_job_is_not_sent() {
        loom::model(|| {
            let model = Model::new(10, 1, 0);
            let withdrawn = Arc::new([false; 2].map(AtomicBool::new));
            let numbers = [0, 1].map(|job| {
                let mut queue = model.queue.lock().unwrap();
                let number = queue.next_number();
                assert!(queue.push(job).is_ok() && queue.has(number) && !queue.has(number + 1));
                number
            });
            let (worker, gone) = (Arc::clone(&model), Arc::clone(&withdrawn));
            let worker = thread::spawn(move || {
                let mut jobs = vec![];
                while worker
                    .queue
                    .lock()
                    .unwrap()
                    .take(1, |_| 1, &mut jobs)
                    .is_some()
                {
                    worker.answer(jobs.drain(..).filter(|job| !gone[*job].load(Relaxed)));
                }
            });
            for (job, number) in numbers.into_iter().enumerate() {
                let queue = model.queue.lock().unwrap();
                if queue.has(number) {
                    withdrawn[job].store(true, Relaxed);
                }
            }
            worker.join().unwrap();
            for (job, withdrawn) in withdrawn.iter().enumerate() {
                let sent = model.answers[job].load(Relaxed) == 1;
                assert!(
                    sent != withdrawn.load(Relaxed),
                    "sent and taken back, or neither"
                );
            }
        });
    }

    #[test]
    fn no_job_waits_for_an_ended_worker() {
        for max_workers in 1..=2 {
            every_job_is_answered_once(10, max_workers, [Fate::Ends; JOBS]);
            every_job_is_answered_once(1, max_workers, [Fate::Ends; JOBS]);
        }
    }

    #[test]
    fn ended_workers_leave_no_job_behind() {
        let fates = [
            Fate::IsDropped { taken: false },
            Fate::IsDropped { taken: true },
            Fate::Fails,
        ];
        for max_workers in 1..=2 {
            for fate in fates {
                every_job_is_answered_once(10, max_workers, [fate; JOBS]);
                every_job_is_answered_once(10, max_workers, [fate, Fate::Ends, Fate::Ends]);
                every_job_is_answered_once(
                    10,
                    max_workers,
                    [Fate::Ends, fate, Fate::IsDropped { taken: true }],
                );
            }
        }
    }
}
