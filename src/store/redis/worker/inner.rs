//! The state that the clones of a store share: queues, cached denials, limits and the topology.

use std::convert::Infallible;
use std::fmt;
use std::future::pending;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use redis::{Cmd, FromRedisValue, ToRedisArgs};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::cluster::MAX_HOPS;
use super::job::{Job, no_runtime};
use super::queues::{NodeQueue, Queues, Target, Work};
use crate::error::{ErrorKind, StoreError};
use crate::limit::{Source, Verdicts};
use crate::observe::mistakes::MISSING_RIGHT;
use crate::observe::{Observer, event, or_log};
use crate::store::Waiters;
use crate::store::redis::batch::{DenialCache, Queue};
use crate::store::redis::link::{error_of, within};
use crate::store::redis::script::Script;
use crate::store::redis::settings::Settings;
use crate::store::redis::topology::cluster::Refusal;
use crate::store::redis::topology::{Node, Topology};
use crate::util::{contain, instant, lock};

pub(crate) struct Inner {
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(super) denials: DenialCache,
    pub(crate) observer: OnceLock<Arc<dyn Observer>>,
    /// The time that tests set; 0 for Redis's own time.
    pub(super) now: Arc<AtomicI64>,
    /// When a missing right was last reported.
    reported: Mutex<Option<Instant>>,
    queues: Mutex<Queues>,
    pub(crate) waiters: Waiters,
}

/// Number of keys that a step of a scan examines. It blocks Redis for about half a millisecond.
const SCAN_STEP: usize = 1_000;

impl Inner {
    /// Minimum interval between two reports of a missing right.
    const REPORT: Duration = Duration::from_secs(60);

    pub(crate) fn new(
        topology: Topology,
        settings: Settings,
        observer: OnceLock<Arc<dyn Observer>>,
        now: Arc<AtomicI64>,
    ) -> Self {
        Self {
            topology,
            denials: DenialCache::new(settings.denials),
            settings,
            observer,
            now,
            reported: Mutex::default(),
            queues: Mutex::default(),
            waiters: Waiters::default(),
        }
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, Queues> {
        lock(&self.queues)
    }

    /// Calls `act` under the lock with the queue of a node on this runtime, and with the buffers of ended workers.
    pub(super) fn with_queue<T>(
        self: &Arc<Self>,
        runtime: &Handle,
        node: Option<Node>,
        act: impl FnOnce(&mut NodeQueue, &mut Vec<Work>) -> T,
    ) -> T {
        let (result, watch) = {
            let mut queues = self.queues();
            let Queues { each, made, spare } = &mut *queues;
            let mut watch = None;
            let found = each
                .iter()
                .position(|queue| queue.is_of(runtime.id(), node));
            let index = found.unwrap_or_else(|| {
                *made += 1;
                let (queue, its_watch) = self.make_queue(*made, runtime, node);
                watch = Some(its_watch);
                each.push(queue);
                each.len() - 1
            });
            (act(&mut each[index], spare), watch)
        };
        if let Some(watch) = watch {
            // A runtime that has shut down drops the watch, whose `Drop` fails the queued checks.
            runtime.spawn(watch.run());
        }
        result
    }

    fn make_queue(
        self: &Arc<Self>,
        number: u64,
        runtime: &Handle,
        node: Option<Node>,
    ) -> (NodeQueue, Watch) {
        let (_store, store) = oneshot::channel();
        let Settings {
            connections,
            queue: max_queued,
            batch,
            timeout,
            ..
        } = self.settings;
        // In a cluster, start a second worker only for a full batch: more calls for one partition cost more than they
        // save.
        let backlog = if self.topology.cluster().is_some() {
            batch.get()
        } else {
            0
        };
        let workers = connections.get();
        let target = node.map(|node| Target {
            node,
            pool: self.topology.pool(node, workers, timeout).into(),
        });
        let max_workers = if target.is_some() { workers } else { 1 };
        let jobs = Queue::new(max_queued.get(), max_workers, backlog);
        let watch = Watch {
            inner: Arc::downgrade(self),
            queue: number,
            store,
        };
        (
            NodeQueue {
                number,
                runtime: runtime.id(),
                target,
                jobs,
                _store,
            },
            watch,
        )
    }

    /// Calls a script with a key that belongs to no caller, and two arguments, following redirects from `node`. The
    /// script may run twice, so it must be idempotent.
    pub(crate) async fn run_shared<T: FromRedisValue>(
        self: &Arc<Self>,
        node: Node,
        script: &Script,
        name: &str,
        arg: impl ToRedisArgs,
        expires: Duration,
    ) -> Result<T, StoreError> {
        let (runtime, key) = (
            runtime()?,
            self.topology.shared_key(&self.settings.prefix, name),
        );
        let command = |_, command: &str, script: &str| {
            let mut cmd = Cmd::new();
            cmd.arg(command)
                .arg(script)
                .arg(1)
                .arg(&key)
                .arg(&arg)
                .arg(expires.as_millis() as u64);
            cmd
        };
        let call = async {
            let (mut node, mut asks) = (node, false);
            for _ in 0..=MAX_HOPS {
                let target = self.with_queue(&runtime, Some(node), |queue, _| queue.target.clone());
                let Some(Target { pool, .. }) = target else {
                    break;
                };
                let mut failures = pool.failures();
                let mut connection = pool.checkout(&mut failures).await?;
                let replies = connection
                    .run(|_| script, &[asks], command)
                    .await
                    .map_err(|error| error_of(&error))?;
                let error = match replies.into_iter().next() {
                    Some(Ok(reply)) => {
                        return redis::from_redis_value(reply)
                            .map_err(|error| error_of(&error.into()));
                    }
                    Some(Err(error)) => error,
                    None => break,
                };
                let Some(cluster) = self.topology.cluster() else {
                    return Err(error_of(&error));
                };
                (node, asks) = match self.refused(cluster, &error, node) {
                    Refusal::Moved { node, .. } => (node, false),
                    Refusal::Ask(node) => (node, true),
                    _ => return Err(error_of(&error)),
                };
            }
            Err(StoreError::new(ErrorKind::NotReady))
        };
        within(self.settings.timeout, call)
            .await
            .map_err(|error| error.with_server(self.topology.address(Some(node))))
    }

    /// Runs one step of a scan on a node. Returns the next cursor and the keys that match `pattern`.
    pub(crate) async fn scan(
        self: &Arc<Self>,
        node: Node,
        cursor: u64,
        pattern: &str,
    ) -> Result<(u64, Vec<Vec<u8>>), StoreError> {
        let target = self.with_queue(&runtime()?, Some(node), |queue, _| queue.target.clone());
        let Some(Target { pool, .. }) = target else {
            return Err(StoreError::new(ErrorKind::NotReady));
        };
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor)
            .arg("MATCH")
            .arg(pattern)
            .arg("COUNT")
            .arg(SCAN_STEP);
        let call = async {
            let mut failures = pool.failures();
            let mut connection = pool.checkout(&mut failures).await?;
            let reply = connection
                .ask(&scan)
                .await
                .map_err(|error| error_of(&error))?;
            redis::from_redis_value(reply).map_err(|error| error_of(&error.into()))
        };
        within(self.settings.timeout, call)
            .await
            .map_err(|error| error.with_server(self.topology.address(Some(node))))
    }

