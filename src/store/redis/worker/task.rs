//! Workers: each sends the checks of one queue to its node, and reports the replies.

use std::io;
use std::mem;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redis::{RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::clock::RedisClock;
use super::queues::{Job, NodeTarget, no_runtime};
use super::store::{SharedStore, runtime_is_ending};
use crate::error::{ErrorKind, StoreError};
use crate::limit::Key;
use crate::observe::Event;
use crate::store::redis::link::{Replies, error_of};
use crate::store::redis::script::ScriptCall;
use crate::store::redis::topology::cluster::Why;
use crate::store::redis::topology::{Node, NodePool, Topology};
use crate::util::{contain, instant, yield_to_others};

/// Maximum number of times that a worker yields to let more checks arrive.
const GATHER: u32 = 4;
/// Pause before another attempt to find the node of a check.
const PAUSE: Duration = Duration::from_millis(3);

/// Sends the checks of a queue until the queue is empty. A task runs one worker after another.
pub(super) struct Worker {
    inner: Arc<SharedStore>,
    queue_number: NonZeroU64,
    batch: Batch,
    /// Whether the current batch may have reached Redis.
    sent: bool,
    /// Whether the queue counts this worker.
    counted: bool,
}

/// The result of a worker's look at its queue.
enum Taken {
    Checks {
        /// Number of checks left in the queue.
        left: usize,
    },
    /// No check to send. The queue has subtracted the worker, and sends its task the next one.
    Nothing(oneshot::Receiver<Worker>),
    /// The queue was removed with its runtime.
    QueueGone,
}

impl Worker {
    /// Creates a worker, which its queue must have counted.
    pub(super) fn new(inner: &Arc<SharedStore>, queue_number: NonZeroU64) -> Self {
        Self {
            inner: Arc::clone(inner),
            queue_number,
            batch: Batch::default(),
            sent: false,
            counted: true,
        }
    }

    /// Runs this worker, then each worker that the task receives. Between two workers, the task keeps their buffers,
    /// but no reference to the store.
    pub(super) async fn run(mut self, target: Option<NodeTarget>) {
        let Some(NodeTarget { node, pool }) = target else {
            // Rare, and boxed so that the future of the other workers is small.
            return Box::pin(self.find_nodes()).await;
        };
        while let Some(next) = self.send(node, &pool).await {
            let batch = mem::take(&mut self.batch);
            drop(self);
            let Ok(worker) = next.await else { return };
            self = worker;
            self.batch = batch;
        }
    }

    /// Sends the checks of this queue to `node` until the queue is empty.
    ///
    /// Returns the receiver of the next worker of this task, or `None` if the task ends.
    async fn send(&mut self, node: Node, pool: &NodePool) -> Option<oneshot::Receiver<Worker>> {
        loop {
            self.batch.clear_calls();
            let left = match self.take_jobs(self.inner.settings.batch.get()) {
                Taken::Checks { left } => left,
                Taken::Nothing(next) => return Some(next),
                Taken::QueueGone => return None,
            };
            let sent_at = self.make_calls(node, left);
            if self.batch.jobs.is_empty() {
                continue;
            }
            match self.call(node, pool).await {
                Ok(replies) => self.answer(&replies, sent_at, node),
                Err(error) => self.fail(&error, node),
            }
            if self.inner.topology.cluster().is_some() {
                self.gather().await;
            }
        }
    }

    /// Finds the nodes of checks without a node: the slots are unknown, or a check's keys are on two nodes at the
    /// moment.
    async fn find_nodes(mut self) {
        loop {
            // Wait before taking the checks: until then, their callers can withdraw them.
            let found = match self.inner.topology.cluster() {
                Some(cluster) if !cluster.is_known() => {
                    let timeout = self.inner.settings.timeout;
                    self.inner.refreshed(cluster, timeout).await
                }
                _ => {
                    sleep(PAUSE).await;
                    Ok(())
                }
            };
            if !matches!(self.take_jobs(usize::MAX), Taken::Checks { .. }) {
                return;
            }
            self.drop_late(None, instant());
            let mut placed = vec![];
            let mut unplaced = vec![];
            for job in self.batch.jobs.drain(..) {
                match self.inner.node_of(&job) {
                    None => unplaced.push(job),
                    node => placed.push((node, job)),
                }
            }
            if !unplaced.is_empty() {
                let error = match found {
                    Ok(()) => self.inner.topology.no_master(),
                    Err(error) => error,
                };
                let named = self.inner.named(error, None);
                for job in unplaced {
                    self.inner.fail_unsent(job, named.clone());
                }
                self.inner.refresh(Why::Unknown);
            }
            self.inner.requeue(placed);
        }
    }

    /// Yields, so that callers that just got a reply can queue their next check: this fills the batch of each
    /// partition. Stops when a yield brings no new check, or after [`GATHER`] yields.
    async fn gather(&self) {
        let mut before = self.pushed();
        for _ in 0..GATHER {
            yield_to_others().await;
            let now = self.pushed();
            if now == before {
                break;
            }
            before = now;
        }
    }

    /// Number of checks ever queued.
    fn pushed(&self) -> u64 {
        let mut queues = self.inner.queues();
        match queues.of(self.queue_number) {
            Some(queue) => queue.pushed(),
            None => 0,
        }
    }

    /// Builds the calls of the checks in the batch. `left` is the number of other queued checks. Returns the time.
    fn make_calls(&mut self, node: Node, left: usize) -> Instant {
        let now = instant();
        self.drop_late(Some(node), now);
        let Self { inner, batch, .. } = self;
        batch.make_calls(
            &inner.topology,
            &inner.settings.prefix,
            inner.now.load(Ordering::Relaxed),
            inner.clock.micros_at(now),
        );
        match &inner.topology {
            Topology::Sentinel(sentinels) => sentinels.watch(),
            Topology::Cluster(cluster) if cluster.refresher.marker_is_due() => {
                inner.refresh(Why::Marker);
            }
            Topology::Server(_) | Topology::Cluster(_) => {}
        }
        if let Some(observer) = inner.observer.get()
            && !batch.jobs.is_empty()
        {
            contain(|| {
                observer.notify(&Event::Sent {
                    checks: batch.jobs.len(),
                    waiting: left,
                })
            });
        }
        now
    }

    /// Takes checks. Ends the worker if there is nothing to send.
    fn take_jobs(&mut self, max: usize) -> Taken {
        let Batch { jobs, callers, .. } = &mut self.batch;
        let mut queues = self.inner.queues();
        let Some(queue) = queues.of(self.queue_number) else {
            return Taken::QueueGone;
        };
        let now = instant();
        if let Some(left) = queue.take(max, now, callers, jobs) {
            return Taken::Checks { left };
        }
        // `fail` may have moved a whole queue into this buffer.
        jobs.shrink_to(self.inner.settings.batch.get());
        self.counted = false;
        let (task, next) = oneshot::channel();
        queue.idle.push(task);
        let timer = queue.arm_timer(now);
        drop(queues);
        if let (Some(time), Ok(runtime)) = (timer, Handle::try_current()) {
            self.inner
                .start_worker_at(time, &runtime, self.queue_number);
        }
        Taken::Nothing(next)
    }

    /// Drops abandoned checks, and fails those older than the timeout.
    fn drop_late(&mut self, node: Option<Node>, now: Instant) {
        let timeout = self.inner.settings.timeout;
        let jobs = &mut self.batch.jobs;
        for job in jobs.extract_if(.., |job| job.is_late(now, timeout)) {
            let error = StoreError::new(ErrorKind::Timeout);
            self.inner.fail_unsent(job, self.inner.named(error, node));
        }
    }

    /// Sends the calls. Returns the reply to each.
    ///
    /// # Errors
    ///
    /// Returns an error that applies to all of the calls.
    async fn call(&mut self, node: Node, pool: &NodePool) -> Result<Replies, StoreError> {
        self.sent = false;
        let mut error = match self.attempt(pool).await {
            Ok(replies) => return Ok(replies),
            Err(error) => error,
        };
        if error.is_of_connection() && runtime_is_ending() {
            // A runtime that shuts down may drop the connection's driver before this worker. That is not a failure of
            // Redis.
            error = no_runtime();
        }
        let named = self.inner.named(error, Some(node));
        Err(if self.sent { named } else { named.not_sent() })
    }

    async fn attempt(&mut self, pool: &NodePool) -> Result<Replies, StoreError> {
        let Self {
            inner, batch, sent, ..
        } = self;
        let timeout = inner.settings.timeout;
        let mut connection = pool.checkout(timeout).await?;
        // Before the call: if this task is dropped during it, Redis may have run the script.
        *sent = true;
        let mut replies = connection.run(batch.calls(), timeout).await?;
        let outside = batch.outside(&replies);
        if !outside.is_empty() {
            // The script has decided nothing in these calls.
            batch.set_clocks(&outside, &inner.clock);
            let calls: SmallVec<[&ScriptCall; 1]> =
                outside.iter().map(|(i, _)| &batch.calls()[*i]).collect();
            let again = connection.run(&calls, timeout).await;
            replies = merged(replies, &outside, again)?;
        }
        for (call, reply) in batch.calls().iter().zip(&replies) {
            // The server was a master when the connection was made. A new connection finds the present one.
            if let Ok(reply) = reply
                && call.is_read_only(reply)
            {
                connection.give_up(StoreError::new(ErrorKind::ReadOnly));
                break;
            }
        }
        pool.give_back(connection);
        match (inner.topology.cluster(), replies.first()) {
            // Without a cluster there is one call, so its error applies to all checks.
            (None, Some(Err(error))) => Err(error_of(error)),
            _ => Ok(replies),
        }
    }

    /// Answers the checks of each call from its reply. `sent_at` is the time at which the calls were sent.
    fn answer(&mut self, replies: &Replies, sent_at: Instant, node: Node) {
        let Self { inner, batch, .. } = self;
        let mut jobs = batch.jobs.drain(..);
        for (call, reply) in batch.calls[..batch.len].iter().zip(replies) {
            let own = jobs.by_ref().take(call.len());
            match (reply, inner.topology.cluster()) {
                (Ok(reply), _) => answer_call(inner, call, reply, own, sent_at, node),
                (Err(error), Some(cluster)) => {
                    inner.requeue(inner.redirect(cluster, own.collect(), error, node));
                }
                // Without a cluster, `attempt` has returned this as the error of the batch.
                (Err(_), None) => {}
            }
        }
    }

    /// Handles a batch that failed. If it was sent, the connection broke, and only the checks in the batch fail. If it
    /// was not sent, no connection could be made, and all checks that wait for this node fail too: each batch would
    /// otherwise wait for the same timeout. Unsent checks whose slot has moved are queued for the new node instead.
    fn fail(&mut self, error: &StoreError, node: Node) {
        let jobs = &mut self.batch.jobs;
        if self.sent {
            for job in jobs.drain(..) {
                self.inner.fail_taken(job, error.clone());
            }
            if error.is_of_connection() {
                self.inner.refresh(Why::Lost(node));
            }
            return;
        }
        if let Some(queue) = self.inner.queues().of(self.queue_number) {
            queue.take_all(jobs);
        }
        self.inner.refresh(Why::Lost(node));
        let (elsewhere, left) = self.inner.split_moved(jobs.drain(..), node);
        self.inner.requeue(elsewhere);
        for job in left {
            self.inner.fail_taken(job, error.clone());
        }
    }
}

/// Answers the checks of one call from the reply of its script.
fn answer_call(
    inner: &Arc<SharedStore>,
    call: &ScriptCall,
    reply: &Value,
    mut jobs: impl Iterator<Item = Job>,
    sent_at: Instant,
    node: Node,
) {
    let cluster = inner.topology.cluster();
    // The checks whose keys the call has found on two nodes.
    let mut split = vec![];
    let is_read = call.read(reply, |verdicts| {
        let Some(job) = jobs.next() else { return };
        match verdicts {
            Ok(verdicts) => inner.decide(job, Ok(verdicts), sent_at),
            Err(error) if error.kind() == ErrorKind::NotReady && cluster.is_some() => {
                split.push(job);
            }
            Err(error) => inner.decide(job, Err(inner.named(error, Some(node))), sent_at),
        }
    });
    if let Err(error) = is_read {
        let named = inner.named(error, Some(node));
        for job in jobs {
            inner.fail_taken(job, named.clone());
        }
        return;
    }
    if let Some(cluster) = cluster
        && !split.is_empty()
    {
        inner.requeue(inner.redirect(cluster, split, &deleted_here(), node));
    }
}

/// The error of a node with a migrating slot that has only some of the requested keys.
fn deleted_here() -> RedisError {
    (
        redis::ErrorKind::Server(ServerErrorKind::TryAgain),
        "a check of the same call has deleted a key",
    )
        .into()
}

/// The error of one call whose connection failed with this error.
fn lost(error: &StoreError) -> RedisError {
    let kind = match error.kind() {
        ErrorKind::Timeout => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::BrokenPipe,
    };
    io::Error::from(kind).into()
}

/// Fails the worker's checks when its task is dropped with the runtime; if it was the last worker, also those in the
/// queue.
impl Drop for Worker {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        let mut queued = vec![];
        if let Some(queue) = self.inner.queues().of(self.queue_number) {
            queued = queue.worker_dropped(&mut self.batch.callers);
        }
        // Without the lock: an answer wakes its caller's task.
        for job in self.batch.jobs.drain(..) {
            let error = if self.sent {
                no_runtime()
            } else {
                no_runtime().not_sent()
            };
            self.inner.fail_taken(job, error);
        }
        for job in queued {
            job.fail(no_runtime().not_sent());
        }
    }
}

