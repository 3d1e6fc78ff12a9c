//! Each tokio runtime that uses a store has queues, workers and connections of its own, one set for each [`Node`]: no check
//! depends on a runtime but the one that it was made on. They are gone when that runtime ends.

use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Weak};

use tokio::runtime::{self, Handle};
use tokio::sync::oneshot;

use super::future::Job;
use super::inner::Inner;
use super::pool::Pool;
use super::queue::Queue;
use super::transport::Node;
use super::worker::Work;
use crate::store::{ErrorKind, StoreError};

#[derive(Debug, Default)]
pub(super) struct Queues {
    /// Mostly one.
    pub(super) each: Vec<NodeQueue>,
    /// How many were ever made: each has a number.
    made: u64,
    /// What workers that have ended worked with.
    pub(super) spare: Vec<Work>,
}

/// What waits for one node on one runtime, and the connections to send it by.
#[derive(Debug)]
pub(super) struct NodeQueue {
    number: u64,
    runtime: runtime::Id,
    node: Node,
    /// Also tells this queue from others: that of a runtime that is ending may be made anew while its workers still end.
    pub(super) pool: Arc<Pool>,
    pub(super) queue: Queue<Job>,
    /// Dropped with the store: ends the queue's [`Watch`].
    _store: oneshot::Sender<Infallible>,
}

/// Where a job was put: the numbers of a queue, and of the job in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Place {
    queue: u64,
    job: u64,
}

/// A task on a queue's runtime, dropped when that ends: it takes the queue away.
struct Watch {
    inner: Weak<Inner>,
    pool: Weak<Pool>,
    store: oneshot::Receiver<Infallible>,
}

impl Inner {
    /// Calls `act` with the queue of a node on this runtime, under the lock; also with what ended workers have left.
    pub(super) fn with_queue<T>(
        self: &Arc<Self>,
        runtime: &Handle,
        node: Node,
        act: impl FnOnce(&mut NodeQueue, &mut Vec<Work>) -> T,
    ) -> T {
        let (result, watch) = {
            let mut queues = self.queues();
            let Queues { each, made, spare } = &mut *queues;
            let mut watch = None;
            let id = runtime.id();
            let found = each.iter().position(|queue| queue.runtime == id && queue.node == node);
            let index = found.unwrap_or_else(|| {
                *made += 1;
                let (queue, its_watch) = self.make_queue(*made, id, node);
                watch = Some(its_watch);
                each.push(queue);
                each.len() - 1
            });
            (act(&mut each[index], spare), watch)
        };
        if let Some(watch) = watch {
            // A runtime that has ended drops it at once: that answers what waits.
            runtime.spawn(watch.run());
        }
        result
    }

    fn make_queue(self: &Arc<Self>, number: u64, runtime: runtime::Id, node: Node) -> (NodeQueue, Watch) {
        let (_store, store) = oneshot::channel();
        let limits = self.limits;
        // A second call for a partition is worth its cost only once there is enough for it.
        let backlog = if self.transport.cluster().is_some() { limits.batch } else { 0 };
        let max_workers = if node == Node::NOWHERE { 1 } else { limits.workers };
        let pool = Arc::new(Pool::new(self.transport.clone(), node, max_workers, limits.timeout));
        let watch = Watch { inner: Arc::downgrade(self), pool: Arc::downgrade(&pool), store };
        (
            NodeQueue { number, runtime, node, pool, queue: Queue::new(limits.queue, max_workers, backlog), _store },
            watch,
        )
    }
}

impl NodeQueue {
    /// The place of the job that is pushed next.
    pub(super) fn next_place(&self) -> Place {
        Place { queue: self.number, job: self.queue.next_number() }
    }
}

impl Queues {
    /// Whether the job at this place still waits: no worker has it.
    pub(super) fn have(&self, place: Place) -> bool {
        self.each.iter().any(|queue| queue.number == place.queue && queue.queue.has(place.job))
    }

    /// Whether the job that was put at this place first waits somewhere, though a node has sent it elsewhere.
    pub(super) fn have_redirected(&self, place: Place) -> bool {
        self.each.iter().any(|queue| queue.queue.iter().any(|job| job.place == place))
    }

    /// Drops what leads to the nodes that are no longer any, as far as it is not in use.
    pub(super) fn leave(&mut self, is_node: impl Fn(Node) -> bool) {
        self.each.retain(|queue| is_node(queue.node) || !queue.queue.is_idle());
    }

    /// The queue that has this pool. None if its runtime has ended.
    pub(super) fn of(&mut self, pool: &Arc<Pool>) -> Option<&mut Queue<Job>> {
        let queue = self.each.iter_mut().find(|queue| Arc::ptr_eq(&queue.pool, pool));
        queue.map(|queue| &mut queue.queue)
    }
}

impl Watch {
    async fn run(mut self) {
        let _ = (&mut self.store).await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade() else { return };
        let queue = {
            let each = &mut inner.queues().each;
            let index = each.iter().position(|queue| Arc::as_ptr(&queue.pool) == self.pool.as_ptr());
            index.map(|index| each.swap_remove(index))
        };
        for job in queue.into_iter().flat_map(|queue| queue.queue.into_jobs()) {
            job.fail(no_runtime().unsent());
        }
    }
}

/// The runtime of this call.
///
/// # Errors
///
/// [`ErrorKind::NoRuntime`].
pub(super) fn runtime() -> Result<Handle, StoreError> {
    Handle::try_current().map_err(|_| no_runtime())
}

/// Whether the runtime of this task is being shut down: from before it drops its first task, it takes no more of them.
pub(super) fn runtime_is_ending() -> bool {
    let task = tokio::spawn(pending::<()>());
    let is_dropped = task.is_finished();
    task.abort();
    is_dropped
}

/// For what is asked where there is no runtime, or was asked on one that has ended. It says nothing of Redis.
pub(super) fn no_runtime() -> StoreError {
    StoreError::new(ErrorKind::NoRuntime).of_check()
}
