//! The queues of unsent checks, one for each runtime and node; a queued check ([`Job`]); and the future that its caller
//! awaits ([`RedisFuture`]).

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::future::Future;
use std::mem;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::runtime::Id;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::task::Worker;
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Check, Decision, Frees, Key, Mode, SentBy};
use crate::store::redis::topology::{Node, NodePool};
use crate::util::{RandomState, instant, polled_after_completion};

#[derive(Default)]
pub(super) struct NodeQueues {
    /// Usually one: a linear search is fastest.
    pub(super) each: Vec<NodeQueue>,
    /// Number of queues created so far, which numbers the next one.
    pub(super) made: u64,
}

/// The unsent checks of one runtime for one node. The queue without a `target` has the checks whose node is unknown.
pub(super) struct NodeQueue {
    /// Identifies the queue. A runtime that is shutting down may create its queue again while workers of the removed
    /// queue still end.
    pub(super) number: NonZeroU64,
    pub(super) runtime: Id,
    pub(super) target: Option<NodeTarget>,
    jobs: JobQueue<Job>,
    /// The callers with a [give-back](holds_back_later) in the batch of a worker. Their other checks wait for its
    /// reply, since another connection might overtake it.
    giving_back: HashSet<Key, RandomState>,
    /// The tasks of ended workers. Each runs the worker that it is sent, and ends if this sender is dropped.
    pub(super) idle: Vec<oneshot::Sender<Worker>>,
    /// Time at which a worker has last taken checks that [may be delayed](may_be_delayed), or has received their replies.
    sent_at: Option<Instant>,
    /// Whether a timer will start a worker for such checks.
    has_timer: bool,
    /// Dropped with the store, which ends the task that waits for the runtime to shut down.
    pub(super) _store: oneshot::Sender<Infallible>,
}

/// A node and its connections.
#[derive(Clone)]
pub(super) struct NodeTarget {
    pub(super) node: Node,
    pub(super) pool: Arc<NodePool>,
}

impl NodeQueue {
    /// Creates a queue. If `_store` is dropped, its watch ends.
    pub(super) fn new(
        number: NonZeroU64,
        runtime: Id,
        target: Option<NodeTarget>,
        jobs: JobQueue<Job>,
        _store: oneshot::Sender<Infallible>,
    ) -> Self {
        Self {
            number,
            runtime,
            target,
            jobs,
            giving_back: HashSet::default(),
            idle: vec![],
            sent_at: None,
            has_timer: false,
            _store,
        }
    }

    /// Moves checks to the batch of a worker, like [`JobQueue::take`]. Also returns `None` if only
    /// checks that [may be delayed](may_be_delayed) are queued, soon after the last ones were sent. `callers` has the callers
    /// that the worker's last batch has held back, and afterwards the callers of this batch.
    pub(super) fn take(
        &mut self,
        max: usize,
        now: Instant,
        callers: &mut Vec<Key>,
        to: &mut Vec<Job>,
    ) -> Option<usize> {
        // First, since the last batch of this worker has been answered.
        if !callers.is_empty() {
            // The requests that its batch has admitted end soon too: their refunds and releases can share a call.
            self.sent_at = Some(now);
        }
        self.let_go(callers);
        if self.waits_for_others(max, now) {
            // The worker ends, and the timer starts another one for them.
            self.jobs.end_worker();
            return None;
        }
        let giving_back = &self.giving_back;
        let left = self.jobs.take(
            max,
            |job| job.weight as usize,
            |job| !giving_back.is_empty() && job.check.is_of_any(|key| giving_back.contains(key)),
            to,
        )?;
        for Job { check, .. } in &*to {
            if may_be_delayed(check) {
                self.sent_at = Some(now);
            }
            if holds_back_later(check) && self.giving_back.insert(*check.key()) {
                callers.push(*check.key());
            }
        }
        Some(left)
    }

