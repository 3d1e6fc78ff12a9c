use std::convert::Infallible;
use std::sync::Arc;

use tokio::runtime::Id;
use tokio::sync::oneshot;

use super::job::{Job, Place};
use crate::store::redis::batch::{Batch, Queue};
use crate::store::redis::topology::{Node, Pool, Topology};

#[derive(Default)]
pub(super) struct Queues {
    /// Usually one: a linear search is fastest.
    pub(super) each: Vec<NodeQueue>,
    /// Number of queues created so far, which numbers the next one.
    pub(super) made: u64,
    /// Buffers of ended workers, for the next ones.
    pub(super) spare: Vec<Work>,
}

/// The checks of one runtime for one node. Without a target, the checks whose node is unknown.
pub(super) struct NodeQueue {
    /// Identifies the queue. A runtime that is shutting down may create its queue again while workers of the removed
    /// queue still end.
    pub(super) number: u64,
    pub(super) runtime: Id,
    pub(super) target: Option<Target>,
    pub(super) jobs: Queue<Job>,
    /// Dropped with the store, which ends the task that waits for the runtime to shut down.
    pub(super) _store: oneshot::Sender<Infallible>,
}

/// A node and its connections.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) node: Node,
    pub(super) pool: Arc<Pool>,
}

impl NodeQueue {
    pub(super) fn is_of(&self, runtime: Id, node: Option<Node>) -> bool {
        self.runtime == runtime && self.target.as_ref().map(|target| target.node) == node
    }

    /// The place of the next job.
    pub(super) fn next_place(&self) -> Place {
        Place {
            queue: self.number,
            job: self.jobs.next_number(),
        }
    }
}

impl Queues {
    /// Returns `true` if the job at this place is queued, so that no worker has taken it.
    pub(super) fn have(&self, place: Place) -> bool {
        self.each
            .iter()
            .any(|queue| queue.number == place.queue && queue.jobs.has(place.job))
    }

    /// Returns `true` if the job whose first place this was is queued anywhere, possibly after a redirection.
    pub(super) fn have_redirected(&self, place: Place) -> bool {
        self.each
            .iter()
            .any(|queue| queue.jobs.iter().any(|job| job.place == place))
    }

    /// Drops the idle queues of nodes that are not in the cluster.
    pub(super) fn retain(&mut self, is_node: impl Fn(Node) -> bool) {
        let is_left = |queue: &NodeQueue| {
            queue
                .target
                .as_ref()
                .is_some_and(|target| !is_node(target.node))
        };
        self.each
            .retain(|queue| !is_left(queue) || !queue.jobs.is_idle());
    }

    /// Returns the queue of this number, or `None` if its runtime has shut down.
    pub(super) fn of(&mut self, number: u64) -> Option<&mut Queue<Job>> {
        self.each
            .iter_mut()
            .find(|queue| queue.number == number)
            .map(|queue| &mut queue.jobs)
    }

    /// Removes the queue of this number.
    pub(super) fn remove(&mut self, number: u64) -> Option<NodeQueue> {
        let index = self.each.iter().position(|queue| queue.number == number);
        index.map(|index| self.each.swap_remove(index))
    }
}

/// The buffers of a worker: the checks that it has taken, and the script calls for them, which share one round trip.
/// For a single server there is one call, for a node of a cluster one per partition.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) jobs: Vec<Job>,
    /// The calls from `len` on are empty and kept for reuse.
    calls: Vec<Call>,
    len: usize,
}

#[derive(Debug, Default)]
pub(super) struct Call {
    pub(super) batch: Batch,
    /// Number of its checks. They follow the checks of the previous call.
    pub(super) jobs: usize,
    /// Whether `ASKING` precedes it, because the node imports the slot.
    pub(super) asks: bool,
}

impl Work {
    /// Clears the calls for reuse.
    pub(super) fn clear_calls(&mut self) {
        for call in &mut self.calls[..self.len] {
            call.batch.clear();
        }
        self.len = 0;
    }

    /// Groups the checks and builds the calls.
    pub(super) fn make_calls(&mut self, topology: &Topology, prefix: &str) {
        let Self { jobs, calls, len } = self;
        let cluster = topology.cluster();
        if let Some(cluster) = cluster {
            // While a slot migrates, each caller gets a separate call: the keys of different callers may be on
            // different nodes.
            for job in jobs.iter_mut() {
                job.alone = job.redirect.is_some() || cluster.moves(job.partition);
            }
            // A stable sort keeps the order of each caller's checks.
            jobs.sort_by(|a, b| a.group().cmp(&b.group()));
        }
        for group in jobs.chunk_by(|a, b| a.group() == b.group()) {
            let prefix = cluster.map_or(prefix, |cluster| cluster.prefix(group[0].partition));
            if *len == calls.len() {
                calls.push(Call::default());
            }
            let call = &mut calls[*len];
            *len += 1;
            (call.jobs, call.asks) = (group.len(), group[0].asks());
            for job in group {
                call.batch.push(prefix, &job.check);
            }
        }
    }

    pub(super) fn calls(&self) -> &[Call] {
        &self.calls[..self.len]
    }

    /// The checks, grouped by call, and the calls.
    pub(super) fn parts(&mut self) -> (&mut Vec<Job>, &[Call]) {
        (&mut self.jobs, &self.calls[..self.len])
    }
}
