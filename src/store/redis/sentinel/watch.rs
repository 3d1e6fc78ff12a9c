//! Finds out that there is another master, though the former one still answers.
//!
//! One sentinel is asked at a time, each in its turn: that is four small commands a second for an instance, and needs no
//! permission more. A message that sentinels publish may be lost with its connection, so it would have to be asked all the same.

use std::hash::BuildHasher;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::runtime::{Handle, Id};
use tokio::time::{sleep, timeout};

use super::Sentinels;
use crate::store::lock;
use crate::store::seed::RandomState;

/// How often: so that a second is enough though one sentinel is slow.
const EVERY: Duration = Duration::from_millis(250);

/// The task of a runtime, for as long as there is the store.
struct Watch {
    sentinels: Weak<Sentinels>,
    runtime: Id,
}

impl Sentinels {
    /// Starts the watch of this runtime, if it has none.
    pub(super) fn watch(self: &Arc<Self>) {
        let Ok(handle) = Handle::try_current() else { return };
        let runtime = handle.id();
        {
            let mut watching = lock(&self.watching);
            if watching.contains(&runtime) {
                return;
            }
            watching.push(runtime);
        }
        drop(handle.spawn(Watch { sentinels: Arc::downgrade(self), runtime }.run()));
    }

    /// Asks a sentinel, and if it tells of another master, all of them.
    async fn look(self: &Arc<Self>, connection: &mut Option<MultiplexedConnection>, sentinel: usize) {
        let told = timeout(EVERY, self.ask(connection, sentinel)).await;
        let Ok(Ok(master)) = told else { return };
        let is_news = lock(&self.known).as_ref().is_some_and(|known| !known.is_at(&master));
        if is_news {
            // It finds the master, and gives up what leads to the former one.
            let _ = timeout(self.timeout, self.connect()).await;
        }
    }
}

impl Watch {
    async fn run(self) {
        let jitter = || RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        let mut connections: Vec<Option<MultiplexedConnection>> = vec![];
        let mut turn = RandomState::new().hash_one(0) as usize;
        loop {
            sleep(EVERY.mul_f64(0.8 + 0.4 * jitter())).await;
            let Some(sentinels) = self.sentinels.upgrade() else { return };
            connections.resize(sentinels.sentinels.len(), None);
            turn = turn.wrapping_add(1) % connections.len();
            sentinels.look(&mut connections[turn], turn).await;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(sentinels) = self.sentinels.upgrade() {
            lock(&sentinels.watching).retain(|runtime| *runtime != self.runtime);
        }
    }
}
