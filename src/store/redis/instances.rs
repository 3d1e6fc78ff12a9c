//! Counts the instances of a service: each announces itself in Redis, under one key prefix.

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::script::ANNOUNCE;
use super::worker::Inner;
use crate::error::{ErrorKind, StoreError};
use crate::store::Instances;

/// How often each announces itself. It is no longer counted after three times as long.
const EVERY: Duration = Duration::from_secs(2);

/// Announces this instance until the last clone of the returned value is dropped.
///
/// # Errors
///
/// [`ErrorKind::NoRuntime`] outside of a tokio runtime.
pub(super) fn announce(inner: &Arc<Inner>) -> Result<Instances, StoreError> {
    let runtime = Handle::try_current()
        .map_err(|error| StoreError::with_source(ErrorKind::NoRuntime, error))?;
    let alive = Arc::new(AtomicU32::new(1));
    // Dropped, it ends the task.
    let mut announcer = JoinSet::new();
    announcer.spawn_on(run(Arc::downgrade(inner), Arc::clone(&alive)), &runtime);
    Ok(Instances::new(move || {
        let _announcer = &announcer;
        NonZeroU32::new(alive.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN)
    }))
}

async fn run(inner: Weak<Inner>, alive: Arc<AtomicU32>) {
    let name = format!("{:016x}", RandomState::new().hash_one(0));
    // After an outage the first instance finds only itself: accept a lower number from the second time.
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

/// Says that the instance of this name is alive. Returns how many are.
async fn announced(inner: &Arc<Inner>, name: &str) -> Result<u32, StoreError> {
    let node = inner.shared_node().await?;
    inner
        .run_shared(node, &ANNOUNCE, "instances", name, 3 * EVERY)
        .await
}