    /// Returns `true` if only checks that may be delayed are queued, fewer than fill a batch, and it is too early for them.
    fn waits_for_others(&self, max: usize, now: Instant) -> bool {
        // While another worker runs there is no timer.
        let is_last = self.jobs.workers == 1;
        if !is_last || self.jobs.waiting() >= max || self.waits_until(now).is_none() {
            return false;
        }
        self.jobs.iter().all(|job| may_be_delayed(&job.check))
    }

    /// Returns the time at which checks that may be delayed are sent, if that is later.
    fn waits_until(&self, now: Instant) -> Option<Instant> {
        let until = self.sent_at? + DELAY;
        if until <= now {
            return None;
        }
        Some(until)
    }

    /// Returns the time at which the caller must call [`on_timer`](Self::on_timer), since no worker runs for the checks
    /// that are queued. Until then, further calls return `None`.
    pub(super) fn arm_timer(&mut self, now: Instant) -> Option<Instant> {
        if self.has_timer || !self.jobs.needs_worker() {
            return None;
        }
        self.has_timer = true;
        Some(self.waits_until(now).unwrap_or(now))
    }

    /// Lets the checks of these callers pass: the batch with their give-backs has been answered, or has failed.
    fn let_go(&mut self, callers: &mut Vec<Key>) {
        for caller in callers.drain(..) {
            self.giving_back.remove(&caller);
        }
    }

    /// Moves all checks to a worker, which fails them together with its unsent ones.
    pub(super) fn take_all(&mut self, to: &mut Vec<Job>) {
        self.jobs.take_all(to);
    }

    /// Subtracts a worker that was dropped, with the callers of its batch. If it was the last one, returns the queued checks,
    /// which must be failed.
    #[must_use]
    pub(super) fn worker_dropped(&mut self, callers: &mut Vec<Key>) -> Vec<Job> {
        self.let_go(callers);
        self.jobs.worker_dropped()
    }

    /// The checks of a queue whose workers have all ended.
    pub(super) fn into_jobs(self) -> Vec<Job> {
        self.jobs.into_jobs()
    }

    /// Number of checks ever queued.
    pub(super) fn pushed(&self) -> u64 {
        self.jobs.next_number()
    }

    pub(super) fn is_of(&self, runtime: Id, node: Option<Node>) -> bool {
        let own = self.target.as_ref().map(|target| target.node);
        self.runtime == runtime && own == node
    }

    /// Adds a check. Returns its id, and how it is sent.
    ///
    /// # Errors
    ///
    /// [`Full`], unless another queue has accepted the check before.
    pub(super) fn push(&mut self, mut job: Job) -> Result<(JobId, NextSend), Full> {
        // A redirected check keeps its id: its caller may withdraw it.
        if let Some(id) = job.id {
            let starts = self.jobs.push_accepted(job);
            return Ok((id, self.sending(starts)));
        }
        let id = JobId {
            queue: self.number,
            number: self.jobs.next_number(),
        };
        job.id = Some(id);
        if !may_be_delayed(&job.check) {
            let starts = self.jobs.push(job)?;
            return Ok((id, self.sending(starts)));
        }
        // A running worker takes it with its next batch. Otherwise it may wait for others, since no request awaits it.
        let since = job.since;
        let no_worker_runs = self.jobs.push_without_worker(job)?;
        if no_worker_runs {
            return Ok((id, self.send_soon(since)));
        }
        Ok((id, NextSend::Begun))
    }

    fn sending(&mut self, starts: bool) -> NextSend {
        if starts {
            NextSend::By(self.worker_start())
        } else {
            NextSend::Begun
        }
    }

    /// Sends checks that may be delayed, for which no worker runs: immediately, or soon after the last ones.
    fn send_soon(&mut self, now: Instant) -> NextSend {
        if self.waits_until(now).is_none() {
            let starts = self.jobs.start();
            return self.sending(starts);
        }
        match self.arm_timer(now) {
            Some(time) => NextSend::At {
                time,
                queue_number: self.number,
            },
            None => NextSend::Begun,
        }
    }

