//! Shares the blocks of callers among all instances, under one key prefix.
//!
//! Each instance has the blocks in memory, so its requests need no call for them. A task sends the changes of this
//! process, and reads the changes of other instances.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::script::{BLOCK, BLOCKS, KeyCall};
use super::worker::SharedStore;
use crate::background::Task;
use crate::blocks::{BlockChange, BlockChangeKind, BlockedCaller, MAX, TakenChanges};
use crate::error::{ErrorKind, StoreError};
use crate::util::instant;

/// Interval between two reads.
const EVERY: Duration = Duration::from_millis(500);
/// Maximum number of callers whose changes are sent before the next read: a flood must not delay the blocks of other
/// instances.
const MAX_SENT: usize = 100;
/// Maximum number of changes in one reply, which takes Redis about a millisecond.
const PAGE: usize = 1_000;

/// The changed blocks of one reply.
struct Page {
    /// In order, each with the end of the block. `None` if it was ended early.
    changes: Vec<(BlockedCaller, Option<Instant>)>,
    /// The time of the last change on this page. `None` if nothing has changed.
    last: Option<i64>,
    /// The time of the last change of all; 0 for none.
    last_of_all: i64,
    is_full: bool,
}

/// Begins the name of a caller whose block was ended early.
const ENDED: char = '\0';

impl SharedStore {
    /// Starts the task on this runtime, unless it runs.
    pub(super) fn sync_blocks(self: &Arc<Self>) {
        if !self.block_syncer.is_running() {
            let this = Arc::downgrade(self);
            self.block_syncer.spawn(None, |task| run(this, task));
        }
    }

    /// Sends changes by this process, in order. After an error, the rest is unsent again.
    pub(super) async fn send_block_changes(
        self: &Arc<Self>,
        mut changes: TakenChanges,
    ) -> Result<(), StoreError> {
        while let Some(change) = changes.next() {
            self.send_change(change).await?;
            changes.sent();
        }
        Ok(())
    }

    async fn send_change(self: &Arc<Self>, change: &BlockChange) -> Result<(), StoreError> {
        let always = match change.kind {
            BlockChangeKind::Extend(_) => true,
            BlockChangeKind::Begin(_) => false,
            BlockChangeKind::End { was_known } => was_known,
        };
        let mut time = Duration::ZERO;
        if let BlockChangeKind::Extend(end) | BlockChangeKind::Begin(end) = change.kind {
            time = end.saturating_duration_since(instant());
            // After an outage, the block may have ended. Less than a millisecond would end that of another instance.
            if time < Duration::from_millis(1) {
                return Ok(());
            }
        }
        let node = self.shared_node().await?;
        let call = KeyCall {
            script: &BLOCK,
            keys: self.block_keys(),
            args: (&change.caller[..], u8::from(always), MAX),
            ttl: time,
        };
        let _is_changed: bool = self.run_script(node, &call).await?;
        Ok(())
    }

    /// Reads the blocks that have changed after the time `since`, all for 0, and updates it.
    async fn read_blocks(self: &Arc<Self>, since: &mut i64) -> Result<(), StoreError> {
        loop {
            let page = self.read_page(*since).await?;
            if page.last_of_all < *since {
                // Redis has lost changes, and may have another clock. The blocks in memory stay.
                *since = 0;
                if page.last_of_all > 0 {
                    continue;
                }
            }
            self.blocks.learn(&page.changes);
            if let Some(last) = page.last {
                *since = last;
            }
            if !page.is_full {
                return Ok(());
            }
        }
    }

    async fn read_page(self: &Arc<Self>, since: i64) -> Result<Page, StoreError> {
        let node = self.shared_node().await?;
        let call = KeyCall {
            script: &BLOCKS,
            keys: self.block_keys(),
            args: (since, PAGE),
            ttl: Duration::ZERO,
        };
        let reply: Vec<String> = self.run_script(node, &call).await?;
        // After the call, so that no block ends here before it ends in Redis.
        page_of(&reply, instant()).ok_or_else(|| StoreError::new(ErrorKind::Protocol))
    }

    fn block_keys(&self) -> Vec<String> {
        let prefix = &self.settings.prefix;
        ["blocks", "block-changes"]
            .map(|name| self.topology.shared_key(prefix, name))
            .into()
    }
}

/// Decodes the reply of lua/blocks.lua. `None` if it is malformed.
fn page_of(reply: &[String], now: Instant) -> Option<Page> {
    let [time, last_of_all, changes @ ..] = reply else {
        return None;
    };
    let redis_now: i64 = time.parse().ok()?;
    let (changes, []) = changes.as_chunks::<3>() else {
        return None;
    };
    let mut page = Page {
        changes: vec![],
        last: None,
        last_of_all: number(last_of_all)?,
        is_full: changes.len() >= PAGE,
    };
    for [caller, time, end] in changes {
        page.last = Some(number(time)?);
        let rest = number(end)? - redis_now;
        if let Some(caller) = caller.strip_prefix(ENDED) {
            page.add(caller, None);
        } else if rest > 0 {
            page.add(caller, now.checked_add(Duration::from_millis(rest as u64)));
        }
    }
    Some(page)
}

/// Reads a score: some servers write a large one with an exponent.
fn number(score: &str) -> Option<i64> {
    let score: f64 = score.parse().ok()?;
    Some(score as i64)
}

impl Page {
    fn add(&mut self, caller: &str, end: Option<Instant>) {
        let caller = BlockedCaller::from_slice(caller.as_bytes());
        self.changes.push((caller, end));
    }
}

async fn run(store: Weak<SharedStore>, _task: Task) {
    let mut since = 0;
    let mut has_failed = false;
    loop {
        let Some(inner) = store.upgrade() else { return };
        let outcome = async {
            inner
                .send_block_changes(inner.blocks.take_unsent(MAX_SENT))
                .await?;
            inner.read_blocks(&mut since).await
        };
        match outcome.await {
            Ok(()) => has_failed = false,
            Err(error) => {
                // Once per outage: the observer is notified of the failed checks too.
                if !has_failed {
                    inner.failed(&error);
                }
                has_failed = true;
            }
        }
        let blocks = inner.blocks.clone();
        // So that the store can be dropped during the pause: then this task ends.
        drop(inner);
        if has_failed {
            tokio::time::sleep(EVERY).await;
        } else if !blocks.are_unsent() {
            drop(timeout(EVERY, blocks.changed()).await);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(reply: &[&str]) -> Option<Page> {
        let reply: Vec<String> = reply.iter().map(|text| (*text).to_owned()).collect();
        page_of(&reply, instant())
    }

    #[tokio::test(start_paused = true)]
    async fn replies_are_decoded() {
        let read = page(&[
            "1000",
            "12",
            "api:ann",
            "7",
            "4000",
            "\0api:eve",
            "8",
            "9000",
            "api:bob",
            "9e0",
            "0",
        ]);
        let read = read.unwrap();
        let named = |name: &str| BlockedCaller::from_slice(name.as_bytes());
        let end = Some(instant() + Duration::from_secs(3));
        assert_eq!(
            read.changes,
            [(named("api:ann"), end), (named("api:eve"), None)]
        );
        assert_eq!(
            (read.last, read.last_of_all, read.is_full),
            (Some(9), 12, false)
        );
        assert!(page(&["1000", "0"]).unwrap().last.is_none());
        for malformed in [
            &["x", "0"][..],
            &[],
            &["1"],
            &["1", "x"],
            &["1", "0", "a"],
            &["1", "0", "a", "b", "2"],
        ] {
            assert!(page(malformed).is_none(), "{malformed:?}");
        }
    }
}
