//! Checks that have no node: the slots are not known yet, or their keys are on two nodes for a moment.

use std::time::Duration;

use tokio::time::sleep;

use super::refresh::Why;
use crate::store::redis::transport::Node;
use crate::store::redis::worker::Worker;
use crate::store::{ErrorKind, StoreError};

/// Before a check is tried again.
const PAUSE: Duration = Duration::from_millis(3);

impl Worker {
    /// Hands on what waits in the queue of [`Node::NOWHERE`], until it is empty.
    pub(in super::super) async fn place(mut self) {
        loop {
            // Meanwhile the checks are in the queue, where their callers may take them back.
            let found = match self.inner.transport.cluster() {
                Some(cluster) if cluster.map.load().is_empty() => self.inner.refreshed().await,
                _ => {
                    sleep(PAUSE).await;
                    Ok(())
                }
            };
            if self.take_jobs(usize::MAX).is_none() {
                return;
            }
            let unplaced = match found {
                Ok(()) => StoreError::new(ErrorKind::NotReady),
                Err(error) => error,
            };
            let (mut placed, mut left_over) = (vec![], false);
            for job in self.work.jobs.drain(..) {
                match self.inner.node_of(&job) {
                    Node::NOWHERE => {
                        left_over = true;
                        job.fail(unplaced.clone().unsent());
                    }
                    node => placed.push((node, job)),
                }
            }
            if left_over {
                self.inner.refresh(Why::Unknown);
            }
            self.inner.requeue(placed);
        }
    }
}