    /// Returns a worker for the queued checks, unless one runs. Call it when the timer has elapsed.
    pub(super) fn on_timer(&mut self) -> Option<WorkerStart> {
        self.has_timer = false;
        if !self.jobs.start() {
            return None;
        }
        Some(self.worker_start())
    }

    fn worker_start(&mut self) -> WorkerStart {
        WorkerStart {
            queue_number: self.number,
            task: self.idle.pop(),
            target: self.target.clone(),
        }
    }
}

/// How a queued check is sent.
pub(super) enum NextSend {
    /// By a running worker, or by the timer's worker.
    Begun,
    /// By this worker, which the caller must start.
    By(WorkerStart),
    /// By a worker of this queue that the caller must start at this time, unless one runs then.
    At {
        time: Instant,
        queue_number: NonZeroU64,
    },
}

/// Time for which checks that [may be delayed](may_be_delayed) wait for others after the last ones were sent.
const DELAY: Duration = Duration::from_millis(2);

/// A worker to start. The queue has counted it.
pub(super) struct WorkerStart {
    pub(super) queue_number: NonZeroU64,
    /// The task of an ended worker.
    pub(super) task: Option<oneshot::Sender<Worker>>,
    pub(super) target: Option<NodeTarget>,
}

impl NodeQueues {
    /// Returns `true` if the job is in its first queue, so that no worker has taken it.
    pub(super) fn have(&self, id: JobId) -> bool {
        for queue in &self.each {
            let is_in_its_first = queue.number == id.queue && queue.jobs.has(id.number);
            // A worker may have passed over it.
            if is_in_its_first || queue.jobs.held_back.iter().any(|job| job.id == Some(id)) {
                return true;
            }
        }
        false
    }

    /// Returns `true` if the job is in any queue, possibly after a redirection.
    pub(super) fn have_redirected(&self, id: JobId) -> bool {
        self.each
            .iter()
            .any(|queue| queue.jobs.iter().any(|job| job.id == Some(id)))
    }

    /// Drops the idle queues of nodes that are not in the cluster.
    pub(super) fn retain(&mut self, is_node: impl Fn(Node) -> bool) {
        self.each.retain(|queue| match &queue.target {
            // Its workers find the queue by its number, and answer its checks.
            Some(target) => is_node(target.node) || !queue.jobs.is_idle(),
            None => true,
        });
    }

    /// Returns the queue of this number, or `None` if its runtime has shut down.
    pub(super) fn of(&mut self, number: NonZeroU64) -> Option<&mut NodeQueue> {
        self.each.iter_mut().find(|queue| queue.number == number)
    }

    /// Removes the queue of this number.
    pub(super) fn remove(&mut self, number: NonZeroU64) -> Option<NodeQueue> {
        let index = self.each.iter().position(|queue| queue.number == number)?;
        Some(self.each.swap_remove(index))
    }
}

/// A bounded queue that counts its workers.
///
/// Each method is one step under the lock of the owner. A worker that finds the queue empty is subtracted in that step,
/// so the next push requests a new worker. No job waits for a worker that has ended.
#[derive(Debug)]
pub(super) struct JobQueue<J> {
    jobs: VecDeque<J>,
    /// Jobs that a worker has passed over, because another worker's batch holds them back. That worker takes them when its
    /// batch has ended. They are queued, but no longer in `jobs`.
    held_back: Vec<J>,
    max_jobs: usize,
    /// Number of jobs that were removed from `jobs`. Jobs are numbered in order of arrival, so this is the number of the
    /// first one in `jobs`.
    removed: u64,
    /// Number of workers that run or are about to.
    workers: usize,
    max_workers: usize,
    /// Number of queued jobs above which a second or later worker is started.
    backlog: usize,
}

/// The queue has reached its maximum length.
#[derive(Debug)]
pub(super) struct Full;

