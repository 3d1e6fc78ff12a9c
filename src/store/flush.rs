//! Waits for the operations that this process owes a store.

use std::io;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::sleep;

use super::{Store, Unreconciled};
use crate::background::OpQueue;
use crate::error::{ErrorKind, StoreError};
use crate::util::instant;

/// Maximum duration of a flush. Longer than the usual deadlines of stores.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which a flush checks whether anything is left.
const INTERVAL: Duration = Duration::from_millis(1);

/// Flushes a store: see [`Store::flush`]. `own` is a queue of its operations that the store may not know, since a custom
/// store may have no hooks.
pub(crate) async fn flush(store: &impl Store, own: Option<&OpQueue>) -> bool {
    let (since, waiters) = (instant(), store.backend().waiters());
    loop {
        let operations = match (&waiters, own) {
            (Some(waiters), _) => waiters.owed(),
            (None, Some(own)) => own.owed(),
            (None, None) => 0,
        };
        let unreconciled = store.backend().unreconciled();
        if operations == 0 && unreconciled.accounts == 0 {
            return true;
        }
        let is_in_vain = unreconciled.is_outage || Handle::try_current().is_err();
        if is_in_vain || since.elapsed() >= TIMEOUT {
            store.backend().failed(&unflushed(operations, unreconciled));
            return false;
        }
        sleep(INTERVAL).await;
    }
}

fn unflushed(operations: usize, unreconciled: Unreconciled) -> StoreError {
    let text = format!(
        "the end of the process would lose {operations} charges, refunds and releases, and the local grants of {} callers: \
         flush again before it ends",
        unreconciled.accounts
    );
    StoreError::with_source(ErrorKind::Timeout, io::Error::other(text)).check_only()
}
