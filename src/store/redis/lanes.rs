//! One queue, few lanes: the checks in flight at the same moment share a round trip.
//!
//! A check waits in a bounded queue. A lane is a task that takes what is there, sends it as one script call over one
//! pooled connection, answers every check, and goes on until the queue is empty; then it ends. A check that comes
//! while fewer lanes run than may starts one, so that an idle store adds no delay.
//!
//! Each tokio runtime that uses the store has a queue, lanes and connections of its own, so that no check depends on a
//! runtime but the one that it was made on. They are gone when that runtime ends.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::{RedisError, Value};
use tokio::runtime::{self, Handle};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

use super::batch::Batch;
use super::denials::Denials;
use super::pool::{Manager, Pool};
use super::script;
use crate::limit::{Check, Decision, Source, Verdicts};
use crate::store::clock::instant;
use crate::store::{Answer, Error, ErrorKind, Observers, event, lock, polled_after_completion};

pub(super) struct Lanes {
    pub(super) manager: Manager,
    pub(super) prefix: Box<str>,
    pub(super) limits: Limits,
    pub(super) denials: Denials,
    pub(super) observer: Option<Observers>,
    /// A test's own time; 0 for Redis's.
    pub(super) now: Arc<AtomicI64>,
    pub(super) queues: Mutex<Queues>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) lanes: usize,
    pub(super) queue: usize,
    pub(super) batch: usize,
    pub(super) timeout: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Queues {
    /// Mostly one.
    each: Vec<Queue>,
    /// What lanes that have ended worked with.
    spare: Vec<Work>,
}

/// What waits on one runtime.
#[derive(Debug)]
struct Queue {
    runtime: runtime::Id,
    pool: Arc<Pool>,
    jobs: VecDeque<Job>,
    /// How many run.
    lanes: usize,
    /// Dropped with the store: ends the runtime's [`Watch`].
    _store: oneshot::Sender<Infallible>,
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
    /// Answers what is known, and puts any other check into the queue.
    pub(super) fn check(self: &Arc<Self>, check: Check) -> Answer<RedisFuture> {
        if let Some(verdicts) = self.denials.verdicts(&check) {
            return Answer::ready(Ok(check.answer(verdicts, Source::Cached)));
        }
        match self.enqueue(check) {
            Ok(future) => Answer::pending(future),
            Err(error) => Answer::ready(Err(error.unsent())),
        }
    }

    /// Puts a check into the queue, and starts a lane if another may run.
    fn enqueue(self: &Arc<Self>, check: Check) -> Result<RedisFuture, Error> {
        let runtime = Handle::try_current().map_err(|_| no_runtime())?;
        let (answer, receiver) = oneshot::channel();
        let job = Job { check, since: instant(), answer };
        let (watch, lane) = {
            let mut queues = self.queues();
            let Queues { each, spare } = &mut *queues;
            let (queue, watch) = self.queue_of(runtime.id(), each);
            if queue.jobs.len() >= self.limits.queue {
                return Err(Error::new(ErrorKind::QueueFull));
            }
            queue.jobs.push_back(job);
            let lane = (queue.lanes < self.limits.lanes).then(|| {
                queue.lanes += 1;
                (Arc::clone(&queue.pool), spare.pop().unwrap_or_default())
            });
            (watch, lane)
        };
        // A runtime that has ended drops them at once, and so answers the check.
        if let Some(watch) = watch {
            runtime.spawn(watch.run());
        }
        if let Some((pool, work)) = lane {
            runtime.spawn(Lane::new(self, runtime.id(), pool, work).run());
        }
        Ok(RedisFuture { answer: Some(receiver) })
    }

