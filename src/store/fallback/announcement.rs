//! Instances announce that they reconcile: each charges one shared count in the primary store.
//!
//! The count belongs to no caller. It holds the time until which at least one instance reconciles. An
//! announcement is never withdrawn: it expires. So it costs the primary store the same for any number
//! of instances, and no instance waits for a dead one.
//!
//! The methods of [`Partition`] here are apart from those that decide checks, since only the recovery
//! calls them.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::sleep;

use super::partition::Partition;
use crate::error::StoreError;
use crate::limit::{Check, Policies};
use crate::store::Store;
use crate::util::jittered;

impl<P: Store, F: Store> Partition<P, F> {
    /// Announces that this instance is reconciling until `work` is done. Each announcement holds for `time`.
    pub(super) async fn announced<T>(&self, time: Duration, work: impl Future<Output = T>) -> T {
        let check = || Check::charge_debt_of(self.probe, &Policies::reconciling(), time);
        let announcing = pin!(async {
            loop {
                let _ = self.asked_in_time(check()).await;
                sleep(jittered(time, 0.3..0.5)).await;
            }
        });
        match select(pin!(work), announcing).await {
            Either::Left((done, _)) => done,
            Either::Right((never, _)) => never,
        }
    }

    /// Returns the time until the last announcement expires, or `None` if no announcement holds.
    pub(super) async fn reconciling(&self) -> Result<Option<Duration>, StoreError> {
        let peek = Check::peek(self.probe, &Policies::reconciling(), 1);
        Ok(self.asked_in_time(peek).await?.retry_after())
    }
}