/// The buffers of a worker: the checks that it has taken, and the script calls for them, which share one round trip.
/// For a single server there is one call, for a node of a cluster one per partition.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Grouped by call.
    jobs: Vec<Job>,
    /// The callers whose other checks wait for the reply, because they give something back in this batch.
    callers: Vec<Key>,
    /// The first `len` calls are in use. The others are empty, for reuse.
    calls: Vec<ScriptCall>,
    len: usize,
}

impl Batch {
    /// Clears the calls for reuse.
    fn clear_calls(&mut self) {
        for call in &mut self.calls[..self.len] {
            call.clear();
        }
        self.len = 0;
    }

    /// Groups the checks and builds the calls. `now` is 0 for Redis's own time; `clock` estimates it.
    fn make_calls(&mut self, topology: &Topology, prefix: &str, now: i64, clock: i64) {
        let Self {
            jobs, calls, len, ..
        } = self;
        let cluster = topology.cluster();
        if let Some(cluster) = cluster {
            // While a slot migrates, each caller gets a separate call: the keys of different callers may be on
            // different nodes.
            for job in jobs.iter_mut() {
                job.call_per_caller = job.redirect.is_some() || cluster.moves(job.partition);
            }
            // A stable sort keeps the order of each caller's checks.
            jobs.sort_by(|a, b| a.group().cmp(&b.group()));
        }
        for group in jobs.chunk_by(|a, b| a.group() == b.group()) {
            let prefix_of_group = match cluster {
                Some(cluster) => cluster.prefix(group[0].partition),
                None => prefix,
            };
            if *len == calls.len() {
                calls.push(ScriptCall::default());
            }
            let call = &mut calls[*len];
            *len += 1;
            call.now = now;
            call.clock = clock;
            call.needs_asking = group[0].needs_asking();
            // The most frequent call: it needs no map to find equal checks.
            if let [job] = group {
                call.push_only(prefix_of_group, &job.check);
                continue;
            }
            for job in group {
                call.push(prefix_of_group, &job.check);
            }
        }
    }

