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
    let since = instant();
    let list = || match store.backend().waiters() {
        Some(waiters) => waiters.op_queues(),
        None => own.cloned().into_iter().collect(),
    };
    // Kept until the end: a queue that is dropped with its layer takes its count of lost operations with it.
    let mut queues = list();
    let lost_before = lost(&queues);
    loop {
        let operations = queues.iter().map(OpQueue::owed).sum();
        // After the sum: an operation that has ended may have left its refunds to a new queue.
        let has_new = add_new(&mut queues, list());
        let unreconciled = store.backend().unreconciled();
        if operations == 0 && !has_new && unreconciled.accounts == 0 {
            return lost(&queues) == lost_before;
        }
        let is_in_vain = unreconciled.is_outage || Handle::try_current().is_err();
        if is_in_vain || since.elapsed() >= TIMEOUT {
            store.backend().failed(&unflushed(operations, unreconciled));
            return false;
        }
        sleep(INTERVAL).await;
    }
}

/// Adds the queues that are not in the list. Returns `true` if there are any.
fn add_new(queues: &mut Vec<OpQueue>, all: Vec<OpQueue>) -> bool {
    let before = queues.len();
    for queue in all {
        if !queues.iter().any(|known| known.is(&queue)) {
            queues.push(queue);
        }
    }
    queues.len() > before
}

fn lost(queues: &[OpQueue]) -> usize {
    queues.iter().map(OpQueue::lost).sum()
}

fn unflushed(operations: usize, unreconciled: Unreconciled) -> StoreError {
    let text = format!(
        "the end of the process would lose {operations} charges, refunds and releases, and the local grants of {} callers: \
         flush again before it ends",
        unreconciled.accounts
    );
    StoreError::with_source(ErrorKind::Timeout, io::Error::other(text)).check_only()
}