    /// The queue of a runtime. If it is a new one, the watch to start there.
    fn queue_of<'a>(
        self: &Arc<Self>,
        runtime: runtime::Id,
        queues: &'a mut Vec<Queue>,
    ) -> (&'a mut Queue, Option<Watch>) {
        let mut watch = None;
        let place = queues.iter().position(|queue| queue.runtime == runtime).unwrap_or_else(|| {
            let (_store, store) = oneshot::channel();
            let pool = Arc::new(Pool::new(self.manager.clone(), self.limits.lanes));
            watch = Some(Watch { lanes: Arc::downgrade(self), runtime, store });
            queues.push(Queue { runtime, pool, jobs: VecDeque::new(), lanes: 0, _store });
            queues.len() - 1
        });
        (&mut queues[place], watch)
    }

    /// Decides a check that reads and writes as any other.
    pub(super) async fn ping(self: &Arc<Self>) -> Result<(), Error> {
        self.check(Check::probe()).await.map(drop)
    }

    /// Says that the instance of this name is alive for so long. How many are.
    pub(super) async fn announce(self: &Arc<Self>, name: &str, alive: Duration) -> Result<u32, Error> {
        static SCRIPT: LazyLock<redis::Script> =
            LazyLock::new(|| redis::Script::new(include_str!("../../../lua/announce.lua")));
        let runtime = Handle::try_current().map_err(|_| no_runtime())?;
        let (pool, watch) = {
            let mut queues = self.queues();
            let (queue, watch) = self.queue_of(runtime.id(), &mut queues.each);
            (Arc::clone(&queue.pool), watch)
        };
        if let Some(watch) = watch {
            runtime.spawn(watch.run());
        }
        let mut failures = pool.failures();
        let call = async {
            let mut connection = pool.checkout(&mut failures).await?;
            let mut call = SCRIPT.prepare_invoke();
            call.key(format!("{}:instances", self.prefix)).arg(name).arg(alive.as_millis() as u64);
            connection.invoke(&call).await.map_err(|error| super::error(&error))
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
            observer.0.failed(&event::Failed::new(error));
        }
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        lock(&self.queues)
    }
}

/// What is asked where there is no runtime, or was made on one that has ended. It says nothing of Redis.
fn no_runtime() -> Error {
    Error::new(ErrorKind::NoRuntime).of_check()
}

/// A task of a runtime that is dropped when that ends, and then takes the runtime's queue away.
struct Watch {
    lanes: Weak<Lanes>,
    runtime: runtime::Id,
    store: oneshot::Receiver<Infallible>,
}

impl Watch {
    async fn run(mut self) {
        let _ = (&mut self.store).await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(lanes) = self.lanes.upgrade() else { return };
        let queue = {
            let mut queues = lanes.queues();
            let place = queues.each.iter().position(|queue| queue.runtime == self.runtime);
            place.map(|place| queues.each.swap_remove(place))
        };
        for job in queue.into_iter().flat_map(|queue| queue.jobs) {
            let _ = job.answer.send(Err(no_runtime().unsent()));
        }
    }
}

struct Lane {
    lanes: Arc<Lanes>,
    runtime: runtime::Id,
    pool: Arc<Pool>,
    failures: watch::Receiver<Option<RedisError>>,
    work: Work,
    /// Whether Redis may have been sent what it works on.
    sent: bool,
    /// Whether it is in the queue's count of lanes.
    counted: bool,
}

