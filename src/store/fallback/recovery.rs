//! The way back: the probe off the request path, and the settlement of what was granted meanwhile.

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use super::Shared;
use super::breaker::Breaker;
use super::grants::Grant;
use crate::limit::Check;
use crate::store::{Error, ErrorKind, Store};

impl<P: Store, F: Store> Shared<P, F> {
    /// Starts to probe, unless somebody does already.
    pub(super) fn probe(self: &Arc<Self>) {
        if self.probing.load(Ordering::Relaxed) || self.probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let probe = Probe { shared: Arc::downgrade(self) };
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(probe.run()));
        }
    }

    /// Whether the primary store decides a check.
    async fn answers(&self) -> bool {
        matches!(timeout(self.settings.deadline, self.primary.check(Check::probe())).await, Ok(Ok(_)))
    }

    /// How long after the primary store has come back the last of the other instances may find that out and settle;
    /// nothing if there are no others.
    fn others(&self) -> Option<Duration> {
        let others = self.settings.share.instances() > NonZeroU32::MIN;
        // The longest until a probe, and a deadline each for that and for a charge.
        others.then(|| Breaker::LONGEST_DELAY.saturating_add(self.settings.deadline.saturating_mul(2)))
    }

    /// Charges what was granted meanwhile to the primary store, and then lets that decide again. `false` if it fails
    /// again.
    async fn recover(self: &Arc<Self>, sums: &mut Sums) -> bool {
        // While this goes on, the fallback grants more; what is left in the end is little.
        for _ in 0..Self::SETTLEMENTS {
            let before = *sums;
            if !self.settle(sums).await {
                return false;
            }
            if *sums == before {
                break;
            }
        }
        if let Some(after) = self.breaker.close(self.clock.micros()) {
            self.observer().recovered(after);
        }
        self.settle(sums).await;
        true
    }

    const SETTLEMENTS: usize = 3;
    /// How many charges are under way at once, so that live traffic is not held up.
    const AT_ONCE: usize = 64;

    /// Charges all that was granted, and adds it up. `false` if the primary store fails again: the rest is for the next
    /// time.
    async fn settle(self: &Arc<Self>, sums: &mut Sums) -> bool {
        let (grants, unnoted) = self.grants.take();
        sums.dropped += unnoted;
        let mut whole = true;
        let mut charges = JoinSet::new();
        for grant in grants {
            if charges.len() >= Self::AT_ONCE
                && let Some(charge) = charges.join_next().await
            {
                whole &= sums.add(charge);
            }
            if !whole {
                self.grants.put_back(grant);
                continue;
            }
            let shared = Arc::clone(self);
            charges.spawn(async move { (grant.granted, shared.charge(grant).await) });
        }
        while let Some(charge) = charges.join_next().await {
            whole &= sums.add(charge);
        }
        whole
    }

    /// Charges what still counts of a grant. How much that was.
    async fn charge(&self, Grant { key, policies, granted }: Grant) -> Result<u32, Error> {
        let peek = self.fallback.check(self.part(Check::peek(key, &policies, 0))).await?;
        let used = peek.each().map(|each| each.limit().saturating_sub(each.remaining())).max().unwrap_or(0);
        match granted.min(used) {
            0 => Ok(0),
            counts => {
                let charge = self.primary.check(Check::charge(key, &policies, counts));
                let decision = timeout(self.settings.deadline, charge).await;
                decision.map_err(|_| Error::new(ErrorKind::Timeout))?.map(|decision| decision.granted())
            }
        }
    }
}

/// What was settled, in units of cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sums {
    charged: u64,
    dropped: u64,
}

impl Sums {
    /// Adds one caller's. `false` if the primary store failed as a whole. What failed may have been charged, and is not
    /// sent again.
    fn add(&mut self, charge: Result<(u32, Result<u32, Error>), JoinError>) -> bool {
        match charge {
            Ok((_, Ok(charged))) => self.charged += u64::from(charged),
            Ok((granted, Err(error))) => {
                self.dropped += u64::from(granted);
                return error.is_of_check();
            }
            Err(_) => return false,
        }
        true
    }
}

/// The one task that tries the primary store while the breaker is open.
struct Probe<P, F> {
    /// Ends with the last clone of the store.
    shared: Weak<Shared<P, F>>,
}

impl<P: Store, F: Store> Probe<P, F> {
    async fn run(self) {
        let jitter = RandomState::new();
        for probes in 0.. {
            let jitter = jitter.hash_one(probes) as f64 / u64::MAX as f64;
            sleep(Breaker::delay(probes, jitter)).await;
            let Some(mut shared) = self.shared.upgrade() else { return };
            if !shared.answers().await {
                continue;
            }
            let mut sums = Sums::default();
            let mut whole = shared.settle(&mut sums).await;
            if let (true, Some(others)) = (whole, shared.others()) {
                // This task keeps no store alive while it waits.
                drop(shared);
                sleep(others).await;
                let Some(again) = self.shared.upgrade() else { return };
                shared = again;
                whole = shared.answers().await;
            }
            let recovered = whole && shared.recover(&mut sums).await;
            if sums != Sums::default() {
                shared.observer().settled(sums.charged, sums.dropped);
            }
            if recovered {
                return;
            }
        }
    }
}

/// Also when the task is dropped with its runtime: the next check on another one probes again.
impl<P, F> Drop for Probe<P, F> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.probing.store(false, Ordering::Release);
        }
    }
}