impl<J> JobQueue<J> {
    pub(super) fn new(max_jobs: usize, max_workers: usize, backlog: usize) -> Self {
        Self {
            jobs: VecDeque::new(),
            held_back: vec![],
            max_jobs,
            removed: 0,
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
    pub(super) fn push(&mut self, job: J) -> Result<bool, Full> {
        self.check_room()?;
        Ok(self.push_accepted(job))
    }

    /// Adds a job for which no worker need be started. Returns `true` if none runs.
    ///
    /// # Errors
    ///
    /// [`Full`].
    fn push_without_worker(&mut self, job: J) -> Result<bool, Full> {
        self.check_room()?;
        self.jobs.push_back(job);
        Ok(self.workers == 0)
    }

    fn check_room(&self) -> Result<(), Full> {
        if self.waiting() < self.max_jobs {
            Ok(())
        } else {
            Err(Full)
        }
    }

    /// Returns `true` if jobs are queued and no worker runs.
    fn needs_worker(&self) -> bool {
        self.workers == 0 && self.waiting() > 0
    }

    /// Like [`needs_worker`](Self::needs_worker). If `true`, the caller must start a worker, which is counted already.
    fn start(&mut self) -> bool {
        let starts = self.needs_worker();
        // Here, not when the worker runs: until then, other pushes would start more workers for the same jobs.
        if starts {
            self.workers += 1;
        }
        starts
    }

    /// Subtracts a worker that ends, and leaves jobs behind.
    fn end_worker(&mut self) {
        self.workers -= 1;
    }

    /// Like [`push`](Self::push), for a job that another queue has accepted: it ignores the maximum.
    fn push_accepted(&mut self, job: J) -> bool {
        self.jobs.push_back(job);
        let is_needed = self.workers == 0 || self.jobs.len() > self.backlog;
        let starts = self.workers < self.max_workers && is_needed;
        if starts {
            self.workers += 1;
        }
        starts
    }

    /// The queued jobs.
    pub(super) fn iter(&self) -> impl Iterator<Item = &J> {
        self.held_back.iter().chain(&self.jobs)
    }

    /// The number of queued jobs.
    fn waiting(&self) -> usize {
        self.held_back.len() + self.jobs.len()
    }

    /// Returns `true` if no job is queued and no worker runs.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting() == 0 && self.workers == 0
    }

    /// The number of the next job.
    pub(super) fn next_number(&self) -> u64 {
        self.removed + self.jobs.len() as u64
    }

    /// Returns `true` if the job of this number is queued, so that no worker has taken it.
    pub(super) fn has(&self, number: u64) -> bool {
        (self.removed..self.next_number()).contains(&number)
    }

    /// Moves the oldest jobs to a worker: at least one, and more while their total weight is at most `max`. Passes over those
    /// that are held back, which a later call moves. Returns the number of jobs left.
    ///
    /// Returns `None` if no job was moved: the worker is subtracted, and must end. A job that is held is moved by the
    /// worker that holds it back, when its batch has ended.
    pub(super) fn take(
        &mut self,
        max: usize,
        weight: impl Fn(&J) -> usize,
        is_held_back: impl Fn(&J) -> bool,
        to: &mut Vec<J>,
    ) -> Option<usize> {
        let before = to.len();
        let mut room = Room::of(max);
        // First, since they are older than all others: the checks of a caller must stay in order.
        for job in mem::take(&mut self.held_back) {
            if !is_held_back(&job) && room.try_add(weight(&job)) {
                to.push(job);
            } else {
                self.held_back.push(job);
            }
        }
        while let Some(job) = self.jobs.front() {
            if is_held_back(job) {
                self.held_back.extend(self.jobs.pop_front());
            } else if room.try_add(weight(job)) {
                to.extend(self.jobs.pop_front());
            } else {
                break;
            }
            self.removed += 1;
        }
        if to.len() == before {
            // Under the same lock: the next push finds no worker, and starts one.
            self.workers -= 1;
            return None;
        }
        Some(self.waiting())
    }

    /// Moves all jobs to a worker that fails them together with the jobs that it could not send.
    fn take_all(&mut self, to: &mut Vec<J>) {
        self.removed = self.next_number();
        to.extend(self.held_back.drain(..).chain(self.jobs.drain(..)));
    }

    /// Subtracts a worker that was dropped. If it was the last one, returns the queued jobs, which must be failed:
    /// another push might never come.
    #[must_use]
    fn worker_dropped(&mut self) -> Vec<J> {
        self.workers -= 1;
        let mut jobs = vec![];
        if self.workers == 0 {
            self.take_all(&mut jobs);
        }
        jobs
    }

    /// The jobs of a queue whose workers have all ended.
    fn into_jobs(mut self) -> Vec<J> {
        let mut jobs = vec![];
        self.take_all(&mut jobs);
        jobs
    }
}

/// The room in a batch.
struct Room {
    left: usize,
    is_empty: bool,
}

impl Room {
    fn of(left: usize) -> Self {
        Self {
            left,
            is_empty: true,
        }
    }

