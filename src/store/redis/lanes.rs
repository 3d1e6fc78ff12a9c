//! One queue, few lanes: the checks in flight at the same moment share a round trip.
//!
//! A check waits in a bounded queue. A lane is a task that takes what is there, sends it as one script call over one
//! pooled connection, answers every check, and goes on until the queue is empty; then it ends. A check that comes
//! while fewer lanes run than may starts one, so that an idle store adds no delay and holds no task.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::{RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

use super::denials::Denials;
use super::pool::{Failures, Manager};
use super::script::{self, Batch};
use crate::limit::{Check, Decision, Source, Verdicts};
use crate::store::clock::instant;
use crate::store::{Error, ErrorKind, Observers, lock};

pub(super) struct Lanes {
    pub(super) pool: bb8::Pool<Manager>,
    pub(super) failures: Failures,
    pub(super) prefix: Box<str>,
    pub(super) limits: Limits,
    pub(super) denials: Denials,
    pub(super) observer: Option<Observers>,
    /// A test's own time; 0 for Redis's.
    pub(super) now: Arc<AtomicI64>,
    pub(super) queue: Mutex<Queue>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) lanes: usize,
    pub(super) queue: usize,
    pub(super) batch: usize,
    pub(super) timeout: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    jobs: VecDeque<Job>,
    /// How many run.
    lanes: usize,
    /// What lanes that have ended worked with.
    spare: Vec<Work>,
}

/// What a lane works with: the checks that it has taken, and the call that asks them.
#[derive(Debug, Default)]
struct Work {
    jobs: Vec<Job>,
    batch: Batch,
}

/// A check that waits for its answer.
#[derive(Debug)]
struct Job {
    check: Check,
    since: Instant,
    answer: oneshot::Sender<Result<Decision, Error>>,
}

impl Lanes {
    /// Puts a check into the queue, and starts a lane if another may run.
    ///
    /// # Errors
    ///
    /// The future of its answer, if that is not known at once.
    pub(super) fn enqueue(self: &Arc<Self>, check: Check) -> Result<Result<Decision, Error>, RedisFuture> {
        let check = match self.denials.answer(check) {
            Ok(decision) => return Ok(Ok(decision)),
            Err(check) => check,
        };
        let (answer, receiver) = oneshot::channel();
        let job = Job { check, since: instant(), answer };
        let start = {
            let mut queue = self.queue();
            if queue.jobs.len() >= self.limits.queue {
                return Ok(Err(Error::new(ErrorKind::QueueFull).unsent()));
            }
            queue.jobs.push_back(job);
            (queue.lanes < self.limits.lanes).then(|| {
                queue.lanes += 1;
                queue.spare.pop().unwrap_or_default()
            })
        };
        if let Some(work) = start {
            let lane = Lane::new(self, work);
            match Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn(lane.run())),
                // Dropping the lane takes it off the count; the job stays for nobody, since we drop its receiver.
                Err(_) => return Ok(Err(Error::new(ErrorKind::NoRuntime).unsent())),
            }
        }
        Err(RedisFuture { state: State::Waiting(receiver) })
    }

    pub(super) fn check(self: &Arc<Self>, check: Check) -> RedisFuture {
        match self.enqueue(check) {
            Ok(answer) => RedisFuture { state: State::Ready(Some(answer)) },
            Err(waiting) => waiting,
        }
    }

    /// Decides a check that reads and writes as any other.
    pub(super) async fn ping(self: &Arc<Self>) -> Result<(), Error> {
        self.check(Check::probe()).await.map(drop)
    }

    /// Says that the instance of this name is alive for so long. How many are.
    pub(super) async fn announce(&self, name: &str, alive: Duration) -> Result<u32, Error> {
        static SCRIPT: LazyLock<redis::Script> =
            LazyLock::new(|| redis::Script::new(include_str!("../../../lua/announce.lua")));
        let mut failures = self.failures.subscribe();
        let call = async {
            let mut connection = checkout(&self.pool, &mut failures).await?;
            let mut call = SCRIPT.prepare_invoke();
            call.key(format!("{}:instances", self.prefix)).arg(name).arg(alive.as_millis() as u64);
            connection.invoke(&call).await.map_err(super::error)
        };
        timeout(self.limits.timeout, call).await.map_err(|_| Error::new(ErrorKind::Timeout))?
    }

    /// The decision that Redis made on a call that was sent at this time.
    fn decision(&self, check: Check, verdicts: Verdicts, sent: i64) -> Decision {
        self.denials.learn(&check, &verdicts, sent);
        check.answer(verdicts, Source::Redis)
    }

    /// Tells of a failure that no check was answered with.
    pub(super) fn failed(&self, error: &Error) {
        if let Some(observer) = &self.observer {
            observer.0.failed(error);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }
}

struct Lane {
    lanes: Arc<Lanes>,
    failures: watch::Receiver<Option<RedisError>>,
    work: Work,
    /// Whether it is in the queue's count of lanes.
    counted: bool,
}

impl Lane {
    /// A lane that the queue has counted already.
    fn new(lanes: &Arc<Lanes>, work: Work) -> Self {
        Self { lanes: Arc::clone(lanes), failures: lanes.failures.subscribe(), work, counted: true }
    }

