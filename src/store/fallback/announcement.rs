//! How the instances know of each other that they reconcile: each charges one count in the primary store for as long.
//!
//! The count belongs to no caller, and says until when somebody reconciles, not who does. Nobody takes an announcement
//! back: it expires. So it costs the primary store the same for any number of instances, and no instance waits for a
//! dead one.

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
    /// Announces that this instance reconciles until `work` is done. The announcement holds for `time` after that.
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

    /// For how long an instance has announced that it reconciles. `None` if none has.
    pub(super) async fn reconciling(&self) -> Result<Option<Duration>, StoreError> {
        let peek = Check::peek(self.probe, &Policies::reconciling(), 1);
        Ok(self.asked_in_time(peek).await?.retry_after())
    }
}