impl Lane {
    /// A lane that the queue has counted already.
    fn new(lanes: &Arc<Lanes>, runtime: runtime::Id, pool: Arc<Pool>, work: Work) -> Self {
        let (lanes, failures) = (Arc::clone(lanes), pool.failures());
        Self { lanes, runtime, pool, failures, work, sent: false, counted: true }
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
                        let decision = match verdicts {
                            Ok(verdicts) => Ok(self.lanes.decision(check, verdicts, sent)),
                            Err(error) => {
                                self.lanes.denials.forget(&check);
                                Err(error)
                            }
                        };
                        // A caller that has gone away since was charged all the same.
                        let _ = answer.send(decision);
                    }
                }
                Err(error) => {
                    for job in jobs.drain(..) {
                        self.lanes.denials.forget(&job.check);
                        let _ = job.answer.send(Err(error.clone()));
                    }
                    // What waits behind a connection that fails would meet that too, one time-out after the other.
                    if error.is_of_connection()
                        && let Some(queue) = self.lanes.queues().of(self.runtime)
                    {
                        jobs.extend(queue.jobs.drain(..));
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
        let max = self.lanes.limits.batch;
        let waiting = {
            let mut queues = self.lanes.queues();
            let Some(queue) = queues.of(self.runtime) else { return false };
            if queue.jobs.is_empty() {
                // A failure may have emptied the whole queue into it.
                jobs.shrink_to(max);
                // Under the same lock, or a check that comes now would rely on a lane that has ended.
                queue.lanes -= 1;
                self.counted = false;
                queues.spare.push(mem::take(&mut self.work));
                return false;
            }
            let count = queue.jobs.len().min(max);
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
            observer.0.sends(&event::Sends::new(jobs.len(), waiting));
        }
        true
    }

    async fn call(&mut self) -> Result<Value, Error> {
        self.sent = false;
        let result = match timeout(self.lanes.limits.timeout, self.attempt()).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(ErrorKind::Timeout)),
        };
        result.map_err(|error| match error.kind() {
            _ if self.sent => error,
            ErrorKind::Timeout if self.lanes.manager.is_tls() => super::no_tls().unsent(),
            _ => error.unsent(),
        })
    }

    async fn attempt(&mut self) -> Result<Value, Error> {
        let batch = &self.work.batch;
        let now = self.lanes.now.load(Ordering::Relaxed);
        let mut connection = self.pool.checkout(&mut self.failures).await?;
        self.sent = true;
        let mut result = connection.call(&batch.by_hash(now)).await;
        // The one failure that is known to have charged nothing.
        if result.as_ref().is_err_and(|e| e.kind() == redis::ServerErrorKind::NoScript.into()) {
            result = connection.call(&batch.by_source(now)).await;
        }
        if result.as_ref().is_ok_and(script::is_read_only) {
            connection.give_up();
        }
        result.map_err(|error| super::error(&error))
    }
}

impl Queues {
    /// The queue of a runtime that has not ended.
    fn of(&mut self, runtime: runtime::Id) -> Option<&mut Queue> {
        self.each.iter_mut().find(|queue| queue.runtime == runtime)
    }
}

/// When the task is dropped with its runtime: those who wait for the answer elsewhere get it.
impl Drop for Lane {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        let mut waiting = VecDeque::new();
        if let Some(queue) = self.lanes.queues().of(self.runtime) {
            queue.lanes -= 1;
            if queue.lanes == 0 {
                // Nobody is left to send them, and perhaps nobody comes to start another lane.
                waiting = mem::take(&mut queue.jobs);
            }
        }
        for job in self.work.jobs.drain(..) {
            let error = no_runtime();
            self.lanes.denials.forget(&job.check);
            let _ = job.answer.send(Err(if self.sent { error } else { error.unsent() }));
        }
        for job in waiting {
            let _ = job.answer.send(Err(no_runtime().unsent()));
        }
    }
}

/// Resolves to the answer of a [`RedisStore`](crate::RedisStore).
///
/// # Panics
///
/// If it is polled after it has answered.
#[derive(Debug)]
pub struct RedisFuture {
    /// None once it has been told.
    answer: Option<oneshot::Receiver<Result<Decision, Error>>>,
}