    /// Adds a job of this weight, and returns `true`, if there is room. Any batch has room for its first job. After the
    /// first job that does not fit, the batch is full: smaller ones must not overtake it.
    fn try_add(&mut self, weight: usize) -> bool {
        let fits = weight <= self.left || self.is_empty;
        self.left = if fits {
            self.left.saturating_sub(weight)
        } else {
            0
        };
        self.is_empty = false;
        fits
    }
}

/// A queued or sent check. Moved several times, which is fast up to 128 bytes.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) check: Check,
    pub(super) since: Instant,
    /// `None` until it is queued. A redirection keeps the id.
    pub(super) id: Option<JobId>,
    /// Its share of a batch's capacity.
    pub(super) weight: u32,
    /// The partition of its caller.
    pub(super) partition: u16,
    /// Whether only checks of the same caller may share its call.
    pub(super) call_per_caller: bool,
    /// Set after a node has redirected it.
    pub(super) redirect: Option<Box<Redirect>>,
    answer: oneshot::Sender<Result<Decision, StoreError>>,
}

/// Checks with the node that decides each. `None` if the check must wait for its node.
pub(super) type Placed = Vec<(Option<Node>, Job)>;

/// Identifies a job by its first queue, and its number in that queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JobId {
    pub(super) queue: NonZeroU64,
    pub(super) number: u64,
}

/// The redirections of a check.
#[derive(Debug, Default)]
pub(super) struct Redirect {
    /// The node that imports the check's slot. It decides the check after `ASKING`, although it does not own the slot
    /// yet.
    pub(super) importing_node: Option<Node>,
    /// Time of the first rejection because the keys were on two nodes.
    pub(super) split_since: Option<Instant>,
    /// Number of redirections so far.
    pub(super) hops: u8,
}

/// Resolves to the decision of a [`RedisStore`](crate::RedisStore).
///
/// # Panics
///
/// If it is polled after it has resolved.
#[derive(Debug)]
pub struct RedisFuture {
    /// `None` after it has resolved, or was withdrawn.
    answer: Option<Receiver>,
    pub(super) id: JobId,
}

/// Receives the answer to a check.
type Receiver = oneshot::Receiver<Result<Decision, StoreError>>;

impl Job {
    /// Creates a check, and the receiver of its answer.
    pub(super) fn new(check: Check, partition: u16) -> (Self, Receiver) {
        let (answer, receiver) = oneshot::channel();
        let weight = weight(&check);
        let job = Self {
            check,
            since: instant(),
            id: None,
            weight,
            partition,
            call_per_caller: false,
            redirect: None,
            answer,
        };
        (job, receiver)
    }

