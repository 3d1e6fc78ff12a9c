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
use crate::blocks::{BlockChange, BlockChangeKind, BlockedCaller, MAX};
use crate::error::{ErrorKind, StoreError};
use crate::util::instant;

/// Interval between two reads.
const EVERY: Duration = Duration::from_millis(500);
/// Maximum number of changes in one reply, which takes Redis about a millisecond.
const PAGE: usize = 1_000;

/// The changed blocks of one reply.
struct Page {
    blocks: Vec<(BlockedCaller, Instant)>,
    /// The time of the last change. `None` if nothing has changed.
    last: Option<i64>,
    /// Whether a block was ended early.
    has_ended: bool,
    is_full: bool,
}

impl SharedStore {
    /// Starts the task on this runtime, unless it runs.
    pub(super) fn sync_blocks(self: &Arc<Self>) {
        if !self.block_syncer.is_running() {
            let this = Arc::downgrade(self);
            self.block_syncer.spawn(None, |task| run(this, task));
        }
    }

    /// Sends the changes of this process. After an error, keeps the rest for the next attempt.
    pub(super) async fn send_block_changes(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.blocks.take_unsent();
        changes.reverse();
        while let Some(change) = changes.pop() {
            if let Err(error) = self.send_change(&change).await {
                changes.push(change);
                changes.reverse();
                self.blocks.put_back(changes);
                return Err(error);
            }
        }
        Ok(())
    }

    async fn send_change(self: &Arc<Self>, change: &BlockChange) -> Result<(), StoreError> {
        let now = instant();
        let (extends, time) = match change.kind {
            BlockChangeKind::Extend(end) => (1, end.saturating_duration_since(now)),
            BlockChangeKind::Begin(end) => (0, end.saturating_duration_since(now)),
            BlockChangeKind::End => (0, Duration::ZERO),
        };
        // After an outage, the block may have ended. Less than a millisecond would end that of another instance.
        let has_expired = change.kind != BlockChangeKind::End && time < Duration::from_millis(1);
        if has_expired {
            return Ok(());
        }
        let node = self.shared_node().await?;
        let call = KeyCall {
            script: &BLOCK,
            keys: self.block_keys(),
            args: (&change.caller[..], extends, MAX),
            ttl: time,
        };
        let _is_changed: bool = self.run_script(node, &call).await?;
        Ok(())
    }

    /// Reads the blocks that have changed after the time `since`, all for 0, and updates it.
    async fn read_blocks(self: &Arc<Self>, since: &mut i64) -> Result<(), StoreError> {
        loop {
            let page = self.read_page(*since).await?;
            if page.has_ended && *since > 0 {
                return self.read_all_blocks(since).await;
            }
            self.blocks.learn(&page.blocks);
            *since = page.last.unwrap_or(*since);
            if !page.is_full {
                return Ok(());
            }
        }
    }

    /// Replaces the blocks in memory.
    async fn read_all_blocks(self: &Arc<Self>, since: &mut i64) -> Result<(), StoreError> {
        let mut last = 0;
        let mut all = vec![];
        loop {
            let page = self.read_page(last).await?;
            all.extend(page.blocks);
            last = page.last.unwrap_or(last);
            if !page.is_full {
                self.blocks.replace(&all);
                *since = last;
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
    let (time, changes) = reply.split_first()?;
    let redis_now: i64 = time.parse().ok()?;
    let (changes, []) = changes.as_chunks::<3>() else {
        return None;
    };
    let mut page = Page {
        blocks: vec![],
        last: None,
        has_ended: false,
        is_full: changes.len() >= PAGE,
    };
    for [caller, time, end] in changes {
        // Some servers write a large score with an exponent.
        let time: f64 = time.parse().ok()?;
        let end: f64 = end.parse().ok()?;
        page.last = Some(time as i64);
        if caller.is_empty() {
            page.has_ended = true;
            continue;
        }
        let rest = u64::try_from(end as i64 - redis_now).unwrap_or(0);
        if rest > 0
            && let Some(end) = now.checked_add(Duration::from_millis(rest))
        {
            page.blocks
                .push((BlockedCaller::from_slice(caller.as_bytes()), end));
        }
    }
    Some(page)
}

async fn run(store: Weak<SharedStore>, _task: Task) {
    let mut since = 0;
    let mut has_failed = false;
    loop {
        let Some(inner) = store.upgrade() else { return };
        let outcome = async {
            inner.send_block_changes().await?;
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
        } else {
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
            "1000", "api:ann", "7", "4000", "", "8", "0", "api:bob", "9e0", "0",
        ]);
        let read = read.unwrap();
        let ann = BlockedCaller::from_slice(b"api:ann");
        assert_eq!(read.blocks, [(ann, instant() + Duration::from_secs(3))]);
        assert_eq!(
            (read.last, read.has_ended, read.is_full),
            (Some(9), true, false)
        );
        assert!(page(&["1000"]).unwrap().last.is_none());
        for malformed in [&["x"][..], &[], &["1", "a"], &["1", "a", "b", "2"]] {
            assert!(page(malformed).is_none(), "{malformed:?}");
        }
    }
}