impl Future for RedisFuture {
    type Output = Result<Decision, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(receiver) = &mut self.answer else { polled_after_completion("RedisFuture") };
        let answer = ready!(Pin::new(receiver).poll(cx));
        self.answer = None;
        Poll::Ready(answer.unwrap_or_else(|_| Err(no_runtime())))
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.prefix).field("limits", &self.limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::num::NonZeroUsize;
    use std::sync::mpsc;

    use futures_util::FutureExt;
    use futures_util::future::join_all;
    use tokio::runtime::{Builder, Runtime};

    use super::*;
    use crate::store::{RedisStore, Store};
    use crate::support::{RedisServer, check, free_port};

    fn store(url: String, timeout: Duration) -> RedisStore {
        let one = NonZeroUsize::MIN;
        RedisStore::builder(url).connections(one).batch(one).timeout(timeout).connect_lazy().unwrap()
    }

    /// Answers until it is sent the word, tells of that, and says no more.
    fn falls_silent_at(word: &'static str) -> (String, mpsc::Receiver<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut buffer) {
                let asked = &buffer[..length];
                if asked.windows(word.len()).any(|part| part == word.as_bytes()) {
                    let _ = tell.send(());
                } else {
                    let commands = asked.iter().filter(|byte| **byte == b'*').count();
                    stream.write_all(&b"+OK\r\n".repeat(commands)).unwrap();
                }
            }
        });
        (url, told)
    }

    /// Only what was written to a connection may have been charged.
    #[tokio::test]
    async fn a_check_that_got_no_connection_was_not_sent() {
        let (silent, _told) = falls_silent_at("CLIENT");
        let short = Duration::from_millis(50);
        for (url, kind) in
            [(format!("redis://127.0.0.1:{}/", free_port()), ErrorKind::Unreachable), (silent, ErrorKind::Timeout)]
        {
            let store = store(url, short);
            // The first ones are of a call, and the others wait for it.
            for answer in join_all((0..4).map(|_| store.check(check("ann", "10/s")))).await {
                let error = answer.unwrap_err();
                assert!(error.kind() == kind && error.is_unsent(), "{error:?}");
            }
        }
        let (hears, _told) = falls_silent_at("EVALSHA");
        let store = store(hears, Duration::from_millis(500));
        let answers = join_all((0..2).map(|_| store.check(check("ann", "10/s")))).await;
        let errors = answers.into_iter().map(Result::unwrap_err).map(|error| (error.kind(), error.is_unsent()));
        assert!(errors.eq([(ErrorKind::Timeout, false), (ErrorKind::Timeout, true)]));
    }

    #[test]
    fn a_check_whose_runtime_ended_knows_whether_it_was_sent() {
        let runtime = || -> Runtime { Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap() };
        for (word, sent) in [("CLIENT", false), ("EVALSHA", true)] {
            let (url, told) = falls_silent_at(word);
            let store = store(url, Duration::from_secs(60));
            let ends = runtime();
            let guard = ends.enter();
            let checks = [store.check(check("ann", "10/s")), store.check(check("bob", "10/s"))];
            drop(guard);
            told.recv().unwrap();
            drop(ends);
            let errors = checks.map(|check| check.now_or_never().expect("an answer at once").unwrap_err());
            assert!(errors.iter().all(|error| error.kind() == ErrorKind::NoRuntime && error.is_of_check()));
            assert_eq!(errors.map(|error| error.is_unsent()), [!sent, true]);
            assert!(store.lanes.queues().each.is_empty(), "the runtime's connections are gone");
        }
    }

    /// What is not asked on a runtime is an error of that check alone.
    #[test]
    fn a_check_outside_of_a_runtime_was_not_sent() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let error = store.check(check("ann", "10/s")).now_or_never().unwrap().unwrap_err();
        assert!(error.kind() == ErrorKind::NoRuntime && error.is_of_check() && error.is_unsent(), "{error:?}");
    }

    #[tokio::test]
    #[should_panic = "`RedisFuture` polled after completion"]
    async fn an_answer_is_told_once() {
        let server = RedisServer::start();
        let mut answer = store(server.url(), Duration::from_secs(20)).check(check("ann", "10/s"));
        (&mut answer).await.unwrap();
        let _ = (&mut answer).await;
    }

    #[test]
    fn an_answer_that_was_there_at_once_stays() {
        let store = store("redis://127.0.0.1/".to_owned(), Duration::from_secs(1));
        let mut answer = store.check(check("ann", "10/s"));
        for _ in 0..2 {
            assert_eq!((&mut answer).now_or_never().unwrap().unwrap_err().kind(), ErrorKind::NoRuntime);
        }
    }
}