    /// Consecutive checks of the same group share a script call.
    pub(super) fn group(&self) -> (bool, u16, Option<&[u8]>) {
        let caller = if self.call_per_caller {
            Some(self.check.key().as_bytes())
        } else {
            None
        };
        (self.needs_asking(), self.partition, caller)
    }

    /// Returns `true` if its call is preceded by `ASKING`, because the node imports the slot.
    pub(super) fn needs_asking(&self) -> bool {
        match &self.redirect {
            Some(redirect) => redirect.importing_node.is_some(),
            None => false,
        }
    }

    /// Whether the caller has dropped the future.
    pub(super) fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }

    /// Whether it must not be sent: the caller has dropped the future, or the timeout has passed.
    pub(super) fn is_late(&self, now: Instant, timeout: Duration) -> bool {
        // A fallback withdraws its checks itself: it knows whether the runtime was late.
        let has_timeout = !self.check.sending().sender_limits_time;
        let age = now.saturating_duration_since(self.since);
        self.is_abandoned() || has_timeout && age > timeout
    }

    pub(super) fn answer(self, decide: impl FnOnce(Check) -> Result<Decision, StoreError>) {
        // If the caller has dropped the future since the check was sent, the charge stands.
        let _ = self.answer.send(decide(self.check));
    }

    pub(super) fn fail(self, error: StoreError) {
        self.answer(|_| Err(error));
    }
}

impl RedisFuture {
    pub(super) fn new(answer: Receiver, id: JobId) -> Self {
        Self {
            answer: Some(answer),
            id,
        }
    }

    /// Drops the receiver, so that the worker that takes the check drops it unsent.
    pub(super) fn abandon(&mut self) {
        self.answer = None;
    }
}

impl Future for RedisFuture {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(receiver) = &mut self.answer else {
            polled_after_completion("RedisFuture")
        };
        let answer = ready!(Pin::new(receiver).poll(cx));
        self.answer = None;
        match answer {
            Ok(answer) => Poll::Ready(answer),
            // Its worker was dropped with the runtime.
            Err(_) => Poll::Ready(Err(no_runtime())),
        }
    }
}

/// Returns `true` if a check may be sent a little later, together with others: no request awaits it.
fn may_be_delayed(check: &Check) -> bool {
    check.sending().by != SentBy::Request
}

/// Returns `true` if later checks of the caller must not overtake a check: it gives something back for the first time.
fn holds_back_later(check: &Check) -> bool {
    check.gives_room() && check.sending().by != SentBy::Retry
}

/// The error of a check outside of a runtime, or on a runtime that has shut down: no evidence about Redis.
pub(super) fn no_runtime() -> StoreError {
    StoreError::new(ErrorKind::NoRuntime).check_only()
}

