use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::lanes::Lanes;
use crate::store::{Error, ErrorKind};

/// The instances of a service that announce themselves in Redis, under one key prefix.
///
/// Each announces itself every few seconds off the request path, and is no longer counted after three times as long.
/// While Redis is away, the number stays what it was.
///
/// Made by [`RedisStore::announce`](crate::RedisStore::announce). This instance is counted until the last clone is
/// dropped, or the tokio runtime that it was made on ends.
#[derive(Clone)]
pub struct Instances {
    announcer: Arc<Announcer>,
}

struct Announcer {
    alive: Arc<AtomicU32>,
    task: JoinHandle<()>,
}

impl Instances {
    pub(super) const EVERY: Duration = Duration::from_secs(2);

    /// # Errors
    ///
    /// [`ErrorKind::NoRuntime`] outside of a tokio runtime.
    pub(super) fn announce(lanes: &Arc<Lanes>) -> Result<Self, Error> {
        let runtime = Handle::try_current().map_err(|error| Error::with_source(ErrorKind::NoRuntime, error))?;
        let alive = Arc::new(AtomicU32::new(1));
        let task = runtime.spawn(run(Arc::downgrade(lanes), Arc::clone(&alive)));
        Ok(Self { announcer: Arc::new(Announcer { alive, task }) })
    }

    /// As many as `alive` says, with no Redis.
    #[cfg(test)]
    pub(crate) fn simulated(alive: Arc<AtomicU32>) -> Self {
        Self { announcer: Arc::new(Announcer { alive, task: tokio::spawn(async {}) }) }
    }

    /// How many were alive when Redis was last seen; at least this one.
    pub fn alive(&self) -> NonZeroU32 {
        NonZeroU32::new(self.announcer.alive.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN)
    }
}

async fn run(lanes: Weak<Lanes>, alive: Arc<AtomicU32>) {
    let name = format!("{:016x}", std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0));
    // After an outage the first to come back finds only itself: a lower number counts from the second time on.
    let mut before = 1;
    loop {
        let Some(lanes) = lanes.upgrade() else { return };
        match lanes.announce(&name, 3 * Instances::EVERY).await {
            Ok(count) => {
                alive.store(count.max(before), Ordering::Relaxed);
                before = count;
            }
            Err(error) => lanes.failed(&error),
        }
        drop(lanes);
        sleep(Instances::EVERY).await;
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Instances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instances({} alive)", self.alive())
    }
}