    async fn run(mut self) {
        while self.take() {
            if self.work.jobs.is_empty() {
                continue;
            }
            let sent = self.lanes.denials.now();
            let reply = self.call().await;
            let Work { jobs, batch } = &mut self.work;
            match reply.and_then(|reply| batch.read(reply)) {
                Ok(verdicts) => {
                    for (Job { check, answer, .. }, verdicts) in jobs.drain(..).zip(verdicts) {
                        // A caller that has gone away since was charged all the same.
                        let _ = answer.send(verdicts.map(|verdicts| self.lanes.decision(check, verdicts, sent)));
                    }
                }
                Err(error) => {
                    for job in jobs.drain(..) {
                        let _ = job.answer.send(Err(error.clone()));
                    }
                    // What waits behind a connection that fails would meet that too, one time-out after the other.
                    if error.is_of_connection() {
                        jobs.extend(self.lanes.queue().jobs.drain(..));
                    }
                    for job in jobs.drain(..) {
                        let _ = job.answer.send(Err(error.clone().unsent()));
                    }
                }
            }
        }
    }

    /// Moves what waits into an empty batch, up to its bound. `false` if nothing waits: the lane ends.
    fn take(&mut self) -> bool {
        let Work { jobs, batch } = &mut self.work;
        batch.clear();
        let most = self.lanes.limits.batch;
        let waiting = {
            let mut queue = self.lanes.queue();
            if queue.jobs.is_empty() {
                // A failure may have emptied the whole queue into it.
                jobs.shrink_to(most);
                // Under the same lock, or a check that comes now would rely on a lane that has ended.
                queue.lanes -= 1;
                queue.spare.push(mem::take(&mut self.work));
                self.counted = false;
                return false;
            }
            let count = queue.jobs.len().min(most);
            jobs.extend(queue.jobs.drain(..count));
            queue.jobs.len()
        };
        let now = instant();
        jobs.retain_mut(|job| !job.answer.is_closed());
        let late = |job: &Job| now.duration_since(job.since) > self.lanes.limits.timeout;
        for job in jobs.extract_if(.., |job| late(job)) {
            let _ = job.answer.send(Err(Error::new(ErrorKind::Timeout).unsent()));
        }
        for job in jobs.iter() {
            batch.push(&self.lanes.prefix, &job.check);
        }
        if let Some(observer) = &self.lanes.observer
            && !jobs.is_empty()
        {
            observer.0.sends(jobs.len(), waiting);
        }
        true
    }

    async fn call(&mut self) -> Result<Value, Error> {
        match timeout(self.lanes.limits.timeout, self.attempt()).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(ErrorKind::Timeout)),
        }
    }

    async fn attempt(&mut self) -> Result<Value, Error> {
        let (lanes, batch) = (&*self.lanes, &self.work.batch);
        let now = lanes.now.load(Ordering::Relaxed);
        let mut connection = checkout(&lanes.pool, &mut self.failures).await?;
        let mut result = connection.call(&batch.by_hash(now)).await;
        // The one failure that is known to have charged nothing.
        if result.as_ref().is_err_and(|e| e.kind() == redis::ServerErrorKind::NoScript.into()) {
            result = connection.call(&batch.by_source(now)).await;
        }
        if result.as_ref().is_ok_and(script::is_read_only) {
            connection.give_up();
        }
        result.map_err(super::error)
    }
}

/// A connection that is alive, or why there is none.
async fn checkout<'a>(
    pool: &'a bb8::Pool<Manager>,
    failures: &mut watch::Receiver<Option<RedisError>>,
) -> Result<bb8::PooledConnection<'a, Manager>, Error> {
    loop {
        let mut connection = get(pool, failures).await?;
        if connection.is_alive().await {
            return Ok(connection);
        }
    }
}

/// A connection of the pool, or why there is none: bb8 alone would leave us waiting after a failure to connect.
async fn get<'a>(
    pool: &'a bb8::Pool<Manager>,
    failures: &mut watch::Receiver<Option<RedisError>>,
) -> Result<bb8::PooledConnection<'a, Manager>, Error> {
    failures.mark_unchanged();
    let mut getting = pin!(pool.get());
    let got = {
        let mut failing = pin!(failures.changed());
        poll_fn(|cx| match getting.as_mut().poll(cx) {
            Poll::Ready(got) => Poll::Ready(Some(got)),
            Poll::Pending => failing.as_mut().poll(cx).map(|_| None),
        })
        .await
    };
    match got {
        Some(Ok(connection)) => Ok(connection),
        Some(Err(bb8::RunError::User(error))) => Err(super::error(error)),
        Some(Err(bb8::RunError::TimedOut)) => Err(Error::new(ErrorKind::Timeout)),
        None => Err(match &*failures.borrow() {
            Some(error) => super::error(error.clone()),
            None => Error::new(ErrorKind::Unreachable),
        }),
    }
}

/// When the task is dropped with its runtime: the next check starts another lane.
impl Drop for Lane {
    fn drop(&mut self) {
        if self.counted {
            let mut queue = self.lanes.queue();
            queue.lanes -= 1;
            if queue.lanes == 0 {
                // Nobody is left to send them, and perhaps nobody comes to start another lane.
                queue.jobs.clear();
            }
        }
    }
}

/// Resolves to the answer of a [`RedisStore`](crate::RedisStore).
#[derive(Debug)]
pub struct RedisFuture {
    state: State,
}

#[derive(Debug)]
enum State {
    /// Known at once; none once it has been told.
    Ready(Option<Result<Decision, Error>>),
    Waiting(oneshot::Receiver<Result<Decision, Error>>),
}

impl Future for RedisFuture {
    type Output = Result<Decision, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let nobody = || Err(Error::new(ErrorKind::NoRuntime));
        Poll::Ready(match &mut self.state {
            State::Waiting(receiver) => ready!(Pin::new(receiver).poll(cx)).unwrap_or_else(|_| nobody()),
            State::Ready(answer) => answer.take().unwrap_or_else(nobody),
        })
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.prefix).field("limits", &self.limits).finish_non_exhaustive()
    }
}