    /// Answers a check with the outcome of a call that was sent at `sent_at`, and updates the cached denials.
    pub(super) fn decide(&self, job: Job, verdicts: Result<Verdicts, StoreError>, sent_at: i64) {
        if let Err(error) = &verdicts
            && error.kind() == ErrorKind::Permission
        {
            self.lacks_right(error);
        }
        job.answer(|check| {
            match &verdicts {
                Ok(verdicts) => self.denials.learn(&check, verdicts, sent_at),
                Err(_) => self.denials.forget(&check),
            }
            self.waiters.freed(&check);
            verdicts.map(|verdicts| check.answer(verdicts, Source::Redis))
        });
    }

    /// Fails a check that may have been sent.
    pub(super) fn refuse(&self, job: Job, error: StoreError) {
        self.decide(job, Err(error), 0);
    }

    /// Reports a missing right, at most once a minute. The checks that need the right fail, but Redis decides all
    /// others, so the breaker of a fallback stays closed and reports no outage.
    fn lacks_right(&self, error: &StoreError) {
        let is_due = {
            let (mut reported, now) = (lock(&self.reported), instant());
            let is_due = reported.is_none_or(|at| now.duration_since(at) >= Self::REPORT);
            *reported = if is_due { Some(now) } else { *reported };
            is_due
        };
        if is_due {
            let cause = std::error::Error::source(error)
                .map(|cause| format!("{cause}; "))
                .unwrap_or_default();
            let problem = format!("{cause}{error}{MISSING_RIGHT}");
            contain(|| {
                or_log(self.observer.get()).misconfigured(&event::Misconfigured::new(&problem))
            });
        }
    }

    /// Reports a failure that no check returned.
    pub(crate) fn failed(&self, error: &StoreError) {
        contain(|| or_log(self.observer.get()).failed(&event::Failed::new(None, error)));
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// A task that ends with its runtime and then removes the queue and fails the checks in it.
struct Watch {
    inner: Weak<Inner>,
    queue: u64,
    store: oneshot::Receiver<Infallible>,
}

impl Watch {
    async fn run(mut self) {
        let _ = (&mut self.store).await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade() else {
            return;
        };
        let queue = inner.queues().remove(self.queue);
        for job in queue.into_iter().flat_map(|queue| queue.jobs.into_jobs()) {
            job.fail(no_runtime().not_sent());
        }
    }
}

/// Returns the current runtime.
///
/// # Errors
///
/// [`ErrorKind::NoRuntime`] outside of a runtime.
pub(super) fn runtime() -> Result<Handle, StoreError> {
    Handle::try_current().map_err(|_| no_runtime())
}

/// Returns `true` if the current runtime is shutting down: such a runtime drops new tasks immediately, before it drops
/// its first running task.
pub(super) fn runtime_is_ending() -> bool {
    let task = tokio::spawn(pending::<()>());
    let is_dropped = task.is_finished();
    task.abort();
    is_dropped
}

#[cfg(test)]
mod tests {
    use crate::error::{ErrorKind, StoreError};
    use crate::observe::{Observer, event};
    use crate::store::RedisStore;

    struct Panics;

    impl Observer for Panics {
        fn failed(&self, _: &event::Failed<'_>) {
            panic!("the observer's own mistake");
        }
    }

    /// A panic would otherwise end the task that announces this instance, or the query of the slots of a
    /// cluster.
    #[test]
    fn an_observer_that_panics_ends_no_task() {
        let store = RedisStore::builder("redis://127.0.0.1:1")
            .observer(Panics)
            .connect_lazy()
            .unwrap();
        store.inner.failed(&StoreError::new(ErrorKind::Unreachable));
    }
}
