//! Counts the instances of a service: each announces itself in Redis, under one key prefix.
//!
//! The method [`RedisStore::announce`] is in this file, because it starts the task.

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::script::{ANNOUNCE, KeyCall};
use super::worker::{RedisStore, Shared};
use crate::error::{ErrorKind, StoreError};
use crate::store::Instances;

/// Interval between two announcements. An instance expires after three intervals.
const EVERY: Duration = Duration::from_secs(2);

impl RedisStore {
    /// Announces this instance in Redis, and counts the instances that are announced under the same
    /// key prefix: for [`Share::Alive`](crate::store::Share::Alive). The Redis user needs
    /// `+zremrangebyscore +zadd +zcard +pexpire` for it.
    ///
    /// Each instance announces itself every 2 seconds, off the request path, and stops counting 6
    /// seconds after its last announcement. This one continues until the last clone of the result
    /// is dropped, or this Tokio runtime shuts down. While Redis is unreachable, or the slot of the
    /// instances migrates in a cluster, the count does not change.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NoRuntime`](crate::store::ErrorKind::NoRuntime) outside a Tokio runtime.
    pub fn announce(&self) -> Result<Instances, StoreError> {
        let runtime = Handle::try_current()
            .map_err(|error| StoreError::with_source(ErrorKind::NoRuntime, error))?;
        let alive = Arc::new(AtomicU32::new(1));
        // Dropping the set ends the task.
        let mut announcer = JoinSet::new();
        announcer.spawn_on(
            run(Arc::downgrade(&self.inner), Arc::clone(&alive)),
            &runtime,
        );
        Ok(Instances::new(move || {
            let _announcer = &announcer;
            NonZeroU32::new(alive.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN)
        }))
    }
}

async fn run(inner: Weak<Shared>, alive: Arc<AtomicU32>) {
    let name = format!("{:016x}", RandomState::new().hash_one(0));
    // After an outage, the first instance finds only itself: accept a lower count only when the next count confirms it.
    let mut before = 1;
    loop {
        let Some(inner) = inner.upgrade() else { return };
        match announced(&inner, &name).await {
            Ok(count) => {
                alive.store(count.max(before), Ordering::Relaxed);
                before = count;
            }
            Err(error) => inner.failed(&error),
        }
        drop(inner);
        sleep(EVERY).await;
    }
}

/// Announces the instance of this name. Returns the number of live instances.
async fn announced(inner: &Arc<Shared>, name: &str) -> Result<u32, StoreError> {
    let node = inner.shared_node().await?;
    let call = KeyCall {
        script: &ANNOUNCE,
        key: inner
            .topology
            .shared_key(&inner.settings.prefix, "instances"),
        args: name,
        ttl: 3 * EVERY,
    };
    inner.run_script(node, &call).await
}
