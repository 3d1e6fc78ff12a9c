//! Counts the instances of a service: each announces itself in Redis, under one key prefix.
//!
//! The method [`RedisStore::announce`] is in this file, because it starts the task.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::script::{ANNOUNCE, KeyCall};
use super::worker::{RedisStore, SharedStore};
use crate::error::{ErrorKind, StoreError};
use crate::store::Instances;

/// Interval between two announcements. An instance expires after three intervals.
const EVERY: Duration = Duration::from_secs(2);
/// Number of counts in the time after which an instance expires, with the first and the last one.
const COUNTS: usize = 4;

/// The last counts of the instances. The largest one is used: each live instance has announced itself since the first.
struct RecentCounts([u32; COUNTS]);

impl RecentCounts {
    /// Replaces the oldest count. Returns the largest one.
    fn add(&mut self, count: u32) -> u32 {
        self.0.rotate_left(1);
        self.0[COUNTS - 1] = count;
        self.largest()
    }

    /// Keeps the largest count for another [`COUNTS`]: after a failure, Redis may be empty.
    fn hold(&mut self) {
        self.0 = [self.largest(); COUNTS];
    }

    fn largest(&self) -> u32 {
        self.0.iter().fold(1, |largest, count| largest.max(*count))
    }
}

impl RedisStore {
    /// Announces this instance in Redis, and counts the instances that are announced under the same
    /// key prefix: for the [share](crate::store::FallbackBuilder::share) of each. The Redis user needs
    /// `+zremrangebyscore +zadd +zcard +pexpire` for it.
    ///
    /// Each instance announces itself every 2 seconds, off the request path, and expires 6 seconds
    /// after its last announcement. This one continues until the last clone of the result is
    /// dropped, or this Tokio runtime shuts down. A lower count is used after another 6 seconds: a
    /// Redis that restarts empty counts only the instances that have announced themselves since.
    /// While Redis is unreachable, or the slot of the instances migrates in a cluster, the count
    /// does not change. It starts at 1; see [`Instances::at_least`].
    ///
    /// All calls on a store and its clones announce the same instance. Another store counts as another instance, even in the
    /// same process: create one store, and clone it.
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

async fn run(inner: Weak<SharedStore>, alive: Arc<AtomicU32>) {
    let mut recent = RecentCounts([1; COUNTS]);
    loop {
        let Some(inner) = inner.upgrade() else { return };
        match announced(&inner).await {
            Ok(count) => alive.store(recent.add(count), Ordering::Relaxed),
            Err(error) => {
                recent.hold();
                inner.failed(&error);
            }
        }
        // So that the store can be dropped during the pause: then this task ends.
        drop(inner);
        sleep(EVERY).await;
    }
}

/// Announces the instance of this store. Returns the number of live instances.
async fn announced(inner: &Arc<SharedStore>) -> Result<u32, StoreError> {
    let node = inner.shared_node().await?;
    let call = KeyCall {
        script: &ANNOUNCE,
        keys: vec![
            inner
                .topology
                .shared_key(&inner.settings.prefix, "instances"),
        ],
        args: &*inner.instance,
        ttl: 3 * EVERY,
    };
    inner.run_script(node, &call).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_count_is_used_when_others_would_have_expired() {
        let mut recent = RecentCounts([1; COUNTS]);
        assert_eq!(
            [3, 1, 1, 1, 1, 2].map(|count| recent.add(count)),
            [3, 3, 3, 3, 1, 2]
        );
    }

    #[test]
    fn a_failure_holds_the_count() {
        let mut recent = RecentCounts([1; COUNTS]);
        assert_eq!([3, 1, 1].map(|count| recent.add(count)), [3; 3]);
        recent.hold();
        assert_eq!([1, 1, 1, 1].map(|count| recent.add(count)), [3, 3, 3, 1]);
    }
}
