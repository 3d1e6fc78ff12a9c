//! A queue of unsent checks, and the count of the workers that take them.

use std::collections::VecDeque;
use std::mem;

/// A bounded queue that counts its workers.
///
/// Each method is one step under the lock of the owner. A worker that finds the queue empty is subtracted in that step,
/// so the next push requests a new worker. No job waits for a worker that has ended.
#[derive(Debug)]
pub(crate) struct Queue<J> {
    jobs: VecDeque<J>,
    max_jobs: usize,
    /// Number of jobs that have left the queue. Jobs are numbered in order of arrival, so this is the number of the
    /// oldest queued job.
    left: u64,
    /// Number of workers that run or are about to.
    workers: usize,
    max_workers: usize,
    /// Number of queued jobs above which a second or later worker is started.
    backlog: usize,
}

/// The queue has reached its maximum length.
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

    /// Adds a job. Returns `true` if the caller must start a worker, which is counted already.
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

    /// Like [`push`](Self::push), for a job that another queue has accepted: it ignores the maximum.
    pub(crate) fn put(&mut self, job: J) -> bool {
        self.jobs.push_back(job);
        let start = self.workers < self.max_workers
            && (self.workers == 0 || self.jobs.len() > self.backlog);
        self.workers += usize::from(start);
        start
    }

    /// The queued jobs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &J> {
        self.jobs.iter()
    }

    /// Returns `true` if no job is queued and no worker runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.workers == 0
    }

    /// The number of the next job.
    pub(crate) fn next_number(&self) -> u64 {
        self.left + self.jobs.len() as u64
    }

    /// Returns `true` if the job of this number is queued, so that no worker has taken it.
    pub(crate) fn has(&self, number: u64) -> bool {
        (self.left..self.next_number()).contains(&number)
    }

    /// Moves the oldest jobs to a worker: at least one, and more while their total weight is at most `max`. Returns the
    /// number of jobs left.
    ///
    /// Returns `None` if no job was queued: the worker is subtracted, and must end.
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

    /// Moves all jobs to a worker that fails them together with the jobs that it could not send.
    pub(crate) fn take_all(&mut self, to: &mut Vec<J>) {
        self.left = self.next_number();
        to.extend(self.jobs.drain(..));
    }

    /// Subtracts a worker that was dropped. If it was the last one, returns the queued jobs, which must be failed:
    /// another push might never come.
    #[must_use]
    pub(crate) fn leave(&mut self) -> VecDeque<J> {
        self.workers -= 1;
        if self.workers > 0 {
            return VecDeque::new();
        }
        self.left = self.next_number();
        mem::take(&mut self.jobs)
    }

    /// The jobs of a queue whose workers have all ended.
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

    /// The end of a worker.
    #[derive(Debug, Clone, Copy)]
    enum Fate {
        Ends,
        /// Its task is dropped, before its first job or with a job taken.
        IsDropped {
            taken: bool,
        },
        /// Its calls fail, and the queued jobs fail with them.
        Fails,
    }

    struct Model {
        queue: Mutex<Queue<usize>>,
        /// Number of answers to each job.
        answers: [AtomicUsize; JOBS],
    }

    impl Model {
        fn new(max_jobs: usize, max_workers: usize, backlog: usize) -> Arc<Self> {
            Arc::new(Self {
                queue: Mutex::new(Queue::new(max_jobs, max_workers, backlog)),
                answers: Default::default(),
            })
        }

        /// Pushes a job, as a check does. If that starts a worker, runs the worker immediately.
        fn push(&self, job: usize, fate: Fate) {
            let pushed = self.queue.lock().unwrap().push(job);
            match pushed {
                Ok(true) => self.worker(fate),
                Ok(false) => {}
                Err(Full) => self.answer([job]),
            }
        }

        /// The steps under the lock of a worker's loop.
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

    /// Three threads push jobs and run workers, in every order with at most two preemptions.
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
            assert_eq!(queue.workers, 0, "no ended worker is counted");
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

    /// A job is either withdrawn by its caller or taken by a worker.
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
                assert!(sent != withdrawn.load(Relaxed), "either sent or withdrawn");
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