/// A check's share of a batch's capacity: 1, or more if it may read and write much of a long log.
///
/// A log of n charges is stored in blocks of about sqrt(n) charges. Most checks read only its head, some one block; a
/// refund of an older charge rewrites both. With 100,000 charges, Redis spends 20 to 60 times as long on such a refund
/// as on a take.
fn weight(check: &Check) -> u32 {
    let share = match check.mode() {
        Mode::Refund => 16,
        _ => 128,
    };
    let mut weight = 1;
    for policy in check.policies() {
        let params = policy.params();
        if params.frees == Frees::OneByOne {
            weight += u32::try_from(params.capacity.isqrt() / share).unwrap_or(0);
        }
    }
    weight
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
        queue: Mutex<JobQueue<usize>>,
        /// Number of answers to each job.
        answers: [AtomicUsize; JOBS],
    }

    impl Model {
        fn new(max_jobs: usize, max_workers: usize, backlog: usize) -> Arc<Self> {
            Arc::new(Self {
                queue: Mutex::new(JobQueue::new(max_jobs, max_workers, backlog)),
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

        /// Performs the steps of a worker's loop that hold the lock.
        fn worker(&self, fate: Fate) {
            let mut jobs = vec![];
            if let Fate::IsDropped { taken } = fate {
                if taken
                    && self
                        .queue
                        .lock()
                        .unwrap()
                        .take(1, |_| 1, |_| false, &mut jobs)
                        .is_none()
                {
                    return;
                }
                jobs.extend(self.queue.lock().unwrap().worker_dropped());
                return self.answer(jobs);
            }
            while self
                .queue
                .lock()
                .unwrap()
                .take(1, |_| 1, |_| false, &mut jobs)
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
        let mut queue = JobQueue::new(10, 1, 0);
        [3, 1, 1, 5, 9, 2]
            .into_iter()
            .for_each(|weight| drop(queue.push(weight)));
        let mut take = || {
            let mut taken = vec![];
            queue
                .take(5, |weight| *weight, |_| false, &mut taken)
                .map(|_| taken)
        };
        assert_eq!(
            [take(), take(), take(), take(), take()].map(Option::unwrap_or_default),
            [vec![3, 1, 1], vec![5], vec![9], vec![2], vec![]]
        );
    }

    #[test]
    fn another_worker_starts_only_for_a_backlog() {
        let mut queue = JobQueue::new(10, 2, 2);
        let starts: Vec<bool> = (0..5).map(|job| queue.push(job).unwrap()).collect();
        assert_eq!(starts, [true, false, true, false, false]);
        let mut queue = JobQueue::new(10, 2, 0);
        let starts: Vec<bool> = (0..3).map(|job| queue.push(job).unwrap()).collect();
        assert_eq!(starts, [true, true, false]);
    }

    /// Otherwise each check would start a timer, or the second one would wait forever.
    #[tokio::test(start_paused = true)]
    async fn one_timer_runs_for_delayed_checks() {
        let (store, _watch) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current().id();
        let jobs = JobQueue::new(10, 1, 0);
        let mut queue = NodeQueue::new(NonZeroU64::MIN, runtime, None, jobs, store);
        let push = |queue: &mut NodeQueue| {
            let mut check = crate::support::check("ann", "10/s");
            check.sending_mut().by = SentBy::Retry;
            let (job, _answer) = Job::new(check, 0);
            queue.push(job).unwrap().1
        };
        let send = |queue: &mut NodeQueue| {
            let mut sent = vec![];
            while queue.take(10, instant(), &mut vec![], &mut sent).is_some() {}
            sent.len()
        };
        assert!(matches!(push(&mut queue), NextSend::By(_)));
        assert_eq!(send(&mut queue), 1);
        for round in 0..2 {
            let due = instant() + DELAY;
            assert!(
                matches!(push(&mut queue), NextSend::At { time, .. } if time == due),
                "{round}"
            );
            assert!(matches!(push(&mut queue), NextSend::Begun), "{round}");
            tokio::time::advance(DELAY).await;
            assert!(queue.on_timer().is_some(), "{round}");
            assert_eq!(send(&mut queue), 2, "{round}");
        }
    }

    #[test]
    fn held_jobs_come_first_when_they_are_free() {
        let mut queue = JobQueue::new(4, 2, 0);
        [1, 2, 3, 1]
            .into_iter()
            .for_each(|job| drop(queue.push(job)));
        let mut take = |max, held: &[i32]| {
            let mut taken = vec![];
            let left = queue.take(max, |_| 1, |job| held.contains(job), &mut taken);
            let is_full = queue.push(9).is_err();
            queue.jobs.retain(|job| *job != 9);
            (left, taken, is_full)
        };
        assert_eq!(take(1, &[1]), (Some(3), vec![2], false));
        assert_eq!(take(9, &[1]), (Some(2), vec![3], false));
        assert_eq!(take(9, &[1]), (None, vec![], false), "the worker ends");
        assert_eq!(take(1, &[]), (Some(1), vec![1], false));
        assert_eq!(take(9, &[]), (Some(0), vec![1], false));
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
                    .take(1, |_| 1, |_| false, &mut jobs)
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
