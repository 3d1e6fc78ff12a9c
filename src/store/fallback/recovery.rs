//! The recovery: a background task that probes the primary store, closes the breaker and reconciles.
//!
//! The methods of [`Partition`] for this task are here: the decision of a check needs none of them
//! but [`attend`](Partition::attend), which starts the task.

use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{sleep, timeout};

use super::breaker::{Breaker, Ticket};
use super::partition::Partition;
use crate::background::Task;
use crate::error::StoreError;
use crate::limit::{Check, Decision};
use crate::observe::event;
use crate::store::{Answer, Store};
use crate::util::{instant, jittered};

/// Maximum time to wait for other instances that reconcile.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Reconciliations before the breaker closes.
const ROUNDS: usize = 3;

impl<P: Store, F: Store> Partition<P, F> {
    /// Starts the recovery task, unless it is running.
    pub(super) fn attend(self: &Arc<Self>) {
        let partition = Arc::downgrade(self);
        self.recovery
            .spawn(None, |_task| Recovery { partition, _task }.run());
    }

    fn needs_attention(&self) -> bool {
        !self.breaker.is_closed() || !self.accounts.is_empty()
    }

    /// Returns the primary store's decision, or an error after the deadline.
    pub(super) async fn asked_in_time(&self, check: Check) -> Result<Decision, StoreError> {
        self.asked_within(check, self.settings.deadline).await
    }

    /// Returns the primary store's decision, or an error after `time`.
    pub(super) async fn asked_within(
        &self,
        check: Check,
        time: Duration,
    ) -> Result<Decision, StoreError> {
        let key = *check.key();
        let mut answer = match self.primary.check(check) {
            Answer::Ready { answer } => return answer,
            Answer::Pending { future } => pin!(future),
        };
        timeout(time, answer.as_mut()).await.unwrap_or_else(|_| {
            let error = self.late(&key);
            Err(if self.primary.backend().withdraw(answer) {
                error.not_sent()
            } else {
                error
            })
        })
    }

    /// Sends a probe to the primary store.
    async fn ping(&self) -> Result<(), StoreError> {
        self.asked_in_time(Check::probe(self.probe)).await.map(drop)
    }

    /// Returns the time in which all other instances notice that the primary store is back and announce that they
    /// reconcile, and the time for which an announcement holds. `None` without other instances.
    fn others(&self) -> Option<(Duration, Duration)> {
        let instances = self.settings.share.instances();
        // One deadline for the probe, and one for the announcement.
        let both = self.settings.deadline.saturating_mul(2);
        (instances > NonZeroU32::MIN).then(|| {
            let found = Breaker::longest_delay(instances).saturating_add(both);
            (found, Breaker::spread(instances).saturating_add(both))
        })
    }

    /// With a breaker that is not open: probes the store if half-open, and reconciles the fallback's grants. Returns
    /// `false` if the primary store fails again.
    async fn tend(self: &Arc<Self>) -> bool {
        if !self.breaker.is_closed() {
            if let Err(error) = self.ping().await {
                self.count(&error, Ticket::Probe);
                return false;
            }
            self.breaker.succeeded(Ticket::Probe);
        }
        let well = self.reconcile().await;
        self.notify();
        well
    }

    /// With an open breaker: reconciles, and then closes it. Returns `false` if the primary store fails again.
    async fn close(self: &Arc<Self>) -> bool {
        // During a reconciliation the fallback grants more. After three rounds little is left.
        for _ in 0..ROUNDS {
            if !self.reconcile().await {
                return false;
            }
        }
        // Report the recovery when the last partition has recovered.
        if let Some(after) = self.breaker.close(self.clock.micros())
            && self.open.fetch_sub(1, Ordering::AcqRel) == 1
        {
            self.observe(|observer| observer.recovered(&event::Recovered::new(after)));
        }
        // If this fails, `tend` reconciles the rest later.
        self.reconcile().await;
        true
    }
}

/// The task. It ends when no work is left, or with the last clone of the store.
struct Recovery<P: Store, F: Store> {
    partition: Weak<Partition<P, F>>,
    _task: Task,
}

impl<P: Store, F: Store> Recovery<P, F> {
    async fn run(self) {
        let (mut attempts, mut was_open) = (0, false);
        while let Some(partition) = self
            .partition
            .upgrade()
            .filter(|partition| partition.needs_attention())
        {
            let open = partition.breaker.is_open();
            let longest = Breaker::longest_delay(partition.settings.share.instances());
            // Keep no store alive during the pause.
            drop(partition);
            // A short outage ends sooner if its first probe does not wait for as long as those before it.
            if open != was_open {
                (attempts, was_open) = (0, open);
            }
            sleep(jittered(Breaker::delay(attempts, longest), 0.5..1.0)).await;
            let Some(partition) = self.partition.upgrade() else {
                break;
            };
            let attempt = async {
                if partition.breaker.is_open() {
                    self.recover(partition).await
                } else {
                    partition.tend().await
                }
            };
            // User code may panic.
            let well = AssertUnwindSafe(attempt).catch_unwind().await;
            let well = well.unwrap_or(false);
            attempts = if well { 0 } else { attempts.saturating_add(1) };
        }
        let partition = self.partition.upgrade();
        drop(self);
        // Work that arrived while this task was ending has not started another one: see `TaskOwner`.
        if let Some(partition) = partition.filter(|partition| partition.needs_attention()) {
            partition.attend();
        }
    }

    /// With an open breaker: tries to close it. First reconciles, and waits until the other instances have reconciled
    /// too. Otherwise the primary store would grant again what the instances have already granted.
    async fn recover(&self, mut partition: Arc<Partition<P, F>>) -> bool {
        if partition.ping().await.is_err() {
            // Make room for new accounts.
            partition.sweep(|_, _| {}).await;
            return false;
        }
        let (mut well, since) = (true, instant());
        if let Some((found, holds)) = partition.others() {
            well = partition.announced(holds, partition.reconcile()).await;
            let reconciled = instant();
            let mut wait = found.saturating_sub(since.elapsed()).min(LONGEST_WAIT);
            while well && reconciled.elapsed() < LONGEST_WAIT {
                drop(partition);
                sleep(wait).await;
                let Some(again) = self.partition.upgrade() else {
                    return false;
                };
                partition = again;
                match partition.reconciling().await {
                    Ok(None) => break,
                    Ok(Some(time)) => wait = time.min(LONGEST_WAIT),
                    Err(_) => {
                        wait = Breaker::FIRST_DELAY;
                        well = partition.ping().await.is_ok();
                    }
                }
                // Other instances wait for the same moment, so spread the checks.
                let spread = Breaker::spread(partition.settings.share.instances());
                wait += jittered(spread, 0.0..0.5);
                // Charge the fallback's new grants now, so that little is left at the end.
                well = well && partition.reconcile().await;
            }
        }
        let recovered = well && partition.close().await;
        partition.notify();
        recovered
    }
}
