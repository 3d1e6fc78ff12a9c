//! One queue, few workers: the checks in flight at the same moment share a round trip.
//!
//! A check waits in a bounded [`queue`](super::queue). A [`worker`](super::worker) is a task that takes what is there, sends it
//! as one script call over one connection of the [`pool`](super::pool), answers every check, and goes on until the queue
//! is empty; then it ends. A check that comes while fewer workers run than may starts one, so that an idle store adds no
//! delay. [`runtimes`](super::runtimes) has a queue for each tokio runtime, and [`transport`](super::transport) knows how
//! Redis is reached.

use std::fmt;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::cluster::Cluster;
use super::cluster::redirect::Refusal;
use super::denial_cache::DenialCache;
use super::errors::error_of;
use super::future::{Job, RedisFuture};
use super::lua::Lua;
use super::queue::Full;
use super::runtimes::{Queues, runtime};
use super::transport::{Node, Transport};
use super::worker::Worker;
use crate::limit::{Check, Decision, Key, Source, Verdicts};
use crate::store::{Answer, ErrorKind, Observer, StoreError, contain, event, freed, lock};

pub(super) struct Inner {
    pub(super) transport: Transport,
    pub(super) prefix: Box<str>,
    /// Tells what this instance has in flight from what others have: random, and of 48 bits.
    pub(super) instance: u64,
    pub(super) limits: Limits,
    pub(super) denials: DenialCache,
    pub(super) observer: OnceLock<Arc<dyn Observer>>,
    /// A test's own time; 0 for Redis's.
    pub(super) now: Arc<AtomicI64>,
    pub(super) queues: Mutex<Queues>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) workers: usize,
    pub(super) queue: usize,
    pub(super) batch: usize,
    pub(super) timeout: Duration,
}

/// How many nodes may send us elsewhere.
const MAX_HOPS: usize = 4;

impl Inner {
    /// Answers what is known, and puts any other check into the queue.
    pub(super) fn check(self: &Arc<Self>, check: Check) -> Answer<RedisFuture> {
        if let Some(verdicts) = self.denials.verdicts(&check) {
            return Answer::ready(Ok(check.answer(verdicts, Source::Cached)));
        }
        let partition = self.transport.partition(check.key());
        match self.enqueue(check, partition) {
            Ok(future) => Answer::pending(future),
            Err(error) => Answer::ready(Err(error.unsent())),
        }
    }

    /// Puts a check into the queue of its partition's node, and starts a worker if another may run.
    fn enqueue(self: &Arc<Self>, check: Check, partition: u16) -> Result<RedisFuture, StoreError> {
        let runtime = runtime()?;
        if let Some(error) = self.transport.cluster().and_then(|cluster| cluster.refused()) {
            return Err(error.clone());
        }
        let node = self.transport.node(partition);
        let (mut job, mut future) = Job::new(check, partition);
        let worker = self.with_queue(&runtime, node, |queue, spare| {
            job.place = queue.next_place();
            future.place = job.place;
            let start = queue.queue.push(job)?;
            Ok(start.then(|| (Arc::clone(&queue.pool), spare.pop().unwrap_or_default())))
        });
        if let Some((pool, work)) = worker.map_err(|Full| StoreError::new(ErrorKind::QueueFull))? {
            // A runtime that has ended drops it at once: that answers the check.
            runtime.spawn(Worker::new(self, node, pool, work).run());
        }
        Ok(future)
    }

    /// Puts checks that were not decided into the queues of these nodes, on this runtime.
    pub(super) fn requeue(self: &Arc<Self>, jobs: Vec<(Node, Job)>) {
        let Ok(runtime) = Handle::try_current() else { return };
        for (node, job) in jobs {
            let worker = self.with_queue(&runtime, node, |queue, spare| {
                let start = queue.queue.put(job);
                start.then(|| (Arc::clone(&queue.pool), spare.pop().unwrap_or_default()))
            });
            if let Some((pool, work)) = worker {
                runtime.spawn(Worker::new(self, node, pool, work).run());
            }
        }
    }

    /// Takes back a check that still waits in its queue. `false` if it does not.
    pub(super) fn withdraw(&self, future: &mut RedisFuture) -> bool {
        // Under the lock, so that no worker takes it between these two.
        let queues = self.queues();
        let waits =
            queues.have(future.place) || (self.transport.cluster().is_some() && queues.have_redirected(future.place));
        if waits {
            future.abandon();
        }
        waits
    }

