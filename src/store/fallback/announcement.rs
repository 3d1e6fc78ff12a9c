//! How the instances know of each other that they reconcile: each has a request in flight in the primary store as long.
//!
//! It belongs to no caller. Its slot expires, so that no instance waits for a dead one,
//! and in each partition of the primary store by itself.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::partition::Partition;
use crate::limit::{Check, Policies};
use crate::store::Store;

/// Interval of renewals: a third of the time to live of the slot. That is short enough that the others are back
/// within a second, though this one has said it last when the fault ended, and nobody has heard that it no longer does.
const EVERY: Duration = Duration::from_millis(200);

/// Says that this instance reconciles, until it is ended or dropped. If it is dropped, the announcement holds until
/// the slot expires: the instance has failed, and is going to try again.
pub(super) struct Announcement {
    done: oneshot::Sender<()>,
    task: JoinHandle<bool>,
}

impl Announcement {
    /// Says that this instance no longer reconciles. Returns whether the primary store has heard it.
    pub(super) async fn end(self) -> bool {
        let _ = self.done.send(());
        self.task.await.unwrap_or(false)
    }
}

impl<P: Store, F: Store> Partition<P, F> {
    /// Says that this instance reconciles.
    pub(super) fn announce(self: &Arc<Self>) -> Announcement {
        let (done, mut ended) = oneshot::channel();
        let partition = Arc::clone(self);
        let task = tokio::spawn(async move {
            let (probe, policies) = (partition.probe, Policies::reconciling());
            let mut is_heard = false;
            loop {
                is_heard |= partition
                    .reconciling(Check::renew(probe, &policies, partition.slot))
                    .await
                    .is_some();
                match timeout(EVERY, &mut ended).await {
                    Err(_) => {}
                    Ok(Ok(())) => break,
                    Ok(Err(_)) => return is_heard,
                }
            }
            partition
                .reconciling(Check::release(probe, &policies, partition.slot))
                .await;
            is_heard
        });
        Announcement { done, task }
    }

    /// How many other instances reconcile. This one no longer does, and says so again: it may not have been heard. `None` if
    /// the primary store does not say.
    pub(super) async fn others_reconciling(&self) -> Option<u32> {
        self.reconciling(Check::release(
            self.probe,
            &Policies::reconciling(),
            self.slot,
        ))
        .await
    }

    /// How many instances reconcile, after this check.
    async fn reconciling(&self, check: Check) -> Option<u32> {
        let decision = self.asked_in_time(check).await.ok()?;
        // A store that knows nothing of requests in flight may say anything.
        let left = decision.remaining();
        (left > 0).then(|| decision.capacity().saturating_sub(left))
    }
}
