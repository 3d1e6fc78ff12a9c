//! The script calls of one round trip. A single server decides all checks in one call, and a node of a cluster those of each
//! partition in one.

use super::batch::Batch;
use super::future::Job;
use super::inner::Inner;

#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Those beyond `len` wait to be used again.
    each: Vec<Call>,
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

impl Calls {
    pub(super) fn clear(&mut self) {
        for call in &mut self.each[..self.len] {
            call.batch.clear();
            call.jobs = 0;
        }
        self.len = 0;
    }

    /// Makes the calls that ask these checks, and puts the checks into their order.
    pub(super) fn make(&mut self, jobs: &mut [Job], inner: &Inner) {
        let cluster = inner.transport.cluster();
        if let Some(cluster) = cluster {
            // Callers of a partition that is being moved are asked one by one.
            for job in jobs.iter_mut() {
                job.alone = job.redirect.is_some() || cluster.moves(job.partition);
            }
            // Stable, so that each caller's checks stay in their order.
            jobs.sort_by(|a, b| a.group().cmp(&b.group()));
        }
        for group in jobs.chunk_by(|a, b| a.group() == b.group()) {
            let prefix = cluster.map_or(&*inner.prefix, |cluster| cluster.prefix(group[0].partition));
            if self.len == self.each.len() {
                self.each.push(Call::default());
            }
            let call = &mut self.each[self.len];
            self.len += 1;
            (call.jobs, call.asks) = (group.len(), group[0].asks());
            for job in group {
                call.batch.push(prefix, &job.check);
            }
        }
    }

    pub(super) fn as_slice(&self) -> &[Call] {
        &self.each[..self.len]
    }
}
