//! A store of your own in a remote table, which offers no scripts: items of bytes, read and replaced
//! by compare-and-swap, as in DynamoDB. `examples/remote_store.rs` runs it.

#![allow(unreachable_pub, reason = "shared with the example")]
#![allow(clippy::disallowed_methods, reason = "the table has no clock")]

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tower_redis_ratelimit::check::{Check, Decision, Source};
use tower_redis_ratelimit::store::{
    Answer, Backend, Counts, ErrorKind, Store, StoreError, Waiters,
};

/// Stands for the remote table.
#[derive(Debug, Clone, Default)]
pub struct Table(Arc<Mutex<HashMap<Vec<u8>, Item>>>);

/// The bytes, and the time at which the table may delete the item.
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    pub bytes: Vec<u8>,
    pub expires_at: SystemTime,
}

impl Table {
    pub async fn read(&self, key: &[u8]) -> Option<Item> {
        // As over a network, others run between a read and a write.
        tokio::task::yield_now().await;
        let items = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        items.get(key).cloned()
    }

    /// Replaces an item. Returns `false` if its bytes are not `before`.
    pub async fn replace(&self, key: &[u8], before: Option<&Item>, item: Item) -> bool {
        tokio::task::yield_now().await;
        let mut items = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = items.get(key).map(|item| &item.bytes) == before.map(|item| &item.bytes);
        if is_same {
            items.insert(key.to_vec(), item);
        }
        is_same
    }
}

/// Counts in a table. All instances with this table share the counts. Their clocks decide, so an
/// instance whose clock is ahead refills earlier by that.
#[derive(Debug, Clone, Default)]
pub struct Remote {
    table: Table,
    /// The requests of this instance that wait for the store.
    waiters: Waiters,
}

/// Maximum number of attempts of a check: each failed one means that another check of the caller was
/// written.
const ATTEMPTS: u32 = 1_000;

impl Remote {
    pub fn new(table: Table) -> Self {
        Self {
            table,
            waiters: Waiters::default(),
        }
    }

    async fn decide(self, check: Check) -> Result<Decision, StoreError> {
        let key = check.key().as_bytes();
        for _ in 0..ATTEMPTS {
            let before = self.table.read(key).await;
            let mut counts = match &before {
                None => Counts::default(),
                Some(item) => Counts::from_bytes(&item.bytes)
                    .ok_or_else(|| StoreError::new(ErrorKind::Protocol).check_only())?,
            };
            let decision = counts.decide(&check, SystemTime::now(), Source::Other("remote"));
            let item = Item {
                bytes: counts.to_bytes(),
                expires_at: counts.expires_at(),
            };
            let is_unchanged = before
                .as_ref()
                .is_some_and(|item_before| *item_before == item);
            if is_unchanged || self.table.replace(key, before.as_ref(), item).await {
                self.waiters.freed(&check);
                return Ok(decision);
            }
        }
        // Nothing was charged.
        Err(StoreError::new(ErrorKind::Timeout).not_sent().check_only())
    }
}

impl Store for Remote {
    type Future = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

    fn check(&self, check: Check) -> Answer<Self::Future> {
        Answer::pending(Box::pin(self.clone().decide(check)))
    }

    fn backend(&self) -> Backend<'_, Self::Future> {
        Backend::from(&self.waiters)
    }
}
