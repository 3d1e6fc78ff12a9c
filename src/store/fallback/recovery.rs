//! The way back: the one task that looks after the primary store, off the request path.

use std::hash::BuildHasher;
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use super::breaker::{Breaker, Pass};
use super::settlement::Sums;
use super::shared::Shared;
use crate::limit::{Check, Decision};
use crate::store::seed::RandomState;
use crate::store::{Error, ErrorKind, Store, event};

impl<P: Store, F: Store> Shared<P, F> {
    /// Starts the task that looks after the primary store, unless it runs.
    pub(super) fn attend(self: &Arc<Self>) {
        if self.attended.load(Ordering::Relaxed) || self.attended.swap(true, Ordering::AcqRel) {
            return;
        }
        let recovery = Recovery { shared: Arc::downgrade(self) };
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(recovery.run()));
        }
    }

    fn needs_attention(&self) -> bool {
        !self.breaker.is_sound() || !self.grants.is_empty()
    }

    /// What the primary store decides on a check of ours, by the deadline.
    pub(super) async fn asked_in_time(&self, check: Check) -> Result<Decision, Error> {
        let answer = timeout(self.settings.deadline, self.primary.check(check)).await;
        answer.unwrap_or_else(|_| Err(Error::new(ErrorKind::Timeout)))
    }

    /// Has the primary store decide a check.
    async fn ping(&self) -> Result<(), Error> {
        self.asked_in_time(Check::probe()).await.map(drop)
    }

    /// How long after the primary store has come back the last of the other instances may find that out and settle;
    /// nothing if there are no others.
    fn others(&self) -> Option<Duration> {
        let others = self.settings.share.instances() > NonZeroU32::MIN;
        // The longest until a probe, and a deadline each for that and for a charge.
        others.then(|| Breaker::LONGEST_DELAY.saturating_add(self.settings.deadline.saturating_mul(2)))
    }

    /// With the breaker closed: ends a doubt that no request has, and settles what was granted in spite of it.
    async fn tend(self: &Arc<Self>) -> bool {
        if !self.breaker.is_sound() {
            if let Err(error) = self.ping().await {
                self.count(&error, Pass::Trial);
                return false;
            }
            self.breaker.succeeded(Pass::Trial);
        }
        let mut sums = Sums::default();
        let whole = self.settle(&mut sums).await;
        self.tell(sums);
        whole
    }

    /// Settles, and then lets the primary store decide again. `false` if it fails again.
    async fn close(self: &Arc<Self>, sums: &mut Sums) -> bool {
        // While this goes on, the fallback grants more; what is left in the end is little.
        for _ in 0..Self::SETTLEMENTS {
            if self.grants.is_empty() {
                break;
            } else if !self.settle(sums).await {
                return false;
            }
        }
        if let Some(after) = self.breaker.close(self.clock.micros()) {
            self.observer().recovered(&event::Recovered::new(after));
        }
        // If it fails, `tend` goes on.
        self.settle(sums).await;
        true
    }

    const SETTLEMENTS: usize = 3;
}

/// The task. It ends when there is nothing to do, and with the last clone of the store.
struct Recovery<P, F> {
    shared: Weak<Shared<P, F>>,
}

impl<P: Store, F: Store> Recovery<P, F> {
    async fn run(self) {
        let jitter = RandomState::new();
        let (mut attempts, mut was_open) = (0, false);
        while let Some(shared) = self.shared.upgrade().filter(|shared| shared.needs_attention()) {
            let open = shared.breaker.is_open();
            // It keeps no store alive while it waits.
            drop(shared);
            if open != was_open {
                (attempts, was_open) = (0, open);
            }
            sleep(Breaker::delay(attempts, jitter.hash_one(attempts) as f64 / u64::MAX as f64)).await;
            let Some(shared) = self.shared.upgrade() else { return };
            let well = if shared.breaker.is_open() { self.recover(shared).await } else { shared.tend().await };
            attempts = if well { 0 } else { attempts.saturating_add(1) };
        }
        let shared = self.shared.upgrade();
        drop(self);
        // Whoever came in between has found a task that was about to end.
        if let Some(shared) = shared.filter(|shared| shared.needs_attention()) {
            shared.attend();
        }
    }

    /// With the breaker open: tries to close it.
    async fn recover(&self, mut shared: Arc<Shared<P, F>>) -> bool {
        if shared.ping().await.is_err() {
            return false;
        }
        let mut sums = Sums::default();
        let mut whole = shared.settle(&mut sums).await;
        if let (true, Some(others)) = (whole, shared.others()) {
            drop(shared);
            sleep(others).await;
            let Some(again) = self.shared.upgrade() else { return false };
            shared = again;
            whole = shared.ping().await.is_ok();
        }
        let recovered = whole && shared.close(&mut sums).await;
        shared.tell(sums);
        recovered
    }
}

/// Also when the task is dropped with its runtime: the next check on another one starts it again.
impl<P, F> Drop for Recovery<P, F> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.attended.store(false, Ordering::Release);
        }
    }
}
