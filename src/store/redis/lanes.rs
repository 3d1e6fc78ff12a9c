//! One queue, few lanes: the checks in flight at the same moment share a round trip.
//!
//! A check waits in a bounded [`queue`](super::queue). A [`lane`](super::lane) is a task that takes what is there, sends it
//! as one script call over one connection of the [`pool`](super::pool), answers every check, and goes on until the queue
//! is empty; then it ends. A check that comes while fewer lanes run than may starts one, so that an idle store adds no
//! delay. [`runtimes`](super::runtimes) has a queue for each tokio runtime, and [`transport`](super::transport) knows how
//! Redis is reached.

use std::fmt;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;

use super::denials::Denials;
use super::future::{Job, RedisFuture};
use super::lane::Lane;
use super::queue::Full;
use super::runtimes::{Queues, no_runtime};
use super::transport::Transport;
use crate::limit::{Check, Decision, Source, Verdicts};
use crate::store::{Answer, Error, ErrorKind, Observer, event, lock};

pub(super) struct Lanes {
    pub(super) transport: Transport,
    pub(super) prefix: Box<str>,
    pub(super) limits: Limits,
    pub(super) denials: Denials,
    pub(super) observer: OnceLock<Arc<dyn Observer>>,
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
        let node = self.transport.node(check.key().as_bytes());
        let (job, mut future) = Job::new(check);
        let lane = self.with_queue(&runtime, node, |queue, spare| {
            future.place = queue.next_place();
            let start = queue.queue.push(job)?;
            Ok(start.then(|| (Arc::clone(&queue.pool), spare.pop().unwrap_or_default())))
        });
        if let Some((pool, work)) = lane.map_err(|Full| Error::new(ErrorKind::QueueFull))? {
            // A runtime that has ended drops it at once: that answers the check.
            runtime.spawn(Lane::new(self, pool, work).run());
        }
        Ok(future)
    }

    /// Takes back a check that still waits in its queue. `false` if it does not.
    pub(super) fn withdraw(&self, future: &mut RedisFuture) -> bool {
        // Under the lock, so that no lane takes it between these two.
        let queues = self.queues();
        let waits = queues.have(future.place);
        if waits {
            future.abandon();
        }
        waits
    }

    /// Decides a check that reads and writes as any other.
    pub(super) async fn ping(self: &Arc<Self>) -> Result<(), Error> {
        self.check(Check::probe()).await.map(drop)
    }

    /// The answer to a check by what Redis said to a call that was sent at this time.
    pub(super) fn decided(
        &self,
        check: Check,
        verdicts: Result<Verdicts, Error>,
        sent_at: i64,
    ) -> Result<Decision, Error> {
        match verdicts {
            Ok(verdicts) => {
                self.denials.learn(&check, &verdicts, sent_at);
                Ok(check.answer(verdicts, Source::Redis))
            }
            Err(error) => {
                self.denials.forget(&check);
                Err(error)
            }
        }
    }

    /// Tells of a failure that no check was answered with.
    pub(super) fn failed(&self, error: &Error) {
        if let Some(observer) = self.observer.get() {
            observer.failed(&event::Failed::new(None, error));
        }
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, Queues> {
        lock(&self.queues)
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.prefix).field("limits", &self.limits).finish_non_exhaustive()
    }
}
