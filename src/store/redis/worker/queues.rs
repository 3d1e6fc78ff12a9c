use std::convert::Infallible;
use std::sync::Arc;

use tokio::runtime::Id;
use tokio::sync::oneshot;

use super::job::{Job, Place};
use crate::store::redis::batch::{Batch, Queue};
use crate::store::redis::topology::{Node, Pool, Topology};

#[derive(Default)]
pub(super) struct Queues {
    /// Mostly one.
    pub(super) each: Vec<NodeQueue>,
    /// How many were ever made: each has a number.
    pub(super) made: u64,
    /// What workers that have ended worked with.
    pub(super) spare: Vec<Work>,
}

/// What waits on one runtime for one node; or for one to be told, without a target.
pub(super) struct NodeQueue {
    /// Tells it from others: that of a runtime that is ending may be made anew while its workers still end.
    pub(super) number: u64,
    pub(super) runtime: Id,
    pub(super) target: Option<Target>,
    pub(super) jobs: Queue<Job>,
    /// Dropped with the store: ends the task that waits for the end of the runtime.
    pub(super) _store: oneshot::Sender<Infallible>,
}

/// A node, and the connections to it.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) node: Node,
    pub(super) pool: Arc<Pool>,
}

impl NodeQueue {
    pub(super) fn is_of(&self, runtime: Id, node: Option<Node>) -> bool {
        self.runtime == runtime && self.target.as_ref().map(|target| target.node) == node
    }

    /// The place of the job that is pushed next.
    pub(super) fn next_place(&self) -> Place {
        Place {
            queue: self.number,
            job: self.jobs.next_number(),
        }
    }
}

impl Queues {
    /// Whether the job at this place still waits: no worker has it.
    pub(super) fn have(&self, place: Place) -> bool {
        self.each
            .iter()
            .any(|queue| queue.number == place.queue && queue.jobs.has(place.job))
    }

    /// Whether the job that was put at this place first waits somewhere, though a node has sent it elsewhere.
    pub(super) fn have_redirected(&self, place: Place) -> bool {
        self.each
            .iter()
            .any(|queue| queue.jobs.iter().any(|job| job.place == place))
    }

    /// Drops what leads to the nodes that are no longer any, as far as it is not in use.
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

    /// The queue of this number. None if its runtime has ended.
    pub(super) fn of(&mut self, number: u64) -> Option<&mut Queue<Job>> {
        self.each
            .iter_mut()
            .find(|queue| queue.number == number)
            .map(|queue| &mut queue.jobs)
    }

    /// Takes the queue of this number away.
    pub(super) fn remove(&mut self, number: u64) -> Option<NodeQueue> {
        let index = self.each.iter().position(|queue| queue.number == number);
        index.map(|index| self.each.swap_remove(index))
    }
}

/// What a worker works with: the checks that it has taken, and the script calls of one round trip that ask them. A
/// single server decides all checks in one call, and a node of a cluster those of each partition in one.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) jobs: Vec<Job>,
    /// Those beyond `len` wait to be used again.
    calls: Vec<Call>,
    len: usize,
}

#[derive(Debug, Default)]
pub(super) struct Call {
    pub(super) batch: Batch,
    /// How many checks it has, in their order.
    pub(super) jobs: usize,
    /// Whether the node is asked for a slot that is being moved to it.
    pub(super) asks: bool,
}

impl Work {
    /// Forgets the calls.
    pub(super) fn clear_calls(&mut self) {
        for call in &mut self.calls[..self.len] {
            call.batch.clear();
        }
        self.len = 0;
    }

    /// Makes the calls that ask the checks, and puts the checks into their order.
    pub(super) fn make_calls(&mut self, topology: &Topology, prefix: &str) {
        let Self { jobs, calls, len } = self;
        let cluster = topology.cluster();
        if let Some(cluster) = cluster {
            // Callers of a partition that is being moved are asked one by one.
            for job in jobs.iter_mut() {
                job.alone = job.redirect.is_some() || cluster.moves(job.partition);
            }
            // Stable, so that each caller's checks stay in their order.
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

    /// The checks, and the calls that ask them in their order.
    pub(super) fn parts(&mut self) -> (&mut Vec<Job>, &[Call]) {
        (&mut self.jobs, &self.calls[..self.len])
    }
}