    fn calls(&self) -> &[ScriptCall] {
        &self.calls[..self.len]
    }

    /// Returns the calls whose estimate of Redis's time was wrong, with that time.
    fn outside(&self, replies: &Replies) -> Vec<(usize, i64)> {
        let calls = self.calls().iter().zip(replies).enumerate();
        let outside = |(i, (call, reply)): (usize, (&ScriptCall, &Result<Value, RedisError>))| {
            Some((i, call.outside(reply.as_ref().ok()?)?))
        };
        calls.filter_map(outside).collect()
    }

    /// Corrects the estimate of Redis's time, in these calls and for later ones.
    fn set_clocks(&mut self, outside: &[(usize, i64)], clock: &RedisClock) {
        for &(i, at) in outside {
            self.calls[i].clock = at;
            clock.set(at);
        }
        for job in &self.jobs {
            // An invalid window has no borders, so the script decides nothing again.
            let _ = job.check.prepare(|| clock.micros_at(instant()));
        }
    }
}

/// Replaces the replies of the calls `outside` of a calendar's borders, which have decided nothing, by the replies of the second
/// attempt. If that fails, the other calls were decided nevertheless.
fn merged(
    mut replies: Replies,
    outside: &[(usize, i64)],
    again: Result<Replies, StoreError>,
) -> Result<Replies, StoreError> {
    match again {
        Ok(again) => {
            for (&(call, _), reply) in outside.iter().zip(again) {
                replies[call] = reply;
            }
        }
        Err(error) if outside.len() == replies.len() => return Err(error),
        Err(error) => {
            for &(call, _) in outside {
                replies[call] = Err(lost(&error));
            }
        }
    }
    Ok(replies)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a cluster, a master decides the calls of several partitions.
    #[test]
    fn a_failed_second_attempt_keeps_other_replies() {
        let replies = |numbers: &[i64]| -> Replies {
            let mut replies = Replies::new();
            for number in numbers {
                replies.push(Ok(Value::Int(*number)));
            }
            replies
        };
        let numbers = |replies: Replies| -> Vec<Option<Value>> {
            replies.into_iter().map(Result::ok).collect()
        };
        let failed = || Err(StoreError::new(ErrorKind::Timeout));
        let number = |number| Some(Value::Int(number));
        let one = [(1, 7)];
        let kept = merged(replies(&[1, 2, 3]), &one, failed()).unwrap();
        assert_eq!(numbers(kept), [number(1), None, number(3)]);
        let decided = merged(replies(&[1, 2, 3]), &one, Ok(replies(&[9]))).unwrap();
        assert_eq!(numbers(decided), [number(1), number(9), number(3)]);
        let all = [(0, 7), (1, 7)];
        let error = merged(replies(&[1, 2]), &all, failed()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
    }
}