    /// Decides a check that reads and writes as any other; in a cluster, one on each master.
    pub(super) async fn ping(self: &Arc<Self>) -> Result<(), StoreError> {
        let Some(cluster) = self.transport.cluster() else {
            return self.check(Check::probe(Key::PROBE)).await.map(drop);
        };
        self.refreshed().await?;
        let probes: Vec<_> = cluster
            .partition_of_each()
            .into_iter()
            .map(|partition| self.enqueue(Check::probe(Key::PROBE), partition))
            .collect();
        for probe in probes {
            drop(probe?.await?);
        }
        Ok(())
    }

    /// A key of no caller, and the node that has it.
    ///
    /// # Errors
    ///
    /// Why that is not known.
    pub(super) async fn shared(self: &Arc<Self>, name: &str) -> Result<(Node, String), StoreError> {
        let Some(cluster) = self.transport.cluster() else {
            return Ok((self.transport.node(0), format!("{}:{name}", self.prefix)));
        };
        if cluster.shared_node() == Node::NOWHERE {
            self.refreshed().await?;
        }
        Ok((cluster.shared_node(), Cluster::shared_key(&self.prefix, name)))
    }

    /// Calls a script with one key, that of no caller, on a node or wherever that sends us. The script may be run again.
    pub(super) async fn run_at(
        self: &Arc<Self>,
        mut node: Node,
        script: &Lua,
        command: impl Fn(&str, &str) -> Cmd,
    ) -> Result<Value, StoreError> {
        let (runtime, mut asks) = (runtime()?, false);
        let call = async {
            for _ in 0..MAX_HOPS {
                let pool = self.with_queue(&runtime, node, |queue, _| Arc::clone(&queue.pool));
                let mut failures = pool.failures();
                let mut connection = pool.checkout(&mut failures).await?;
                let mut replies = connection.run_each(script, &[asks], |_, name, text| command(name, text)).await;
                let reply = replies.as_mut().map(|replies| replies.pop());
                let error = match reply {
                    Ok(Some(Ok(reply))) => return Ok(reply),
                    Ok(Some(Err(error))) => error,
                    Ok(None) => return Err(StoreError::new(ErrorKind::Protocol)),
                    Err(error) => return Err(error_of(error)),
                };
                let refusal = self.transport.cluster().map(|cluster| (cluster, cluster.refusal(&error, node)));
                (node, asks) = match refusal {
                    Some((cluster, Refusal::Moved { slot, node })) => {
                        cluster.learn(slot, node);
                        (node, false)
                    }
                    Some((_, Refusal::Ask(node))) => (node, true),
                    _ => return Err(error_of(&error)),
                };
            }
            Err(StoreError::new(ErrorKind::NotReady))
        };
        timeout(self.limits.timeout, call).await.map_err(|_| StoreError::new(ErrorKind::Timeout))?
    }

    /// The answer to a check by what Redis said to a call that was sent at this time.
    pub(super) fn decided(
        &self,
        check: Check,
        verdicts: Result<Verdicts, StoreError>,
        sent_at: i64,
    ) -> Result<Decision, StoreError> {
        match &verdicts {
            Ok(verdicts) => self.denials.learn(&check, verdicts, sent_at),
            Err(_) => self.denials.forget(&check),
        }
        freed::tell(&check);
        verdicts.map(|verdicts| check.answer(verdicts, Source::Redis))
    }

    /// Tells of a failure that no check was answered with.
    pub(super) fn failed(&self, error: &StoreError) {
        if let Some(observer) = self.observer.get() {
            contain(|| observer.failed(&event::Failed::new(None, error)));
        }
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, Queues> {
        lock(&self.queues)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.prefix).field("limits", &self.limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::store::{ErrorKind, Observer, RedisStore, StoreError, event};

    struct Panics;

    impl Observer for Panics {
        fn failed(&self, _: &event::Failed<'_>) {
            panic!("the observer's own mistake");
        }
    }

    /// Or the announcement of an instance would end with it, or what asks a cluster for its slots.
    #[test]
    fn an_observer_that_panics_ends_no_task() {
        let store = RedisStore::builder("redis://127.0.0.1:1").observer(Panics).connect_lazy().unwrap();
        store.inner.failed(&StoreError::new(ErrorKind::Unreachable));
    }
}
